"""What memory a job may use on this machine: cgroups, Slurm, physical RAM, shared memory, and Ray's own idea.

Looking never raises. Whatever cannot be read is left out, so that a laptop, a container and a node of a
cluster go the same way. Everything is read below `root`, which is `/` but in tests.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
MIB = 2**20
# cgroup v1 without a limit shows the largest number of whole pages below 2**63; pages of up to 64 KiB
# (Arm) make it a little smaller than pages of 4 KiB do.
UNLIMITED_V1 = 2**63 - 2**16


@dataclass(frozen=True)
class HostLimit:
    """A limit on host RAM in bytes, and the file or variable that says so."""

    bytes: int
    source: str


@dataclass(frozen=True)
class SharedMemory:
    size_bytes: int
    free_bytes: int


def host_limits(root: Path = ROOT, environ: Mapping[str, str] | None = None) -> list[HostLimit]:
    """All limits on the RAM of this process's job on this node; the smallest decides.

    Args:
        environ: where Slurm's variables are looked up; none by default.
    """
    return [*_physical(root), *(limit for limit, _ in _cgroups(root)), *_slurm(environ or {})]


def host_limit(root: Path = ROOT, environ: Mapping[str, str] | None = None) -> HostLimit | None:
    """The smallest of `host_limits`, the first of equal ones; None where nothing can be read."""
    return min(host_limits(root, environ), key=lambda limit: limit.bytes, default=None)


@dataclass(frozen=True)
class Cgroup:
    """A cgroup's directory and the version of its files."""

    directory: Path
    version: str


def limiting_cgroup(root: Path = ROOT) -> Cgroup | None:
    """The cgroup whose limit this process's job meets first; the topmost where none has a limit, None where none tells
    its use (version 2 has no such file for the whole machine)."""
    # Of equal limits the topmost, which counts most.
    limited = min(reversed([*_cgroups(root)]), key=lambda found: found[0].bytes, default=None)
    if limited is not None:
        return limited[1]
    telling = [c for c in _own_cgroups(root) if (c.directory / USAGE_FILES[c.version]).is_file()]
    return telling[-1] if telling else None


# Physical memory


def _physical(root: Path) -> Iterator[HostLimit]:
    """`MemTotal` without the NUMA nodes that have no CPU.

    Where GPU memory is coherent with the host's (GH200, GB200, GB300), the kernel shows each GPU's HBM as
    memory of a NUMA node without CPUs and counts it in `MemTotal`; a job that fills it as if it were host
    RAM takes it from the GPU. Memory of a CXL expander looks the same and is left out as well.
    """
    path = root / "proc" / "meminfo"
    total_bytes = _mem_total(path)
    if not total_bytes:
        return
    cpuless = {
        node.name: nbytes
        for node in sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
        if (node / "cpulist").is_file() and not _read(node / "cpulist").strip()
        if (nbytes := _mem_total(node / "meminfo"))
    }
    source = f"MemTotal in {path}"
    if cpuless and sum(cpuless.values()) < total_bytes:
        total_bytes -= sum(cpuless.values())
        source += f" without {', '.join(cpuless)}, which {'has' if len(cpuless) == 1 else 'have'} no CPU"
    yield HostLimit(total_bytes, source)


