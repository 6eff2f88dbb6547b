"""This machine as the facts of a hardware profile: GPUs and links from NVML, the rest from /proc, /sys and statvfs.

Looking never raises; whatever cannot be read is left out, and said. What takes time is measured elsewhere
(`rllaunch.backends.measure`), in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rllaunch.resolve.detect import MachineFacts, probe_machine, visible_devices
from rllaunch.resolve.limits import ROOT, SharedMemory, shm_bytes
from rllaunch.resolve.profiles import Value

NODES = "sys/devices/system/node"


@dataclass(frozen=True)
class NumaNode:
    """A NUMA node; one without CPUs is the HBM of a GPU, or an expander."""

    number: int
    cpus: str
    memory_bytes: int


@dataclass(frozen=True)
class Disk:
    """The disk under a folder."""

    path: str
    size_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """What this machine shows without being measured.

    Args:
        host, driver, cuda: its name, and the driver's version and newest CUDA; empty without a driver.
        links: how each GPU reaches the host, as profiles write it; empty where NVML does not tell.
        gpu_numa: the NUMA node next to each GPU; -1 where the system does not tell.
    """

    facts: MachineFacts
    host: str = ""
    driver: str = ""
    cuda: str = ""
    links: tuple[str, ...] = ()
    gpu_numa: tuple[int, ...] = ()
    numa: tuple[NumaNode, ...] = ()
    shm: SharedMemory | None = None
    disk: Disk | None = None
    missing: tuple[str, ...] = field(default=())
    """What could not be read, a sentence each."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_machine(folder: Path, root: Path = ROOT) -> Machine:
    """This machine, with the disk under a folder."""
    facts = probe_machine(root)
    missing = []
    if facts.gpu_error:
        missing.append(f"the GPUs do not answer: {facts.gpu_error}")
    elif not facts.gpu_names:
        missing.append("no GPU is visible: nothing about GPUs, their memory and their links")
    elif not all(facts.gpu_memory_bytes):
        missing.append("the driver does not tell how much memory the GPUs have")
    if len(set(facts.gpu_names)) > 1:
        missing.append(f"the GPUs are not alike ({', '.join(sorted(set(facts.gpu_names)))}): a profile has one kind")
    links, numa, driver, cuda = _from_nvml(root)
    if facts.gpu_names and not any(links):
        missing.append("NVML does not tell how the GPUs reach the host")
    if facts.host_memory_bytes is None:
        missing.append("nothing tells how much host memory there is")
    return Machine(
        facts,
        platform.node(),
        driver,
        cuda,
        links,
        numa,
        tuple(_numa_nodes(root)),
        shm_bytes(root),
        _disk(folder),
        tuple(missing),
    )


def facts_of(machine: Machine, date: str) -> dict[str, Value]:
    """The facts of a hardware profile that this machine shows, each with its source.

    Args:
        date: as the sources name it.
    """
    said = f"detected on {machine.host}, {date}" + (f", driver {machine.driver}" if machine.driver else "")
    facts = machine.facts
    found: dict[str, Any] = {"accelerator": "cuda" if facts.gpu_names else "cpu"}
    sources = {}
    # Without a GPU a slot stands for one, and how many there are is no fact of the machine.
    if facts.gpu_names:
        found["gpus_per_node"] = len(facts.gpu_names)
    if facts.gpu_names and all(facts.gpu_memory_bytes):
        found["gpu_memory_bytes"] = min(facts.gpu_memory_bytes)
    if facts.host_memory_bytes:
        found["host_memory_bytes"] = facts.host_memory_bytes
        sources["host_memory_bytes"] = f"{said}: {facts.host_memory_origin}"
    links = {link for link in machine.links if link}
    if links:
        # Of several the slowest decides: all GPUs of a node move at once.
        found["host_link"] = min(links)
        sources["host_link"] = f"{said}: NVML" + (f", of {', '.join(sorted(links))}" if len(links) > 1 else "")
    return {key: Value(value, "", sources.get(key, said)) for key, value in found.items()}


def remarks_of(machine: Machine) -> Iterator[str]:
    """What else was seen, a line each; no key of the configuration has it."""
    from rllaunch.units import gib

    for node in machine.numa:
        near = [str(i) for i, number in enumerate(machine.gpu_numa) if number == node.number]
        cpus = f"CPUs {node.cpus}" if node.cpus else "no CPU (HBM or an expander, not counted as host memory)"
        gpus = f"; next to it GPU {', '.join(near)}" if near else ""
        yield f"NUMA node {node.number}: {gib(node.memory_bytes)}, {cpus}{gpus}."
    if machine.shm:
        yield f"/dev/shm: {gib(machine.shm.size_bytes)}, of which {gib(machine.shm.free_bytes)} are free."
    if machine.disk:
        disk = machine.disk
        yield f"Disk under {disk.path}: {gib(disk.size_bytes)}, of which {gib(disk.free_bytes)} are free."
    for sentence in machine.missing:
        yield f"Not known: {sentence}."


