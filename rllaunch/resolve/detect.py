"""What this machine is: its GPUs from NVML, its host memory from `rllaunch.resolve.limits`, and which profile fits.

Looking never raises and never imports torch. Whatever cannot be read is left out, so that a laptop,
a container and a GPU node go the same way.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rllaunch.resolve.limits import ROOT, host_limit

CPU_PROFILE = "cpu"


@dataclass(frozen=True)
class MachineFacts:
    """What this machine shows.

    Args:
        gpu_names: the visible GPUs as NVML names them.
        gpu_memory_bytes: memory of each, 0 where the driver does not tell (GPUs that share the host's).
        gpu_error: why the GPUs could not be listed though a driver is there; else empty.
        arch: processor architecture, such as `x86_64` or `aarch64`.
        host_memory_bytes: RAM this process may use; None where nothing tells.
        host_memory_origin: where that limit is from: a file of a cgroup, Slurm's variables, or `MemTotal`.
    """

    gpu_names: tuple[str, ...] = ()
    gpu_memory_bytes: tuple[int, ...] = ()
    gpu_error: str = ""
    arch: str = ""
    host_memory_bytes: int | None = None
    host_memory_origin: str = ""


def probe_machine(root: Path = ROOT) -> MachineFacts:
    """What this machine shows: its GPUs from NVML, the rest from files below `root` and what Slurm sets."""
    gpus, gpu_error = _probe_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    limit = host_limit(root, os.environ)
    return MachineFacts(
        gpu_names=tuple(name for name, _ in gpus),
        gpu_memory_bytes=tuple(memory_bytes for _, memory_bytes in gpus),
        gpu_error=gpu_error,
        arch=platform.machine(),
        host_memory_bytes=limit.bytes if limit else None,
        host_memory_origin=limit.source if limit else "",
    )


def match_hardware(facts: MachineFacts, detect_table: Mapping[str, Sequence[str]]) -> str | None:
    """The hardware profile of a machine, or None if no profile, or more than one, fits its GPUs.

    A pattern fits a GPU whose name contains it as whole words, in any case: `B300` fits `NVIDIA B300 SXM6 AC`
    and not `NVIDIA GB300`. A profile fits if each GPU is fitted by one of its patterns; the one with the
    longest wins. Without GPUs it is `cpu`, unless a driver is there and does not answer.

    Args:
        detect_table: hardware profile → patterns of GPU names.
    """
    if not facts.gpu_names:
        return None if facts.gpu_error else CPU_PROFILE
    lengths = {
        profile: min(_longest_pattern(name, patterns) for name in facts.gpu_names)
        for profile, patterns in detect_table.items()
    }
    longest = max(lengths.values(), default=0)
    best = [profile for profile, length in lengths.items() if length == longest]
    return best[0] if longest and len(best) == 1 else None


def _longest_pattern(name: str, patterns: Sequence[str]) -> int:
    """Characters of the longest pattern that the name contains as whole words; 0 if it contains none."""
    return max((len(p) for p in patterns if _contains_words(name, p)), default=0)


def _contains_words(name: str, pattern: str) -> bool:
    return re.search(rf"(?<![^\W_]){re.escape(pattern)}(?![^\W_])", name, re.IGNORECASE) is not None


def _probe_gpus(visible: str | None) -> tuple[list[tuple[str, int]], str]:
    """Name and memory of the GPUs that `CUDA_VISIBLE_DEVICES` leaves visible, and what went wrong.

    Without the library, or with the library and no driver, there is no GPU and nothing went wrong.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except ImportError:
        return [], ""
    except pynvml.NVMLError as err:
        absent = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return [], "" if err.value in absent else f"NVML: {err}"
    try:
        if "MIG-" in (visible or ""):
            return [], "CUDA_VISIBLE_DEVICES names MIG slices, which are not whole GPUs"
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if visible is not None:
            uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
            handles = [handles[index] for index in visible_devices(visible, uuids)]
        gpus = []
        for handle in handles:
            try:
                memory_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            except pynvml.NVMLError_NotSupported:
                memory_bytes = 0
            gpus.append((str(pynvml.nvmlDeviceGetName(handle)), memory_bytes))
    except pynvml.NVMLError as err:
        return [], f"NVML: {err}"
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return gpus, ""


def visible_devices(visible: str, uuids: Sequence[str]) -> list[int]:
    """Which of the GPUs with these UUIDs a value of `CUDA_VISIBLE_DEVICES` names.

    As CUDA reads it: indices or starts of UUIDs, up to the first that names nothing; none at all if one is named
    twice (as torch/cuda/__init__.py counts them too). CUDA may order GPUs otherwise than NVML, which changes
    nothing where all GPUs of a node are alike.
    """
    devices: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            named = [int(entry)] if int(entry) < len(uuids) else []
        else:
            named = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(named) != 1:
            break
        if named[0] in devices:
            return []
        devices += named
    return devices
