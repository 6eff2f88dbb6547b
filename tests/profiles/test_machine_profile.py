"""`rllaunch profiles detect`: this machine, or one that NVML is made to show, as a profile; and what a plan takes of it."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from fake_nvml import FakeNvml

from rllaunch.commands import detection
from rllaunch.resolve.limits import HostLimit
from rllaunch.resolve.machine import read_machine, remarks_of

GB, GIB = 10**9, 2**30
MEASURED = {
    "bytes": 4 * GIB,
    "gpus": [
        {
            "index": index,
            "bytes": 4 * GIB,
            "to_gpu": 54.04e9,
            "to_host": to_host,
            "pinning": 5.5e9,
            "fresh_to_host": 4.96e9,
            "pageable_to_gpu": 9.1e9,
            "pageable_to_host": 6.2e9,
        }
        for index, to_host in ((0, 53.91e9), (1, 51.26e9))
    ],
    "memory_copy": 11.2e9,
    "missing": [],
}


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have NVML show a machine, whose host has so many bytes."""

    def show(host_bytes: int = 2 * 10**12, **machine: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(**machine))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        limit = HostLimit(host_bytes, "cgroup v2 limit in /sys/fs/cgroup/memory.max")
        monkeypatch.setattr("rllaunch.resolve.detect.host_limit", lambda *_: limit)
        monkeypatch.setattr("platform.node", lambda: "node7")

    return show


def facts(file: Path) -> dict[str, Any]:
    return tomllib.loads(file.read_text(encoding="utf-8"))["facts"]


def test_a_node_of_gpus_becomes_a_profile_that_is_in_order(rllaunch: Any, tmp_path: Path, gpus: Any):
    gpus(count=8)
    made = rllaunch("profiles", "detect", "--write", "ours.toml")
    assert (made.code, made.out) == (0, "ours.toml\n")
    data = tomllib.loads((tmp_path / "ours.toml").read_text(encoding="utf-8"))
    assert {key: fact["value"] for key, fact in data["facts"].items()} == {
        "accelerator": "cuda",
        "gpus_per_node": 8,
        "gpu_memory_bytes": 143771 * 2**20,
        "host_memory_bytes": 2 * 10**12,
        "host_link": "PCIe Gen5 x16",
    }
    sources = {key: fact["source"] for key, fact in data["facts"].items()}
    assert sources["gpus_per_node"].startswith("detected on node7, 20")
    assert sources["gpus_per_node"].endswith(", driver 580.95.05")
    assert sources["host_memory_bytes"].endswith(": cgroup v2 limit in /sys/fs/cgroup/memory.max")
    assert data["profile"]["extends"] == "H200"
    assert data["profile"]["description"] == "node7: 8 × NVIDIA H200"
    assert "gpu_names" not in data["detect"]
    result = rllaunch("profiles", "check", "ours.toml")
    assert (result.code, result.out) == (0, "")


def test_gpus_that_no_profile_knows_are_known_by_the_new_one(rllaunch: Any, tmp_path: Path, gpus: Any):
    gpus(count=2, name="NVIDIA Q1", memory_bytes=64 * GIB, pcie=(4, 8))
    rllaunch("profiles", "detect", "--write", "profiles/q1.toml")
    data = tomllib.loads((tmp_path / "profiles/q1.toml").read_text(encoding="utf-8"))
    assert "extends" not in data["profile"]
    assert data["detect"]["gpu_names"] == ["NVIDIA Q1"]
    assert data["facts"]["host_link"]["value"] == "PCIe Gen4 x8"
    assert rllaunch("profiles", "check", "q1").code == 0
    assert rllaunch("profiles", "detect", "--write", "profiles/q1.toml").code == 3
    assert rllaunch("profiles", "detect", "--write", "profiles/q1.toml", "--force").code == 0
    assert tomllib.loads((tmp_path / "profiles/q1.toml").read_text(encoding="utf-8")) == data
    assert "on 1 × 2 q1" in rllaunch("plan", "--model", "qwen3-0.6b").out


