"""Environment variables that break releasing memory or sharing it between processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import layout_of
from rllaunch.doctor.numbers import gpus_key
from rllaunch.resolve.origins import Resolved, show_value

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


def _variable(resolved: Resolved, name: str) -> tuple[str, str, bool]:
    """A variable's value as the processes get it, a line saying where it is from, and whether the user's
    environment (which wins) has it."""
    if name in os.environ:
        return os.environ[name], f"{name} = {show_value(os.environ[name])}   this environment", True
    configured = (resolved.config.env.model_extra or {}).get(name)
    if configured is None:
        return "", "", False
    return str(configured), resolved.describe(f"env.{name}"), False


def _check_segments(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.hardware.accelerator != "cuda":
        return
    offloads = [key for key in ("handoff.offload_train", "handoff.offload_rollout") if resolved.value(key)]
    shares = ["handoff.colocate"] if resolved.config.handoff.colocate else []
    broken = ["what is offloaded keeps its GPU memory"] if offloads else []
    broken += ["weight updates over CUDA IPC fail on older kernels"] if shares else []
    for name in ALLOCATOR_VARIABLES:
        value, origin, is_users = _variable(resolved, name)
        if broken and EXPANDABLE.search(value):
            finding = SEGMENTS.error(
                resolved,
                f"{name} turns expandable segments on: " + ", and ".join(broken),
                [*offloads, *shares],
                f"unset {name}, or take expandable_segments:True out of it"
                if is_users
                else f"--set env.{name}=expandable_segments:False",
            )
            yield replace(finding, origins=(origin, *finding.origins))


def _check_graphs(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    layout = layout_of(resolved)
    spans = layout.engine_gpus > layout.gpus_per_node and not {"RL314", "RL315"} & layout.broken()
    releases = config.handoff.offload_rollout and config.rollout.backend == "sglang"
    value, origin, is_users = _variable(resolved, "NCCL_GRAPH_REGISTER")
    if config.hardware.accelerator == "cuda" and spans and releases and value != "0":
        finding = GRAPHS.finding(
            "warning",
            resolved,
            "engines that span nodes and release their CUDA graphs can hang at the first replay unless "
            "NCCL_GRAPH_REGISTER is 0",
            ["rollout.rollout_num_gpus_per_engine", gpus_key(resolved), "handoff.offload_rollout"],
            "export NCCL_GRAPH_REGISTER=0" if is_users else "--set env.NCCL_GRAPH_REGISTER=0",
        )
        where = (origin,) if origin else ()
        yield replace(finding, origins=(*where, *finding.origins))


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
