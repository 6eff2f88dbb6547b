"""The memory a job may use, from trees of files that look like `/proc` and `/sys`, and from Slurm's variables."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from rllaunch.resolve.detect import probe_machine
from rllaunch.resolve.limits import (
    HostLimit,
    gpu_limits,
    host_limit,
    host_limits,
    ray_kill_threshold,
    ray_total,
    shm_bytes,
)

GIB = 2**30
UNLIMITED = "9223372036854771712\n"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"


def tree(root: Path, files: dict[str, str], ram_gib: int | None = 64) -> Path:
    """A machine of that much RAM with these files."""
    if ram_gib is not None:
        files = {"proc/meminfo": f"MemTotal:       {ram_gib * 2**20} kB\nMemFree:     1024 kB\n"} | files
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def said(root: Path, limits: list[HostLimit]) -> dict[str, int]:
    """GiB by source, which is shown below the machine's root."""
    return {limit.source.replace(str(root), ""): limit.bytes // GIB for limit in limits}


def test_a_machine_without_limits_has_its_physical_memory(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2})
    assert said(root, host_limits(root)) == {"MemTotal in /proc/meminfo": 64}
    assert ray_total(root) == host_limit(root)


def test_nothing_to_read_is_no_limit(tmp_path: Path) -> None:
    assert host_limits(tmp_path) == []
    assert host_limit(tmp_path) is None
    assert ray_total(tmp_path) is None
    assert shm_bytes(tmp_path) is None


# cgroup v2


def test_a_parent_of_the_cgroup_may_be_the_smaller(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job_7/step_0\n",
        "proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + V2,
        "sys/fs/cgroup/slurm/memory.max": "max\n",
        "sys/fs/cgroup/slurm/job_7/memory.max": f"{20 * GIB}\n",
        "sys/fs/cgroup/slurm/job_7/step_0/memory.max": f"{30 * GIB}\n",
        "sys/fs/cgroup/slurm/job_8/memory.max": "1\n",
    }
    root = tree(tmp_path, files)
    assert said(root, host_limits(root)) == {
        "MemTotal in /proc/meminfo": 64,
        "cgroup v2 limit in /sys/fs/cgroup/slurm/job_7/step_0/memory.max": 30,
        "cgroup v2 limit in /sys/fs/cgroup/slurm/job_7/memory.max": 20,
    }
    assert host_limit(root) == HostLimit(20 * GIB, f"cgroup v2 limit in {root}/sys/fs/cgroup/slurm/job_7/memory.max")
    assert ray_total(root) == HostLimit(64 * GIB, f"MemTotal in {root}/proc/meminfo"), "C031: Ray does not look there"


def test_the_mount_is_where_mountinfo_says(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "proc/self/mountinfo": "30 23 0:26 / /mnt/my\\040cgroups rw - cgroup2 none rw\n",
        "mnt/my cgroups/pod/memory.max": f"{9 * GIB}",
        "sys/fs/cgroup/pod/memory.max": f"{1 * GIB}",
    }
    root = tree(tmp_path, files)
    assert host_limit(root) == HostLimit(9 * GIB, f"cgroup v2 limit in {root}/mnt/my cgroups/pod/memory.max")


def test_a_container_mounts_its_own_cgroup_as_the_top(tmp_path: Path) -> None:
    """Without a cgroup namespace the process's path is the host's, and the mount begins in the middle of it."""
    files = {
        "proc/self/cgroup": "0::/docker/abc/worker\n",
        "proc/self/mountinfo": V2.replace(" / /sys", " /docker/abc /sys"),
        "sys/fs/cgroup/memory.max": f"{16 * GIB}",
        "sys/fs/cgroup/worker/memory.max": f"{12 * GIB}",
    }
    root = tree(tmp_path, files)
    assert sorted(said(root, host_limits(root)).values()) == [12, 16, 64]
    assert ray_total(root) == HostLimit(16 * GIB, f"cgroup v2 limit in {root}/sys/fs/cgroup/memory.max")


# cgroup v1


def test_cgroup_v1_counts_the_limits_there_are(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/slurm/job_7\n0::/\n",
        "proc/self/mountinfo": V1.replace("/memory ", "/cpu,memory "),
        "sys/fs/cgroup/cpu,memory/memory.limit_in_bytes": UNLIMITED,
        "sys/fs/cgroup/cpu,memory/slurm/memory.limit_in_bytes": "9223372036854710272",  # pages of 64 KiB
        "sys/fs/cgroup/cpu,memory/slurm/job_7/memory.limit_in_bytes": f"{12 * GIB}\n",
    }
    root = tree(tmp_path, files)
    assert said(root, host_limits(root)) == {
        "MemTotal in /proc/meminfo": 64,
        "cgroup v1 limit in /sys/fs/cgroup/cpu,memory/slurm/job_7/memory.limit_in_bytes": 12,
    }


def test_version_2_beside_version_1_limits_nothing_by_itself(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/box\n0::/box\n",
        "proc/self/mountinfo": V1 + V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": UNLIMITED,
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{6 * GIB}",
    }
    root = tree(tmp_path, files)
    assert sorted(said(root, host_limits(root)).values()) == [6, 64]
    assert ray_total(root) == HostLimit(64 * GIB, f"MemTotal in {root}/proc/meminfo")


# Slurm


