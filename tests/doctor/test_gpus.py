"""RL401 to RL410: packages, GPUs and what drives them, on machines that NVML and metadata describe."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml
import pytest
from doctor_cases import resolved_of
from fake_nvml import H200_BYTES, FakeNvml

from rllaunch.doctor.engine import builtin_rules, diagnose, exit_code
from rllaunch.doctor.finding import Finding
from rllaunch.doctor.gpus import Gpu, GpuNode, GpuProcess, numbers, read_node
from rllaunch.doctor.rules.busy_gpus import check_busy
from rllaunch.doctor.rules.gpu_tests import run_program
from rllaunch.doctor.rules.locked_memory import check_locked_memory
from rllaunch.doctor.rules.memory_saver import LIBRARY, check_memory_saver, needs_memory_saver
from rllaunch.doctor.rules.nccl import check_links
from rllaunch.doctor.rules.numa import check_numa
from rllaunch.doctor.rules.versions import check_driver
from rllaunch.resolve.origins import Resolved

GIB = 2**30
H200 = {"hardware.name": "H200", "hardware.gpu_memory_bytes": 150754820096}
CPU = {"model.dtype": "float32", "hardware.name": "cpu", "hardware.accelerator": "cpu", "hardware.gpus_per_node": 1}
CPU |= {"trainer.backend": "embedded", "rollout.backend": "embedded"}
ENGINES = {**H200, "trainer.backend": "embedded", "model.dtype": "float32"}
Gpus = Callable[..., FakeNvml]
Packages = Callable[..., None]


def found(code: str, values: dict[str, Any], *, gpu_test: bool = False) -> list[Finding]:
    """What one rule of the environment finds."""
    rules = [rule for rule in builtin_rules() if rule.code == code]
    assert [rule.probes for rule in rules] == [True]
    findings = diagnose(resolved_of(values), rules, probe=True, gpu_test=gpu_test)
    assert {finding.code for finding in findings} <= {code}, findings
    return findings


# What NVML shows


def test_a_machine_without_a_driver_shows_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    assert read_node() == GpuNode()


def test_a_gpu_as_nvml_shows_it_and_the_driver_is_asked_once(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    nvml = gpus(2, used={1: 3 * GIB}, processes={1: [(4242, 3 * GIB)]}, cut=[1], cluster=7, cuda=12090)
    gpu = Gpu(
        index=1,
        name="NVIDIA H200",
        uuid="GPU-00000001-0000-0000-0000-000000000000",
        memory_bytes=H200_BYTES,
        used_bytes=3 * GIB,
        processes=(GpuProcess(4242, 3 * GIB, "python3"),),
        is_cut=True,
        pci_address="0000:1c:00.0",
        reaches_nvswitch=True,
        spans_nodes=True,
    )
    node = read_node()
    assert node.visible == (gpu,)
    assert len(node.gpus) == 2
    assert node.cuda == (12, 9)
    assert (read_node(), nvml.asked) == (node, 1)


@pytest.mark.parametrize(
    ("links_to", "reaches"),
    [
        (pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH, True),
        (pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, False),
        (pynvml.NVML_NVLINK_DEVICE_TYPE_UNKNOWN, None),
        (None, None),
    ],
)
def test_where_nvlink_leads(gpus: Gpus, links_to: int | None, reaches: bool | None) -> None:
    gpus(1, links_to=links_to, cluster=0)
    (gpu,) = read_node().gpus
    assert gpu.reaches_nvswitch is reaches
    assert not gpu.spans_nodes, "a fabric within one node"


def test_errors_of_this_family_are_errors_of_the_environment() -> None:
    assert exit_code([Finding("RL401", "error", "")]) == 5
    assert exit_code([Finding("RL401", "warning", "")]) == 0


@pytest.mark.parametrize("code", [f"RL4{n:02}" for n in (1, 2, 3, 4, 5, 7, 8, 9, 10)])
def test_a_launch_on_the_cpu_hears_nothing_of_gpus(code: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(2, used={0: 9 * GIB}, cut=[1], links_to=pynvml.NVML_NVLINK_DEVICE_TYPE_GPU, cuda=9000)
    for name, value in {
        "NCCL_NVLS_ENABLE": "1",
        "CUDA_VISIBLE_DEVICES": "7",
        "LD_PRELOAD": "torch_memory_saver",
    }.items():
        monkeypatch.setenv(name, value)
    assert found(code, CPU, gpu_test=True) == []


# RL401


def test_a_package_that_another_does_not_fit_is_named_with_who_asks_and_what_to_type(packages: Packages) -> None:
    packages("sglang", "0.5.17", "torch==2.11.0", "sglang-kernel==0.4.5", "transformers==5.12.1; extra == 'never'")
    packages("torch", "2.13.0+cpu")
    packages("sglang-kernel", "0.4.3")
    packages("rllaunch", "0.1.0", "torch>=2.6", "sglang>=0.5.17; extra == 'sglang'", extras=("sglang",))
    torch, kernel = found("RL401", ENGINES)
    assert torch.message == "torch 2.13.0+cpu is installed, sglang 0.5.17 asks for torch==2.11.0"
    assert torch.origins == ("rllaunch 0.1.0 asks for torch>=2.6", "sglang 0.5.17 asks for torch==2.11.0")
    assert torch.fix == "pip install 'torch==2.11.0'"
    assert kernel.message == "sglang-kernel 0.4.3 is installed, sglang 0.5.17 asks for sglang-kernel==0.4.5"
    assert kernel.fix == "pip install 'sglang-kernel==0.4.5'"
    assert exit_code([torch]) == 5


def test_packages_that_fit_say_nothing_and_a_local_version_counts_for_nothing(packages: Packages) -> None:
    packages(
        "sglang", "0.5.17", "torch==2.11.0", "sglang-kernel==0.4.5", "torch_memory_saver>=0.0.9.post1", "aiohttp<0.1"
    )
    packages("torch", "2.11.0+cu130")
    packages("sglang-kernel", "0.4.5")
    packages("torch_memory_saver", "0.0.10")
    packages("rllaunch", "0.1.0", "torch>=2.6", "sglang>=0.5.17; extra == 'sglang'", extras=("sglang",))
    assert found("RL401", ENGINES) == []


def test_minimums_are_those_of_the_extras_that_the_launch_uses(packages: Packages) -> None:
    asks = ("sglang>=0.5.17; extra == 'sglang'", "megatron-core>=0.16; extra == 'megatron'")
    packages("rllaunch", "0.1.0", *asks, extras=("sglang", "megatron"))
    packages("sglang", "0.5.3")
    packages("megatron-core", "0.12.0")
    (engines,) = found("RL401", ENGINES)
    assert engines.message == "sglang 0.5.3 is installed, rllaunch[sglang] 0.1.0 asks for sglang>=0.5.17"
    assert engines.fix == "pip install 'sglang>=0.5.17'"
    assert len(found("RL401", H200)) == 2
    embedded = {**ENGINES, "rollout.backend": "embedded"}
    assert found("RL401", embedded) == []


def test_a_missing_kernel_under_whatever_name_it_is_asked_for(packages: Packages) -> None:
    packages("rllaunch", "0.1.0")
    packages("sglang", "0.5.1", "sgl-kernel==0.3.4", "torch_memory_saver==0.0.8")
    (finding,) = found("RL401", ENGINES)
    assert finding.message == "sgl-kernel is not installed, sglang 0.5.1 asks for sgl-kernel==0.3.4"
    assert finding.fix == "pip install 'sgl-kernel==0.3.4'"


def test_a_nightly_build_counts_as_its_version(packages: Packages) -> None:
    packages("rllaunch", "0.1.0", "torch>=2.6")
    packages("torch", "2.13.0.dev20261101+cu130")
    assert found("RL401", ENGINES) == []


def test_two_that_no_version_satisfies(packages: Packages) -> None:
    packages("rllaunch", "0.1.0", "torch>=2.12")
    packages("sglang", "0.5.17", "torch==2.11.0")
    packages("torch", "2.11.0")
    (finding,) = found("RL401", ENGINES)
    assert finding.message == "torch 2.11.0 is installed, rllaunch 0.1.0 asks for torch>=2.12"
    assert finding.fix == "no torch is what both ask for: other versions of those that ask"


@pytest.mark.parametrize(
    ("built", "driver", "level"),
    [
        ((13, 0), (12, 8), "error"),
        ((12, 9), (12, 4), "warning"),
        ((12, 4), (12, 4), None),
        ((12, 8), (13, 0), None),
        (None, (12, 4), None),
        ((13, 0), None, None),
    ],
)
def test_torchs_cuda_and_the_drivers(
    built: tuple[int, int] | None, driver: tuple[int, int] | None, level: str | None
) -> None:
    findings = list(check_driver(resolved_of(H200), GpuNode(cuda=driver), built))
    assert [finding.level for finding in findings] == ([level] if level else [])
    if level == "error":
        assert "is built for CUDA 13.0, the driver runs CUDA 12.8 at most" in findings[0].message
        assert findings[0].fix == "a newer NVIDIA driver, or a torch built for CUDA 12.8 or older"


def test_the_driver_of_this_machine_is_held_against_the_torch_of_this_machine(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rllaunch.doctor.packages.torch_version_file", lambda: "cuda: Optional[str] = '13.0'\n")
    gpus(8, cuda=12040)
    assert [
        f.level for f in found("RL401", {**H200, "rollout.backend": "embedded", "trainer.backend": "embedded"})
    ] == ["error"]
    gpus(8, cuda=13000)
    assert found("RL401", {**H200, "rollout.backend": "embedded", "trainer.backend": "embedded"}) == []


# RL402


def saver(values: dict[str, Any], installed: list[str] | None, cuda: tuple[int, int] | None = (13, 0)) -> list[Finding]:
    return list(check_memory_saver(resolved_of(values), installed, cuda))


CU12, CU13 = f"{LIBRARY}_cu12.abi3.so", f"{LIBRARY}_cu13.abi3.so"


def test_engines_that_offload_need_the_memory_saver(packages: Packages) -> None:
    assert saver(ENGINES, None) == [], "SGLang is not there either, and brings it"
    packages("rllaunch", "0.1.0", "torch_memory_saver>=0.0.10; extra == 'sglang'", extras=("sglang",))
    packages("sglang", "0.5.17", "torch_memory_saver>=0.0.9.post1")
    (finding,) = saver(ENGINES, None)
    assert finding.message == "memory cannot be released: torch_memory_saver is not installed"
    assert finding.fix == "pip install 'torch_memory_saver>=0.0.10,>=0.0.9.post1'"
    assert saver({**ENGINES, "handoff.offload_rollout": False}, None) == []
    assert saver({**ENGINES, "rollout.backend": "embedded"}, None) == []


def test_a_trainer_that_offloads_by_it_needs_it_too() -> None:
    launch = resolved_of({**H200, "rollout.backend": "embedded"})
    assert needs_memory_saver(launch) == []

    def by(backend: str) -> Resolved:
        handoff = launch.config.handoff.model_copy(update={"trainer_offload_backend": backend})
        return replace(launch, config=launch.config.model_copy(update={"handoff": handoff}))

    assert needs_memory_saver(by("arena")) == []
    launch = by("torch_memory_saver")
    assert needs_memory_saver(launch) == ["trainer.backend", "handoff.trainer_offload_backend"]
    (finding,) = check_memory_saver(launch, None, (13, 0))
    assert finding.message == "memory cannot be released: torch_memory_saver is not installed"


def test_its_library_is_one_for_torchs_cuda(packages: Packages) -> None:
    packages("torch_memory_saver", "0.0.10")
    assert saver(ENGINES, [CU12, CU13]) == []
    assert saver(ENGINES, [CU12], (12, 8)) == []
    assert saver(ENGINES, [f"{LIBRARY}.abi3.so"]) == [], "an older release, for one CUDA"
    assert saver(ENGINES, [CU12], None) == [], "nothing is known of torch"
    (finding,) = saver(ENGINES, [f"{LIBRARY}.abi3.so", CU12])
    assert finding.message == (
        f"memory cannot be released: torch_memory_saver 0.0.10 has no library for CUDA 13 to preload (it has: {CU12})"
    )
    assert finding.fix.endswith("--force-reinstall --no-deps, or a torch for CUDA 12")
    assert len(saver(ENGINES, [], None)) == 1


def test_it_refuses_to_be_preloaded_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    in_config = {**ENGINES, "env.LD_PRELOAD": f"/opt/{CU13}"}
    (finding,) = saver(in_config, [CU13])
    assert finding.fix == "take it out of env.LD_PRELOAD"
    assert finding.origins[0].startswith("env.LD_PRELOAD")
    monkeypatch.setenv("LD_PRELOAD", f"/lib/libjemalloc.so:/opt/{CU13}")
    (finding,) = saver(ENGINES, [CU13])
    assert finding.fix == "unset LD_PRELOAD, or take torch_memory_saver out of it"
    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so")
    assert saver(in_config, [CU13]) == [], "the user's variable wins"


def test_what_is_installed_is_looked_up(packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllaunch.doctor.rules.memory_saver.torch_cuda", lambda: (13, 0))
    packages("sglang", "0.5.17")
    site = tmp_path / "site-packages"
    (site / "torch_memory_saver").mkdir()
    (site / "torch_memory_saver" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    assert "has no library for CUDA 13" in found("RL402", ENGINES)[0].message
    (site / CU13).touch()
    assert found("RL402", ENGINES) == []


# RL403


def test_c006_nvls_needs_an_nvswitch_not_only_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    bridged = GpuNode((Gpu(0, reaches_nvswitch=False), Gpu(1, reaches_nvswitch=False)), (0, 1))
    switched = GpuNode((Gpu(0, reaches_nvswitch=True), Gpu(1, reaches_nvswitch=None)), (0, 1))
    assert list(check_links(resolved_of(H200), bridged)) == []
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    (finding,) = check_links(resolved_of(H200), bridged)
    assert finding.message == (
        "NCCL_NVLS_ENABLE=1 needs an NVSwitch, and the NVLink of GPUs 0, 1 leads to GPUs only: NCCL hangs at its start"
    )
    assert finding.origins == ('NCCL_NVLS_ENABLE = "1"   this environment',)
    assert finding.fix == "export NCCL_NVLS_ENABLE=0"
    assert list(check_links(resolved_of(H200), switched)) == []
    assert list(check_links(resolved_of(H200), GpuNode())) == []
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    (finding,) = check_links(resolved_of({**H200, "env.NCCL_NVLS_ENABLE": "1"}), bridged)
    assert finding.fix == "--set env.NCCL_NVLS_ENABLE=0"
    assert list(check_links(resolved_of({**H200, "env.NCCL_NVLS_ENABLE": "0"}), bridged)) == []


def test_c047_without_cumem_nccl_never_uses_the_fabric_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    rack = GpuNode((Gpu(0, spans_nodes=True),), (0,))
    two_nodes = {**H200, "cluster.num_nodes": 2}
    assert list(check_links(resolved_of(two_nodes), rack)) == []
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    (finding,) = check_links(resolved_of(two_nodes), rack)
    assert finding.level == "warning"
    assert finding.message.startswith("NCCL_CUMEM_ENABLE=0 keeps NCCL off the NVLink fabric between nodes")
    assert finding.fix == "export NCCL_CUMEM_ENABLE=1"
    assert list(check_links(resolved_of(two_nodes), GpuNode((Gpu(0),), (0,)))) == []
    assert list(check_links(resolved_of(H200), rack)) == [], "nothing crosses nodes"


def test_c047_a_profile_that_switches_cumem_on_is_believed_without_a_gpu(
    rllaunch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    answer = rllaunch("doctor", "--model", "dsv4", "--hardware", "GB300", "--json").json()
    (finding,) = [f for f in answer["findings"] if f["code"] == "RL403"]
    assert finding["fix"] == "export NCCL_CUMEM_ENABLE=1"


# RL404


TWO_OF_EIGHT = {**H200, "cluster.num_gpus_per_node": 2}


@pytest.mark.parametrize(
    ("visible", "message"),
    [
        ("0,9", "names 9, which is none: CUDA shows only the 1 GPU named before it; this machine has GPUs 0 to 7"),
        ("gpu0", "names gpu0, which is none: CUDA shows no GPU; this machine has GPUs 0 to 7"),
        ("3,3", "names GPU 3 twice: CUDA then shows none; this machine has GPUs 0 to 7"),
        ("MIG-1", "names the MIG instance MIG-1, and a launch takes whole GPUs; this machine has GPUs 0 to 7"),
        ("", "leaves 0 of this machine's 8 GPUs visible, the launch uses 2 of a node"),
        ("-1", "leaves 0 of this machine's 8 GPUs visible, the launch uses 2 of a node"),
        ("5", "leaves 1 of this machine's 8 GPUs visible, the launch uses 2 of a node"),
    ],
)
def test_a_variable_that_hides_what_the_launch_needs(
    visible: str, message: str, gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpus(8)
    (finding,) = found("RL404", TWO_OF_EIGHT)
    assert finding.message == f"CUDA_VISIBLE_DEVICES {message}"
    assert finding.origins[0] == f'CUDA_VISIBLE_DEVICES = "{visible}"   this environment'
    assert finding.fix.startswith("unset CUDA_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES=0,1")
    assert found("RL502", TWO_OF_EIGHT) == [], "one mistake, one error"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert found("RL404", TWO_OF_EIGHT) == []


def test_a_machine_that_is_too_small_is_not_the_variables_fault(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    gpus(1)
    assert found("RL404", TWO_OF_EIGHT) == []
    assert len(found("RL502", TWO_OF_EIGHT)) == 1


def test_a_variable_of_this_shell_is_nothing_to_another_cluster(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    gpus(8, memory_bytes=80 * GIB)
    assert found("RL404", {**H200, "cluster.ray_address": "head:6379"}) == []


def test_gpus_by_their_uuids(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00000004,GPU-00000006-0000")
    gpus(8)
    assert found("RL404", TWO_OF_EIGHT) == []
    assert [gpu.index for gpu in read_node().visible] == [4, 6]


def test_a_gpu_that_mig_has_cut(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(8, cut=[3])
    (finding,) = found("RL404", H200)
    assert finding.message == "MIG cuts GPU 3 into instances: a process sees one of them, never the whole"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert found("RL404", TWO_OF_EIGHT) == [], "a GPU that the launch does not see"


def test_gpus_of_another_size_than_the_profiles(gpus: Gpus) -> None:
    gpus(8, name="NVIDIA H100 80GB HBM3", memory_bytes=85520809984)
    (finding,) = found("RL404", H200)
    assert finding.level == "warning"
    assert finding.message == "GPUs 0 to 7: NVIDIA H100 80GB HBM3 with 79.6 GiB, the launch is planned for 140.4 GiB"
    assert finding.fix == "--hardware auto, or --set hardware.gpu_memory_bytes=85520809984"
    assert found("RL404", {**H200, "hardware.gpu_memory_bytes": 85520809984}) == []
    gpus(8, memory_bytes=H200_BYTES - GIB)
    assert found("RL404", H200) == [], "what a driver keeps for itself"


# RL405


def test_gpus_that_others_use_are_named_with_who_uses_them(gpus: Gpus) -> None:
    gpus(8, used={0: 61 * GIB, 5: 2 * GIB, 6: 400 * 2**20}, processes={0: [(4242, 60 * GIB), (4243, None)]})
    (finding,) = found("RL405", {**H200, "cluster.num_gpus_per_node": 6})
    assert finding.level == "warning"
    assert finding.message.splitlines() == [
        "others hold memory of GPUs 0, 5",
        "GPU 0: 61.0 GiB of 140.4 GiB in use",
        f"  process 4242 python3 ({60 * GIB} bytes)",
        "  process 4243 python3",
        "GPU 5: 2.0 GiB of 140.4 GiB in use",
        "  by processes that cannot be seen from here, as those of another container",
    ]
    assert finding.fix == (
        "CUDA_VISIBLE_DEVICES=1,2,3,4,6,7, or wait for these processes, or end them yourself if they are yours"
    )
    assert found("RL405", {**H200, "cluster.num_gpus_per_node": 8})[0].fix.startswith("wait for these processes")


def test_gpus_that_are_free(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(8, used={7: 60 * GIB, 6: 400 * 2**20})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    assert found("RL405", {**H200, "cluster.num_gpus_per_node": 7}) == []


def test_a_plan_that_no_longer_fits_beside_them_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rllaunch.doctor.rules.busy_gpus._planned_peak", lambda resolved: 100 * GIB)
    launch = resolved_of(H200)

    def beside(used_gib: int) -> Finding:
        node = GpuNode((Gpu(0, "NVIDIA H200", memory_bytes=140 * GIB, used_bytes=used_gib * GIB),), (0,))
        (finding,) = check_busy(launch, node)
        return finding

    assert beside(40).level == "warning"
    assert beside(41).level == "error"
    assert beside(41).message.splitlines()[0] == (
        "others hold memory of GPU 0: the plan needs 100.0 GiB, GPU 0 has 99.0 GiB free"
    )


def test_the_plan_is_asked_for_its_peak(gpus: Gpus, rllaunch: Any) -> None:
    launch = ("doctor", "--model", "qwen3-8b", "--hardware", "H200", "--json")
    levels = []
    for used in (2 * GIB, 139 * GIB):
        gpus(8, used={0: used})
        levels += [f["level"] for f in rllaunch(*launch).json()["findings"] if f["code"] == "RL405"]
    assert levels == ["warning", "error"]


# RL407


def numa_machine(root: Path, cpus: str, mems: str) -> Path:
    """Two sockets of four processors with four GPUs each, and a third node that is HBM."""
    files = {"proc/self/status": f"Name:\tpython\nCpus_allowed_list:\t{cpus}\nMems_allowed_list:\t{mems}\n"}
    files |= {f"sys/devices/system/node/node{n}/cpulist": text for n, text in ((0, "0-3\n"), (1, "4-7\n"), (2, "\n"))}
    files |= {f"sys/bus/pci/devices/0000:{n + 0x1B:02x}:00.0/numa_node": f"{n // 4}\n" for n in range(8)}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_process_that_is_bound_to_one_socket(tmp_path: Path, gpus: Gpus) -> None:
    gpus(8)
    root = numa_machine(tmp_path, "0-3", "0-2")
    (finding,) = check_numa(resolved_of(H200), read_node(), root)
    assert finding.level == "warning"
    assert finding.message.splitlines() == [
        "host copies of some GPUs cross the processors' link",
        "GPUs 4 to 7: next to NUMA node 1, this process may use processors of node 0 only",
    ]
    assert finding.origins[0] == f"Cpus_allowed_list: 0-3   {root}/proc/self/status"
    assert list(check_numa(resolved_of(TWO_OF_EIGHT), read_node(), root)) == [], "two GPUs next to node 0"


def test_memory_of_one_socket_is_told_and_hbm_is_no_place_to_bind_to(tmp_path: Path, gpus: Gpus) -> None:
    gpus(8)
    (finding,) = check_numa(resolved_of(H200), read_node(), numa_machine(tmp_path, "0-7", "1-2"))
    assert finding.message.splitlines()[1:] == [
        "GPUs 0 to 3: next to NUMA node 0, this process may use memory of node 1 only"
    ]
    assert list(check_numa(resolved_of(H200), read_node(), numa_machine(tmp_path, "0-7", "0-1"))) == []


def test_a_machine_that_does_not_say_which_gpu_is_where(tmp_path: Path, gpus: Gpus) -> None:
    gpus(8)
    root = numa_machine(tmp_path, "0-3", "0")
    for file in root.glob("sys/bus/pci/devices/*/numa_node"):
        file.write_text("-1\n")
    assert list(check_numa(resolved_of(H200), read_node(), root)) == []
    assert list(check_numa(resolved_of(H200), read_node(), tmp_path / "no machine")) == []


# RL408, RL409


def test_tests_on_the_gpu_run_only_when_asked_for() -> None:
    assert found("RL408", ENGINES) == []
    assert found("RL409", ENGINES) == []


def test_a_test_that_cannot_run_says_so(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(0)
    (finding,) = found("RL408", ENGINES, gpu_test=True)
    assert (finding.level, finding.message) == (
        "info",
        "not run: processes share GPU memory (CUDA IPC): no GPU is visible",
    )
    gpus(8)
    monkeypatch.setattr("rllaunch.doctor.rules.gpu_tests.is_installed", lambda module: module == "torch")
    (finding,) = found("RL409", ENGINES, gpu_test=True)
    assert finding.message == (
        "not run: paused GPU memory is free and comes back whole: torch_memory_saver is not installed"
    )


def program(body: str) -> list[str]:
    return [sys.executable, "-c", body]


def says(ok: bool, text: str) -> str:
    return f"print({json.dumps(json.dumps({'ok': ok, 'text': text}))})"


def test_what_a_program_answers_is_what_is_told(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(8)
    answers = {
        "good": says(True, "8 GPUs"),
        "bad": says(False, "GPU 3: nothing arrived"),
        "broken": "raise OSError('no')",
    }
    told = {}
    for name, body in answers.items():
        monkeypatch.setattr("rllaunch.doctor.rules.gpu_tests.is_installed", lambda module: True)
        monkeypatch.setattr(
            "rllaunch.doctor.rules.gpu_tests.run_program",
            lambda command, environ, body=body: run_program(program(body), environ),
        )
        (told[name],) = found("RL408", ENGINES, gpu_test=True)
    assert [finding.level for finding in told.values()] == ["info", "error", "error"]
    assert told["good"].message.startswith("processes share GPU memory (CUDA IPC): 8 GPUs (")
    assert told["bad"].message == "not so: processes share GPU memory (CUDA IPC): GPU 3: nothing arrived"
    assert told["broken"].message.endswith(": ended with 1: OSError: no")
    assert told["bad"].fix.endswith("-m rllaunch.backends.gpu_tests.cuda_ipc` shows all of it")


def test_a_program_that_hangs_ends_with_what_it_started(tmp_path: Path) -> None:
    body = "import subprocess, time; p = subprocess.Popen(['sleep', '60'])\n"
    body += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    begin = time.monotonic()
    answer = run_program(program(body), {}, timeout_seconds=2.0)
    assert (answer.ok, answer.text) == (False, "no answer within 2 s")
    assert time.monotonic() - begin < 20
    state = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")

    def is_there() -> bool:
        try:
            return state.read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + 20  # it was killed; a busy machine takes a moment to end it
    while is_there() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_there()


@pytest.mark.skipif(bool(read_node().gpus), reason="needs a machine without a GPU")
def test_the_programs_answer_on_a_machine_without_a_gpu() -> None:
    answer = run_program(
        [sys.executable, "-m", "rllaunch.backends.gpu_tests.memory_saver"], {"PYTHONPATH": ":".join(sys.path)}
    )
    assert not answer.ok
    assert answer.text in ("torch sees no GPU", "ModuleNotFoundError: No module named 'torch_memory_saver'")


# RL410


def test_infiniband_and_a_limit_of_locked_memory(tmp_path: Path) -> None:
    two_nodes = resolved_of({**H200, "cluster.num_nodes": 2})
    assert list(check_locked_memory(two_nodes, 8 * 2**20, tmp_path)) == [], "no InfiniBand"
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    (finding,) = check_locked_memory(two_nodes, 8 * 2**20, tmp_path)
    assert finding.message.startswith("a process may lock 8.0 MiB of memory, and this machine has InfiniBand")
    assert list(check_locked_memory(two_nodes, None, tmp_path)) == []
    assert list(check_locked_memory(resolved_of(H200), 8 * 2**20, tmp_path)) == []


def test_gpus_in_words() -> None:
    assert [numbers(n) for n in ([3], [0, 1], [0, 1, 2], [0, 2, 3])] == [
        "GPU 3",
        "GPUs 0, 1",
        "GPUs 0 to 2",
        "GPUs 0, 2, 3",
    ]
