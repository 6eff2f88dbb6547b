"""Bytes in use on GPUs and on their node, whoever holds them: what a backend with real memory reports."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from rllaunch.backends.base import MemoryReading
from rllaunch.resolve.detect import visible_devices
from rllaunch.resolve.limits import ROOT, USAGE_FILES, Cgroup, limiting_cgroup
from rllaunch.resolve.schema import LaunchConfig

# NVML answers in about a millisecond; a handoff moves tens of GiB a second.
SAMPLE_SECONDS = 0.02
_PROC = Path("/proc")


class GpuMemory:
    """NVML's reading of some GPUs, sampled between two readings for the peak.

    Args:
        gpus: UUIDs (`GPU-…`), or NVML's numbers of them.
    """

    def __init__(self, gpus: Sequence[str | int]) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._handles = [self._handle(gpu) for gpu in gpus]
        self._lock = threading.Lock()
        self._peak = self._now()
        self._stop = threading.Event()
        threading.Thread(target=self._sample, name="gpu-memory", daemon=True).start()

    def _handle(self, gpu: str | int) -> Any:
        if isinstance(gpu, str):
            return self._nvml.nvmlDeviceGetHandleByUUID(gpu)
        return self._nvml.nvmlDeviceGetHandleByIndex(gpu)

    def used(self) -> int:
        """Bytes in use on the fullest of the GPUs."""
        return max(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)

    def _now(self) -> tuple[int, int]:
        return self.used(), node_bytes()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._raise(self._now())

    def _raise(self, now: tuple[int, int]) -> None:
        with self._lock:
            self._peak = max(self._peak[0], now[0]), max(self._peak[1], now[1])

    def reading(self, moved_bytes: int = 0, pids: Sequence[int] = ()) -> MemoryReading:
        """Now, and the most since the last reading.

        Args:
            pids: of the processes whose own share is asked for.
        """
        now = self._now()
        self._raise(now)
        with self._lock:
            peak, self._peak = self._peak, now
        return MemoryReading(now[0], now[1], peak[0], peak[1], moved_bytes, self.of_processes(pids))

    def of_processes(self, pids: Sequence[int]) -> int | None:
        """Bytes that these processes hold on the fullest of the GPUs; None where NVML does not tell, as in a container
        that has other numbers for its processes."""
        totals = []
        if not pids:
            return None
        for handle in self._handles:
            try:
                running = self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except self._nvml.NVMLError:
                return None
            held = [p.usedGpuMemory for p in running if p.pid in pids]
            if not held or any(amount is None for amount in held):
                return None
            totals.append(sum(map(int, held)))
        return max(totals, default=None)

    def stop(self) -> None:
        self._stop.set()


def node_bytes(root: Path = ROOT) -> int:
    """Host RAM in use: of the cgroup whose limit the job meets first, where there is one, else of the machine.

    Pinned and shared memory count; files that are merely cached do not, the kernel drops them for who needs memory.
    """
    if (cgroup := _cgroup(root)) is not None:
        try:
            return _used(cgroup)
        except (OSError, ValueError, KeyError):
            pass
    memory = psutil.virtual_memory()
    return int(memory.total - memory.available)


@cache
def _cgroup(root: Path) -> Cgroup | None:
    """Looked up once: it is asked for fifty times a second."""
    return limiting_cgroup(root)


# Of a cgroup and those below it: version 1 sums them up under names of their own.
_FILE_AND_SHARED = {"v2": ("file", "shmem"), "v1": ("total_cache", "total_shmem")}


def _used(cgroup: Cgroup) -> int:
    current = int((cgroup.directory / USAGE_FILES[cgroup.version]).read_text(encoding="ascii"))
    lines = (cgroup.directory / "memory.stat").read_text(encoding="ascii").splitlines()
    stat = dict(line.split() for line in lines)
    file, shared = _FILE_AND_SHARED[cgroup.version]
    return current - max(0, int(stat[file]) - int(stat[shared]))


def recorded_pss(config: LaunchConfig, pids: Sequence[int]) -> int | None:
    """`pss_of` where the launch asks for it."""
    return pss_of(pids) if config.run.record_pss else None


def pss_of(pids: Sequence[int]) -> int | None:
    """Host bytes of these processes, pages that several share counted in parts; None where the kernel does not tell.

    Who has ended holds nothing. Measured on two cores with Linux 6.18: 6 ms a GiB of plain pages, 4 of huge ones, up to
    19 of shared memory.
    """
    if not pids or not (_PROC / "self" / "smaps_rollup").exists():
        return None
    total = 0
    for pid in pids:
        try:
            lines = (_PROC / str(pid) / "smaps_rollup").read_text(encoding="ascii").splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return None
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def gpu_of_process(environ: Mapping[str, str] = os.environ) -> str:
    """UUID of the first GPU this process may use; empty where there is none or nothing says."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return ""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        uuids = [uuids[index] for index in visible_devices(visible, uuids)]
    return next(iter(uuids), "")
