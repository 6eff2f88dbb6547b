"""`offload_train_process_groups`: communicators that go and come back have to be there, and nobody may keep them."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import either
from rllaunch.resolve.origins import Resolved

KEY, OFFLOAD = "handoff.offload_train_process_groups", "handoff.offload_train"
KEEP = "--no-offload-train-process-groups"
# Options of Megatron-core under which something holds a communicator by itself: (name, values without it, why).
HOLDERS = (
    ("cuda_graph_impl", (None, "none"), "a CUDA graph replays collectives of the communicator it was captured with"),
    ("enable_cuda_graph", (None, False), "a CUDA graph replays collectives of the communicator it was captured with"),
    ("external_cuda_graph", (None, False), "a CUDA graph replays collectives of the communicator it was captured with"),
    ("nccl_ub", (None, False), "buffers are registered with a communicator once, when they are allocated"),
)


def _check(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if not config.handoff.offload_train_process_groups or config.trainer.backend == "embedded":
        return
    if not config.handoff.offload_train:
        yield RULE.error(
            resolved,
            "offload_train_process_groups has no effect: the trainer is never offloaded",
            [KEY, OFFLOAD],
            either("--offload-train", KEEP),
        )
    if config.world_size == 1:
        yield RULE.finding(
            "warning",
            resolved,
            "offload_train_process_groups has no effect: one rank has nobody to communicate with",
            [KEY, "cluster.num_nodes", "cluster.num_gpus_per_node"],
            KEEP,
        )
    given = config.megatron.model_extra or {}
    for name, without, why in HOLDERS:
        if given.get(name) not in without:
            yield RULE.error(
                resolved,
                f"communicators cannot be made anew beside [megatron] {name}: {why}",
                [KEY, f"megatron.{name}"],
                KEEP,
            )


RULE = Rule(
    code="RL342",
    name="communicators that are offloaded are there, and held by nobody else",
    reason="without a second rank, or a trainer that is offloaded, the flag would do nothing and say nothing; what "
    "holds a communicator by itself uses it after it is destroyed",
    check=_check,
)
RULES = (RULE,)
