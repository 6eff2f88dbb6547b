"""Memory of the GPUs that others hold."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.gpus import VISIBLE, Gpu, GpuNode, numbers, read_node
from rllaunch.doctor.numbers import either
from rllaunch.doctor.rules.host_memory import runs_here
from rllaunch.plan.choose import Unknown, plan_launch
from rllaunch.resolve.origins import Resolved
from rllaunch.units import gib

# Less is a desktop, or an agent that watches the machine.
BUSY_BYTES = 2**30


def check_busy(resolved: Resolved, node: GpuNode) -> Iterator[Finding]:
    """Whether the visible GPUs are free: a warning with who holds them, an error where the plan then does not fit."""
    if resolved.config.hardware.accelerator != "cuda":
        return
    used = node.visible[: resolved.config.gpus_per_node]
    busy = [gpu for gpu in used if gpu.used_bytes >= BUSY_BYTES]
    if not busy:
        return
    fullest = max(busy, key=lambda gpu: gpu.used_bytes)
    needed = _planned_peak(resolved)
    is_short = needed is not None and 0 < fullest.memory_bytes < needed + fullest.used_bytes
    text = f"others hold memory of {numbers([gpu.index for gpu in busy])}"
    if is_short:
        text += (
            f": the plan needs {gib(needed or 0)}, GPU {fullest.index} has "
            f"{gib(fullest.memory_bytes - fullest.used_bytes)} free"
        )
    free = [gpu.index for gpu in node.gpus if gpu.used_bytes < BUSY_BYTES and not gpu.is_cut]
    others = f"{VISIBLE}={','.join(map(str, free))}" if len(free) >= len(used) else ""
    yield Finding(
        RULE.code,
        "error" if is_short else "warning",
        "\n".join([text, *(line for gpu in busy for line in _holders(gpu))]),
        (resolved.describe("hardware.name"),),
        either(others, "wait for these processes, or end them yourself if they are yours"),
    )


def _planned_peak(resolved: Resolved) -> int | None:
    """Bytes of a GPU at the fullest step; None where nothing can be planned."""
    if resolved.config.trainer.backend == "embedded" or "model_type" not in resolved.config.model.architecture:
        return None
    choice = plan_launch(resolved)
    return None if isinstance(choice, Unknown) else choice.taken.plan.peak("gpu")


def _holders(gpu: Gpu) -> Iterator[str]:
    yield f"GPU {gpu.index}: {gib(gpu.used_bytes)} of {gib(gpu.memory_bytes)} in use"
    for process in gpu.processes:
        held = "" if process.memory_bytes is None else f" ({process.memory_bytes} bytes)"
        yield f"  process {process.pid} {process.name}".rstrip() + held
    if not gpu.processes:
        yield "  by processes that cannot be seen from here, as those of another container"


def _check(resolved: Resolved) -> Iterator[Finding]:
    """A warning names who holds the memory; an error says that the plan does not fit beside it."""
    node = read_node()
    if runs_here(resolved, node.facts):
        yield from check_busy(resolved, node)


RULE = Rule(
    code="RL405",
    name="the GPUs are free",
    reason="what others hold is missing when the trainer or an engine wakes; rllaunch ends no process that it did not "
    "start",
    check=_check,
    probes=True,
    overridable=True,
)
RULES = (RULE,)
