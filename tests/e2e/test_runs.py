"""Whole runs under Ray: what they leave, what they hold in memory, and that orders change nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import a_run_of, finish, small_checkpoint, start

SHORT = ("--num-rollout", "4", "--eval-interval", "2", "--save-interval", "2")
GPU = ("--colocate-memory-peak-device", "gpu")
MIRROR = ("--engine-weights", "mirror")


def test_a_run_leaves_what_the_readme_says(train: Callable[..., Any]):
    run = train(*SHORT)
    assert run.code == 0, run.err
    assert run.out.splitlines()[-1] == str(run.path)
    config = json.loads((run.path / "config.json").read_text())
    assert config["run"]["num_rollout"] == 4
    assert {"origins", "command", "versions"} <= set(json.loads((run.path / "launch.json").read_text()))
    assert [row["rollout_id"] for row in run.metrics] == [0, 1, 2, 3]
    for row in run.metrics:
        wanted = {"rollout_id", "reward_mean", "exact_match", "loss", "entropy", "kl", "grad_norm", "tokens", "seconds"}
        assert wanted <= set(row)
        assert {"generate", "train", "update_weights", "handoff", "step"} <= set(row["seconds"])
        assert row["logprob_diff"] < 1e-4, (
            "engine and trainer agree on what was sampled: the update carried the weights"
        )
    assert ["eval_exact_match" in row for row in run.metrics] == [False, True, False, True]
    assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == ["rollout_000001", "rollout_000003"]
    assert told_before_the_first_rollout(run.err) == [
        "random weights: tiny has no checkpoint",
        "starting Ray on this machine",
        "starting 1 trainer rank and the rollout engines",
        "the rollout engines are up (N s)",
        "the trainer is up: 75.9 k parameters (N s)",
        "the engines have its weights (N s)",
    ]
    assert "finished 4 rollouts" in run.err
    assert "memory as planned, to the byte" in run.err


def told_before_the_first_rollout(err: str) -> list[str]:
    """Lines between the headline and the first rollout's, with N for each number of seconds."""
    lines = err[err.index("tiny on ") : err.index("\nrollout 1/")].splitlines()[1:]
    return [re.sub(r"\d+\.\d s", "N s", line) for line in lines]


def test_an_export_has_the_tokenizer_of_the_checkpoint_that_training_started_from(tmp_path: Path):
    from transformers import AutoTokenizer

    small_checkpoint(tmp_path / "model")
    run = finish(start(tmp_path / "run", *a_run_of(tmp_path / "model"), cwd=tmp_path), tmp_path / "run")
    assert run.code == 0, run.err
    assert "random weights" not in run.err
    exported = AutoTokenizer.from_pretrained(run.path / "checkpoints" / "rollout_000000" / "hf")
    assert exported("abc=")["input_ids"] == [3, 4, 5, 2]


def test_events_are_the_schedule_step_by_step(train: Callable[..., Any]):
    run = train(*SHORT)
    start_up = [e["step"] for e in run.events if e["rollout_id"] is None]
    assert start_up == [
        "engine.offload_kv", "engine.offload_weights", "trainer.init", "trainer.offload", "engine.onload_weights",
        "update_weights", "engine.onload_kv",
    ]  # fmt: skip
    plain = [e["step"] for e in run.events if e["rollout_id"] == 0]
    full = [e["step"] for e in run.events if e["rollout_id"] == 1]
    assert plain == [
        "generate", "engine.offload_kv", "engine.offload_weights", "trainer.onload", "train", "trainer.offload",
        "engine.onload_weights", "update_weights", "engine.onload_kv",
    ]  # fmt: skip
    assert full == [*plain[:5], "save", *plain[5:], "eval"]
    keys = {
        "rollout_id",
        "step",
        "seconds",
        "bytes_moved",
        "gpu_bytes",
        "host_bytes",
        "planned_gpu_bytes",
        "planned_host_bytes",
    }
    assert all(keys <= set(e) for e in run.events)


def test_host_memory_of_each_process_is_recorded_where_it_is_asked_for(train: Callable[..., Any]):
    asked = train("--num-rollout", "2", "--record-pss")
    assert asked.code == 0, asked.err
    for event in asked.events:
        assert 2**26 < event["pss_bytes"] < 2**33, event["step"]
    assert all(event["pss_bytes"] is None for event in train(*SHORT).events)


