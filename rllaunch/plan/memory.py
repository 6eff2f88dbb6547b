"""What a schedule holds in memory, step by step: bytes per region on the GPU and on the host.

Given the bytes of each region, `price` walks the schedule operation by operation, so a copy that is
allocated before its source is freed counts. The embedded backend is held against it to the byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rllaunch.plan.handoff import BACKED_UP, ENGINE_REGIONS, Region, Schedule, Step


@dataclass(frozen=True)
class StepBytes:
    """Bytes at the end of a step, and the most within it.

    Args:
        gpu: region → bytes on the device at the end of the step; what is always there is `static`.
        host: the same on the node, of all its slots together; a shared arena is `arena`.
        bytes_moved: copied between one GPU and the host; what an update sends is not in it.
        gpu_fullest, host_fullest: the regions at the fullest moment within the step.
    """

    phase: str
    name: str
    gpu: Mapping[str, int]
    host: Mapping[str, int]
    gpu_peak: int
    host_peak: int
    bytes_moved: int
    gpu_fullest: Mapping[str, int]
    host_fullest: Mapping[str, int]

    @property
    def gpu_total(self) -> int:
        return sum(self.gpu.values())

    @property
    def host_total(self) -> int:
        return sum(self.host.values())


class Ledger:
    """Bytes of every region while a schedule is walked; `apply` one step at a time.

    Args:
        sizes: region → bytes on one GPU when resident.
        static_gpu: bytes of one GPU that are in use all the time.
        static_host: bytes of one node that are in use all the time, of all its processes together.
        trainer_host: bytes of one node that are in use once the trainer is built.
        save_host: bytes of one node that are in use while a checkpoint is written.
        slots_per_node: GPUs that share one host, each with its own copies there.
    """

    def __init__(
        self,
        schedule: Schedule,
        sizes: Mapping[Region, int],
        *,
        static_gpu: int = 0,
        static_host: int = 0,
        trainer_host: int = 0,
        save_host: int = 0,
        slots_per_node: int = 1,
    ) -> None:
        self.options = schedule.options
        self.sizes = dict(sizes)
        self.slots_per_node = slots_per_node
        self.trainer_host = trainer_host
        self.save_host = save_host
        self.gpu: dict[str, int] = {"static": static_gpu} if static_gpu else {}
        self.gpu |= {r: self.sizes.get(r, 0) for r in ENGINE_REGIONS}
        self.host: dict[str, int] = {"static": static_host} if static_host else {}
        self.arena_bytes = 0
        if self.options.buffers == "shared" and self.options.offload_train:
            backup = sum(self.sizes.get(r, 0) for r in BACKED_UP)
            mirror = self.sizes.get("weights", 0) if self.options.has_mirror else 0
            self.arena_bytes = max(backup, mirror)

    def apply(self, phase: str, step: Step) -> StepBytes:
        if step.name == "trainer.init" and self.trainer_host:
            self.host["trainer"] = self.trainer_host
        gpu_fullest, host_fullest, moved = dict(self.gpu), dict(self.host), 0
        if step.name == "save" and self.save_host:
            host_fullest["save_staging"] = self.save_host
        gpu_peak, host_peak = _total(gpu_fullest), _total(host_fullest)
        for op in step.ops:
            region = op.region
            if region is None:
                continue
            size = self.sizes.get(region, 0)
            if op.action in ("copy_out", "copy_in"):
                moved += size
            elif op.tier == "gpu":
                if op.action == "alloc":
                    self.gpu[region] = size
                elif op.action == "free":
                    self.gpu.pop(region, None)
            elif op.action == "alloc":
                # The arena is mapped whole at its first use and stays for the run.
                name, size = ("arena", self.arena_bytes) if self.arena_bytes else (region, size)
                self.host[name] = size * self.slots_per_node
            elif op.action == "free" and not self.arena_bytes:
                self.host.pop(region, None)
            if op.action != "alloc":
                continue
            if op.tier == "gpu" and (total := _total(self.gpu)) > gpu_peak:
                gpu_fullest, gpu_peak = dict(self.gpu), total
            elif op.tier == "host" and (total := _total(self.host)) > host_peak:
                host_fullest, host_peak = dict(self.host), total
        return StepBytes(
            phase,
            step.name,
            dict(self.gpu),
            dict(self.host),
            gpu_peak,
            host_peak,
            moved,
            gpu_fullest,
            host_fullest,
        )


def _total(regions: Mapping[str, int]) -> int:
    return sum(regions.values())


def price(
    schedule: Schedule,
    sizes: Mapping[Region, int],
    *,
    save: bool = True,
    evaluate: bool = True,
    static_gpu: int = 0,
    static_host: int = 0,
    slots_per_node: int = 1,
) -> list[StepBytes]:
    """Bytes of start-up and of the first cycle; the arguments are those of `Ledger`."""
    ledger = Ledger(schedule, sizes, static_gpu=static_gpu, static_host=static_host, slots_per_node=slots_per_node)
    phases: Iterable[tuple[str, Iterable[Step]]] = (
        ("init", schedule.init),
        ("cycle", schedule.steps(save=save, evaluate=evaluate)),
    )
    return [ledger.apply(phase, step) for phase, steps in phases for step in steps]
