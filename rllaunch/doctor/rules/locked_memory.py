"""The limit of locked memory (`ulimit -l`), which InfiniBand counts against."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.resolve.limits import ROOT
from rllaunch.resolve.origins import Resolved
from rllaunch.units import gib

ADAPTERS = "sys/class/infiniband"


def check_locked_memory(resolved: Resolved, limit_bytes: int | None, root: Path = ROOT) -> Iterator[Finding]:
    """Whether NCCL may register its buffers with the adapters of this machine.

    Pinned host copies are no matter of this limit: what CUDA pins is not counted as locked.

    Args:
        limit_bytes: None for no limit.
    """
    config = resolved.config
    if config.hardware.accelerator == "cpu" or config.cluster.num_nodes == 1 or limit_bytes is None:
        return
    adapters = root / ADAPTERS
    if adapters.is_dir() and any(adapters.iterdir()):
        yield RULE.finding(
            "warning",
            resolved,
            f"a process may lock {gib(limit_bytes)} of memory, and this machine has InfiniBand: NCCL can fail to "
            "register its buffers",
            ["cluster.num_nodes"],
            "ulimit -l unlimited before `ray start` on each node (docker: --ulimit memlock=-1)",
        )


def _check(resolved: Resolved) -> Iterator[Finding]:
    """Pinned host copies are no matter of this limit: what CUDA pins is not counted as locked."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield from check_locked_memory(resolved, None if soft == resource.RLIM_INFINITY else soft)


RULE = Rule(
    code="RL410",
    name="InfiniBand may lock memory",
    reason="with 8 MiB, which containers start with, NCCL cannot register memory (NVIDIA/nccl-tests#206)",
    check=_check,
    probes=True,
)
RULES = (RULE,)
