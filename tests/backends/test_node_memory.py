"""Readings of GPUs: the fullest one, and the most since the last reading."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rllaunch.backends import node_memory as memory
from rllaunch.backends.node_memory import GpuMemory, node_bytes


def test_a_reading_is_the_fullest_gpu_with_the_peak_since_the_last(monkeypatch: pytest.MonkeyPatch):
    used = {2: 100, 3: 300}
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=used[handle]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    host = [1000]
    monkeypatch.setattr(memory, "node_bytes", lambda: host[0])
    gpus = GpuMemory([2, 3])
    try:
        assert (gpus.reading().gpu_bytes, gpus.reading().gpu_peak_bytes) == (300, 300)
        used[2], host[0] = 900, 5000
        deadline = time.monotonic() + 10
        while gpus._peak != (900, 5000) and time.monotonic() < deadline:
            time.sleep(0.01)
        used[2], host[0] = 50, 1500
        first, second = gpus.reading(), gpus.reading()
    finally:
        gpus.stop()
    assert (first.gpu_bytes, first.gpu_peak_bytes, first.host_bytes, first.host_peak_bytes) == (300, 900, 1500, 5000)
    assert (second.gpu_peak_bytes, second.host_peak_bytes) == (300, 1500)


def test_the_share_of_some_processes_is_told_where_the_driver_tells_it(monkeypatch: pytest.MonkeyPatch):
    running = [SimpleNamespace(pid=7, usedGpuMemory=100), SimpleNamespace(pid=8, usedGpuMemory=30)]
    nvml = SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=200),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: running,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus = GpuMemory(["GPU-a"])
    try:
        assert gpus.reading(pids=[7, 8, 9]).own_gpu_bytes == 130
        # A container may number its processes otherwise than the driver: then nothing is known, not nothing held.
        assert gpus.reading(pids=[9]).own_gpu_bytes is None
        assert gpus.reading().own_gpu_bytes is None
        running[0].usedGpuMemory = None
        assert gpus.reading(pids=[7, 8]).own_gpu_bytes is None
    finally:
        gpus.stop()


@pytest.mark.parametrize(
    ("limited", "used"), [(("job",), 12145), (("job/step",), 500), (("job", "job/step"), 12145)], ids=str
)
def test_host_memory_is_what_counts_against_the_limit_that_is_met_first(
    limited: tuple[str, ...], used: int, tmp_path: Path
):
    mount = tmp_path / "sys/fs/cgroup"
    (mount / "job/step").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    for name in limited:
        (mount / name / "memory.max").write_text("20000\n")
    (mount / "job/memory.current").write_text("12345\n")
    # Of these bytes 200 are a cached file, which goes when memory is asked for; the rest of `file` is shared memory.
    (mount / "job/memory.stat").write_text("anon 11000\nfile 1345\nshmem 1145\n")
    (mount / "job/step/memory.current").write_text("500\n")
    (mount / "job/step/memory.stat").write_text("anon 500\nfile 0\nshmem 0\n")
    assert node_bytes(tmp_path) == used


def test_without_a_limit_all_of_the_container_counts(tmp_path: Path):
    mount = tmp_path / "sys/fs/cgroup"
    (mount / "step").mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/step\n")
    for directory, used in ((mount, 900), (mount / "step", 300)):
        (directory / "memory.current").write_text(f"{used}\n")
        (directory / "memory.stat").write_text("file 0\nshmem 0\n")
    assert node_bytes(tmp_path) == 900


def test_host_memory_in_a_cgroup_of_version_1(tmp_path: Path):
    job = tmp_path / "sys/fs/cgroup/memory/job"
    job.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/job\n")
    (job / "memory.usage_in_bytes").write_text("700\n")
    (job / "memory.stat").write_text("cache 1\ntotal_cache 300\ntotal_shmem 250\n")
    assert node_bytes(tmp_path) == 650


def test_host_memory_without_cgroups_is_the_machines(tmp_path: Path):
    assert 2**26 < node_bytes(tmp_path) < 2**50


def test_pss_is_what_processes_hold_by_themselves():
    before = memory.pss_of([os.getpid()])
    assert before is not None
    held = bytearray(os.urandom(1)) * (64 * 2**20)
    after = memory.pss_of([os.getpid()])
    assert after is not None
    assert 0.9 * len(held) < after - before < 1.3 * len(held)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    both = memory.pss_of([os.getpid(), child.pid])
    assert both is not None
    assert both > after
    child.communicate(b"\n")
    ended = memory.pss_of([os.getpid(), child.pid])
    assert ended is not None
    assert ended == pytest.approx(after, rel=0.1), "who has ended holds nothing"
    assert memory.pss_of([]) is None


def test_without_an_answer_of_the_kernel_there_is_no_pss(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(memory, "_PROC", tmp_path)
    assert memory.pss_of([7]) is None
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "smaps_rollup").write_text("")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "smaps_rollup").write_text("Rss: 9 kB\nPss: 3 kB\nPss_Dirty: 2 kB\n")
    assert memory.pss_of([7, 8]) == 3 * 1024
    (tmp_path / "8" / "smaps_rollup").mkdir(parents=True)  # read, it is an error as of a kernel that refuses
    assert memory.pss_of([7, 8]) is None
