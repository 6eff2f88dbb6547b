"""Shared memory holds a bucket of the weight update."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.plan.sizes import object_store_bytes
from rllaunch.resolve.origins import Resolved

SHARED_MEMORY = Path("/dev/shm")
BUCKET = "handoff.update_weight_buffer_size"


def check_shared_memory(resolved: Resolved, weights_bytes: int | None = None) -> list[Finding]:
    """Whether `/dev/shm` has room for the buckets of the embedded backend.

    Args:
        weights_bytes: of the whole update, where known: a bucket is never larger than that.
    """
    config = resolved.config
    if config.trainer.backend != "embedded" or not SHARED_MEMORY.is_dir():
        return []
    needed_bytes = config.handoff.update_weight_buffer_size
    if weights_bytes is not None:
        needed_bytes = min(needed_bytes, weights_bytes)
    free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    if needed_bytes <= free_bytes:
        return []
    return [
        RULE.finding(
            # An error only where the size of the update is known; else the bucket may be far smaller.
            "error" if weights_bytes is not None else "warning",
            resolved,
            f"a bucket of the weight update needs {_mib(needed_bytes)} of shared memory, "
            f"{SHARED_MEMORY} has {_mib(free_bytes)} free",
            [BUCKET],
            f"--update-weight-buffer-size {max(1, free_bytes // 2)}, or more {SHARED_MEMORY} (docker: --shm-size)",
        )
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _check(resolved: Resolved) -> Iterator[Finding]:
    yield from check_shared_memory(resolved)


def _check_object_store(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    is_local = not (config.cluster.ray_address or os.environ.get("RAY_ADDRESS"))
    if not is_local or not SHARED_MEMORY.is_dir():
        return
    needed_bytes, free_bytes = object_store_bytes(config), shutil.disk_usage(SHARED_MEMORY).free
    if needed_bytes > free_bytes:
        yield STORE.finding(
            "warning",
            resolved,
            f"Ray's object store takes {_mib(needed_bytes)} of shared memory for two rollouts, {SHARED_MEMORY} has "
            f"{_mib(free_bytes)} free: Ray falls back to files on a disk",
            ["rollout.rollout_batch_size", "rollout.n_samples_per_prompt", "rollout.rollout_max_response_len"],
            f"more {SHARED_MEMORY} (docker: --shm-size), or smaller rollouts",
        )


RULE = Rule(
    code="RL506",
    name="shared memory holds an update bucket",
    reason="containers start with 64 MiB of it (ray-project/ray#14535, allenai/open-instruct#1067)",
    check=_check,
    probes=True,
    overridable=True,
)
STORE = Rule(
    code="RL511",
    name="shared memory holds Ray's object store",
    reason="with less Ray puts the store on a disk, which is many times slower (ray-project/ray#14535)",
    check=_check_object_store,
    probes=True,
)
RULES = (RULE, STORE)
