"""A rehearsal: a resolved big launch played in small, with the same schedule, the same loop and the same proportions.

The model is shrunk within its own architecture and the cluster to one node with one or two ranks. Every region of
the memory pools is given the plan's bytes times one ratio, and the capacities are the limits times the same: an order
that breaks a limit at full size breaks it here, in the same step.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rllaunch.backends.base import LaunchContext
from rllaunch.errors import ConfigError, RunError
from rllaunch.plan.forecast import Break, MemoryPlan
from rllaunch.plan.handoff import ENGINE_REGIONS, Region, Schedule, build_schedule
from rllaunch.plan.memory import Ledger, StepBytes
from rllaunch.plan.sizes import TRAINER_PARTS
from rllaunch.resolve.origins import Origin, Resolved
from rllaunch.resolve.schema import LaunchConfig, Pools
from rllaunch.run.data import TaskData, load_task
from rllaunch.run.rehearsal import shrink

CYCLES = 3
# A GPU of 200 GiB becomes a pool of 100 MiB: large beside the shrunk model, small beside this machine.
RATIO = 2.0**-11
# Where the shrunk model is large beside that, up to a GPU of 3 GiB.
MOST_RATIO = 2.0**-6
# Answers of the rehearsed task: three digits and an end.
RESPONSE_LEN = 4


@dataclass(frozen=True)
class Rehearsal:
    """A launch in small.

    Args:
        ratio: bytes here for a byte there.
        expected: the step that must break, as the plan of the big launch has it; None if it fits.
    """

    resolved: Resolved
    schedule: Schedule
    plan: MemoryPlan
    ratio: float
    expected: Break | None

    @property
    def config(self) -> LaunchConfig:
        return self.resolved.config


def in_small(resolved: Resolved, plan: MemoryPlan, task: Mapping[str, Any], ranks: int) -> Rehearsal:
    """The rehearsal of a planned launch.

    Args:
        task: values of a task profile, by key.
        ranks: trainer ranks and engines it is played with; more would not fit a laptop.
    Raises:
        ConfigError: the plan has no limit to rehearse against, or the architecture cannot be shrunk.
    """
    if plan.limits.gpu is None and plan.limits.host is None:
        raise ConfigError(
            "there is no limit to rehearse against: the hardware profile knows neither GPU nor host memory",
            resolved.describe("hardware.name"),
            "give it hardware.gpu_memory_bytes and hardware.host_memory_bytes",
        )
    schedule = build_schedule(plan.options)
    bare = _small(resolved, plan, task, ranks)
    data = load_task(bare)
    actual = _actual_bytes(bare.config, schedule, data, ranks)
    broken = plan.first_break
    told = None if broken is None else (broken.phase, broken.step, broken.tier)
    # One slot stands for one GPU: for the stage that breaks as the plan does, the fullest first.
    stages = sorted(plan.sizes.gpus, key=lambda gpu: -sum(gpu.values()))
    found, scale = None, RATIO
    while scale <= MOST_RATIO:
        for stage in stages:
            wanted = _per_slot(plan, stage)
            ratio = max(scale, *(min(MOST_RATIO, n / wanted[r]) for r, n in actual.items() if wanted.get(r, 0) > 0))
            pools = _pools(plan, schedule, ratio, ranks, actual, wanted)
            made = replace(bare, config=_updated(bare.config, {"pools": pools}))
            rehearsal = Rehearsal(made, schedule, plan, ratio, broken)
            found = foretold(rehearsal)
            if found == told:
                return rehearsal
        # What the model cannot make small hides a narrow break: in larger pools it weighs less.
        scale *= 2
    raise RunError(
        "the rehearsal does not break where the plan does",
        (f"plan: {told}", f"rehearsal: {found}"),
        "report this with what `rllaunch plan --json` prints",
    )


def _small(resolved: Resolved, plan: MemoryPlan, task: Mapping[str, Any], ranks: int) -> Resolved:
    """The launch on one node of `ranks` slots, on the embedded backend, with the handoff that was chosen."""
    big, options = resolved.config, plan.options
    fresh = LaunchConfig()
    architecture = shrink(big.model.architecture, 16)
    architecture.pop("vocab_size", None)  # that of the rehearsed task
    samples = 4 * 2
    values: dict[str, Any] = {
        "model": {"hf_checkpoint": "", "architecture": architecture, "vocabulary": "auto", "dtype": "float32"},
        "hardware": {"accelerator": "cpu", "gpus_per_node": ranks},
        "cluster": {
            "num_nodes": 1,
            "num_gpus_per_node": ranks,
            "actor_num_nodes": 1,
            "actor_num_gpus_per_node": ranks,
            "ray_address": "local",
        },
        "handoff": {
            "colocate_memory_peak_device": options.order,
            "offload_train": options.offload_train,
            "offload_rollout": options.offload_rollout,
            "offload_rollout_level": tuple(name for name in ("kv_cache", "weight") if name in options.level),
            "offload_train_buffers": options.buffers,
            "engine_weights": options.engine_weights,
            "update_weights_from": options.update_from,
        },
        "trainer": fresh.trainer.model_dump()
        | {
            "backend": "embedded",
            "expert_tensor_parallel_size": 1,
            "global_batch_size": samples,
            "num_steps_per_rollout": 1,
            "precision": "fp32",
            "lr": big.trainer.lr,
        },
        "rollout": fresh.rollout.model_dump()
        | {
            "backend": "embedded",
            "rollout_batch_size": 4,
            "n_samples_per_prompt": 2,
            "rollout_num_gpus": ranks,
            "rollout_num_gpus_per_engine": 1,
            "rollout_max_response_len": RESPONSE_LEN,
            "dtype": "float32",
        },
        "task": {key.partition(".")[2]: value for key, value in task.items()} | {"eval_prompt_data": ""},
        "run": {"num_rollout": CYCLES, "save_interval": 0, "eval_interval": 0},
        "sglang": fresh.sglang.model_dump(),
        "megatron": {},
        "env": {},
    }
    values["algorithm"] = {"lora_target_modules": ("all-linear",)} if big.has_lora else {}
    config = _updated(big, values, replace_sections=("sglang", "megatron", "env"))
    origins = {key: (Origin(None, "derived", "the rehearsal"),) for key in ("task.prompt_data", "task.reward")}
    return Resolved(config, origins, resolved.profiles)


def _updated(
    config: LaunchConfig, values: Mapping[str, Mapping[str, Any]], replace_sections: Sequence[str] = ()
) -> LaunchConfig:
    data = config.model_dump()
    for section, given in values.items():
        data[section] = dict(given) if section in replace_sections else data[section] | dict(given)
    return LaunchConfig.model_validate(data)


def _actual_bytes(config: LaunchConfig, schedule: Schedule, data: TaskData, ranks: int) -> dict[Region, int]:
    """What each region of the shrunk model needs by itself."""
    import tempfile

    from rllaunch.backends.base import Slot
    from rllaunch.backends.embedded.engine import EmbeddedEngine
    from rllaunch.backends.embedded.trainer import EmbeddedTrainer
    from rllaunch.run.start import longest_prompt

    context = LaunchContext(config, schedule.options, data.vocabulary, longest_prompt(config, data), ranks)
    with tempfile.TemporaryDirectory() as ledgers:
        slot = Slot(0, 0, "cpu", ledgers)
        engine, trainer = EmbeddedEngine(context, slot), EmbeddedTrainer(context, slot)
        sizes = dict(engine.region_bytes()) | dict(trainer.region_bytes())
        engine.shutdown()
        trainer.shutdown()
    return sizes


def _per_slot(plan: MemoryPlan, stage: Mapping[Region, int]) -> dict[Region, int]:
    """Bytes of each region of one GPU at full size, such that a node's copies add up to the plan's.

    The fullest GPU may hold more than the mean of the fullest node. The difference goes to the gradients, which
    are on the GPU when the state is and never on the host.
    """
    gpus = plan.sizes.gpus_per_node
    sizes = dict(stage)
    for region in ("params", "optimizer"):
        share = plan.sizes.node[region] // gpus
        sizes["grads"] += max(0, sizes[region] - share)
        sizes[region] = min(sizes[region], share)
    return sizes


def _pools(
    plan: MemoryPlan,
    schedule: Schedule,
    ratio: float,
    ranks: int,
    actual: Mapping[Region, int],
    wanted: Mapping[Region, int],
) -> dict[str, Any]:
    """The pools' section: regions, what is always there and the capacities, all in the same proportion.

    A region that is larger here than its share, because the model shrinks no further, makes room for itself: as much
    as is there in the step that breaks, or in the step of those that fit where it is most.
    """
    sizes, node_share = plan.sizes, ratio * ranks / plan.sizes.gpus_per_node
    trainer = sum(n for name, n in sizes.static_host.items() if name in TRAINER_PARTS)
    always = sum(sizes.static_host.values()) - trainer
    shares = {r: int(wanted.get(r, 0) * ratio) for r in get_args(Region)}
    given: dict[str, Any] = {
        "region_bytes": {r: max(actual.get(r, 0), share) for r, share in shares.items()},
        "device_static_bytes": int(sum(sizes.static_gpu.values()) * ratio),
        "host_static_bytes": int(always * node_share),
        "host_trainer_bytes": int(trainer * node_share),
        "host_save_bytes": int(sizes.save_staging * node_share),
    }
    here = list(_priced(Pools.model_validate(given), schedule, ranks))
    exact = list(_priced(Pools.model_validate(given | {"region_bytes": shares}), schedule, ranks))
    broken = plan.first_break
    at = [(phase, step.name) for phase, step in here]
    last = len(at) if broken is None else at.index((broken.phase, broken.step)) + 1
    for tier, key, share in (("gpu", "device_capacity_bytes", ratio), ("host", "host_capacity_bytes", node_share)):
        limit = plan.limits.gpu if tier == "gpu" else plan.limits.host
        if limit is None:
            continue
        excess = [
            (a.gpu_peak - b.gpu_peak) if tier == "gpu" else (a.host_peak - b.host_peak)
            for (_, a), (_, b) in zip(here[:last], exact[:last], strict=True)
        ]
        given[key] = int(limit * share) + (excess[-1] if broken and broken.tier == tier else max(excess))
    return given


def _priced(pools: Pools, schedule: Schedule, ranks: int) -> Iterator[tuple[str, StepBytes]]:
    """The steps of start-up and of a cycle as the pools will count them."""
    ledger = Ledger(
        schedule,
        {r: pools.region_bytes.get(r, 0) for r in (*ENGINE_REGIONS, *get_args(Region))},
        static_gpu=pools.device_static_bytes,
        static_host=pools.host_static_bytes,
        trainer_host=pools.host_trainer_bytes,
        save_host=pools.host_save_bytes,
        slots_per_node=ranks,
    )
    for phase, steps in (("init", schedule.init), ("cycle", schedule.steps(save=True, evaluate=False))):
        for step in steps:
            yield phase, ledger.apply(phase, step)


def foretold(rehearsal: Rehearsal) -> tuple[str, str, str] | None:
    """(phase, step, tier) that the pools of the rehearsal must refuse, from their own sizes; None if all fits."""
    pools, ranks = rehearsal.config.pools, rehearsal.config.hardware.gpus_per_node
    for phase, step in _priced(pools, rehearsal.schedule, ranks):
        if (tier := _over(step, pools.device_capacity_bytes, pools.host_capacity_bytes)) is not None:
            return phase, step.name, tier
    return None


def _over(step: StepBytes, gpu: int | None, host: int | None) -> str | None:
    if gpu is not None and step.gpu_peak > gpu:
        return "gpu"
    return "host" if host is not None and step.host_peak > host else None


def _events(run_dir: Path) -> list[dict[str, Any]]:
    """What was recorded; nothing where it broke before the first step."""
    file = run_dir / "events.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def broke_at(run_dir: Path, rehearsal: Rehearsal) -> tuple[str, str]:
    """(phase, step) that ended a rehearsal: the one after the last that was recorded.

    Engines that do not even load break the first.
    """
    done = len(_events(run_dir))
    init, last = rehearsal.schedule.init, CYCLES - 1
    if done < len(init):
        return "init", init[done].name
    done -= len(init)
    for rollout in range(CYCLES):
        steps = list(rehearsal.schedule.steps(save=rollout == last, evaluate=False))
        if done < len(steps):
            return "cycle", steps[done].name
        done -= len(steps)
    return "cycle", "nothing"


@dataclass(frozen=True)
class Row:
    """A step as it ran: bytes at their fullest, scaled back to the big launch."""

    phase: str
    step: str
    seconds: float
    gpu: float
    host: float
    planned_gpu: int
    planned_host: int


def timeline(run_dir: Path, rehearsal: Rehearsal) -> list[Row]:
    """Start-up and the last cycle of a rehearsal beside the plan of the big launch.

    What was measured is scaled by what the pools were planned to hold, so that a region which the shrunk model could
    not make small enough does not count as a difference.
    """
    events = _events(run_dir)
    rollouts = [e["rollout_id"] for e in events if e["rollout_id"] is not None]
    shown = [e for e in events if e["rollout_id"] in (None, max(rollouts, default=None))]
    planned = {(s.phase, s.name): s for s in rehearsal.plan.steps}
    rows = []
    for event in shown:
        phase = "init" if event["rollout_id"] is None else "cycle"
        step = planned.get((phase, event["step"]))
        if step is None:
            continue
        rows.append(
            Row(
                phase,
                event["step"],
                event["seconds"],
                step.total("gpu") * event["gpu_peak_bytes"] / event["planned_gpu_peak_bytes"],
                step.total("host") * event["host_peak_bytes"] / event["planned_host_peak_bytes"],
                step.total("gpu"),
                step.total("host"),
            )
        )
    return rows
