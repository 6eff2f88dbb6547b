"""What both sides of a slot must know of each other: the shared arena's size, and the books' reading."""

from __future__ import annotations

from rllaunch.backends.base import LaunchContext, MemoryReading
from rllaunch.backends.embedded.host_copies import HostCopies
from rllaunch.backends.embedded.layout import lay_out
from rllaunch.backends.embedded.model import build_model, engine_dtype
from rllaunch.backends.embedded.pool import Pool


def arena_bytes(context: LaunchContext) -> int:
    """The larger of the trainer's backup and the engine's mirror."""
    from rllaunch.backends.embedded.trainer import trainer_layouts

    layouts = trainer_layouts(context)
    engine = build_model(context, dtype=engine_dtype(context), device="meta")
    mirror = lay_out([("engine", engine.named_parameters())]).nbytes if context.options.has_mirror else 0
    return max(layouts.params.nbytes + layouts.optimizer.nbytes, mirror)


def read_memory(device: Pool, host: Pool, copies: HostCopies | None) -> MemoryReading:
    """The books of a slot's device and of its node's host, whoever holds the memory; starts a new peak."""
    (gpu, gpu_peak), (node, node_peak) = device.reading(), host.reading()
    return MemoryReading(gpu, node, gpu_peak, node_peak, copies.take_moved() if copies else 0)
