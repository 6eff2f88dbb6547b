"""What this machine is: its GPUs from NVML, its host memory from `/proc` and cgroups, and which profile fits.

Looking never raises and never imports torch. Whatever cannot be read is left out, so that a laptop,
a container and a GPU node go the same way.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
        host_memory_origin: where that limit is from: a file of a cgroup, or `MemTotal`.
    """

    gpu_names: tuple[str, ...] = ()
    gpu_memory_bytes: tuple[int, ...] = ()
    gpu_error: str = ""
    arch: str = ""
    host_memory_bytes: int | None = None
    host_memory_origin: str = ""


def probe_machine(procfs: Path = Path("/proc"), sysfs: Path = Path("/sys")) -> MachineFacts:
    """What this machine shows: its GPUs from NVML, the rest from below `procfs` and `sysfs`."""
    gpus, gpu_error = _probe_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    host_memory_bytes, host_memory_origin = _host_memory(procfs, sysfs)
    return MachineFacts(
        gpu_names=tuple(name for name, _ in gpus),
        gpu_memory_bytes=tuple(memory_bytes for _, memory_bytes in gpus),
        gpu_error=gpu_error,
        arch=platform.machine(),
        host_memory_bytes=host_memory_bytes,
        host_memory_origin=host_memory_origin,
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

    As CUDA reads it: indices or starts of UUIDs, up to the first that names nothing. CUDA may order
    GPUs otherwise than NVML, which changes nothing where all GPUs of a node are alike.
    """
    devices: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            named = [int(entry)] if int(entry) < len(uuids) else []
        else:
            named = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(named) != 1:
            break
        devices += named
    return devices


def _host_memory(procfs: Path, sysfs: Path) -> tuple[int | None, str]:
    """RAM this process may use, in bytes, and its origin: the least of its cgroups' limits and `MemTotal`."""
    limits = [*_mem_total(procfs), *_cgroup_limits(procfs, sysfs)]
    return min(limits, key=lambda limit: limit[0], default=(None, ""))


def _mem_total(procfs: Path) -> Iterator[tuple[int, str]]:
    path = procfs / "meminfo"
    if found := re.search(r"^MemTotal:\s+(\d+) kB", _read(path), re.MULTILINE):
        yield int(found.group(1)) * 1024, f"MemTotal in {path}"


def _cgroup_limits(procfs: Path, sysfs: Path) -> Iterator[tuple[int, str]]:
    """The memory limit of this process's cgroup and of each one above it; `max` is no limit.

    Each line of `/proc/self/cgroup` is `hierarchy:controllers:path`. Version 2 has no controllers and is
    mounted at `/sys/fs/cgroup`, or at its `unified` beside version 1. Version 1 without a limit shows a
    number near 2**63, which `MemTotal` undercuts.
    """
    root = sysfs / "fs" / "cgroup"
    for line in _read(procfs / "self" / "cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            mounts, file, version = [root, root / "unified"], "memory.max", "v2"
        elif "memory" in controllers.split(","):
            mounts, file, version = [root / controllers], "memory.limit_in_bytes", "v1"
        else:
            continue
        for mount in mounts:
            for directory in _up_to(mount, path):
                text = _read(directory / file).strip()
                if text.isdecimal():
                    yield int(text), f"cgroup {version} limit in {directory / file}"


def _up_to(mount: Path, path: str) -> Iterator[Path]:
    """The directory of a cgroup and those above it, up to the mount.

    In a container the path may be the host's, whose directories are not there, or lead out of the
    container's namespace (`/../…`): then what is left is the mount itself.
    """
    inside = PurePosixPath(path.lstrip("/"))
    if ".." not in inside.parts:
        yield from (mount / part for part in (inside, *inside.parents) if part != PurePosixPath("."))
    yield mount


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