def _from_nvml(root: Path) -> tuple[tuple[str, ...], tuple[int, ...], str, str]:
    """Links and NUMA nodes of the GPUs, the driver's version and its CUDA; nothing where it does not answer."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except Exception:  # no library, no driver: `probe_machine` has said so
        return (), (), "", ""

    def ask(default: Any, question: Callable[..., Any], *args: Any) -> Any:
        try:
            return question(*args)
        except nvml.NVMLError:
            return default

    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(ask(0, nvml.nvmlDeviceGetCount))]
        if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
            uuids = [str(ask("", nvml.nvmlDeviceGetUUID, handle)) for handle in handles]
            handles = [handles[index] for index in visible_devices(visible, uuids)]
        links = tuple(_link(nvml, ask, handle) for handle in handles)
        numa = tuple(_gpu_numa(root, ask(None, nvml.nvmlDeviceGetPciInfo, handle)) for handle in handles)
        driver, cuda = str(ask("", nvml.nvmlSystemGetDriverVersion)), ask(0, nvml.nvmlSystemGetCudaDriverVersion)
    except nvml.NVMLError:
        return (), (), "", ""
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    return links, numa, driver, f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""


def _link(nvml: Any, ask: Callable[..., Any], handle: Any) -> str:
    """`NVLink-C2C` where the GPU has one to its CPU, else PCIe's generation and lanes.

    The most that GPU and slot can do together: an idle GPU shows Gen1 as its current generation.
    """
    coherent = ask(None, nvml.nvmlDeviceGetC2cModeInfoV, handle)
    if coherent is not None and coherent.isC2cEnabled:
        return "NVLink-C2C"
    generation = ask(0, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = ask(0, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    return f"PCIe Gen{generation} x{lanes}" if generation and lanes else ""


def _gpu_numa(root: Path, pci: Any) -> int:
    if pci is None:
        return -1
    bus_id = pci.busId.decode() if isinstance(pci.busId, bytes) else str(pci.busId)
    text = _read(root / "sys/bus/pci/devices" / bus_id[-12:].lower() / "numa_node").strip()
    return int(text) if text.isdecimal() else -1


def _numa_nodes(root: Path) -> Iterator[NumaNode]:
    folders = [f for f in (root / NODES).glob("node[0-9]*") if f.name.removeprefix("node").isdecimal()]
    for folder in sorted(folders, key=lambda f: int(f.name.removeprefix("node"))):
        words = _read(folder / "meminfo").split()
        kib = words[words.index("MemTotal:") + 1] if "MemTotal:" in words else ""
        nbytes = int(kib) * 1024 if kib.isdecimal() else 0
        yield NumaNode(int(folder.name.removeprefix("node")), _read(folder / "cpulist").strip(), nbytes)


def _disk(folder: Path) -> Disk | None:
    try:
        found = shutil.disk_usage(folder)
    except OSError:
        return None
    return Disk(str(folder), found.total, found.free)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


# What was measured, as `rllaunch.backends.measure` says it


def measured_facts(measured: Mapping[str, Any], machine: Machine, date: str) -> dict[str, Value]:
    """The facts that a measurement gives; the slower way of a link counts, and the slowest GPU."""
    gpus = measured.get("gpus") or []
    if not gpus:
        return {}
    name = machine.facts.gpu_names[0] if machine.facts.gpu_names else "GPU"
    said = f"measured on {machine.host}, {date}, {name}, driver {machine.driver or 'unknown'}"
    size = f"{gpus[0]['bytes'] / 2**30:g} GiB"
    slowest = min(gpus, key=lambda gpu: min(gpu["to_gpu"], gpu["to_host"]))
    ways = (("to_gpu", "to the GPU"), ("to_host", "to the host"))
    both = " and ".join(f"{slowest[way] / 1e9:.1f} GB/s {words}" for way, words in ways)
    facts = {
        "host_link_bytes_per_second": Value(
            round(min(slowest["to_gpu"], slowest["to_host"]), -8), "", f"{said}: {both}, {size} of pinned memory"
        )
    }
    if slowest.get("fresh_to_host"):
        facts["host_pin_bytes_per_second"] = Value(
            round(slowest["fresh_to_host"], -8), "", f"{said}: {size} made, locked and copied into"
        )
    return facts


def measured_remarks(measured: Mapping[str, Any]) -> Iterator[str]:
    """The rest of a measurement, a line each."""
    names = {
        "memory_copy": "Host memory, one thread copying",
        "page_faults": "Fresh host pages, faulted in by several threads",
        "disk_write": "Disk, written and flushed",
        "disk_read": "Disk, read back without the page cache",
    }
    for key, name in names.items():
        if rate := measured.get(key):
            yield f"{name}: {rate / 1e9:.2f} GB/s."
    for gpu in measured.get("gpus") or []:
        ways = (("pageable_to_gpu", "to it"), ("pageable_to_host", "from it"))
        parts = [f"{gpu[key] / 1e9:.1f} GB/s {words}" for key, words in ways if gpu.get(key)]
        pinning = f"; pages are locked at {gpu['pinning'] / 1e9:.1f} GB/s" if gpu.get("pinning") else ""
        yield f"GPU {gpu['index']}, pageable memory: {' and '.join(parts)}{pinning}."
    for sentence in measured.get("missing", ()):
        yield f"Not measured: {sentence}."
