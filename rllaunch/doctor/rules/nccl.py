"""NCCL's switches against the links that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.gpus import GpuNode, numbers, read_node
from rllaunch.doctor.rules.host_memory import runs_here
from rllaunch.doctor.variables import process_variable
from rllaunch.resolve.origins import Resolved

NVLS, CUMEM = "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE"


def check_links(resolved: Resolved, node: GpuNode) -> Iterator[Finding]:
    """Whether what NCCL is told to use is there, and what is there is not switched off."""
    if resolved.config.hardware.accelerator != "cuda":
        return
    yield from _check_nvls(resolved, node)
    yield from _check_cumem(resolved, node)


def _check_nvls(resolved: Resolved, node: GpuNode) -> Iterator[Finding]:
    value, origin, is_users = process_variable(resolved, NVLS)
    without = [gpu.index for gpu in node.visible if gpu.reaches_nvswitch is False]
    if value != "1" or not without or resolved.config.world_size == 1:
        return
    yield Finding(
        RULE.code,
        "error",
        f"{NVLS}=1 needs an NVSwitch, and the NVLink of {numbers(without)} leads to GPUs only: NCCL hangs at its start",
        (origin,),
        f"export {NVLS}=0" if is_users else f"--set env.{NVLS}=0",
    )


def _check_cumem(resolved: Resolved, node: GpuNode) -> Iterator[Finding]:
    """A fabric over several nodes is seen in the GPUs, or said by the profile, which switches cuMem on for it."""
    value, origin, is_users = process_variable(resolved, CUMEM)
    if value != "0" or resolved.config.cluster.num_nodes == 1:
        return
    below = resolved.origins.get(f"env.{CUMEM}", ())
    says_profile = any(o.layer == "hardware profile" and str(o.value) == "1" for o in below)
    if not (says_profile or any(gpu.spans_nodes for gpu in node.visible)):
        return
    yield RULE.finding(
        "warning",
        resolved,
        f"{CUMEM}=0 keeps NCCL off the NVLink fabric between nodes: what crosses them goes over the network",
        ["cluster.num_nodes", "hardware.name"],
        f"export {CUMEM}=1" if is_users else f"--set env.{CUMEM}=1",
    ).with_origin(origin)


def _check(resolved: Resolved) -> Iterator[Finding]:
    node = read_node()
    yield from check_links(resolved, node if runs_here(resolved, node.facts) else GpuNode())


RULE = Rule(
    code="RL403",
    name="NCCL's switches fit the links",
    reason="NVLink is not NVSwitch, and a launch that forces NVLS hangs without one (radixark/miles#840); without "
    "cuMem NCCL never uses the fabric of an NVL72 (vllm-project/vime#103)",
    check=_check,
    probes=True,
    overridable=True,
)
RULES = (RULE,)
