"""`rllaunch diff`: what changed, who set it on either side, and what that does to the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

GB300 = "--model dsv4 --hardware GB300"
QWEN3 = "--model qwen3-30b-a3b --hardware H100"


def keys(answer: dict[str, Any]) -> list[str]:
    return [row["key"] for row in answer["changed"]]


@pytest.fixture
def run_dir(rllaunch: Any, tmp_path: Path) -> Path:
    """A directory as a run of `tiny` leaves it, with what matters here."""
    answer = rllaunch("resolve", "--model", "tiny", "--hardware", "cpu", "--lr", "0.5", "--json").json()
    directory = tmp_path / "runs" / "one"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(answer["config"]), encoding="utf-8")
    (directory / "launch.json").write_text(json.dumps({"origins": answer["origins"]}), encoding="utf-8")
    return directory


def test_a_changed_key_is_shown_with_both_origins_and_both_plans(rllaunch: Any):
    result = rllaunch("diff", GB300, f"{GB300} --colocate-memory-peak-device cpu --lr 1e-5")
    assert result.code == 0
    changed, _, plans = result.out.partition(" plan ")
    label = next(line for line in changed.splitlines() if '"gpu"' in line).partition("(")[2].partition(")")[0]
    assert changed.rstrip().splitlines() == [
        "handoff.colocate_memory_peak_device",
        f'  - "gpu"   hardware profile: GB300 ({label}) hardware/GB300.toml:21',
        '  + "cpu"   flag: --colocate-memory-peak-device cpu',
        "handoff.offload_train_buffers",
        '  - "shared"   derived: handoff.offload_train_buffers = auto: the fastest that fits',
        '  + "fresh"   derived: handoff.offload_train_buffers = auto: nothing fits, this exceeds its limits least',
        "handoff.update_weights_from",
        '  - "gpu"   derived: handoff.update_weights_from = auto: the fastest that fits',
        '  + "host"   derived: handoff.update_weights_from = auto: nothing fits, this exceeds its limits least',
        "trainer.lr",
        "  - 1e-06   schema default",
        "  + 1e-05   flag: --lr 1e-5",
    ]
    rows = {line[:11].strip(): line[11:].strip() for line in plans.splitlines() if line.strip()}
    assert float(rows["handoff s"].split()[0]) > 0
    assert rows["fits"].startswith("yes ")
    assert rows["fits"].endswith(" over on the host")
    assert rows["host peak"].startswith("876.5 GiB of 898.0 GiB ")
    assert "GiB of 898.0 GiB (+" in rows["host peak"]
    assert rows["GPU peak"].endswith("the same")
    assert result.err.endswith(": 4 keys changed\n")


def test_the_plans_are_those_of_the_plan_command(rllaunch: Any):
    longer = f"{GB300} --rollout-max-response-len 32768 --num-nodes 16"
    plans = rllaunch("diff", GB300, longer, "--json").json()["plan"]
    for side, words in (("a", GB300), ("b", longer)):
        alone = rllaunch("plan", *words.split(), "--json").json()
        for name in ("peaks", "limits", "fits", "order", "seconds", "first_break", "engine_weights", "buffers"):
            assert plans[side][name] == alone[name], (side, name)
    assert plans["a"]["peaks"] != plans["b"]["peaks"]


def test_a_launch_does_not_differ_from_itself(rllaunch: Any):
    answer = rllaunch("diff", QWEN3, QWEN3, "--json").json()
    assert answer["changed"] == []
    assert answer["plan"]["a"] == answer["plan"]["b"]
    result = rllaunch("diff", QWEN3, QWEN3)
    assert result.err == f"{QWEN3} → {QWEN3}: the same launch\n"


@pytest.mark.parametrize(("other", "code"), [(QWEN3, 0), (f"{QWEN3} --lr 1", 1)])
def test_only_with_exit_code_a_difference_is_a_failure(rllaunch: Any, other: str, code: int):
    assert rllaunch("diff", QWEN3, other).code == 0
    assert rllaunch("diff", QWEN3, other, "--exit-code").code == code


def test_two_profiles_are_compared_by_themselves(rllaunch: Any):
    result = rllaunch("diff", "H100", "h200")
    assert result.code == 0
    assert "hardware.gpu_memory_bytes\n  - 85" in result.out
    assert "   hardware profile: H100 (rllaunch " in result.out
    assert "trainer.lr" not in result.out
    assert (
        "note: H100: no plan: a hardware profile alone is no launch; name the rest, such as --model qwen3-4b"
        in result.err
    )
    assert rllaunch("diff", "H100", "H200", "--json").json()["plan"]["a"] == {
        "why_not": "no plan: a hardware profile alone is no launch; name the rest, such as --model qwen3-4b"
    }


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ("H100", "H200", ("--model", "qwen3-30b-a3b")),
        ("qwen3-4b", "qwen3-30b-a3b", ("--hardware", "H200")),
        ("sort", "reverse", ("--model", "tiny", "--hardware", "cpu")),
        ("dsv4-gb300", "dsv4-h200", ()),
    ],
)
def test_profiles_are_launches_with_what_flags_say_of_both(rllaunch: Any, a: str, b: str, common: tuple[str, ...]):
    answer = rllaunch("diff", a, b, *common, "--json").json()
    assert answer["changed"]
    assert "fits" in answer["plan"]["a"]
    assert "fits" in answer["plan"]["b"]
    assert not set(keys(answer)) & {word[2:].replace("-", "_") + ".name" for word in common}


def test_a_file_and_what_it_changes(rllaunch: Any, tmp_path: Path):
    (tmp_path / "a.toml").write_text('[model]\nname = "tiny"\n[hardware]\nname = "cpu"\n', encoding="utf-8")
    (tmp_path / "b.toml").write_text('[model]\nname = "tiny"\n[trainer]\nlr = 0.25\n', encoding="utf-8")
    answer = rllaunch("diff", "a.toml", "b.toml", "--hardware", "cpu", "--json").json()
    (row,) = answer["changed"]
    assert row["key"] == "trainer.lr"
    assert row["b"] == {"value": 0.25, "layer": "config", "source": "b.toml:4"}
    assert row["a"]["layer"] == "model profile"


def test_what_a_side_says_itself_stands_above_what_is_said_of_both(rllaunch: Any):
    answer = rllaunch("diff", QWEN3, f"{QWEN3} --seed 4", "--seed", "3", "--json").json()
    (row,) = answer["changed"]
    assert (row["key"], row["a"]["value"], row["b"]["value"]) == ("run.seed", 3, 4)


def test_a_run_keeps_the_origins_it_had(rllaunch: Any, run_dir: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLLAUNCH_RUN__NUM_ROLLOUT", "7")  # of today, not of the run
    answer = rllaunch("diff", run_dir, "--model tiny --hardware cpu", "--json").json()
    rows = {row["key"]: row for row in answer["changed"]}
    assert rows["trainer.lr"]["a"] == {"value": 0.5, "layer": "flag", "source": "--lr 0.5"}
    assert rows["run.num_rollout"]["b"]["source"] == "RLLAUNCH_RUN__NUM_ROLLOUT in the environment"
    assert rows["run.num_rollout"]["a"]["value"] == 150
    assert set(rows) == {"trainer.lr", "trainer.lr_decay_iters", "run.num_rollout"}
    assert answer["plan"]["a"]["fits"]


def test_a_run_without_origins_names_its_file(rllaunch: Any, run_dir: Path):
    (run_dir / "launch.json").unlink()
    answer = rllaunch("diff", run_dir, "--model tiny --hardware cpu", "--json").json()
    (row,) = answer["changed"]
    assert row["a"] == {"value": 0.5, "layer": "run", "source": str(run_dir / "config.json")}


def test_a_launch_that_is_not_sound_has_no_plan_and_its_keys_are_compared(rllaunch: Any):
    other = f"{GB300} --lora-rank 16"
    answer = rllaunch("diff", GB300, other, "--json").json()
    assert "algorithm.lora_rank" in keys(answer)
    assert answer["plan"]["b"]["why_not"].startswith("no plan: gpu order cannot run with LoRA (RL303;")
    result = rllaunch("diff", GB300, other)
    assert (result.code, "note: " + other in result.err) == (0, True)


def test_a_secret_is_not_shown(rllaunch: Any):
    other = f"{QWEN3} --set env.HF_TOKEN=hf_do_not_print"
    for words in ((), ("--json",)):
        result = rllaunch("diff", QWEN3, other, *words)
        assert "env.HF_TOKEN" in result.out
        assert "hf_do_not_print" not in result.out + result.err


@pytest.mark.parametrize(
    ("a", "says"),
    [
        ("H10", "error: 'H10' is no profile, no run directory and no file\n  in H10\nhint: did you mean 'H100'?\n"),
        ("nowhere.toml", "error: config file does not exist: nowhere.toml\n  in nowhere.toml\n"),
        ("--model dsv4 --hardwre GB300", "error: unknown flag --hardwre\n  in --model dsv4 --hardwre GB300\nhint: did you mean '--hardware'?\n"),
        ("--model dsv4 GB300", "error: 'GB300' belongs to no flag\n  in --model dsv4 GB300\n"),
        ("--model 'dsv4 --hardware", "error: not a launch: No closing quotation\n"),
        ("--hardware GB300", "error: no model is named\n  in --hardware GB300\n"),
        ("empty", "error: no run in empty\n  in empty\n  empty/config.json\nhint: name the directory of a run\n"),
        ("model", "error: model/config.json is not the config of a run\n  in model\nhint: write '--model model --hardware …'\n"),
        ("broken", "error: the run's config cannot be read: "),
    ],
)  # fmt: skip
def test_what_is_no_launch_is_one_clear_error(rllaunch: Any, tmp_path: Path, a: str, says: str):
    for name, text in {"empty": None, "model": '{"model_type": "qwen3"}', "broken": "{"}.items():
        (tmp_path / name).mkdir()
        if text:
            (tmp_path / name / "config.json").write_text(text, encoding="utf-8")
    result = rllaunch("diff", a, QWEN3)
    assert (result.code in (2, 3), result.out) == (True, "")
    assert result.err.startswith(says)


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [
        ("H100", "qwen3-4b", "error: H100 is a hardware profile, qwen3-4b a model profile\nhint: compare two of a kind\n"),
        ("H100", QWEN3, "error: H100 alone is no launch\nhint: name the rest, such as --model qwen3-4b\n"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_said(rllaunch: Any, a: str, b: str, says: str):
    result = rllaunch("diff", a, b)
    assert (result.code, result.out, result.err) == (2, "", says)
