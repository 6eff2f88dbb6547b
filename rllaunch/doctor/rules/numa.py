"""GPUs and the processors and memory next to them, from /sys and /proc."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.gpus import GpuNode, numbers, read_node
from rllaunch.doctor.rules.cluster import ray_address
from rllaunch.resolve.limits import ROOT
from rllaunch.resolve.origins import Resolved

NODES = "sys/devices/system/node"
# Line of /proc/self/status → what it speaks of.
ALLOWED = {"Cpus_allowed_list": "processors", "Mems_allowed_list": "memory"}


def check_numa(resolved: Resolved, node: GpuNode, root: Path = ROOT) -> Iterator[Finding]:
    """Whether this process may use what lies next to each of its GPUs.

    NUMA nodes without processors are left out: they are the HBM of GPUs, no host RAM and no place to bind to.
    """
    if resolved.config.hardware.accelerator != "cuda" or ray_address(resolved)[0] not in ("", "local"):
        return
    processors = _processors(root)
    if len(processors) < 2:
        return
    status = _status(root)
    near: dict[int, list[int]] = {}
    for gpu in node.visible[: resolved.config.gpus_per_node]:
        number = _number(root / "sys/bus/pci/devices" / gpu.pci_address / "numa_node") if gpu.pci_address else None
        if number in processors:
            near.setdefault(number, []).append(gpu.index)
    lines = []
    for line, what in ALLOWED.items():
        allowed = _members(status.get(line, ""))
        if not allowed:
            continue
        mine = [n for n, cpus in processors.items() if (cpus & allowed if line.startswith("Cpus") else n in allowed)]
        for number, gpus in sorted(near.items()):
            if number not in mine:
                lines.append(
                    f"{numbers(gpus)}: next to NUMA node {number}, this process may use {what} of {_some(mine)}"
                )
    if lines:
        yield Finding(
            RULE.code,
            "warning",
            "\n".join(["host copies of some GPUs cross the processors' link", *lines]),
            tuple(f"{line}: {status[line]}   {root}/proc/self/status" for line in ALLOWED if line in status),
            "start without taskset and numactl, and give the job the whole node (Slurm: --exclusive; Docker: no "
            "--cpuset-cpus, no --cpuset-mems)",
        )


def _processors(root: Path) -> dict[int, set[int]]:
    """NUMA node → its processors, of the nodes that have any."""
    found = {}
    for folder in (root / NODES).glob("node[0-9]*"):
        if cpus := _members(_read(folder / "cpulist")):
            found[int(folder.name.removeprefix("node"))] = cpus
    return dict(sorted(found.items()))


def _status(root: Path) -> Mapping[str, str]:
    lines = (line.partition(":") for line in _read(root / "proc/self/status").splitlines())
    return {name: value.strip() for name, _, value in lines if name in ALLOWED}


def _members(text: str) -> set[int]:
    """`0-3,8` as a set."""
    members: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            members |= set(range(int(first), int(last if last.isdecimal() else first) + 1))
    return members


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdecimal() else None  # -1: the machine does not say


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return ""


def _some(nodes: list[int]) -> str:
    return f"node {' and '.join(map(str, nodes))} only" if nodes else "none of these nodes"


def _check(resolved: Resolved) -> Iterator[Finding]:
    """For each GPU, the processors and the memory of its NUMA node against what this process may use.

    NUMA nodes without processors are left out: they are the HBM of GPUs, no host RAM and no place to bind to.
    """
    yield from check_numa(resolved, read_node())


RULE = Rule(
    code="RL407",
    name="the job may use what lies next to its GPUs",
    reason="copies from the wrong socket ran at 115 GB/s instead of 330 (vllm-project/vllm#39361, NVIDIA-NeMo/RL#2613, "
    "pytorch/torchtitan#3519)",
    check=_check,
    probes=True,
)
RULES = (RULE,)