@pytest.mark.parametrize(
    "words",
    [SHORT, (*SHORT, *MIRROR), (*SHORT, *GPU, *MIRROR), (*SHORT, *GPU, *MIRROR, "--offload-train-buffers", "fresh")],
    ids=["cpu", "cpu mirror", "gpu shared", "gpu fresh"],
)
def test_memory_is_what_was_planned_to_the_byte(train: Callable[..., Any], words: tuple[str, ...]):
    run = train(*words)
    assert run.code == 0, run.err
    for event in run.events:
        for what in ("gpu_bytes", "host_bytes", "gpu_peak_bytes", "host_peak_bytes"):
            assert event[what] == event[f"planned_{what}"], (what, event)
        if "." in event["step"]:
            assert event["bytes_moved"] == event["planned_bytes_moved"], event


def copies(run: Any) -> tuple[int, int, int]:
    """Bytes of mirror and backup, and the most the host held at any moment."""
    by_step = {e["step"]: e for e in run.events if e["rollout_id"] == 0}
    backup = by_step["generate"]["host_bytes"]
    return backup, by_step["train"]["host_bytes"], max(e["host_peak_bytes"] for e in run.events)


def test_cpu_order_holds_mirror_and_backup_together_and_gpu_order_never(train: Callable[..., Any]):
    fresh = ("--offload-train-buffers", "fresh")
    backup, mirror, peak_in_cpu_order = copies(train(*SHORT, *MIRROR, *fresh))
    assert backup > mirror > 0
    assert peak_in_cpu_order == backup + mirror
    _, _, peak_in_gpu_order = copies(train(*SHORT, *GPU, *MIRROR, *fresh))
    assert peak_in_gpu_order == max(mirror, backup)
    _, _, peak_shared = copies(train(*SHORT, *GPU, *MIRROR))
    assert peak_shared == max(mirror, backup)
    # Retained buffers void what gpu order is for.
    _, _, peak_retained = copies(train(*SHORT, *GPU, *MIRROR, "--offload-train-buffers", "retained"))
    assert peak_retained == backup + mirror


def test_the_order_of_the_handoff_changes_no_number(train: Callable[..., Any]):
    runs = [
        train(*SHORT),
        train(*SHORT, *MIRROR),
        train(*SHORT, *GPU, *MIRROR),
        train(*SHORT, *GPU, *MIRROR, "--update-weights-from", "host"),
        train(*SHORT, "--no-offload-train", "--no-offload-rollout"),
    ]
    for run in runs:
        assert run.code == 0, run.err
        assert run.without_seconds() == runs[0].without_seconds()


def test_two_ranks_learn_what_one_learns(train: Callable[..., Any]):
    one, two = train(*SHORT), train(*SHORT, "--num-gpus-per-node", "2")
    assert two.code == 0, two.err
    for a, b in zip(one.metrics, two.metrics, strict=True):
        for key in ("reward_mean", "loss", "entropy", "grad_norm"):
            assert b[key] == pytest.approx(a[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize(
    "words",
    [("--advantage-estimator", "ppo"), ("--lora-rank", "8"), ("--kl-loss-coef", "0.01")],
    ids=["ppo", "lora", "kl"],
)
def test_every_algorithm_runs_in_cpu_order_with_its_memory_as_planned(
    train: Callable[..., Any], words: tuple[str, ...]
):
    run = train("--num-rollout", "3", *words)
    assert run.code == 0, run.err
    assert len(run.metrics) == 3
    assert "memory as planned, to the byte" in run.err
    if "ppo" in words:
        assert all("value_loss" in row for row in run.metrics)


def test_json_ends_with_one_summary_object(train: Callable[..., Any]):
    run = train("--num-rollout", "1", "--json")
    summary = json.loads(run.out)
    assert summary["status"] == "finished"
    assert summary["run_dir"] == str(run.path)
    assert run.out.count("\n") == 1, "one line"
    assert {"rollouts", "reward_mean", "exact_match", "eval_exact_match", "worst_plan_ratio"} <= set(summary)