def test_another_link_than_that_of_the_extended_profile_does_not_keep_its_speed(
    rllaunch: Any, tmp_path: Path, gpus: Any
):
    gpus(count=8, pcie=(4, 16))
    rllaunch("profiles", "detect", "--write", "ours.toml")
    fact = facts(tmp_path / "ours.toml")["host_link_bytes_per_second"]
    assert (fact["value"], fact["source"]) == (
        26.1e9,
        "not measured: 83% of the 31.5 GB/s that PCIe Gen4 x16 carries",
    )
    assert rllaunch("profiles", "check", "ours.toml").code == 0


def test_a_coherent_link_is_no_pcie(rllaunch: Any, gpus: Any):
    gpus(count=4, name="NVIDIA GB300", memory_bytes=284208 * 2**20, is_coherent=True, host_bytes=898 * GIB)
    seen = rllaunch("profiles", "detect", "--json").json()
    assert seen["facts"]["host_link"]["value"] == "NVLink-C2C"
    assert "host_link_bytes_per_second" not in seen["facts"]
    assert 'extends = "GB300"' in seen["profile"]


def test_only_visible_gpus_count(rllaunch: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch):
    gpus(count=8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    seen = rllaunch("profiles", "detect", "--json").json()
    assert seen["facts"]["gpus_per_node"]["value"] == 2
    assert len(seen["machine"]["links"]) == 2


def test_what_was_measured_is_a_fact_with_both_ways_and_the_slowest_gpu_counts(
    rllaunch: Any, tmp_path: Path, gpus: Any, monkeypatch: pytest.MonkeyPatch
):
    gpus(count=2)
    monkeypatch.setattr(detection, "measure", lambda folder, nbytes: MEASURED)
    rllaunch("profiles", "detect", "--measure", "--write", "profiles/ours.toml")
    said = facts(tmp_path / "profiles/ours.toml")
    link, pin = said["host_link_bytes_per_second"], said["host_pin_bytes_per_second"]
    assert (link["value"], pin["value"]) == (51.3e9, 5e9)
    assert link["source"].startswith("measured on node7, 20")
    assert link["source"].endswith(
        ", NVIDIA H200, driver 580.95.05: 54.0 GB/s to the GPU and 51.3 GB/s to the host, 4 GiB of pinned memory"
    )
    text = (tmp_path / "profiles/ours.toml").read_text(encoding="utf-8")
    assert "# GPU 1, pageable memory: 9.1 GB/s to it and 6.2 GB/s from it; pages are locked at 5.5 GB/s.\n" in text
    assert rllaunch("profiles", "check", "ours").code == 0

    launch = ("plan", "--model", "qwen3-0.6b", "--offload-train-buffers", "fresh")
    ours, shipped = (rllaunch(*launch, "--hardware", name) for name in ("ours", "H200"))
    line = ours.out.splitlines()[2]
    assert line.startswith("  host link 51.3 GB/s (measured on node7, 20")
    assert "; fresh pages 5.0 GB/s (measured on node7, 20" in line
    assert shipped.out.splitlines()[2].startswith("  host link 55.3 GB/s (measured 2026-11-29, one H200")
    answers = {name: rllaunch(*launch, "--hardware", name, "--json").json() for name in ("ours", "H200", "VR-NVL72")}
    assert (answers["ours"]["link"]["measured"], answers["ours"]["link"]["bytes_per_second"]) == (True, 51.3e9)
    assert answers["VR-NVL72"]["link"]["measured"] is False

    def seconds(*more: str) -> float:
        steps = rllaunch(*launch, "--hardware", "ours", "--json", *more).json()["steps"]
        return float(next(s["seconds"] for s in steps if (s["phase"], s["name"]) == ("cycle", "trainer.offload")))

    # Of the 10.2 GB/s that one H200's host took, 5.0 here: the same bytes take as much longer.
    usual = seconds("--set", "hardware.host_pin_bytes_per_second=unset")
    assert seconds() == pytest.approx(usual * 10.2 / 5.0, rel=0.01)


def test_a_flag_over_a_measured_value_is_named_instead(rllaunch: Any):
    words = ("plan", "--model", "qwen3-0.6b", "--hardware", "H200", "--set", "hardware.host_link_bytes_per_second=3e10")
    assert rllaunch(*words).out.splitlines()[2] == (
        "  host link 30.0 GB/s (--set hardware.host_link_bytes_per_second=3e10)"
    )


# -- without a GPU ---------------------------------------------------------------------------------


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_without_gpus_measures_its_host_and_says_what_it_could_not(rllaunch: Any, tmp_path: Path):
    made = rllaunch("profiles", "detect", "--measure", "--measure-mib", "16", "--write", "profiles/box.toml")
    assert made.code == 0, made.err
    assert "note: no GPU is visible: nothing about GPUs, their memory and their links\n" in made.err
    assert "note: links and pinned memory: torch " in made.err
    text = (tmp_path / "profiles/box.toml").read_text(encoding="utf-8")
    for remark in (
        "# Host memory, one thread copying: ",
        "# Fresh host pages, faulted in by several threads: ",
        "# Disk, written and flushed: ",
        "# Disk, read back without the page cache: ",
        "# /dev/shm: ",
        "# Not known: no GPU is visible",
        "# Not measured: links and pinned memory: torch ",
    ):
        assert remark in text
    assert set(facts(tmp_path / "profiles/box.toml")) == {"accelerator", "host_memory_bytes"}
    assert rllaunch("profiles", "check", "box").code == 0
    assert rllaunch("plan", "--model", "tiny", "--hardware", "box").code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["profiles"]


@pytest.mark.usefixtures("no_gpu")
def test_without_a_file_the_profile_is_the_output(rllaunch: Any, tmp_path: Path):
    result = rllaunch("profiles", "detect")
    assert tomllib.loads(result.out)["profile"]["name"] == "this-machine"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_gpu")
def test_a_measurement_that_ends_badly_leaves_the_rest(rllaunch: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(detection, "PROGRAM", "rllaunch.nothing")
    result = rllaunch("profiles", "detect", "--measure", "--json")
    assert result.code == 0
    assert result.json()["machine"]["missing"][-1].startswith("nothing: the measurement ended with 1: ")
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--write", "here.toml"), 3, "error: the file is there already: here.toml\n"),
        (("--write", "box.yaml"), 2, "error: a profile's file ends in .toml: box.yaml\n"),
        (("--write", "h100.toml"), 3, "error: hardware profile name 'h100' is taken\n"),
        (("--from", "H10"), 3, "error: unknown hardware profile 'H10'\n"),
        (("--measure-mib", "1"), 2, "hint: add --measure\n"),
    ],
)
def test_what_cannot_be_written_is_one_error_before_anything_is_measured(
    rllaunch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, told: str
):
    (tmp_path / "here.toml").write_text("mine")
    monkeypatch.setattr(detection, "detected", lambda *_, **__: pytest.fail("it looked"))
    result = rllaunch("profiles", "detect", *words)
    assert result.code == code
    assert told in result.err
    assert (tmp_path / "here.toml").read_text() == "mine"


def test_only_the_measuring_process_imports_torch():
    script = (
        "import sys\n"
        "from rllaunch.cli import main\n"
        "try: main(['profiles', 'detect', '--measure', '--measure-mib', '1', '--json'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'ray', 'transformers', 'numpy') if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert '"memory_copy"' in done.stdout


def test_numa_nodes_without_cpus_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for number, cpus, gib in ((0, "0-71", 480), (2, "", 185)):
        folder = tmp_path / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cpus + "\n")
        (folder / "meminfo").write_text(f"Node {number} MemTotal:       {gib * 2**20} kB\n")
    lines = list(remarks_of(read_machine(tmp_path, tmp_path)))
    assert lines[:2] == [
        "NUMA node 0: 480.0 GiB, CPUs 0-71.",
        "NUMA node 2: 185.0 GiB, no CPU (HBM or an expander, not counted as host memory).",
    ]
