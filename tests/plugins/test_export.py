"""`rllaunch export`: what a target answers is shown, nothing is dropped, and what it gets wrong is told."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = ("--model", "tiny", "--hardware", "cpu")

ECHO = """
    from rllaunch.export import Export, Exporter, LeftOut

    def echo(resolved, environment):
        seed = ("--seed", str(resolved.config.run.seed))
        left = LeftOut("trainer.lr", resolved.config.trainer.lr, "echo does not learn")
        return Export(("echo", "go"), (seed, ("--names", "a b", "c")), environment, (left,), ("$(echo --from-a-file)",), ("hold on",))

    @hookimpl
    def rllaunch_exporters():
        return [Exporter("echo", "says it again", echo)]
"""


def exporting(body: str) -> str:
    return f"""
    from rllaunch.errors import ConfigError
    from rllaunch.export import Export, Exporter

    def make(resolved, environment):
        {body}

    @hookimpl
    def rllaunch_exporters():
        return [Exporter("mine", "", make)]
    """


def test_stdout_is_a_script_and_stderr_says_what_is_not_in_it(guest, rllaunch):
    guest(ECHO)
    result = rllaunch("export", "--to", "echo", *LAUNCH, "--seed", "5", "--set", "env.GREETING=it's me")
    assert result.code == 0
    *exports, first, second, third, fourth = result.out.splitlines()
    assert (first, second, third, fourth) == (
        "echo go \\", "  $(echo --from-a-file) \\", "  --seed 5 \\", "  --names 'a b' c",
    )  # fmt: skip
    assert """export GREETING='it'"'"'s me'""" in exports
    left, reason, note, verdict = result.err.splitlines()
    assert left.startswith("left out: trainer.lr = 0.002   model profile: tiny (rllaunch ")
    assert (reason, note) == ("  echo does not learn", "note: hold on")
    assert verdict == "tiny on 1 × 1 cpu for echo: 2 options, 3 variables, 1 left out"
    ran = subprocess.run(["sh", "-c", result.out], capture_output=True, text=True, check=True)
    assert ran.stdout == "go --from-a-file --seed 5 --names a b c\n"


def test_json_has_all_of_it(guest, rllaunch):
    guest(ECHO)
    answer = rllaunch("export", "--to", "echo", *LAUNCH, "--lr", "0.5", "--json").json()
    assert answer["program"] == ["echo", "go"]
    assert answer["arguments"] == ["--seed", "0", "--names", "a b", "c"]
    assert answer["substitutions"] == ["$(echo --from-a-file)"]
    assert answer["environment"]["OMP_NUM_THREADS"] == "1"
    assert answer["left_out"] == [
        {"key": "trainer.lr", "value": 0.5, "reason": "echo does not learn", "origin": "--lr 0.5"}
    ]
    assert answer["notes"] == ["hold on"]


def test_variables_of_whoever_exports_are_not_the_launchs(guest, rllaunch, monkeypatch: pytest.MonkeyPatch):
    guest(ECHO)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("WANDB_API_KEY", "do_not_print")
    result = rllaunch("export", "--to", "echo", *LAUNCH)
    assert "export OMP_NUM_THREADS=1\n" in result.out
    assert "do_not_print" not in result.out + result.err


def test_targets_are_listed(guest, rllaunch):
    guest(ECHO)
    assert rllaunch("export", "--list", "--json").json() == [
        {"name": "echo", "description": "says it again", "plugin": "guest 1.2.3"}
    ]
    assert "says it again" in rllaunch("export", "--list").out


def test_without_a_plugin_there_is_no_target_and_a_hint_where_one_is(rllaunch):
    hint = "plugins bring them: `pip install plugins/rllaunch-miles` in the clone of rllaunch brings miles\n"
    result = rllaunch("export", "--to", "miles", *LAUNCH)
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: no plugin exports to 'miles'\n  --to miles\nhint: {hint}"
    assert rllaunch("export", "--list").err.endswith(hint)


def test_a_target_that_is_not_there_or_not_named_is_a_usage_error(guest, rllaunch):
    guest(ECHO)
    result = rllaunch("export", "--to", "ecko", *LAUNCH)
    assert (result.code, result.err) == (
        2,
        "error: no plugin exports to 'ecko'\n  --to ecko\nhint: did you mean 'echo'?\n",
    )
    result = rllaunch("export", *LAUNCH)
    assert (result.code, result.err) == (2, "error: export needs a target\n  --to NAME\nhint: --to echo\n")


def test_a_launch_that_is_not_sound_is_not_exported(guest, rllaunch):
    guest(ECHO)
    words = ("--model", "dsv4", "--hardware", "GB300", "--lora-rank", "16")
    result = rllaunch("export", "--to", "echo", *words)
    assert result.code == 3
    assert "error[RL303]" in result.out
    assert "echo go" not in result.out
    assert [f["code"] for f in rllaunch("export", "--to", "echo", *words, "--json").json()["findings"]] == ["RL303"]


def test_one_that_does_not_fit_is_exported_with_a_word_on_it(guest, rllaunch):
    guest(ECHO)
    result = rllaunch("export", "--to", "echo", "--model", "dsv4", "--hardware", "GB300", "--num-nodes", "1",
                      "--pipeline-model-parallel-size", "1", "--context-parallel-size", "1", "--rollout-num-gpus-per-engine", "4",
                      "--sglang-ep-size", "4", "--set", "trainer.decoder_first_pipeline_num_layers=none",
                      "--set", "trainer.decoder_last_pipeline_num_layers=none")  # fmt: skip
    assert result.code == 0, result.out
    assert result.out.rstrip().endswith("--names 'a b' c")
    assert "error[RL20" in result.err


def test_an_export_imports_nothing_heavy(guest, tmp_path: Path):
    guest(ECHO)
    script = (
        "import sys\n"
        "from rllaunch.cli import main\n"
        "try: main(['export', '--to', 'echo', '--model', 'dsv4', '--hardware', 'GB300'])\n"
        "except SystemExit as stop: print(stop.code, file=sys.stderr)\n"
        "print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules], file=sys.stderr)\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-2:] == ["0", "[]"]
    assert "echo go" in done.stdout


@pytest.mark.parametrize(
    ("body", "code", "says"),
    [
        ("return 3", 3, "error: plugin guest 1.2.3 exported int, which is no Export\n"),
        ("raise KeyError('lr')", 3, "error: plugin guest 1.2.3 failed to export: KeyError: 'lr'\n"),
        ("raise ConfigError('mine has no rollout', 'there', 'leave it')", 3, "error: mine has no rollout\n  there\n"),
    ],
    ids=["no Export", "it raises", "it refuses the launch"],
)
def test_a_target_that_fails_is_one_error_with_its_name(body: str, code: int, says: str, guest, rllaunch):
    guest(exporting(body))
    result = rllaunch("export", "--to", "mine", *LAUNCH)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(says)


def test_a_target_name_that_is_taken_stays_with_the_first(guest, rllaunch):
    guest(ECHO, "alpha")
    guest(ECHO, "beta")
    assert [row["plugin"] for row in rllaunch("export", "--list", "--json").json()] == ["alpha 1.2.3"]
    findings = rllaunch("plugins", "--json").json()["findings"]
    assert [f["message"] for f in findings] == ["export target 'echo' is taken by alpha 1.2.3"]


def test_the_variables_of_the_example_are_the_same_launch(rllaunch_project, monkeypatch: pytest.MonkeyPatch, example):
    rllaunch_project.use("example", "rllaunch_example")
    words = ("--model", "dsv4", "--hardware", "GB300", "--lr", "3e-6", "--offload-rollout-level", "kv_cache")
    exported = rllaunch_project.run("export", "--to", "example-variables", *words).out.replace("export ", "")
    asked = rllaunch_project.json("resolve", *words)["config"]
    *variables, program, command = shlex.split(exported)
    assert (program, command) == ("rllaunch", "train")
    for variable in variables:
        name, _, value = variable.partition("=")
        monkeypatch.setenv(name, value)
    assert rllaunch_project.json("resolve")["config"] == asked
