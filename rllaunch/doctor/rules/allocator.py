"""Environment variables that break releasing memory or sharing it between processes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import layout_of
from rllaunch.doctor.numbers import gpus_key
from rllaunch.doctor.variables import process_variable
from rllaunch.resolve.origins import Resolved

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def _check_segments(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.hardware.accelerator != "cuda":
        return
    offloads = [key for key in ("handoff.offload_train", "handoff.offload_rollout") if resolved.value(key)]
    shares = ["handoff.colocate"] if resolved.config.handoff.colocate else []
    broken = ["what is offloaded keeps its GPU memory"] if offloads else []
    broken += ["weight updates over CUDA IPC fail on older kernels"] if shares else []
    for name in ALLOCATOR_VARIABLES:
        value, origin, is_users = process_variable(resolved, name)
        if broken and EXPANDABLE.search(value):
            yield SEGMENTS.error(
                resolved,
                f"{name} turns expandable segments on: " + ", and ".join(broken),
                [*offloads, *shares],
                f"unset {name}, or take expandable_segments:True out of it"
                if is_users
                else f"--set env.{name}=expandable_segments:False",
            ).with_origin(origin)


def _check_graphs(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    layout = layout_of(resolved)
    spans = layout.engine_gpus > layout.gpus_per_node and not {"RL314", "RL315"} & layout.broken()
    releases = config.handoff.offload_rollout and config.rollout.backend == "sglang"
    value, origin, is_users = process_variable(resolved, "NCCL_GRAPH_REGISTER")
    if config.hardware.accelerator == "cuda" and spans and releases and value != "0":
        yield GRAPHS.finding(
            "warning",
            resolved,
            "engines that span nodes and release their CUDA graphs can hang at the first replay unless "
            "NCCL_GRAPH_REGISTER is 0",
            ["rollout.rollout_num_gpus_per_engine", gpus_key(resolved), "handoff.offload_rollout"],
            "export NCCL_GRAPH_REGISTER=0" if is_users else "--set env.NCCL_GRAPH_REGISTER=0",
        ).with_origin(origin)


SEGMENTS = Rule(
    code="RL330",
    name="no expandable segments beside offload or IPC",
    reason="the memory saver does not see such memory, and IPC of it needs a newer kernel "
    "(fzyzcjy/torch_memory_saver#24, OpenRLHF/OpenRLHF#957, pytorch/pytorch#183387)",
    check=_check_segments,
    overridable=True,
)
GRAPHS = Rule(
    code="RL336",
    name="no NCCL graph registration in engines that span nodes",
    reason="a resumed graph has its addresses but new memory behind them, and its replay hangs "
    "(fzyzcjy/torch_memory_saver#88, fzyzcjy/torch_memory_saver#107, sgl-project/sglang#40648)",
    check=_check_graphs,
)
RULES = (SEGMENTS, GRAPHS)
