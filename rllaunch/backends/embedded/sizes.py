"""What both sides of a slot must agree on: the sizes of regions and of the shared arena, and the books' reading."""

from __future__ import annotations

from collections.abc import Mapping

from rllaunch.backends.base import LaunchContext, MemoryReading
from rllaunch.backends.embedded.layout import lay_out
from rllaunch.backends.embedded.model import build_model, engine_dtype
from rllaunch.backends.embedded.pool import Pool
from rllaunch.backends.embedded.trainer_layouts import trainer_layouts
from rllaunch.plan.handoff import BACKED_UP, Region


def padded_bytes(context: LaunchContext, needed: Mapping[Region, int]) -> dict[Region, int]:
    """Bytes each region takes: what its content needs, or more if `pools.region_bytes` says so.

    The content lies at the start of a padded region; what follows is moved, copied and counted with it.
    """
    given = context.config.pools.region_bytes
    return {region: max(nbytes, given.get(region, 0)) for region, nbytes in needed.items()}


def arena_bytes(context: LaunchContext) -> int:
    """The larger of the trainer's backup and the engine's mirror."""
    layouts = trainer_layouts(context)
    engine = build_model(context, dtype=engine_dtype(context), device="meta")
    sizes = padded_bytes(
        context,
        {
            "params": layouts.params.nbytes,
            "optimizer": layouts.optimizer.nbytes,
            "weights": lay_out([("engine", engine.named_parameters())]).nbytes,
        },
    )
    return max(sum(sizes[r] for r in BACKED_UP), sizes["weights"] if context.options.has_mirror else 0)


def read_memory(device: Pool, host: Pool, moved_bytes: int) -> MemoryReading:
    """The books of a slot's device and of its node's host, whoever holds the memory; starts a new peak.

    Args:
        moved_bytes: copied between them by the asker since its last reading.
    """
    (gpu, gpu_peak), (node, node_peak) = device.reading(), host.reading()
    return MemoryReading(gpu, node, gpu_peak, node_peak, moved_bytes)
