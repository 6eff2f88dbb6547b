"""`train --rehearse`: a big launch in small, in a process of its own, ends as its plan says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launches import chosen
from launching import Run, finish

from rllaunch.plan.forecast import MemoryPlan
from rllaunch.plan.handoff import build_schedule

DSV4 = "--model dsv4 --hardware GB300"
CPU_ORDER = f"{DSV4} --colocate-memory-peak-device cpu"
MOE = (
    "--model glm-4.5-air --hardware GB200 --num-nodes 4 --tensor-model-parallel-size 4 --sequence-parallel"
    " --expert-model-parallel-size 16 --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 4"
    " --recompute-granularity full --max-tokens-per-gpu 8192"
)
FROM_GPU = (
    "--model qwen3-30b-a3b --hardware GB300 --colocate-memory-peak-device gpu --offload-train-buffers fresh"
    " --update-weights-from gpu"
)
LORA = (
    "--model qwen3-4b --hardware H200 --tensor-model-parallel-size 2 --lora-rank 16 --recompute-granularity full"
    " --max-tokens-per-gpu 8192"
)


@pytest.fixture(scope="module")
def rehearse(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    """`rehearse(words)`: a whole rehearsal; the same words again give the same one."""
    made: dict[tuple[str, ...], Run] = {}

    def run(*words: str) -> Run:
        if words not in made:
            directory = tmp_path_factory.mktemp("rehearsal")
            path = directory / "run"
            command = [sys.executable, "-m", "rllaunch", "train", "--rehearse", "--json", "--run-dir", str(path)]
            process = subprocess.Popen(
                [*command, *" ".join(words).split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=directory,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            made[words] = finish(process, path)
        return made[words]

    return run


def summary(run: Run) -> dict[str, Any]:
    return dict(json.loads(run.out.splitlines()[-1]))


def planned_steps(plan: MemoryPlan) -> list[str]:
    schedule = build_schedule(plan.options)
    return [step.name for step in (*schedule.init, *schedule.steps(save=False, evaluate=False))]


def ran_through(run: Run, plan: MemoryPlan, *, ranks: int = 1, cycles: int = 3) -> None:
    """It ended well, on the launch's own schedule, and each step held what the pools were planned to, to the byte."""
    assert run.code == 0, run.err
    told = summary(run)
    assert (told["rehearsed"], told["fits"], told["first_break"]) == (True, True, None)
    assert f"the rehearsal ran through: {plan.label}" in run.err
    init = len(build_schedule(plan.options).init)
    steps = [event["step"] for event in run.events]
    assert steps[: len(planned_steps(plan))] == planned_steps(plan)
    assert {event["rollout_id"] for event in run.events[:init]} == {None}
    assert [event["rollout_id"] for event in run.events if event["step"] == "generate"] == list(range(cycles))
    for event in run.events:
        assert event["gpu_peak_bytes"] == event["planned_gpu_peak_bytes"], event["step"]
        # Two ranks reach their peaks on the one host in their own time: one may be a step ahead.
        off = 0.0 if ranks == 1 else 0.1
        assert event["host_peak_bytes"] == pytest.approx(event["planned_host_peak_bytes"], rel=off), event["step"]
    assert len(run.metrics) == cycles


def close_to_plan(run: Run, plan: MemoryPlan, rel: float = 0.02) -> None:
    """Scaled back, the rows are the plan's own bytes."""
    rows = summary(run)["steps"]
    by_step = {(step.phase, step.name): step for step in plan.steps}
    assert rows
    for row in rows:
        step = by_step[row["phase"], row["step"]]
        assert row["gpu"] == pytest.approx(sum(step.gpu.values()), rel=rel)
        assert row["host"] == pytest.approx(sum(step.host.values()), rel=rel)


def test_deepseek_v4_on_gb300_runs_through_in_gpu_order(rehearse: Callable[..., Run]):
    run, plan = rehearse(DSV4), chosen(DSV4).taken.plan
    assert plan.options.order == "gpu"
    ran_through(run, plan)
    close_to_plan(run, plan)
    assert (run.path / "config.json").is_file()


def test_deepseek_v4_on_gb300_breaks_in_cpu_order_at_the_step_the_plan_names(rehearse: Callable[..., Run]):
    run, plan = rehearse(CPU_ORDER), chosen(CPU_ORDER).taken.plan
    assert run.code == 4, run.err
    broken = plan.first_break
    assert broken is not None
    assert (broken.phase, broken.step, broken.tier) == ("init", "trainer.offload", "host")
    told = summary(run)
    assert told["fits"] is False
    assert told["first_break"] == {"phase": "init", "step": "trainer.offload", "tier": "host"}
    done = [event["step"] for event in run.events]
    assert done == ["engine.offload_kv", "engine.offload_weights", "trainer.init"], "up to the step before it"
    assert "error[RL201]: does not fit: exceeds the host's 898.0 GiB by " in run.err


def test_a_mixture_of_experts_runs_through_on_two_ranks(rehearse: Callable[..., Run]):
    run, plan = rehearse(MOE, "--rehearse-ranks 2"), chosen(MOE).taken.plan
    ran_through(run, plan, ranks=2)
    close_to_plan(run, plan, rel=0.1)
    assert "glm4_moe shrunk, 2 ranks, 3 cycles" in run.err


def test_no_rank_offloads_before_an_update_from_the_gpu_is_over(rehearse: Callable[..., Run]):
    run, plan = rehearse(FROM_GPU, "--rehearse-ranks 2"), chosen(FROM_GPU).taken.plan
    ran_through(run, plan, ranks=2)
    updates = [event for event in run.events if event["step"] == "update_weights"]
    assert len(updates) == 4
    assert all(event["host_peak_bytes"] == event["planned_host_peak_bytes"] for event in updates)


def test_lora_keeps_a_mirror_and_runs_through(rehearse: Callable[..., Run]):
    run, plan = rehearse(LORA), chosen(LORA).taken.plan
    assert plan.options.has_mirror
    ran_through(run, plan)


def test_a_rehearsal_s_directory_is_where_it_was_asked_for(rehearse: Callable[..., Run]):
    run = rehearse(DSV4)
    assert Path(summary(run)["run_dir"]) == run.path
