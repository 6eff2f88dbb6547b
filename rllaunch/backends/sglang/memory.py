"""Bytes in use on an engine's GPUs and on its node, whoever holds them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from rllaunch.backends.base import MemoryReading

# NVML answers in about a millisecond; a handoff moves tens of GiB a second.
SAMPLE_SECONDS = 0.02
_CGROUP = Path("/sys/fs/cgroup/memory.current")


class GpuMemory:
    """NVML's reading of some GPUs, sampled between two readings for the peak.

    Args:
        gpus: NVML's numbers of them.
    """

    def __init__(self, gpus: Sequence[int]) -> None:
        import pynvml

        pynvml.nvmlInit()
        self._nvml: Any = pynvml
        self._handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in gpus]
        self._lock = threading.Lock()
        self._peak = self._now()
        self._stop = threading.Event()
        threading.Thread(target=self._sample, name="gpu-memory", daemon=True).start()

    def _now(self) -> tuple[int, int]:
        gpu = max(int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used) for handle in self._handles)
        return gpu, node_bytes()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._raise(self._now())

    def _raise(self, now: tuple[int, int]) -> None:
        with self._lock:
            self._peak = max(self._peak[0], now[0]), max(self._peak[1], now[1])

    def reading(self) -> MemoryReading:
        """Now, and the most since the last reading."""
        now = self._now()
        self._raise(now)
        with self._lock:
            peak, self._peak = self._peak, now
        return MemoryReading(now[0], now[1], peak[0], peak[1])

    def stop(self) -> None:
        self._stop.set()


def node_bytes() -> int:
    """Host RAM in use: of the container where there is one, else of the machine. Pinned memory counts in both."""
    try:
        return int(_CGROUP.read_text(encoding="ascii"))
    except (OSError, ValueError):
        memory = psutil.virtual_memory()
        return int(memory.total - memory.available)
