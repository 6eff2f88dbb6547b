"""The memory plan of a launch: every step of its schedule with bytes on the fullest GPU and the fullest node.

The ledger of `rllaunch.plan.memory` walks the schedule; here it is filled with a launch's sizes, what is
always there is added, and the whole is held against the limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rllaunch.errors import ConfigError
from rllaunch.plan import constants as c
from rllaunch.plan.handoff import BACKED_UP, TIERS, HandoffOptions, Region, Schedule, Step, Tier, build_schedule
from rllaunch.plan.memory import Ledger, StepBytes
from rllaunch.plan.sizes import TRAINER_PARTS, LaunchSizes
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.units import gib

# What a region is called on the host, where it is a copy.
_HOST_NAMES = {"weights": "mirror", "params": "params backup", "optimizer": "optimizer backup"}


def name_of(region: str, tier: Tier) -> str:
    """A region or a constant part as a reader knows it."""
    return (_HOST_NAMES.get(region, region) if tier == "host" else region).replace("_", " ")


@dataclass(frozen=True)
class Limits:
    """Bytes one GPU and one node may hold; None where nobody says."""

    gpu: int | None
    host: int | None

    def of(self, tier: Tier) -> int | None:
        return self.gpu if tier == "gpu" else self.host


@dataclass(frozen=True)
class PlannedStep:
    """A step at its fullest moments.

    Args:
        gpu, host: name → bytes, what is always there included.
        seconds: of a handoff step, from the hardware's link; None for the work itself.
    """

    phase: str
    name: str
    gpu: Mapping[str, int]
    host: Mapping[str, int]
    seconds: float | None

    def total(self, tier: Tier) -> int:
        return sum((self.gpu if tier == "gpu" else self.host).values())


@dataclass(frozen=True)
class Break:
    """The first step over a limit."""

    index: int
    step: str
    phase: str
    tier: Tier
    excess: int


@dataclass(frozen=True)
class MemoryPlan:
    """A schedule with its bytes, its limits and its time."""

    options: HandoffOptions
    steps: tuple[PlannedStep, ...]
    limits: Limits
    sizes: LaunchSizes

    def peak(self, tier: Tier) -> int:
        return max(step.total(tier) for step in self.steps)

    def peak_step(self, tier: Tier) -> PlannedStep:
        return max(self.steps, key=lambda step: step.total(tier))

    def headroom(self, tier: Tier) -> float | None:
        """The share of the limit that stays free at the peak; negative when it does not fit."""
        limit = self.limits.of(tier)
        return None if limit is None else 1 - self.peak(tier) / limit

    @property
    def first_break(self) -> Break | None:
        for index, step in enumerate(self.steps):
            for tier in TIERS:
                limit = self.limits.of(tier)
                if limit is not None and step.total(tier) > limit:
                    return Break(index, step.name, step.phase, tier, step.total(tier) - limit)
        return None

    @property
    def fits(self) -> bool:
        return self.first_break is None

    @property
    def seconds(self) -> float:
        """The handoff of one cycle, without generating, training, saving and evaluating."""
        return sum(step.seconds or 0.0 for step in self.steps if step.phase == "cycle" and step.name != "train")

    @property
    def seconds_added(self) -> float:
        """What the launch pays for how it holds its memory: the handoff, and Adam on the host where it runs there."""
        return sum(step.seconds or 0.0 for step in self.steps if step.phase == "cycle")

    @property
    def label(self) -> str:
        return label_of(self.options)

    def to_json(self) -> dict[str, Any]:
        broken = self.first_break
        return {
            "order": self.options.order,
            "engine_weights": self.options.weights_mode,
            "buffers": self.options.buffers if self.options.offload_train else None,
            "update_from": "gpu" if self.options.updates_awake else "host",
            "offload_train": self.options.offload_train,
            "offload_rollout": self.options.offload_rollout,
            "steps": [
                {
                    "phase": s.phase,
                    "name": s.name,
                    "gpu": {"total": s.total("gpu"), **s.gpu},
                    "host": {"total": s.total("host"), **s.host},
                    "seconds": None if s.seconds is None else round(s.seconds, 3),
                }
                for s in self.steps
            ],
            "parameters": self.sizes.parameters,
            "peaks": {"gpu": self.peak("gpu"), "host": self.peak("host")},
            "limits": {"gpu": self.limits.gpu, "host": self.limits.host},
            "fits": self.fits,
            "first_break": None
            if broken is None
            else {"phase": broken.phase, "step": broken.step, "tier": broken.tier, "excess": broken.excess},
            "seconds": round(self.seconds, 3),
        }


def label_of(options: HandoffOptions) -> str:
    """A schedule in a few words: order, engine weights, buffers."""
    if not options.offload_train and not options.offload_rollout:
        return "nothing offloaded"
    parts = [f"{options.order} order"] if options.offload_train and options.offload_rollout else []
    if not options.offload_rollout:
        parts.append("engines stay")
    else:
        parts.append("weights resident" if options.weights_mode == "resident" else options.weights_mode)
        if not options.releases_kv:
            parts.append("KV cache resident")
    parts.append(f"{options.buffers} backup" if options.offload_train else "trainer stays")
    if options.order == "gpu" and not options.updates_awake:
        parts.append("update from the host")
    return ", ".join(parts)


def limits_of(config: LaunchConfig) -> Limits:
    """What the hardware profile allows: GPU memory less the trainer's margin, and the node's host memory.

    On the embedded backend the capacities of its pools; where it computes on the CPU both are in host memory.

    Raises:
        ConfigError: the margin leaves nothing.
    """
    hardware, margin = config.hardware, config.handoff.train_memory_margin_bytes
    if config.trainer.backend == "embedded":
        pools, host = config.pools, hardware.host_memory_bytes
        shared = None if host is None or hardware.accelerator != "cpu" else host
        device = None if shared is None else shared // config.gpus_per_node
        return Limits(pools.device_capacity_bytes or device, pools.host_capacity_bytes or shared)
    gpu = None if hardware.gpu_memory_bytes is None else hardware.gpu_memory_bytes - margin
    if gpu is not None and gpu <= 0:
        raise ConfigError(
            f"the trainer's margin of {gib(margin)} leaves nothing of a GPU's {gib(hardware.gpu_memory_bytes or 0)}",
            ("hardware.gpu_memory_bytes", "handoff.train_memory_margin_bytes"),
            "--train-memory-margin-bytes 1073741824",
        )
    return Limits(gpu, hardware.host_memory_bytes)


def forecast(config: LaunchConfig, options: HandoffOptions, sizes: LaunchSizes, limits: Limits) -> MemoryPlan:
    """The plan of start-up and one cycle that saves and evaluates.

    Raises:
        ScheduleError: no schedule exists for these options.
    """
    schedule = build_schedule(options)
    memory, speed = PlannedMemory(schedule, sizes), _Speed(config, options, sizes)
    steps = []
    evaluates = bool(config.task.eval_prompt_data)
    phases: Sequence[tuple[str, Sequence[Step]]] = (
        ("init", schedule.init),
        ("cycle", list(schedule.steps(save=True, evaluate=evaluates))),
    )
    for phase, its_steps in phases:
        for step in its_steps:
            priced = memory.apply(phase, step)
            gpu = {r: n for r, n in priced.gpu_fullest.items() if n}
            host = {r: n for r, n in priced.host_fullest.items() if n}
            steps.append(PlannedStep(phase, step.name, gpu, host, speed.seconds(step)))
    return MemoryPlan(options, tuple(steps), limits, sizes)


class PlannedMemory:
    """The bytes of a launch on Megatron and SGLang while a schedule is walked: of the fullest GPU and the fullest node.

    Beside the regions it counts what is always there: contexts, processes, buffers.
    """

    def __init__(self, schedule: Schedule, sizes: LaunchSizes) -> None:
        self._sizes = sizes
        self._on_gpus, self._on_node = [Ledger(schedule, gpu) for gpu in sizes.gpus], Ledger(schedule, sizes.node)
        self._is_built = False

    def apply(self, phase: str, step: Step) -> StepBytes:
        self._is_built = self._is_built or step.name.startswith("trainer.")
        gpu = max((ledger.apply(phase, step) for ledger in self._on_gpus), key=lambda priced: priced.gpu_peak)
        node = self._on_node.apply(phase, step)
        on_gpu, on_node = dict(self._sizes.static_gpu), self._static_host()
        saving = {"save_staging": self._sizes.save_staging} if step.name == "save" else {}
        return replace(
            gpu,
            gpu={**gpu.gpu, **on_gpu},
            host={**node.host, **on_node},
            gpu_peak=gpu.gpu_peak + sum(on_gpu.values()),
            host_peak=node.host_peak + sum((on_node | saving).values()),
            gpu_fullest={**gpu.gpu_fullest, **on_gpu},
            host_fullest={**node.host_fullest, **saving, **on_node},
        )

    def _static_host(self) -> dict[str, int]:
        return {n: b for n, b in self._sizes.static_host.items() if self._is_built or n not in TRAINER_PARTS}


def update_speed(config: LaunchConfig, options: HandoffOptions) -> c.Constant:
    """How fast an update's buckets reach an engine; over several nodes nobody has measured it."""
    is_on_gpu = options.updates_awake and config.cluster.num_nodes == 1
    return c.UPDATE_SPEED_ON_GPU if is_on_gpu else c.UPDATE_SPEED


