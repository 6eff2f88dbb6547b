"""The command line as a whole: what it imports, prints where, and exits with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DSV4 = ("--model", "dsv4", "--hardware", "GB300")
HEAVY = ("torch", "ray", "transformers")


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("resolve", *DSV4),
        ("explain", "lr", *DSV4),
        ("doctor", "--no-probe", *DSV4),
        ("doctor", *DSV4),
        ("doctor", "--gpu-test", *DSV4),
        ("train", *DSV4),
        ("train", "--dry-run", *DSV4),
        ("plugins",),
        ("plugins", "new", "rllaunch-acme"),
        ("export", "--list"),
        ("diff", "H100", "H200", "--model", "dsv4"),
        ("profiles", "list"),
        ("profiles", "show", "GB300"),
        ("profiles", "new", "box", "--from", "H100", "--force"),
        ("profiles", "check", "GB300"),
        ("profiles", "detect"),
        ("schema",),
    ],
    ids=" ".join,
)
def test_what_does_not_run_anything_imports_nothing_heavy(words: tuple[str, ...]):
    script = (
        "import sys\n"
        "from rllaunch.cli import main\n"
        f"try: main({list(words)!r})\n"
        "except SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_help_lists_every_command(rllaunch: Any):
    result = rllaunch("--help")
    assert result.code == 0
    for command in ("train", "doctor", "resolve", "explain", "diff", "export", "profiles", "plugins"):
        assert f"\n  {command} " in result.out


def test_train_help_lists_the_launch_flags_with_their_meaning(rllaunch: Any):
    out = rllaunch("train", "--help").out
    for text in (
        "--colocate-memory-peak-device cpu|gpu|auto",
        "--offload-train / --no-offload-train",
        "[handoff]",
        "--megatron-OPTION",
    ):
        assert text in out


def test_unknown_commands_and_options_are_usage_errors(rllaunch: Any):
    result = rllaunch("trian")
    assert (result.code, result.err) == (2, "error: unknown command 'trian'\nhint: did you mean 'train'?\n")
    assert rllaunch("profiles", "show").code == 2
    assert rllaunch("train", *DSV4, "--jsn").code == 2


def test_data_goes_to_stdout_and_talk_to_stderr(rllaunch: Any):
    for words in (
        ("resolve", *DSV4),
        ("doctor", "--no-probe", *DSV4),
        ("train", "--dry-run", *DSV4),
        ("plugins",),
        ("profiles", "list"),
    ):
        result = rllaunch(*words, "--json")
        assert result.code == 0, result.err
        json.loads(result.out)


def test_doctor_json_has_the_documented_shape(rllaunch: Any):
    result = rllaunch("doctor", "--no-probe", *DSV4, "--lora-rank", "16", "--json")
    assert result.code == 3
    answer = result.json()
    assert answer["ok"] is False
    assert [f["code"] for f in answer["findings"] if f["level"] == "error"] == ["RL303"]
    assert set(answer["findings"][0]) == {"code", "level", "message", "origins", "fix"}


def test_what_needs_a_gpu_is_tried_only_on_request(rllaunch: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def tried(*words: str) -> dict[str, str]:
        findings = rllaunch("doctor", *DSV4, "--json", *words).json()["findings"]
        return {f["code"]: f["message"] for f in findings if f["code"] in ("RL408", "RL409")}

    assert tried() == {}
    told = tried("--gpu-test")
    assert set(told) == {"RL408", "RL409"}
    assert all(message.endswith("no GPU is visible") for message in told.values())
    assert rllaunch("doctor", *DSV4, "--gpu-test", "--no-probe").code == 2


@pytest.mark.parametrize(
    ("words", "code", "setting"),
    [
        (("--lora-rank", "16"), "RL303", "algorithm.lora_rank = 16   flag: --lora-rank 16"),
        (
            ("--advantage-estimator", "ppo"),
            "RL302",
            'algorithm.advantage_estimator = "ppo"   flag: --advantage-estimator ppo',
        ),
        (("--no-offload-rollout",), "RL301", "handoff.offload_rollout = false   flag: --no-offload-rollout"),
        (("--no-offload-train",), "RL301", "handoff.offload_train = false   flag: --no-offload-train"),
    ],
)
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["train", "dry-run"])
def test_gpu_order_refuses_what_it_cannot_do_with_both_origins(
    rllaunch: Any, words: tuple[str, ...], code: str, setting: str, dry: tuple[str, ...]
):
    result = rllaunch("train", *DSV4, *words, *dry)
    assert result.code == 3
    assert result.out.count("error[") == 1
    assert f"error[{code}]" in result.out
    assert '  handoff.colocate_memory_peak_device = "gpu"   hardware profile: GB300 (rllaunch ' in result.out
    assert f"  {setting}" in result.out
    assert "  hint: " in result.out


def test_a_launch_for_a_cluster_that_is_not_here_says_so_in_one_screen(rllaunch: Any):
    result = rllaunch("train", *DSV4)
    assert result.code == 5
    lines = (result.out + result.err).splitlines()
    assert len(lines) <= 48
    for text in (
        "`pip install -e '.[megatron]'` in the clone of rllaunch",
        "`pip install -e '.[sglang]'` in the clone of rllaunch",
        "8 nodes × 4 GPUs",
        "start-up  engine.offload_kv → trainer.init",
    ):
        assert any(text in line for line in lines), text


def test_a_dry_run_prints_command_environment_and_schedule_and_exits_0(rllaunch: Any):
    result = rllaunch("train", *DSV4, "--dry-run")
    assert result.code == 0
    for text in (
        "schedule\n",
        "environment\n",
        "command\n  rllaunch train --model dsv4 --hardware GB300 ",
        "CUDA_DEVICE_MAX_CONNECTIONS=1",
    ):
        assert text in result.out, text
    answer = rllaunch("train", *DSV4, "--dry-run", "--json").json()
    assert answer["schedule"]["order"] == "gpu"
    assert [s["name"] for s in answer["schedule"]["init"]][:2] == ["engine.offload_kv", "trainer.init"]


def test_a_dry_run_tells_what_this_machine_lacks_and_does_not_fail_for_it(rllaunch: Any):
    # Eight nodes are on no machine, and paths of a cluster are not on a laptop.
    words = ("train", *DSV4, "--hf-checkpoint", "/not/here/dsv4", "--data", "not-here.jsonl", "--dry-run")
    result = rllaunch(*words)
    assert result.code == 0
    lacking = result.out.split("\nthis machine\n")[1].splitlines()
    for line in (
        "  RL346  there is no directory /not/here/dsv4",
        "  RL349  the prompt file not-here.jsonl does not exist",
    ):
        assert line in lacking
    assert any(line.startswith("  RL502  the launch needs 8 nodes × 4 GPUs, a local") for line in lacking)
    assert "error[" not in result.out
    ends = (
        "note: on this machine `rllaunch train` would end with 3; `rllaunch doctor` with the same flags says what to do"
    )
    assert result.err.splitlines()[-2:] == [
        ends,
        "dry run: nothing was started, the configuration is sound, but `rllaunch train` refuses it (RL512, RL513)",
    ]
    assert rllaunch(*[word for word in words if word != "--dry-run"]).code == 3, "as it said"
    answer = rllaunch(*words, "--json").json()
    assert answer["ok"] is True
    assert {"RL346", "RL349", "RL502"} <= {f["code"] for f in answer["this_machine"]}
    assert not {f["code"] for f in answer["this_machine"]} & {f["code"] for f in answer["findings"]}


@pytest.mark.parametrize("name", ["./gone", "/not/here/gone", "~/gone", "org/model/part", "org/model"])
def test_what_reads_as_a_path_is_one_for_models_and_checkpoints_alike(rllaunch: Any, name: str):
    is_path = name != "org/model"
    as_model = rllaunch("resolve", "--model", name, "--hardware", "cpu")
    assert as_model.code == 3
    assert ("model configuration does not exist" in as_model.err) is is_path
    findings = rllaunch("doctor", *DSV4, "--hf-checkpoint", name, "--json").json()["findings"]
    assert ("RL346" in {f["code"] for f in findings}) is is_path


def test_a_dry_run_of_an_unsound_launch_does_not_look_at_the_machine(rllaunch: Any):
    result = rllaunch("train", *DSV4, "--lora-rank", "16", "--dry-run", "--json")
    assert result.code == 3
    assert "this_machine" not in result.json()
    assert rllaunch("train", "--model", "tiny", "--hardware", "cpu", "--dry-run", "--json").json()["this_machine"] == []


def test_a_dry_run_of_a_run_that_goes_on_takes_its_directory_for_what_it_is(rllaunch: Any, tmp_path: Path):
    made = rllaunch("resolve", "--model", "tiny", "--hardware", "cpu", "--json").json()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(made["config"]), encoding="utf-8")
    new = ("train", "--model", "tiny", "--hardware", "cpu", "--run-dir", "run", "--dry-run", "--json")
    assert [f["code"] for f in rllaunch(*new).json()["this_machine"]] == ["RL504"]
    resumed = rllaunch("train", "--resume", "--run-dir", "run", "--dry-run", "--json")
    assert (resumed.code, resumed.json()["this_machine"]) == (0, [])


def test_secrets_never_reach_a_command_line_or_the_environment_table(rllaunch: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "hf_do_not_print")
    monkeypatch.setenv("WANDB_API_KEY", "do_not_print_either")
    for words in (("train", "--dry-run"), ("train", "--dry-run", "--json"), ("resolve", "--json")):
        result = rllaunch(words[0], *DSV4, *words[1:])
        assert "do_not_print" not in result.out + result.err


def test_colour_only_for_a_terminal(rllaunch: Any):
    assert "\033[" not in rllaunch("doctor", "--no-probe", *DSV4, "--lora-rank", "16").out


def test_a_secret_in_the_configuration_is_refused_without_being_shown(rllaunch: Any):
    result = rllaunch("train", *DSV4, "--set", "env.HF_TOKEN=hf_do_not_print")
    assert result.code == 3
    assert "error[RL338]" in result.out
    assert "  env.HF_TOKEN = …   flag: --set env.HF_TOKEN=…" in result.out
    assert "hf_do_not_print" not in result.out + result.err


def test_every_command_takes_json():
    import typer

    from rllaunch.cli import COMMANDS, app

    group = typer.main.get_command(app)
    context = typer.Context(group)
    lacking, seen = [], 0
    for name in COMMANDS:
        command = group.get_command(context, name)  # type: ignore[attr-defined]
        leaves = getattr(command, "commands", {}) or {"": command}
        for leaf, each in leaves.items():
            seen += 1
            if not any("--json" in parameter.opts for parameter in each.params):
                lacking.append(f"{name} {leaf}".strip())
    assert seen >= 14
    assert lacking == []


def test_what_new_wrote_is_told_as_json(rllaunch: Any):
    answer = rllaunch("profiles", "new", "box", "--from", "H100", "-o", "there/box.toml", "--json").json()
    assert answer == {"name": "box", "file": "there/box.toml"}
    assert rllaunch("schema", "--json").json() == rllaunch("schema").json()


def test_a_group_of_commands_alone_shows_what_there_is(rllaunch: Any):
    """As `rllaunch` alone: on stderr, with the exit code of a command line that lacks a word."""
    result = rllaunch("profiles")
    assert result.code == 2
    assert result.out == ""
    assert result.err == rllaunch("profiles", "--help").out
    assert all(f"  {name} " in result.err for name in ("list", "show", "new", "check", "detect"))