def _mem_total(path: Path) -> int:
    """Bytes that a `meminfo` gives as `MemTotal`: the whole machine's, or a NUMA node's (`Node 0 MemTotal:`)."""
    found = re.search(r"^(?:Node \d+ )?MemTotal:\s+(\d+) kB", _read(path), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


# cgroups


@dataclass(frozen=True)
class _Mount:
    """Where the cgroups from `top` downwards are mounted."""

    directory: Path
    top: PurePosixPath
    version: str


LIMIT_FILES = {"v2": "memory.max", "v1": "memory.limit_in_bytes"}
USAGE_FILES = {"v2": "memory.current", "v1": "memory.usage_in_bytes"}


def _cgroups(root: Path) -> Iterator[tuple[HostLimit, Cgroup]]:
    """The memory limit of this process's cgroup and of each one above it."""
    for cgroup in _own_cgroups(root):
        file = cgroup.directory / LIMIT_FILES[cgroup.version]
        text = _read(file).strip()
        if text.isdecimal() and int(text) < UNLIMITED_V1:
            yield HostLimit(int(text), f"cgroup {cgroup.version} limit in {file}"), cgroup


def _own_cgroups(root: Path) -> Iterator[Cgroup]:
    """This process's cgroup and those above it, lowest first.

    Each line of `/proc/self/cgroup` is `hierarchy:controllers:path`; version 2 is `0::path` (cgroups(7)).
    """
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            version = "v2"
        elif "memory" in controllers.split(","):
            version = "v1"
        else:
            continue
        for mount in mounts:
            if mount.version == version:
                yield from (Cgroup(directory, version) for directory in _up_to(mount, path))


def _mounts(root: Path) -> Iterator[_Mount]:
    """Mounts of cgroup v2, and of v1's memory controller, by `/proc/self/mountinfo`.

    A line is `id parent device top directory options … - type source super-options` (proc(5)). Where none
    is named, the usual places count.
    """
    found = False
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            version = "v2"
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            version = "v1"
        else:
            continue
        found = True
        yield _Mount(root / _unescaped(fields[4]).lstrip("/"), PurePosixPath(_unescaped(fields[3])), version)
    if not found:
        cgroup = root / "sys/fs/cgroup"
        top = PurePosixPath("/")
        yield from (_Mount(cgroup, top, "v2"), _Mount(cgroup / "unified", top, "v2"))
        yield _Mount(cgroup / "memory", top, "v1")


def _unescaped(text: str) -> str:
    """A path of `mountinfo`, whose blanks and backslashes are octal (`\\040`)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found.group(1), 8)), text)


def _up_to(mount: _Mount, path: str) -> Iterator[Path]:
    """The directory of a cgroup and those above it, up to the mount.

    In a container the path may be the host's, whose directories are not there, or lead out of the
    container's namespace (`/../…`): then what is left is the mount itself.
    """
    inside = PurePosixPath(path)
    if inside.is_relative_to(mount.top) and ".." not in inside.parts:
        relative = inside.relative_to(mount.top)
        yield from (mount.directory / part for part in (relative, *relative.parents) if part != PurePosixPath("."))
    yield mount.directory


# Slurm


def _slurm(environ: Mapping[str, str]) -> Iterator[HostLimit]:
    """What Slurm gives the job on this node; its numbers are MiB (sbatch(1): --mem, default unit megabytes).

    Slurm sets one of the three. 0 means all of the node's memory, which is no limit of its own.
    """
    ways = (
        ("SLURM_MEM_PER_NODE", ()),
        ("SLURM_MEM_PER_CPU", ("SLURM_CPUS_ON_NODE",)),
        ("SLURM_MEM_PER_GPU", ("SLURM_GPUS_ON_NODE", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")),
    )
    for name, counters in ways:
        counter = next((c for c in counters if _count(environ.get(c, ""))), "")
        mib = _count(environ.get(name, ""))
        if not mib or (counters and not counter):
            continue
        count = _count(environ[counter]) if counter else 1
        yield HostLimit(mib * count * MIB, f"{name} × {counter}" if counter else name)


def _count(text: str) -> int:
    """`8`, or how many a list such as `0,1,4` names; 0 for anything else."""
    text = text.strip()
    if text.isdecimal():
        return int(text)
    return len(text.split(",")) if re.fullmatch(r"\d+(,\d+)+", text) else 0


# Shared memory and Ray


def shm_bytes(root: Path = ROOT) -> SharedMemory | None:
    """Size and free bytes of `/dev/shm`; its pages count against the same limits as all others."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError:
        return None
    return SharedMemory(found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)


def ray_total(root: Path = ROOT) -> HostLimit | None:
    """What Ray takes for the memory of this node.

    `MemTotal`, or the limit of the cgroup at the top of the mount if that is smaller. So Ray sees the limit of
    a container, and sees neither that of a Slurm job or a systemd unit, which stands further down, nor
    that HBM is no host RAM.

    Source: ray-project/ray@01e0cc8 src/ray/common/memory_monitor.cc, GetMemoryBytes; ray-project/ray#59796.
    """
    limits = []
    meminfo = root / "proc/meminfo"
    if total_bytes := _mem_total(meminfo):
        limits.append(HostLimit(total_bytes, f"MemTotal in {meminfo}"))
    for version, place in (("v2", "memory.max"), ("v1", "memory/memory.limit_in_bytes")):
        file = root / "sys/fs/cgroup" / place
        if file.exists():
            text = _read(file).strip()
            if text.isdecimal() and int(text):
                limits.append(HostLimit(int(text), f"cgroup {version} limit in {file}"))
            break
    return min(limits, key=lambda limit: limit.bytes, default=None)


def ray_kill_threshold(environ: Mapping[str, str], limit_bytes: int) -> int | None:
    """Bytes in use from which Ray kills a worker, if it takes the node for `limit_bytes`; None: it never does.

    A share of the total (`RAY_memory_usage_threshold`), or all but `RAY_min_memory_free_bytes` if that is
    more. A refresh interval of 0 ms turns the monitor off.

    Source: ray-project/ray@01e0cc8 src/ray/common/memory_monitor.cc, GetMemoryThreshold; the share and the
    interval: docs.ray.io, Out-Of-Memory Prevention.
    """
    if _number(environ.get("RAY_memory_monitor_refresh_ms", ""), 250) == 0:
        return None
    share = _number(environ.get("RAY_memory_usage_threshold", ""), 0.95)
    threshold = int(limit_bytes * share)
    free_bytes = _number(environ.get("RAY_min_memory_free_bytes", ""), -1)
    return max(threshold, limit_bytes - int(free_bytes)) if free_bytes >= 0 else threshold


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default


def gpu_limits() -> list[int]:
    """Bytes of each visible GPU, as the driver shows them; empty without a driver.

    0 for a GPU whose driver does not tell.
    """
    from rllaunch.resolve.detect import probe_machine

    return list(probe_machine().gpu_memory_bytes)


def describe(limits: Iterable[HostLimit]) -> list[str]:
    """A line for each limit, smallest first."""
    return [f"{limit.bytes} bytes   {limit.source}" for limit in sorted(limits, key=lambda limit: limit.bytes)]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
