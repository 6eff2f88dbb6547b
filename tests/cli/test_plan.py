"""`rllaunch plan`: what a person reads, what a machine reads, what is drawn, and the exit code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DSV4 = ("--model", "dsv4", "--hardware", "GB300")
CPU_ORDER = (*DSV4, "--colocate-memory-peak-device", "cpu")
SMALL = ("--model", "qwen3-0.6b", "--hardware", "H100")
HEAVY = ("torch", "ray", "transformers", "matplotlib", "numpy")
STEPS = {
    "engine.offload_kv",
    "engine.offload_weights",
    "engine.onload_weights",
    "engine.onload_kv",
    "trainer.init",
    "trainer.onload",
    "trainer.clear_memory",
    "trainer.offload",
    "generate",
    "train",
    "save",
    "update_weights",
    "eval",
}


@pytest.mark.parametrize(
    "words", [("plan", *DSV4), ("plan", *CPU_ORDER, "--json"), ("plan", "--fit", *SMALL)], ids=" ".join
)
def test_planning_imports_nothing_heavy(words: tuple[str, ...]):
    script = (
        "import sys\n"
        "from rllaunch.cli import main\n"
        f"try: main({list(words)!r})\n"
        "except SystemExit: pass\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.stdout


# -- for a person ----------------------------------------------------------------------------------


def test_a_launch_that_fits_says_so_in_its_first_lines_and_exits_0(rllaunch: Any):
    result = rllaunch("plan", *DSV4)
    assert result.code == 0
    first, second, *_ = result.out.splitlines()
    assert first == "dsv4 (284.3 B parameters) on 8 × 4 GB300: fits"
    assert second == "  gpu order, mirror, shared backup, optimizer on the host"
    assert "✗" not in step_tables(result.out)[0]


def test_a_launch_that_does_not_fit_exits_4_and_marks_the_first_step_that_breaks(rllaunch: Any):
    result = rllaunch("plan", *CPU_ORDER)
    assert result.code == 4
    assert result.out.splitlines()[0] == "dsv4 (284.3 B parameters) on 8 × 4 GB300: does not fit"
    marked = [line for line in result.out.splitlines() if "✗" in line]
    assert len(marked) == 1
    assert re.search(r"✗ +trainer\.offload ", marked[0])
    assert result.err == (
        "note: prompts are not counted in samples: set --rollout-max-context-len\n"
        "hint: `rllaunch doctor` says what would free how much; "
        "`rllaunch plan --fit --num-nodes 8` looks for a layout on as many nodes or more\n"
    )


def test_the_seconds_of_what_else_there_is_are_called_those_of_the_handoff(rllaunch: Any):
    lines = [line.strip() for line in rllaunch("plan", *DSV4).out.splitlines()]
    at = lines.index("What else there is")
    head = next(line for line in lines[at:] if "why not" in line)
    assert re.split(r" {2,}", head) == ["GPU", "host", "handoff s", "why not"]


def step_tables(out: str) -> list[str]:
    """The tables of the two schedules, which stand side by side: the left and the right half."""
    lines = out.splitlines()
    (head,) = (i for i, line in enumerate(lines) if "(taken)" in line)
    (end,) = (i for i, line in enumerate(lines) if "What else there is" in line)
    cut = lines[head].index("order, ", lines[head].index("(taken)")) - 4
    return ["\n".join(line[:cut] for line in lines[head:end]), "\n".join(line[cut:] for line in lines[head:end])]


def test_both_orders_stand_side_by_side(rllaunch: Any):
    taken, other = step_tables(rllaunch("plan", *DSV4).out)
    assert taken.startswith("gpu order, mirror, shared backup, optimizer on the host (taken)")
    assert other.lstrip().startswith("cpu order, mirror, fresh backup, optimizer on the host (the other")
    assert "trainer.clear_memory" in taken
    assert "trainer.clear_memory" not in other
    assert "✗" in other


def test_the_limits_stand_beside_the_peaks(rllaunch: Any):
    out = rllaunch("plan", *DSV4).out
    answer = rllaunch("plan", *DSV4, "--json").json()
    for name, tier in (("a GPU", "gpu"), ("a node's host", "host")):
        (line,) = (line for line in out.splitlines() if line.startswith(f" {name} "))
        peak, limit = answer["peaks"][tier], answer["limits"][tier]
        assert line.split()[name.count(" ") + 1 :][:5] == [
            *f"{peak / 2**30:.1f} GiB {limit / 2**30:.1f} GiB".split(),
            f"{1 - peak / limit:.1%}",
        ]


def test_a_limit_nobody_states_is_not_known_and_the_rest_is_planned(rllaunch: Any):
    result = rllaunch("plan", *SMALL, "--set", "hardware.host_memory_bytes=unset")
    assert result.code == 0
    (line,) = (line for line in result.out.splitlines() if line.startswith(" a node's host "))
    assert " not known " in line
    assert result.out.splitlines()[0] == (
        "qwen3-0.6b (596.0 M parameters) on 1 × 8 H100: "
        "fits in a GPU's memory; whether in a node's host memory is open, no limit is stated"
    )


@pytest.mark.parametrize("model", ["tiny", "qwen3-0.6b"])
def test_where_no_memory_is_stated_there_is_no_verdict_and_the_way_to_one_is_told(rllaunch: Any, model: str):
    result = rllaunch("plan", "--model", model)
    assert result.code == 0
    first = result.out.splitlines()[0]
    assert first.endswith(") on 1 × 1 cpu: no limit is stated, so nothing says whether it fits")
    assert "fits" not in result.out.replace(first, "")
    assert result.err.splitlines()[-1] == (
        "hint: without --hardware this machine was taken, and profile cpu states no memory: "
        "--hardware NAME plans for another, `rllaunch plan --here` for what a job may use on this one"
    )
    result = rllaunch("plan", "--model", model, "--hardware", "cpu")
    assert result.err.splitlines()[-1] == (
        "hint: profile cpu states no memory: "
        "--hardware NAME plans for another machine, `rllaunch plan --here` for what a job may use on this one"
    )
    result = rllaunch("plan", "--model", model, "--set", "hardware.host_memory_bytes=600GiB")
    assert result.out.splitlines()[0].endswith(") on 1 × 1 cpu: fits")
    assert "states no memory" not in result.err
    result = rllaunch("plan", "--model", model, "--here")
    assert result.out.splitlines()[0].endswith((") on 1 × 1 cpu: fits", ") on 1 × 1 cpu: does not fit"))
    assert "states no memory" not in result.err


def test_layouts_that_nothing_limits_are_not_told_as_if_they_fitted(rllaunch: Any):
    words = [w for key in ("gpu", "host") for w in ("--set", f"hardware.{key}_memory_bytes=unset")]
    result = rllaunch("plan", "--fit", *SMALL, *words)
    assert result.code == 0
    assert "\nno limit is stated, so nothing says whether it fits\n" in result.out
    assert result.err.startswith("hint: profile H100 states no memory: --hardware NAME plans for another machine, ")


def test_no_layout_is_looked_for_where_the_trainer_has_one(rllaunch: Any):
    result = rllaunch("plan", "--fit", "--model", "qwen3-0.6b")
    assert result.code == 3
    assert result.out == ""
    assert result.err.startswith(
        "error: the embedded trainer has one layout, so there is none to look for\n"
        '  trainer.backend = "embedded"   hardware profile: cpu ('
    )
    assert result.err.endswith("hint: --hardware NAME, of a machine with GPUs; `rllaunch profiles list` shows them\n")


def test_the_doctor_says_that_nothing_limits_a_launch_it_has_not_looked_at_the_machine_for(rllaunch: Any):
    words = ("doctor", "--no-probe", "--model", "qwen3-0.6b")
    result = rllaunch(*words)
    assert (result.code, result.out) == (0, "")
    assert result.err == (
        "qwen3-0.6b on 1 × 1 cpu: the configuration is sound (this machine was not looked at); "
        "no limit is stated, so nothing says whether it fits\n"
        "hint: without --hardware this machine was taken, and profile cpu states no memory: "
        "--hardware NAME plans for another, `rllaunch plan --here` for what a job may use on this one\n"
    )
    stated = rllaunch(*words, "--set", "hardware.host_memory_bytes=600GiB")
    assert stated.err == "qwen3-0.6b on 1 × 1 cpu: the configuration is sound (this machine was not looked at)\n"


def test_what_else_there_is_says_why_not(rllaunch: Any):
    out = rllaunch("plan", *CPU_ORDER).out
    assert "exceeds the host's 898.0 GiB by " in out
    assert "not open:" in out


@pytest.mark.parametrize("more", [("--lora-rank", "8"), ("--advantage-estimator", "ppo")], ids=["LoRA", "critic"])
def test_a_source_of_updates_that_rules_ways_out_is_named(rllaunch: Any, more: tuple[str, ...]):
    auto = ("--model", "qwen3-0.6b", "--hardware", "H100", "--colocate-memory-peak-device", "auto", *more)
    asked = (*auto, "--update-weights-from", "gpu")
    *open_ones, ruled_out = rllaunch("plan", *asked, "--json").json()["alternatives"]
    assert not any("not open" in other["why_not"] for other in open_ones)
    assert ruled_out["why_not"].endswith("; not open: handoff.update_weights_from is set (--update-weights-from gpu)")
    assert ruled_out["update_from"] == "host"
    alternatives = rllaunch("plan", *auto, "--json").json()["alternatives"]
    assert not any("not open" in other["why_not"] for other in alternatives)
    for command in (("doctor", "--no-probe"), ("train", "--dry-run")):
        found = {f["code"]: f for f in rllaunch(*command, *asked, "--json").json()["findings"]}
        assert found["RL344"]["level"] == "warning"
        assert found["RL344"]["message"].startswith(
            "only ways in which the trainer stays on the GPU are left: gpu order"
        )
        assert "RL344" not in rllaunch(*command, *auto, "--json").out
    refused = rllaunch("plan", *asked, "--offload-train")
    assert refused.code == 3
    assert refused.out.startswith("error[RL344]: no handoff updates from the GPU: gpu order cannot run with ")


def test_what_is_more_than_a_screen_is_counted(rllaunch: Any):
    out = rllaunch("plan", *SMALL, "--colocate-memory-peak-device", "auto").out
    others = len(rllaunch("plan", *SMALL, "--colocate-memory-peak-device", "auto", "--json").json()["alternatives"])
    assert out.splitlines()[-1] == f"… and {others - 12} more: --json has them all"


def test_an_engine_without_a_known_gpu_is_noted(rllaunch: Any):
    result = rllaunch("plan", *SMALL, "--set", "hardware.gpu_memory_bytes=unset")
    assert "note: the profile states no GPU memory: the KV cache's size is unknown" in result.err


# -- for a machine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [DSV4, CPU_ORDER, (*SMALL, "--colocate-memory-peak-device", "auto")], ids=" ".join)
def test_json_has_the_documented_shape(rllaunch: Any, words: tuple[str, ...]):
    result = rllaunch("plan", *words, "--json")
    answer = result.json()
    assert result.code == (0 if answer["fits"] else 4)
    assert set(answer) == {
        *(
            "order",
            "engine_weights",
            "buffers",
            "update_from",
            "offload_train",
            "offload_rollout",
            "steps",
            "parameters",
            "peaks",
        ),
        *("limits", "fits", "first_break", "seconds", "alternatives", "link"),
    }
    assert answer["order"] in ("cpu", "gpu")
    assert answer["engine_weights"] in ("mirror", "discard", "resident")
    assert type(answer["parameters"]) is int
    for step in answer["steps"]:
        assert set(step) == {"phase", "name", "gpu", "host", "seconds"}
        assert step["phase"] in ("init", "cycle")
        assert step["name"] in STEPS
        for tier in ("gpu", "host"):
            assert all(type(size) is int and size >= 0 for size in step[tier].values())
            assert step[tier]["total"] == sum(size for name, size in step[tier].items() if name != "total")
    phases = [step["phase"] for step in answer["steps"]]
    assert phases == sorted(phases, reverse=True), "start-up, then the cycle"
    for tier in ("gpu", "host"):
        assert answer["peaks"][tier] == max(step[tier]["total"] for step in answer["steps"])
        assert type(answer["limits"][tier]) is int
    assert answer["fits"] == all(answer["peaks"][tier] <= answer["limits"][tier] for tier in ("gpu", "host"))


@pytest.mark.parametrize("words", [DSV4, CPU_ORDER, (*SMALL, "--colocate-memory-peak-device", "auto")], ids=" ".join)
def test_json_has_what_else_there_is(rllaunch: Any, words: tuple[str, ...]):
    others = rllaunch("plan", *words, "--json").json()["alternatives"]
    assert others
    for other in others:
        assert {"order", "engine_weights", "buffers", "peaks", "fits", "seconds", "why_not"} <= set(other)
        assert "steps" not in other
        assert type(other["peaks"]["gpu"]) is type(other["peaks"]["host"]) is int
        assert other["why_not"]
        assert (other["first_break"] is None) is other["fits"]


def test_json_names_the_first_step_that_breaks(rllaunch: Any):
    answer = rllaunch("plan", *CPU_ORDER, "--json").json()
    over = [s for s in answer["steps"] if s["host"]["total"] > answer["limits"]["host"]]
    assert answer["first_break"] == {
        "phase": over[0]["phase"],
        "step": over[0]["name"],
        "tier": "host",
        "excess": over[0]["host"]["total"] - answer["limits"]["host"],
    }
    assert (over[0]["phase"], over[0]["name"]) == ("init", "trainer.offload")
    assert rllaunch("plan", *DSV4, "--json").json()["first_break"] is None


def test_json_of_fit_has_flags_that_plan_as_they_say(rllaunch: Any):
    result = rllaunch("plan", "--fit", *SMALL, "--json")
    assert result.code == 0
    answer = result.json()
    assert set(answer) == {"found", "smaller", "considered"}
    best = answer["found"][0]
    again = rllaunch("plan", *SMALL, *best["flags"].split(), "--json").json()
    assert again["peaks"] == best["peaks"]
    assert again["fits"] is best["fits"] is True


def test_where_no_layout_fits_the_exit_code_is_4_and_each_count_says_why(rllaunch: Any):
    result = rllaunch("plan", "--fit", *DSV4, "--max-nodes", "4")
    assert result.code == 4
    lines = result.out.splitlines()
    assert lines[0] == "dsv4 on GB300: no layout on up to 4 nodes fits"
    assert [line.split(":")[0] for line in lines[1:]] == ["1 node", "2 nodes", "3 nodes", "4 nodes"]
    assert rllaunch("plan", "--fit", *DSV4, "--max-nodes", "4", "--json").json()["found"] == []


def test_node_counts_that_are_left_out_are_named(rllaunch: Any):
    lines = rllaunch("plan", "--fit", *DSV4).out.splitlines()
    assert [line.split(":")[0] for line in lines if " node" in line and ": " in line][-5:] == [
        "1 node",
        "2 to 4 nodes",
        "5 nodes",
        "6 nodes",
        "7 nodes",
    ]
    assert "2 to 4 nodes: too few too; --json says what each lacks" in lines
    assert (
        "6 nodes: the trainer's state alone takes 912.5 GiB of a node's host, 14.5 GiB more than there are"
        in "\n".join(lines)
    )


def test_fit_names_the_flags_of_the_best_last(rllaunch: Any):
    words = ("plan", "--fit", "--model", "qwen3-32b", "--hardware", "H100", "--recompute-granularity", "full")
    best = rllaunch(*words, "--json").json()["found"][0]
    assert best["flags"]
    assert rllaunch(*words).out.splitlines()[-1] == f"as flags: {best['flags']}"


def test_a_launch_that_has_the_best_layout_needs_no_flags(rllaunch: Any):
    assert rllaunch("plan", "--fit", *SMALL, "--json").json()["found"][0]["flags"] == ""
    assert rllaunch("plan", "--fit", *SMALL).out.splitlines()[-1] == (
        "the best is the launch's own layout: no flags are needed"
    )


@pytest.mark.parametrize("width", [60, 80, 100])
def test_tables_fit_a_narrow_terminal_with_whole_words(rllaunch: Any, monkeypatch: pytest.MonkeyPatch, width: int):
    whole = set(rllaunch("plan", *DSV4).out.split())
    monkeypatch.setenv("COLUMNS", str(width))
    lines = [line.rstrip() for line in rllaunch("plan", *DSV4).out.splitlines()]
    assert max(map(len, lines[3:])) <= width
    # Of what else there is, one reason names a key that is half as long as the narrowest of these.
    words = {word for line in lines[: lines.index("What else there is")] for word in line.split() if "─" not in word}
    assert words <= whole or width == 60


# -- drawn -----------------------------------------------------------------------------------------


def test_plot_writes_svg_and_png_of_both_orders(rllaunch: Any, tmp_path: Path):
    for name, magic in (("plan.svg", b"<?xml"), ("plan.png", b"\x89PNG")):
        result = rllaunch("plan", *CPU_ORDER, "--plot", tmp_path / name)
        assert result.code == 4, "drawn, and it still does not fit"
        assert f"drawn: {tmp_path / name}" in result.err.splitlines()
        assert (tmp_path / name).read_bytes().startswith(magic)
    svg = (tmp_path / "plan.svg").read_text()
    for text in ("gpu order, mirror, shared backup", "cpu order, mirror, fresh backup", "dsv4 (284.3 B parameters)"):
        assert text in svg


def test_json_stays_json_when_it_is_drawn_too(rllaunch: Any, tmp_path: Path):
    result = rllaunch("plan", *DSV4, "--json", "--plot", tmp_path / "plan.svg")
    assert result.json()["fits"] is True
    assert (tmp_path / "plan.svg").is_file()


@pytest.mark.parametrize("name", ["plan.pdf", "plan"])
def test_another_suffix_is_an_error_before_anything_is_written(rllaunch: Any, tmp_path: Path, name: str):
    result = rllaunch("plan", *DSV4, "--plot", tmp_path / name)
    assert result.code == 2
    assert result.out == ""
    assert "cannot draw a plan as" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_search_is_not_drawn_and_says_so(rllaunch: Any, tmp_path: Path):
    result = rllaunch("plan", "--fit", *SMALL, "--plot", tmp_path / "plan.svg")
    assert result.code == 2
    assert result.err.startswith("error: --plot draws one plan, --fit looks at many\n")
    assert list(tmp_path.iterdir()) == []


# -- wrong input -----------------------------------------------------------------------------------


def test_what_cannot_be_planned_is_an_error_in_the_configuration(rllaunch: Any):
    words = ("plan", *SMALL, "--set", "model.architecture.model_type=quen3")
    told = "the launch cannot be planned: unknown model_type 'quen3'"
    result = rllaunch(*words)
    assert result.code == 3
    assert result.err.startswith(f"error: {told}\n")
    assert "\nhint: " in result.err
    assert result.out == ""
    answer = rllaunch(*words, "--json").json()
    assert answer["ok"] is False
    assert [finding["message"] for finding in answer["findings"]] == [told]


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (
            ("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "30"),
            "RL316",
            "28 − 30 = -2 layers cannot be divided over 1 pipeline stage beside the ends",
        ),
        (("--no-colocate",), "RL305", "trainer and engines on separate GPUs are not supported yet"),
        (
            ("--colocate-memory-peak-device", "gpu", "--no-offload-train"),
            "RL301",
            "gpu order needs both offloads on",
        ),
    ],
    ids=["stages", "not colocated", "no handoff"],
)
def test_a_launch_that_a_rule_refuses_is_not_planned(rllaunch: Any, words: tuple[str, ...], code: str, told: str):
    """What the doctor says of it, and no bytes."""
    result = rllaunch("plan", *SMALL, *words)
    assert result.code == 3
    assert result.out.startswith(f"error[{code}]: {told}\n")
    assert words[0] in result.out, "where it came from"
    assert "\n  hint: " in result.out
    assert "GiB" not in result.out
    is_layout = code.startswith(("RL31", "RL32"))
    hint = "hint: `rllaunch plan --fit --num-nodes 1` looks for a layout on as many nodes or more\n"
    assert result.err == (hint if is_layout else "")
    answer = rllaunch("plan", *SMALL, *words, "--json").json()
    assert answer["ok"] is False
    assert [(finding["code"], finding["message"]) for finding in answer["findings"]] == [(code, told)]


def test_a_search_without_colocation_is_refused(rllaunch: Any):
    result = rllaunch("plan", "--fit", *SMALL, "--no-colocate")
    assert result.code == 3
    assert result.err.startswith("error: trainer and engines on GPUs of their own are not planned\n")


def test_the_limits_of_this_machine_count_where_they_are_lower(rllaunch: Any, monkeypatch: pytest.MonkeyPatch):
    from rllaunch.resolve import limits

    monkeypatch.setattr(limits, "host_limit", lambda: limits.HostLimit(100 * 2**30, "cgroup v2: memory.max"))
    monkeypatch.setattr(limits, "gpu_limits", list)
    launch = ("plan", "--model", "qwen3-8b", "--hardware", "H200", "--num-nodes", "1", "--json")
    there, here = rllaunch(*launch), rllaunch(*launch, "--here")
    assert (there.code, here.code) == (0, 4)
    assert here.json()["limits"]["host"] == 100 * 2**30
    assert here.json()["limits"]["gpu"] == there.json()["limits"]["gpu"]
    large = limits.HostLimit(2**50, "physical")
    monkeypatch.setattr(limits, "host_limit", lambda: large)
    assert rllaunch(*launch, "--here").json()["limits"] == there.json()["limits"]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "30"), "RL316"),
        (("--no-colocate",), "RL305"),
        (("--colocate-memory-peak-device", "gpu", "--no-offload-train"), "RL301"),
    ],
)
def test_of_a_launch_that_cannot_be_no_bytes_are_told(rllaunch: Any, words: tuple[str, ...], code: str):
    result = rllaunch("plan", *SMALL, *words)
    assert result.code == 3
    assert result.out.startswith(f"error[{code}]: ")
    assert "GiB" not in result.out
    answer = rllaunch("plan", *SMALL, *words, "--json").json()
    assert answer["ok"] is False
    assert code in [finding["code"] for finding in answer["findings"]]
