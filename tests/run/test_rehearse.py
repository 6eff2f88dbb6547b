"""A rehearsal breaks where the plan of the big launch breaks, foretold from its own pools, over many launches."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from launches import chosen, resolved

from rllaunch.errors import ConfigError
from rllaunch.flags import take_flags
from rllaunch.plan.choose import Choice, decided, plan_launch
from rllaunch.plan.forecast import Limits, MemoryPlan
from rllaunch.plugins import load_plugins
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.resolve import Request, resolve
from rllaunch.run.rehearse import Rehearsal, foretold, in_small, timeline

FULL = "--recompute-granularity full --max-tokens-per-gpu 8192"
AUTO = "--colocate-memory-peak-device auto"
LAUNCHES = {
    "dense": f"--model qwen3-0.6b --hardware H100 {AUTO}",
    "dense, TP": f"--model llama3.1-8b --hardware H200 --tensor-model-parallel-size 8 --sequence-parallel {FULL} {AUTO}",
    "dense, PP": f"--model qwen3-14b --hardware B200 --pipeline-model-parallel-size 4 {FULL} {AUTO}",
    "moe": (
        "--model qwen3-30b-a3b --hardware H100 --num-nodes 2 --tensor-model-parallel-size 4 --expert-model-parallel-size 8"
        f" --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 4 {FULL} {AUTO}"
    ),
    "moe, trays": (
        "--model glm-4.5-air --hardware GB200 --num-nodes 4 --tensor-model-parallel-size 4 --expert-model-parallel-size 16"
        f" --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 4 {FULL} {AUTO}"
    ),
    "mla, mirror": (
        "--model moonlight-16b-a3b --hardware H200 --expert-model-parallel-size 8 --rollout-num-gpus-per-engine 4"
        f" --sglang-ep-size 4 {FULL} {AUTO}"
    ),
    "reference": f"--model qwen3-4b --hardware H100 --kl-loss-coef 0.001 --engine-weights mirror {FULL} {AUTO}",
    "lora": f"--model qwen3-4b --hardware H100 --lora-rank 16 {FULL} {AUTO}",
    "critic": f"--model qwen3-4b --hardware H100 --advantage-estimator ppo --tensor-model-parallel-size 2 {FULL} {AUTO}",
    "dsv4": "--model dsv4 --hardware GB300",
    "dsv4, cpu order": "--model dsv4 --hardware GB300 --colocate-memory-peak-device cpu",
    "dsv4, auto": f"--model dsv4 --hardware GB300 {AUTO}",
}  # fmt: skip


@cache
def task() -> dict[str, Any]:
    profile = load_plugins().profiles().get("task", "reverse", "test")
    directory = profile.directory or Path()
    return {
        key: str(directory / value.value) if key.endswith("prompt_data") else value.value
        for key, value in profile.values.items()
    } | {"task.name": "reverse"}


@cache
def planned(words: str) -> tuple[Resolved, tuple[MemoryPlan, ...]]:
    """The launch and every legal way to hand it over."""
    launch = resolved(words)
    choice = plan_launch(launch)
    assert isinstance(choice, Choice)
    return launch, tuple(candidate.plan for candidate in (choice.taken, *choice.others))


def first_over(plan: MemoryPlan) -> tuple[str, str, str] | None:
    for step in plan.steps:
        for tier, parts, limit in (("gpu", step.gpu, plan.limits.gpu), ("host", step.host, plan.limits.host)):
            if limit is not None and sum(parts.values()) > limit:
                return step.phase, step.name, tier
    return None


def rehearsed(launch: Resolved, plan: MemoryPlan, ranks: int) -> Rehearsal:
    return in_small(launch, plan, task(), ranks)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("words", LAUNCHES.values(), ids=LAUNCHES)
def test_every_way_to_hand_over_breaks_in_small_where_it_breaks_in_large(words: str, ranks: int):
    launch, plans = planned(words)
    for plan in plans[:: max(1, len(plans) // 4)]:
        assert foretold(rehearsed(launch, plan, ranks)) == first_over(plan), plan.label


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_limit_just_below_any_step_breaks_the_rehearsal_there(data: st.DataObject):
    launch, plans = planned(data.draw(st.sampled_from(list(LAUNCHES.values()))))
    plan = data.draw(st.sampled_from(plans))
    limits: dict[str, int | None] = {}
    for tier in ("gpu", "host"):
        totals = [sum((step.gpu if tier == "gpu" else step.host).values()) for step in plan.steps]
        at = data.draw(st.sampled_from([None, *totals]))
        share = data.draw(st.sampled_from([0.99, 0.999, 1.001, 1.01]))
        limits[tier] = None if at is None else int(at * share)
        # Bytes are counted in 2048ths: what lies closer to a limit than the rounding is nobody's promise.
        assume(at is None or all(abs(total - at * share) > 2**20 for total in totals))
    assume(limits["gpu"] or limits["host"])
    tight = replace(plan, limits=Limits(limits["gpu"], limits["host"]))
    ranks = data.draw(st.sampled_from([1, 2]))
    assert foretold(rehearsed(launch, tight, ranks)) == first_over(tight)


def test_the_combinations_break_on_both_tiers_in_many_steps():
    """What the tests above compare is not always None."""
    seen = set()
    for words, tier in product(LAUNCHES.values(), ("gpu", "host")):
        launch, plans = planned(words)
        for plan in plans[:2]:
            totals = sorted({sum((s.gpu if tier == "gpu" else s.host).values()) for s in plan.steps})
            limit = int(totals[-1] * 0.999)
            limits = Limits(limit, None) if tier == "gpu" else Limits(None, limit)
            seen.add(foretold(rehearsed(launch, replace(plan, limits=limits), 1)))
    assert None not in seen
    assert {tier for _, _, tier in seen} == {"gpu", "host"}  # type: ignore[misc]
    assert len(seen) >= 5


@pytest.mark.parametrize("words", LAUNCHES.values(), ids=LAUNCHES)
def test_a_rehearsal_is_the_launch_s_own_schedule_in_its_own_proportions(words: str):
    launch, plans = planned(words)
    plan = plans[0]
    small = rehearsed(launch, plan, 2)
    assert small.schedule.options == plan.options
    assert [
        s.name
        for s in (
            *small.schedule.init,
            *small.schedule.steps(save=True, evaluate=bool(launch.config.task.eval_prompt_data)),
        )
    ] == [step.name for step in plan.steps]
    pools = small.config.pools
    assert pools.device_capacity_bytes is not None
    assert pools.device_capacity_bytes < 2 * 2**30, "for a laptop"
    assert small.config.trainer.backend == small.config.rollout.backend == "embedded"
    assert (
        small.config.model.architecture["model_type"].removesuffix("_text")
        == (launch.config.model.architecture["model_type"])
    )
    # What the shrunk model cannot make small enough is the model's own size, not the plan's; it widens the limits.
    excess = {r: size - plan.sizes.gpu[r] * small.ratio for r, size in pools.region_bytes.items()}
    assert all(excess[region] > -1 for region in ("kv_cache", "cuda_graph", "weights", "grads", "activations"))
    assert plan.limits.gpu is not None
    assert (
        -8 < pools.device_capacity_bytes - plan.limits.gpu * small.ratio < sum(n for n in excess.values() if n > 0) + 8
    )
    host = sum(pools.region_bytes[r] for r in ("params", "optimizer"))
    node = sum(plan.sizes.node[r] for r in ("params", "optimizer"))
    assert host >= node * small.ratio / plan.sizes.gpus_per_node - 2
    assert plan.limits.host is not None
    assert pools.host_capacity_bytes is not None
    share = plan.limits.host * small.ratio * 2 / plan.sizes.gpus_per_node
    assert -16 < pools.host_capacity_bytes - share < 2 * sum(n for n in excess.values() if n > 0) + 16


def test_without_a_limit_there_is_nothing_to_rehearse_against():
    launch = resolved(
        "--model qwen3-0.6b --hardware H100 --set hardware.host_memory_bytes=unset --set hardware.gpu_memory_bytes=unset"
    )
    choice = plan_launch(launch)
    assert isinstance(choice, Choice)
    with pytest.raises(ConfigError, match="there is no limit to rehearse against"):
        rehearsed(launch, choice.taken.plan, 1)


def test_one_known_limit_is_enough():
    words = "--model qwen3-0.6b --hardware H100 --set hardware.host_memory_bytes=unset"
    small = rehearsed(resolved(words), chosen(words).taken.plan, 1)
    assert small.config.pools.host_capacity_bytes is None
    assert small.config.pools.device_capacity_bytes is not None


def test_measured_bytes_are_scaled_back_by_what_was_planned_for_the_pools(tmp_path: Path):
    words = "--model qwen3-0.6b --hardware H100"
    plan = chosen(words).taken.plan
    small = rehearsed(resolved(words), plan, 1)
    rows = [(None, "trainer.init", 30), (0, "generate", 10), (1, "generate", 20), (1, "no.such_step", 10)]
    lines = [
        {
            "rollout_id": rollout, "step": step, "seconds": 0.5, "gpu_peak_bytes": gpu, "planned_gpu_peak_bytes": 20,
            "host_peak_bytes": 30, "planned_host_peak_bytes": 30,
        }
        for rollout, step, gpu in rows
    ]  # fmt: skip
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, last = timeline(tmp_path, small)
    by_step = {(step.phase, step.name): step for step in plan.steps}
    init, generate = by_step["init", "trainer.init"], by_step["cycle", "generate"]
    assert (first.phase, first.step, last.phase, last.step) == ("init", "trainer.init", "cycle", "generate")
    assert first.gpu == sum(init.gpu.values()) * 30 / 20
    assert last.gpu == sum(generate.gpu.values())
    assert last.host == last.planned_host == sum(generate.host.values())


CELLS = [(p.model, p.hardware) for p in load_plugins().profiles().of_kind("cell")]


@pytest.mark.parametrize(("model", "hardware"), CELLS, ids="-".join)
def test_every_shipped_cell_can_be_rehearsed(model: str, hardware: str):
    words, _, _ = take_flags(["--model", model, "--hardware", hardware])
    launch = decided(resolve(Request((), tuple(words), environ={}), load_plugins()))
    choice = plan_launch(launch)
    assert isinstance(choice, Choice)
    plan = choice.taken.plan
    broken = plan.first_break
    told = None if broken is None else (broken.phase, broken.step, broken.tier)
    assert foretold(in_small(launch, plan, task(), 1)) == told


def test_there_are_cells_to_rehearse():
    assert len(CELLS) >= 22
