"""Whole runs under Ray of the pair that GPUs run: the megatron trainer and SGLang engines, here on the CPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
pytest.importorskip("sglang")

from launching import Run, finish, start

pytestmark = [pytest.mark.stack, pytest.mark.slow]

STUBS = Path(__file__).with_name("stubs")
# SGLang's engines start one after the other, in a quarter of a minute each where nothing else runs.
TIMEOUT_SECONDS = 600.0

START_UP = {
    "cpu": [
        "engine.offload_kv", "engine.offload_weights", "trainer.init", "trainer.offload", "engine.onload_weights",
        "update_weights", "engine.onload_kv",
    ],
    "gpu": [
        "engine.offload_kv", "trainer.init", "trainer.clear_memory", "update_weights", "trainer.offload", "engine.onload_kv",
    ],
}  # fmt: skip
CYCLE = {
    "cpu": [
        "generate", "engine.offload_kv", "engine.offload_weights", "trainer.onload", "train", "trainer.offload",
        "engine.onload_weights", "update_weights", "engine.onload_kv",
    ],
    "gpu": [
        "generate", "engine.offload_kv", "trainer.onload", "engine.offload_weights", "train", "trainer.clear_memory",
        "engine.onload_weights", "update_weights", "trainer.offload", "engine.onload_kv",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def on_cpu(cpu_guest: dict[str, str]) -> dict[str, str]:
    """Variables of a run in which both sides do without CUDA: stubs stand for SGLang's kernels."""
    return {**cpu_guest, "PYTHONPATH": os.pathsep.join([str(STUBS), cpu_guest["PYTHONPATH"]])}


@pytest.fixture(scope="module", params=["cpu", "gpu"])
def pair(
    request: pytest.FixtureRequest, on_cpu: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Run]]:
    """Two rollouts of one rank and one engine in `cpu` order, of two and two in `gpu` order."""
    order = request.param
    size = {"cpu": "1", "gpu": "2"}[order]
    directory = tmp_path_factory.mktemp(f"pair-{order}")
    words = ("--trainer-backend", "megatron-cpu", "--rollout-backend", "sglang", "--num-rollout", "2")
    words += ("--num-gpus-per-node", size, "--tensor-model-parallel-size", size)
    words += ("--colocate-memory-peak-device", order, "--check-weight-update-equal")
    run = finish(start(directory / "run", *words, cwd=directory, env=on_cpu), directory / "run", TIMEOUT_SECONDS)
    assert run.code == 0, run.err
    yield order, run
    shutil.rmtree(directory)


def holds(run: Run) -> None:
    """Every rollout was sampled with the weights the trainer had, and training had changed them by more than rounding."""
    for row in run.metrics:
        # The trainer scores what the engine sampled, before it trains on it. Ratios beyond the clip range (0.2) after
        # training say that the weights of a rollout before would be off by far more than this.
        assert row["logprob_diff"] < 1e-4, row["rollout_id"]
        assert row["clip_fraction"] > 1e-2, row["rollout_id"]
        assert row["update_bytes"] == 75_904 * 4, "every parameter, in float32"
        assert 0 < row["reward_mean"] < 1
        assert 2 < row["entropy"] < 3, "untrained: nearly that of an even choice among the tokens"
        assert -1 < row["loss"] < 0, "entropy counts in favour"


def test_the_engines_logprobs_are_the_trainers_after_every_update(pair: tuple[str, Run]) -> None:
    _, run = pair
    assert [row["rollout_id"] for row in run.metrics] == [0, 1]
    holds(run)
    assert 0 < run.metrics[-1]["eval_reward_mean"] < 1


def test_events_are_the_schedule_of_the_order(pair: tuple[str, Run]) -> None:
    order, run = pair
    cycle = CYCLE[order]
    last = [*cycle[: cycle.index("train") + 1], "save", *cycle[cycle.index("train") + 1 :], "eval"]
    steps = [(e["rollout_id"], e["step"]) for e in run.events]
    assert steps == [
        *((None, s) for s in START_UP[order]), *((0, s) for s in cycle), *((1, s) for s in last),
    ]  # fmt: skip


def test_a_finished_run_goes_on_from_its_checkpoint(pair: tuple[str, Run], on_cpu: dict[str, str]) -> None:
    order, run = pair
    if order == "gpu":
        pytest.skip("a minute each: once is enough")
    command = [sys.executable, "-m", "rllaunch", "train", "--resume", "--run-dir", str(run.path), "--num-rollout", "3"]
    before = run.metrics
    resumed = subprocess.run(
        command, capture_output=True, text=True, cwd=run.path.parent, env={**os.environ, **on_cpu},
        timeout=TIMEOUT_SECONDS, check=False,
    )  # fmt: skip
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from rollout_000001" in resumed.stderr
    assert run.metrics[:2] == before
    assert [row["rollout_id"] for row in run.metrics] == [0, 1, 2]
    holds(run)
