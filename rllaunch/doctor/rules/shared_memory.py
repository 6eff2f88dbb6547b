"""Shared memory holds a bucket of the weight update, an arena where there is one, and Ray's objects."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.rules.cluster import ray_address
from rllaunch.plan.choose import Unknown, plan_launch
from rllaunch.plan.sizes import object_store_bytes
from rllaunch.resolve.origins import Resolved

SHARED_MEMORY = Path("/dev/shm")
BUCKET = "handoff.update_weight_buffer_size"
BUFFERS = "handoff.offload_train_buffers"


def check_shared_memory(
    resolved: Resolved, weights_bytes: int | None = None, arena_bytes: int = 0, free_bytes: int | None = None
) -> list[Finding]:
    """Whether `/dev/shm` has room for what the trainer keeps there on a node.

    Args:
        weights_bytes: of the whole update, where known: a bucket is never larger than that.
        arena_bytes: of all arenas of the node (`offload_train_buffers = shared`).
        free_bytes: as the machine says unless given.
    """
    config = resolved.config
    if config.trainer.backend not in ("embedded", "megatron") or not SHARED_MEMORY.is_dir():
        return []
    # To an engine in a process of its own on the same GPU a bucket goes by way of the GPU's memory.
    over_ipc = config.hardware.accelerator != "cpu" and "embedded" not in (
        config.trainer.backend,
        config.rollout.backend,
    )
    bucket_bytes = 0 if over_ipc else config.handoff.update_weight_buffer_size
    if weights_bytes is not None:
        bucket_bytes = min(bucket_bytes, weights_bytes)
    if free_bytes is None:
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    if bucket_bytes + arena_bytes <= free_bytes:
        return []
    more = f"more {SHARED_MEMORY} (docker: --shm-size)"
    if arena_bytes:
        both = f"a bucket of the weight update and the arenas need {_mib(bucket_bytes)} + {_mib(arena_bytes)}"
        what = both if bucket_bytes else f"the arenas of a node need {_mib(arena_bytes)}"
        fix = f"--offload-train-buffers fresh, or {more}"
    else:
        what = f"a bucket of the weight update needs {_mib(bucket_bytes)}"
        fix = f"--update-weight-buffer-size {max(1, free_bytes // 2)}, or {more}"
    return [
        RULE.finding(
            # An error only where the size is known; else the bucket may be far smaller.
            "error" if weights_bytes is not None or arena_bytes > free_bytes else "warning",
            resolved,
            f"{what} of shared memory, {SHARED_MEMORY} has {_mib(free_bytes)} free",
            [BUCKET, *([BUFFERS] if arena_bytes else [])],
            fix,
        )
    ]


def arenas_bytes(resolved: Resolved) -> int:
    """Bytes of a node's arenas, by the plan; 0 where there are none or nothing can be planned."""
    config = resolved.config
    if config.handoff.offload_train_buffers != "shared" or config.trainer.backend != "megatron":
        return 0
    choice = plan_launch(resolved)
    return 0 if isinstance(choice, Unknown) else max(step.host.get("arena", 0) for step in choice.taken.plan.steps)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"


def _check(resolved: Resolved) -> Iterator[Finding]:
    if ray_address(resolved)[0] in ("", "local"):
        yield from check_shared_memory(resolved, arena_bytes=arenas_bytes(resolved))


def _check_object_store(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if ray_address(resolved)[0] not in ("", "local") or not SHARED_MEMORY.is_dir():
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
    name="shared memory holds an update bucket and the arenas",
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
