"""The GPUs that the launch gets to see: what `CUDA_VISIBLE_DEVICES` leaves, whole ones, those of the profile."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.gpus import VISIBLE, GpuNode, numbers, read_node
from rllaunch.doctor.numbers import either, gpus_key, plural
from rllaunch.doctor.rules.cluster import ray_address
from rllaunch.resolve.detect import visible_devices
from rllaunch.resolve.origins import Resolved, show_value
from rllaunch.units import gib

# A driver keeps more or less of a GPU for itself than the one whose number the profile has.
SAME_SIZE = 0.02


def check_visible(resolved: Resolved, node: GpuNode, visible: str | None) -> Iterator[Finding]:
    """Whether the GPUs of this machine are there for the launch.

    Args:
        visible: value of `CUDA_VISIBLE_DEVICES`; None if it is unset.
    """
    address, _ = ray_address(resolved)
    if resolved.config.hardware.accelerator != "cuda" or address not in ("", "local") or not node.gpus:
        return  # workers of another cluster have an environment of their own
    if visible is not None:
        yield from _check_variable(resolved, node, visible)
    if cut := [gpu.index for gpu in node.visible if gpu.is_cut]:
        yield Finding(
            RULE.code,
            "error",
            f"MIG cuts {numbers(cut)} into instances: a process sees one of them, never the whole",
            (resolved.describe("hardware.name"),),
            f"other GPUs ({VISIBLE}), or MIG off: nvidia-smi -i {','.join(map(str, cut))} -mig 0 (an administrator)",
        )
    yield from _check_profile(resolved, node)


def _check_variable(resolved: Resolved, node: GpuNode, visible: str) -> Iterator[Finding]:
    wanted, there, shown = resolved.config.gpus_per_node, len(node.gpus), len(node.shown)
    origin = f"{VISIBLE} = {show_value(visible)}   this environment"
    all_of_them = f"this machine has {numbers(range(there))}"
    suffices = f"{VISIBLE}={','.join(map(str, range(wanted)))}" if wanted <= there else ""
    fix = either(f"unset {VISIBLE}", suffices if wanted < there else "")
    if problem := _unreadable(node, visible):
        yield Finding(RULE.code, "error", f"{VISIBLE} {problem}; {all_of_them}", (origin,), fix)
    elif shown < wanted <= there:
        fewer = f"--num-gpus-per-node {shown}" if shown else ""
        yield RULE.error(
            resolved,
            f"{VISIBLE} leaves {shown} of this machine's {plural(there, 'GPU')} visible, "
            f"the launch uses {wanted} of a node",
            [gpus_key(resolved)],
            either(fix, fewer),
        ).with_origin(origin)


def _unreadable(node: GpuNode, visible: str) -> str:
    """What CUDA does not take as its writer meant it; empty if it does. A -1 ends the list on purpose."""
    uuids = [gpu.uuid for gpu in node.gpus]
    seen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if not entry or entry.startswith("-") or entry == "NoDevFiles":
            return ""
        if entry.startswith("MIG-"):
            return f"names the MIG instance {entry}, and a launch takes whole GPUs"
        named = visible_devices(entry, uuids)
        if not named:
            rest = f"only the {plural(len(seen), 'GPU')} named before it" if seen else "no GPU"
            return f"names {entry}, which is none: CUDA shows {rest}"
        if named[0] in seen:
            return f"names GPU {named[0]} twice: CUDA then shows none"
        seen += named
    return ""


def _check_profile(resolved: Resolved, node: GpuNode) -> Iterator[Finding]:
    """By size: a profile may have any name, and what a plan goes by is the size."""
    planned = resolved.config.hardware.gpu_memory_bytes
    for name, memory_bytes in dict.fromkeys((gpu.name, gpu.memory_bytes) for gpu in node.visible if not gpu.is_cut):
        if not planned or not memory_bytes or abs(memory_bytes - planned) <= SAME_SIZE * planned:
            continue
        alike = [gpu.index for gpu in node.visible if (gpu.name, gpu.memory_bytes) == (name, memory_bytes)]
        yield RULE.finding(
            "warning",
            resolved,
            f"{numbers(alike)}: {name} with {gib(memory_bytes)}, the launch is planned for {gib(planned)}",
            ["hardware.name", "hardware.gpu_memory_bytes"],
            f"--hardware auto, or --set hardware.gpu_memory_bytes={memory_bytes}",
        )


def _check(resolved: Resolved) -> Iterator[Finding]:
    yield from check_visible(resolved, read_node(), os.environ.get(VISIBLE))


RULE = Rule(
    code="RL404",
    name="the launch sees the GPUs that it counts on",
    reason="CUDA stops at the first entry that names nothing and shows nothing where one is named twice "
    "(torch/cuda/__init__.py); GPUs that never come are waited for in silence (verl-project/verl#505)",
    check=_check,
    probes=True,
    overridable=True,
)
RULES = (RULE,)
