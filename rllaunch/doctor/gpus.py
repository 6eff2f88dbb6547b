"""What NVML shows of this machine's GPUs: all of them, and which `CUDA_VISIBLE_DEVICES` leaves visible."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from typing import Any

from rllaunch.resolve.detect import MachineFacts, visible_devices

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class GpuProcess:
    """A process with memory on a GPU.

    Args:
        memory_bytes: None where the driver does not tell, as in some containers.
    """

    pid: int
    memory_bytes: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML shows it.

    Args:
        memory_bytes: 0 where the driver does not tell (a GPU that shares the host's).
        used_bytes: held by processes; what the driver keeps for itself is left out where it says so.
        processes: all of them but this one.
        is_cut: in MIG mode, so that CUDA sees instances of it and never the whole.
        pci_address: as /sys writes it; empty if unknown.
        reaches_nvswitch: whether its NVLink leads to a switch and not to another GPU; None without
            NVLink, or if unknown.
        spans_nodes: its NVLink fabric joins several nodes (NVL72).
    """

    index: int
    name: str = ""
    uuid: str = ""
    memory_bytes: int = 0
    used_bytes: int = 0
    processes: tuple[GpuProcess, ...] = ()
    is_cut: bool = False
    pci_address: str = ""
    reaches_nvswitch: bool | None = None
    spans_nodes: bool = False


@dataclass(frozen=True)
class GpuNode:
    """The GPUs of this machine.

    Args:
        shown: indices of those that `CUDA_VISIBLE_DEVICES` leaves visible, in its order.
        cuda: the newest CUDA the driver runs, as (13, 0); None without a driver.
    """

    gpus: tuple[Gpu, ...] = ()
    shown: tuple[int, ...] = ()
    cuda: tuple[int, int] | None = None

    @property
    def visible(self) -> tuple[Gpu, ...]:
        return tuple(self.gpus[index] for index in self.shown)

    @property
    def facts(self) -> MachineFacts:
        """The visible ones in the form that profiles are matched with."""
        return MachineFacts(tuple(g.name for g in self.visible), tuple(g.memory_bytes for g in self.visible))


def read_node() -> GpuNode:
    """This machine's GPUs; none without a driver, or with one that does not answer (RL502 tells why)."""
    return _read_node(os.environ.get(VISIBLE))


@cache  # eight rules ask, and a driver without persistence starts its GPUs at each first question
def _read_node(visible: str | None) -> GpuNode:
    try:
        import pynvml as nvml

        nvml.nvmlInit()
    except ImportError:
        return GpuNode()
    except nvml.NVMLError:
        return GpuNode()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        gpus = tuple(_read_gpu(nvml, index, handle) for index, handle in enumerate(handles))
        number = _ask(nvml, 0, nvml.nvmlSystemGetCudaDriverVersion)
    except nvml.NVMLError:
        return GpuNode()
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()
    shown = range(len(gpus)) if visible is None else visible_devices(visible, [gpu.uuid for gpu in gpus])
    return GpuNode(gpus, tuple(shown), (number // 1000, number % 1000 // 10) if number else None)


def forget() -> None:
    """Read the machine again at the next question."""
    _read_node.cache_clear()


def _ask(nvml: Any, default: Any, question: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return question(*args, **kwargs)
    except nvml.NVMLError:
        return default


def _read_gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle, version=nvml.nvmlMemory_v2)
    if memory is None:
        memory = _ask(nvml, None, nvml.nvmlDeviceGetMemoryInfo, handle)
    pci = _ask(nvml, None, nvml.nvmlDeviceGetPciInfo, handle)
    return Gpu(
        index,
        str(_ask(nvml, "", nvml.nvmlDeviceGetName, handle)),
        str(_ask(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        int(memory.total) if memory else 0,
        int(memory.used) if memory else 0,
        _processes(nvml, handle),
        _ask(nvml, [0], nvml.nvmlDeviceGetMigMode, handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE,
        _sysfs_address(pci.busId) if pci else "",
        _reaches_nvswitch(nvml, handle),
        any(_ask(nvml, b"", _cluster, nvml, handle)),
    )


def _processes(nvml: Any, handle: Any) -> tuple[GpuProcess, ...]:
    found: dict[int, GpuProcess] = {}
    for question in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        for process in _ask(nvml, (), question, handle):
            if process.pid != os.getpid():
                name = str(_ask(nvml, "", nvml.nvmlSystemGetProcessName, process.pid))
                found[process.pid] = GpuProcess(process.pid, process.usedGpuMemory, name.rpartition("/")[2])
    return tuple(found.values())


def _sysfs_address(bus_id: str | bytes) -> str:
    """`00000000:1B:00.0`, as NVML writes it, with the four digits of /sys."""
    return (bus_id.decode() if isinstance(bus_id, bytes) else bus_id)[-12:].lower()


def _reaches_nvswitch(nvml: Any, handle: Any) -> bool | None:
    """By its first link that is up."""
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        state = _ask(nvml, None, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if state is None:
            break
        if state == nvml.NVML_FEATURE_ENABLED:
            end = _ask(nvml, None, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
            known = (nvml.NVML_NVLINK_DEVICE_TYPE_GPU, nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH)
            return bool(end == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH) if end in known else None
    return None


def _cluster(nvml: Any, handle: Any) -> bytes:
    """The id of the cluster that its NVLink fabric joins; zeros for a fabric within one node."""
    info = nvml.c_nvmlGpuFabricInfo_t()
    nvml.nvmlDeviceGetGpuFabricInfo(handle, byref(info))
    return bytes(info.clusterUuid) if info.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED else b""


def numbers(indices: Sequence[int]) -> str:
    """`GPU 3`, `GPUs 0 to 7` or `GPUs 0, 2, 5`."""
    if len(indices) == 1:
        return f"GPU {indices[0]}"
    if len(indices) > 2 and list(indices) == list(range(indices[0], indices[-1] + 1)):
        return f"GPUs {indices[0]} to {indices[-1]}"
    return "GPUs " + ", ".join(map(str, indices))