@pytest.mark.parametrize(
    ("environ", "gib", "source"),
    [
        ({"SLURM_MEM_PER_NODE": "1228800"}, 1200, "SLURM_MEM_PER_NODE"),
        ({"SLURM_MEM_PER_CPU": "4096", "SLURM_CPUS_ON_NODE": "32"}, 128, "SLURM_MEM_PER_CPU × SLURM_CPUS_ON_NODE"),
        ({"SLURM_MEM_PER_GPU": "102400", "SLURM_GPUS_ON_NODE": "8"}, 800, "SLURM_MEM_PER_GPU × SLURM_GPUS_ON_NODE"),
        ({"SLURM_MEM_PER_GPU": "102400", "SLURM_JOB_GPUS": "0,1,4"}, 300, "SLURM_MEM_PER_GPU × SLURM_JOB_GPUS"),
    ],
)
def test_c031_slurm_says_less_than_the_node_has(environ: dict[str, str], gib: int, source: str, tmp_path: Path) -> None:
    root = tree(tmp_path, {}, ram_gib=1536)
    assert host_limit(root, environ) == HostLimit(gib * GIB, source)
    assert host_limit(root) == HostLimit(1536 * GIB, f"MemTotal in {root}/proc/meminfo")


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_MEM_PER_NODE": "0"},  # --mem=0: all of it
        {"SLURM_MEM_PER_NODE": "lots"},
        {"SLURM_MEM_PER_CPU": "4096"},
        {"SLURM_MEM_PER_GPU": "4096", "SLURM_JOB_GPUS": ""},
        {"SLURM_JOB_ID": "7"},
    ],
)
def test_slurm_without_a_number_is_no_limit(environ: dict[str, str], tmp_path: Path) -> None:
    assert len(host_limits(tree(tmp_path, {}), environ)) == 1


# Coherent GPU memory


def test_hbm_that_the_kernel_counts_as_memory_is_no_host_ram(tmp_path: Path) -> None:
    """A GB200 tray: two Grace with LPDDR5X, and the HBM of each GPU as a node without CPUs."""
    node = "sys/devices/system/node/node"
    files = {f"{node}{n}/cpulist": f"{72 * n}-{72 * n + 71}\n" for n in (0, 1)}
    files |= {f"{node}{n}/cpulist": "\n" for n in (2, 10, 18, 26, 3)}
    files |= {f"{node}{n}/meminfo": f"Node {n} MemTotal:       {480 * 2**20} kB\n" for n in (0, 1)}
    files |= {f"{node}{n}/meminfo": f"Node {n} MemTotal:       {184 * 2**20} kB\n" for n in (2, 10, 18, 26)}
    files |= {f"{node}3/meminfo": "Node 3 MemTotal:       0 kB\n"}  # a MIG slice that is not there
    root = tree(tmp_path, files, ram_gib=2 * 480 + 4 * 184)
    (limit,) = host_limits(root)
    assert limit.bytes == 960 * GIB
    assert limit.source.endswith("/proc/meminfo without node10, node18, node2, node26, which have no CPU")
    assert ray_total(root) == HostLimit(1696 * GIB, f"MemTotal in {root}/proc/meminfo"), "Ray counts the HBM"


def test_an_ordinary_machine_with_two_sockets_keeps_all_its_memory(tmp_path: Path) -> None:
    node = "sys/devices/system/node/node"
    files = {f"{node}{n}/cpulist": f"{n}\n" for n in (0, 1)}
    files |= {f"{node}{n}/meminfo": f"Node {n} MemTotal:       {32 * 2**20} kB\n" for n in (0, 1)}
    root = tree(tmp_path, files)
    assert said(root, host_limits(root)) == {"MemTotal in /proc/meminfo": 64}


# Ray


@pytest.mark.parametrize(
    ("environ", "threshold"),
    [
        ({}, 950),
        ({"RAY_memory_usage_threshold": "0.5"}, 500),
        ({"RAY_memory_usage_threshold": "half"}, 950),
        ({"RAY_min_memory_free_bytes": "20"}, 980),
        ({"RAY_min_memory_free_bytes": "200"}, 950),
        ({"RAY_memory_monitor_refresh_ms": "100"}, 950),
        ({"RAY_memory_monitor_refresh_ms": "0"}, None),
    ],
)
def test_c033_the_bytes_at_which_ray_kills(environ: dict[str, str], threshold: int | None) -> None:
    assert ray_kill_threshold(environ, 1000) == threshold


@pytest.mark.parametrize("limit", ["max\n", UNLIMITED, f"{64 * GIB}\n", f"{900 * GIB}\n"])
def test_c033_a_limit_that_is_none_leaves_ray_with_the_physical_memory(limit: str, tmp_path: Path) -> None:
    total = ray_total(tree(tmp_path, {"sys/fs/cgroup/memory.max": limit}))
    assert total is not None
    assert total.bytes == 64 * GIB


def test_ray_itself_takes_this_machine_for_as_much() -> None:
    from ray._common.utils import get_system_memory

    total = ray_total()
    assert total is not None
    assert total.bytes == get_system_memory()


# This machine


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="needs /proc")
def test_this_machine_allows_something_and_not_more_than_it_has() -> None:
    limits = host_limits(environ=os.environ)
    smallest = host_limit(environ=os.environ)
    assert smallest is not None
    assert smallest in limits
    assert 0 < smallest.bytes <= psutil.virtual_memory().total
    assert probe_machine().host_memory_bytes == smallest.bytes


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")
def test_c034_shared_memory_has_a_size_and_a_free_part() -> None:
    found = shm_bytes()
    assert found is not None
    disk = psutil.disk_usage("/dev/shm")
    assert found.size_bytes == disk.total
    assert 0 <= found.free_bytes <= found.size_bytes


def test_gpu_limits_are_one_a_gpu() -> None:
    assert gpu_limits() == list(probe_machine().gpu_memory_bytes)
