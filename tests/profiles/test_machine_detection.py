"""Which machine this is, from trees of files that look like `/proc` and `/sys`."""

from __future__ import annotations

import platform
import tomllib
from importlib.resources import files
from pathlib import Path

import pytest

from rllaunch.resolve.detect import MachineFacts, match_hardware, probe_machine, visible_devices

GIB = 2**30
HARDWARE_DIR = Path(str(files("rllaunch_profiles"))) / "hardware"
HARDWARE = [tomllib.loads(path.read_text(encoding="utf-8")) for path in HARDWARE_DIR.glob("*.toml")]
SHIPPED = {p["profile"]["name"]: p["detect"]["gpu_names"] for p in HARDWARE if "detect" in p}


def machine_tree(
    root: Path, cgroup: str, limits: dict[str, str], mem_total_kib: int | None = 64 * 2**20
) -> MachineFacts:
    """Probe a machine of 64 GiB with that `/proc/self/cgroup` and those files below `/sys/fs/cgroup`."""
    contents = {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    if mem_total_kib is not None:
        contents["proc/meminfo"] = f"MemTotal:       {mem_total_kib} kB\nMemFree:         1024 kB\n"
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return probe_machine(root)


def test_a_machine_without_any_limit_has_its_physical_memory(tmp_path):
    facts = machine_tree(tmp_path, "0::/user.slice\n", {"user.slice/memory.max": "max\n"})
    assert facts.host_memory_bytes == 64 * GIB
    assert facts.host_memory_origin == f"MemTotal in {tmp_path}/proc/meminfo"
    assert facts.arch == platform.machine()


def test_the_limit_of_a_cgroup_v2_is_the_smallest_on_the_way_up(tmp_path):
    limits = {"job/memory.max": f"{20 * GIB}\n", "job/step/memory.max": "max\n", "other/memory.max": "1\n"}
    facts = machine_tree(tmp_path, "0::/job/step\n", limits)
    assert facts.host_memory_bytes == 20 * GIB
    assert facts.host_memory_origin == f"cgroup v2 limit in {tmp_path}/sys/fs/cgroup/job/memory.max"


def test_a_container_sees_its_limit_at_the_mount(tmp_path):
    assert machine_tree(tmp_path, "0::/\n", {"memory.max": f"{8 * GIB}"}).host_memory_bytes == 8 * GIB


@pytest.mark.parametrize("path", ["/../../system.slice", "/kubepods/pod1/on-the-host"])
def test_a_path_that_is_not_in_the_container_falls_back_to_the_mount(tmp_path, path):
    limits = {"memory.max": f"{8 * GIB}", "../../system.slice/memory.max": "1"}
    facts = machine_tree(tmp_path, f"0::{path}\n", limits)
    assert facts.host_memory_bytes == 8 * GIB


def test_the_limit_of_a_cgroup_v1_counts(tmp_path):
    cgroup = "3:cpuset:/\n2:cpu,cpuacct:/slurm\n1:memory:/slurm/job_7/step_0\n0::/\n"
    facts = machine_tree(tmp_path, cgroup, {"memory/slurm/job_7/memory.limit_in_bytes": f"{12 * GIB}"})
    assert facts.host_memory_bytes == 12 * GIB
    assert facts.host_memory_origin.startswith("cgroup v1 limit in ")


def test_a_cgroup_v1_without_a_limit_shows_a_huge_number(tmp_path):
    facts = machine_tree(tmp_path, "1:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert facts.host_memory_bytes == 64 * GIB


def test_version_2_may_be_mounted_beside_version_1(tmp_path):
    limits = {"unified/job/memory.max": f"{6 * GIB}", "memory/memory.limit_in_bytes": "9223372036854771712"}
    assert machine_tree(tmp_path, "4:memory:/\n0::/job\n", limits).host_memory_bytes == 6 * GIB


def test_a_limit_above_the_physical_memory_is_none(tmp_path):
    facts = machine_tree(tmp_path, "0::/\n", {"memory.max": f"{900 * GIB}"})
    assert (facts.host_memory_bytes, facts.host_memory_origin[:8]) == (64 * GIB, "MemTotal")


def test_a_system_without_proc_says_nothing_and_does_not_raise(tmp_path):
    facts = probe_machine(tmp_path)
    assert (facts.host_memory_bytes, facts.host_memory_origin) == (None, "")


@pytest.mark.parametrize("text", ["", "max", "-1", "not a number", "\x00"])
def test_a_limit_that_is_no_number_is_left_out(tmp_path, text):
    assert machine_tree(tmp_path, "0::/\n", {"memory.max": text}).host_memory_bytes == 64 * GIB


def test_this_machine_can_be_probed():
    facts = probe_machine()
    assert len(facts.gpu_names) == len(facts.gpu_memory_bytes)
    assert facts.host_memory_bytes is None or facts.host_memory_bytes > 0


@pytest.mark.parametrize(
    ("names", "profile"),
    [
        ([], "cpu"),
        (["NVIDIA H100 80GB HBM3"] * 8, "H100"),
        (["NVIDIA H200"] * 8, "H200"),
        (["NVIDIA B200"] * 8, "B200"),
        (["NVIDIA B300 SXM6 AC"] * 8, "B300"),
        (["NVIDIA GB200"] * 4, "GB200"),
        (["NVIDIA GB300"] * 4, "GB300"),
        (["nvidia gb300"], "GB300"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "A100"),
        (["NVIDIA A100-SXM4-40GB"] * 8, "A100-40GB"),
        (["NVIDIA A100 80GB PCIe"], None),
        (["NVIDIA GH200 480GB"], "GH200"),
        (["NVIDIA H20"] * 8, "H20"),
        (["NVIDIA H100 PCIe"], None),
        (["NVIDIA H800 PCIe"], None),
        (["NVIDIA L20"], "L20"),
        (["NVIDIA L40S"] * 4, "L40S"),
        (["NVIDIA L40"], None),
        (["NVIDIA GeForce RTX 4090"], "RTX-4090"),
        (["NVIDIA RTX PRO 6000 Blackwell Workstation Edition"], "RTX-PRO-6000"),
        (["NVIDIA GeForce RTX 5090"], None),
        (["NVIDIA H200", "NVIDIA GeForce RTX 4090"], None),
        (["NVIDIA H200", "NVIDIA B200"], None),
    ],
)
def test_gpus_are_recognised_by_the_shipped_patterns(names, profile):
    assert match_hardware(MachineFacts(gpu_names=tuple(names)), SHIPPED) == profile


def test_there_are_patterns_for_each_shipped_gpu():
    assert len(SHIPPED) == 14


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_a_pattern_is_whole_words(name, profile):
    bare = {"B300": ["B300"], "GB300": ["GB300"], "H200": ["H200"], "B200": ["B200"], "GB200": ["GB200"]}
    assert match_hardware(MachineFacts(gpu_names=(name,)), bare) == profile
    without_grace = {"B300": ["B300"], "B200": ["B200"], "H200": ["H200"]}
    assert match_hardware(MachineFacts(gpu_names=("NVIDIA GB300",)), without_grace) is None


def test_the_longest_pattern_wins():
    table = {"H100": ["H100"], "H100-SXM": ["NVIDIA H100 80GB HBM3"], "any": ["NVIDIA"]}
    assert match_hardware(MachineFacts(gpu_names=("NVIDIA H100 80GB HBM3",)), table) == "H100-SXM"
    assert match_hardware(MachineFacts(gpu_names=("NVIDIA H100 PCIe",)), table) == "any"


def test_two_profiles_that_fit_alike_are_no_answer():
    table = {"mine": ["NVIDIA H200"], "yours": ["NVIDIA H200"]}
    assert match_hardware(MachineFacts(gpu_names=("NVIDIA H200",)), table) is None


def test_gpus_that_cannot_be_asked_are_not_taken_for_no_gpus():
    assert match_hardware(MachineFacts(gpu_error="NVML: Driver/library version mismatch"), SHIPPED) is None


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("", []),
        ("-1", []),
        ("0", [0]),
        ("1, 0", [1, 0]),
        ("0,9,1", [0]),
        ("GPU-b", [1]),
        ("GPU-", []),
        ("GPU-x,0", []),
        ("0,1,1", []),
        ("GPU-b,1", []),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(visible, devices):
    assert visible_devices(visible, ["GPU-a1", "GPU-b2"]) == devices