class _Speed:
    """Seconds of a handoff step. All GPUs move at once, each over its own link."""

    def __init__(self, config: LaunchConfig, options: HandoffOptions, sizes: LaunchSizes) -> None:
        self.options = options
        self.uses_saver = config.handoff.trainer_offload_backend == "torch_memory_saver"
        self.update_bytes = sizes.update_bytes
        self.update_speed = update_speed(config, options)
        # Also of weights that have no copy of their own, but are rebuilt from their masters.
        self.own_part = sizes.gpu.get("params", self.update_bytes)
        link = config.hardware.host_link_bytes_per_second
        self.link = (link or c.ASSUMED_LINK.value) * c.LINK_SHARE.value
        self.pin = config.hardware.host_pin_bytes_per_second or c.PIN_FRESH.value
        per_node = config.gpus_per_node
        self.bytes: dict[Region, int] = {r: n // per_node for r, n in sizes.node.items()}
        traffic = sizes.host_optimizer * c.CPU_ADAM_TRAFFIC.value
        self.optimizer_seconds = traffic / c.CPU_ADAM_SPEED.value

    def seconds(self, step: Step) -> float | None:
        if step.name == "train":
            return self.optimizer_seconds or None
        if "." not in step.name and step.name != "update_weights":
            return None
        if step.name == "trainer.init":
            return None
        if step.name == "update_weights":
            return self._update()
        return sum(self._copy(op.action, op.region) for op in step.ops if op.region and op.action.startswith("copy"))

    def _copy(self, action: str, region: Region) -> float:
        rate = self.link
        if self.options.buffers == "fresh":
            # Pages that are pinned for one stay cost more than what is copied into them.
            is_arena = region in BACKED_UP and not self.uses_saver
            out, back = (self.pin, c.UNPIN_FRESH.value) if is_arena else (c.SAVER_PIN.value, c.SAVER_UNPIN.value)
            rate = min(rate, out if action == "copy_out" else back)
        return self.bytes.get(region, 0) / rate

    def _update(self) -> float:
        """From the GPU, or each GPU's own part from the backup over the link; then all of it to every engine."""
        own_part = 0 if self.options.updates_awake else min(self.update_bytes, self.own_part)
        return own_part / self.link + self.update_bytes / self.update_speed.value
