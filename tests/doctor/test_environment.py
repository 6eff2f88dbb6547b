"""The rules that look at this machine, in real conditions: directories, sockets, packages there or not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_cases import resolved_of
from launches import resolved

from rllaunch.doctor.engine import builtin_rules, diagnose, exit_code
from rllaunch.doctor.finding import Finding
from rllaunch.doctor.rules import backends
from rllaunch.doctor.rules.backends import build_lacks, is_installed
from rllaunch.doctor.rules.cluster import unreachable
from rllaunch.doctor.rules.host_memory import check_profile_memory, check_ray_total
from rllaunch.doctor.rules.run_dir import check_disk, check_run_dir
from rllaunch.doctor.rules.shared_memory import check_shared_memory
from rllaunch.resolve.detect import MachineFacts, probe_machine
from rllaunch.resolve.limits import host_limit, ray_total
from rllaunch.units import gib

CPU = {
    "model.dtype": "float32",
    "hardware.name": "cpu",
    "hardware.accelerator": "cpu",
    "hardware.gpus_per_node": 1,
    "trainer.backend": "embedded",
    "rollout.backend": "embedded",
    "handoff.update_weight_buffer_size": 4096,
}
MORE_BYTES_THAN_ANY_DISK_HAS = 2**62


def found(code: str, values: dict[str, Any]) -> list[Finding]:
    """What one rule of the environment finds."""
    rules = [rule for rule in builtin_rules() if rule.code == code]
    assert [rule.probes for rule in rules] == [True]
    findings = diagnose(resolved_of(values), rules, probe=True)
    assert {finding.code for finding in findings} <= {code}
    return findings


def test_a_launch_on_the_cpu_finds_everything_it_needs_here(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1 + 1 ="}\n')
    values = {**CPU, "task.prompt_data": str(prompts), "run.run_dir": str(tmp_path / "run")}
    findings = diagnose(resolved_of(values), builtin_rules(), probe=True)
    # Where these tests run below a limit that Ray does not see, that is true and no mistake of the launch.
    assert [finding for finding in findings if finding.code != "RL510"] == []
    assert sorted(tmp_path.iterdir()) == [prompts], "looking leaves nothing behind"


def test_looking_imports_neither_torch_nor_ray() -> None:
    script = """
        import sys
        from doctor_cases import resolved_of
        from rllaunch.doctor.engine import builtin_rules, diagnose
        diagnose(resolved_of(), builtin_rules(), probe=True, gpu_test=True)
        print(sorted({"torch", "ray", "transformers", "sglang", "megatron.core"} & set(sys.modules)))
    """
    path = [str(Path(__file__).parent), *sys.path]
    command = [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}\n" + textwrap.dedent(script)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[]\n"


# RL501


@pytest.mark.skipif(find_spec("sglang") is not None, reason="sglang is installed here")
def test_engines_that_are_not_installed() -> None:
    (finding,) = found("RL501", {"trainer.backend": "embedded"})
    assert finding.message == "the sglang engines cannot run here: sglang is not installed"
    assert finding.fix == "`pip install -e '.[sglang]'` in the clone of rllaunch"
    assert exit_code([finding]) == 5


@pytest.mark.skipif(is_installed("megatron.core"), reason="Megatron-core is installed here")
def test_a_trainer_that_is_not_installed_is_one_finding_with_all_it_lacks() -> None:
    (finding,) = found("RL501", {"rollout.backend": "embedded"})
    assert finding.message.startswith("the megatron trainer cannot run here: megatron.core is not installed")
    assert finding.fix.startswith("`pip install -e '.[megatron]'` in the clone of rllaunch")


def test_engines_need_a_torch_that_sees_the_gpus_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "is_installed", lambda module: True)
    monkeypatch.setattr(backends, "torch_version_file", lambda: "__version__ = '2.11.0+cpu'\ncuda = None\n")
    (finding,) = found("RL501", {"trainer.backend": "embedded"})
    assert finding.message == "the sglang engines cannot run here: torch 2.11.0+cpu is a build without CUDA"
    assert len(found("RL501", {})) == 1, "one mistake, one error"
    monkeypatch.setattr(backends, "torch_version_file", lambda: "__version__ = '2.11.0+cu130'\ncuda = '13.0'\n")
    assert found("RL501", {"trainer.backend": "embedded"}) == []


def test_backends_that_need_nothing_more() -> None:
    assert found("RL501", CPU) == []


def test_a_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "a_broken_backend"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("a_broken_backend")
    assert not is_installed("no_such_package.core")
    assert not is_installed("sys.core"), "a module that is no package"


@pytest.mark.parametrize(
    ("version_file", "platform", "lacks"),
    [
        (
            "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n",
            "cuda",
            "torch 2.13.0+cpu is a build without CUDA",
        ),
        (
            "__version__ = '2.9.1+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
            "cuda",
            "",
        ),
        (
            "__version__ = '2.9.1+cu128'\nhip: Optional[str] = None\n",
            "hip",
            "torch 2.9.1+cu128 is a build without ROCm",
        ),
        ("__version__ = '2.9.1+rocm6.4'\ncuda = None\nhip = '6.4.43482'\n", "hip", ""),
        ("", "cuda", ""),
    ],
)
def test_what_a_build_of_torch_lacks(version_file: str, platform: str, lacks: str) -> None:
    assert build_lacks(version_file, platform) == lacks


# RL502


def test_a_local_cluster_is_one_node_on_the_cpu_too() -> None:
    (finding,) = found("RL502", {**CPU, "cluster.num_nodes": 2, "cluster.num_gpus_per_node": 4})
    assert finding.message == "the launch needs 2 nodes, a local cluster is one"
    assert finding.fix == "--num-nodes 1 --num-gpus-per-node 8, or --ray-address HOST:PORT of a running cluster"
    assert found("RL502", {**CPU, "cluster.num_gpus_per_node": 64}) == []


def test_c051_too_few_gpus_are_shown_node_by_node() -> None:
    here = len(probe_machine().gpu_names)
    wanted = here + 1
    (finding,) = found("RL502", {"cluster.num_nodes": 16, "cluster.num_gpus_per_node": wanted})
    first, *table = finding.message.splitlines()
    assert first.startswith(f"the launch needs 16 nodes × {wanted} GPU")
    assert [line.split() for line in table] == [
        ["node", "requested", "present"],
        ["0", str(wanted), str(here)],
        ["1–15", str(wanted), "none"],
    ]
    assert exit_code([finding]) == 5


def test_what_a_remote_cluster_has_is_not_this_machines_business() -> None:
    assert found("RL502", {"cluster.num_nodes": 16, "cluster.ray_address": "head:6379"}) == []


# RL503


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_cluster_that_answers(listening: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert found("RL503", {"cluster.ray_address": f"127.0.0.1:{listening}"}) == []
    assert found("RL503", {"cluster.ray_address": f"ray://127.0.0.1:{listening}"}) == []
    assert found("RL503", {"cluster.ray_address": "auto"}) == []
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{listening}")
    assert found("RL503", {}) == []


def test_c050_a_cluster_that_is_gone_is_named_with_its_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    (finding,) = found("RL503", {})
    assert finding.message == f"the Ray cluster at 127.0.0.1:{port} does not answer: connection refused"
    assert finding.origins == (f'RAY_ADDRESS = "127.0.0.1:{port}"   this environment',)
    (finding,) = found("RL503", {"cluster.ray_address": f"localhost:{port}"})
    assert finding.origins[0].startswith(f'cluster.ray_address = "localhost:{port}"   flag')


@pytest.mark.parametrize("address", ["head", "head:port", "head:99999", "10.0.0.1:0"])
def test_an_address_that_is_none(address: str) -> None:
    (finding,) = found("RL503", {"cluster.ray_address": address})
    assert finding.message == f"the Ray cluster at {address} is no HOST:PORT"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])  # RFC 2606 and 5737: nobody is there
def test_looking_for_a_cluster_takes_half_a_second_at_most(host: str) -> None:
    begin = time.monotonic()
    assert unreachable(host, 6379)
    assert time.monotonic() - begin < 3  # the limit, and a busy machine; a name server waits for five seconds


# RL504


def test_a_run_directory_that_does_not_exist_yet(tmp_path: Path) -> None:
    assert check_run_dir(resolved_of({"run.run_dir": str(tmp_path / "a" / "b" / "run")}), resume=False) == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_holds_a_run_is_for_resuming_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    values = {"run.run_dir": str(tmp_path)}
    (finding,) = found("RL504", values)
    assert finding.message == f"the run directory already holds a run: {tmp_path / 'config.json'} exists"
    assert finding.fix == "--resume to go on with that run, or another --run-dir"
    assert check_run_dir(resolved_of(values), resume=True) == []


def test_an_unset_run_directory_is_a_new_one_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("a file of the user's")
    assert found("RL504", {}) == []
    (tmp_path / "runs").write_text("a file, too")
    (finding,) = found("RL504", {})
    assert finding.message == f"the run directory runs cannot be written: {tmp_path / 'runs'} is not a directory"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory that nobody can write")
def test_a_place_where_nothing_can_be_created_is_named() -> None:
    (finding,) = found("RL504", {"run.run_dir": "/proc/runs/first"})
    assert finding.message.startswith("the run directory /proc/runs/first cannot be written: /proc: ")
    assert exit_code([finding]) == 5


# RL505


def test_a_disk_with_room_for_reserve_and_checkpoints(tmp_path: Path) -> None:
    launch = resolved_of({"run.run_dir": str(tmp_path / "run"), "run.disk_reserve_bytes": 0})
    assert check_disk(launch) == []
    assert check_disk(launch, checkpoint_bytes=1024) == []


def test_a_disk_without_room_is_shown_with_both_numbers(tmp_path: Path) -> None:
    values = {"run.run_dir": str(tmp_path / "run"), "run.disk_reserve_bytes": MORE_BYTES_THAN_ANY_DISK_HAS}
    (finding,) = found("RL505", values)
    begin = f"no room for the run directory {tmp_path / 'run'}: needs 4294967296.00 GiB, "
    begin += f"the disk of {tmp_path} has "
    assert finding.message.startswith(begin)
    free_gib = float(finding.message.removeprefix(begin).removesuffix(" GiB free"))
    assert free_gib == pytest.approx(shutil.disk_usage(tmp_path).free / 2**30, abs=1.0)


def test_checkpoints_count_beside_the_reserve(tmp_path: Path) -> None:
    launch = resolved_of({"run.run_dir": str(tmp_path), "run.disk_reserve_bytes": 2**30})
    (finding,) = check_disk(launch, checkpoint_bytes=MORE_BYTES_THAN_ANY_DISK_HAS)
    assert "needs 4294967297.00 GiB = 4294967296.00 GiB of checkpoints + 1.00 GiB reserve" in finding.message
    assert finding.origins[-1].startswith("run.save_total_limit = 2")


# RL506

needs_shared_memory = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /dev/shm")


@needs_shared_memory
def test_c034_an_object_store_larger_than_shared_memory() -> None:
    """Two rollouts' ids, log-probs and masks, made and read: 2 × 2 × 16 bytes a token."""
    free = shutil.disk_usage("/dev/shm").free
    tokens = free // 64 + 2**20
    values = {**CPU, "rollout.rollout_batch_size": tokens, "rollout.rollout_max_response_len": 1}
    (finding,) = found("RL511", {**values, "rollout.n_samples_per_prompt": 1})
    assert finding.message.startswith("Ray's object store takes ")
    assert "--shm-size" in finding.fix
    assert found("RL511", {**values, "rollout.rollout_batch_size": 4}) == []
    elsewhere = {**values, "cluster.ray_address": "10.0.0.1:6379"}
    assert found("RL511", elsewhere) == [], "another cluster's store is its own"


@needs_shared_memory
def test_c034_a_bucket_larger_than_shared_memory() -> None:
    values = {**CPU, "handoff.update_weight_buffer_size": MORE_BYTES_THAN_ANY_DISK_HAS}
    (finding,) = found("RL506", values)
    assert finding.message.startswith(
        "a bucket of the weight update needs 4398046511104 MiB of shared memory, /dev/shm has "
    )
    assert "(docker: --shm-size)" in finding.fix
    smaller = finding.fix.partition(",")[0].split()[1]
    assert found("RL506", {**values, "handoff.update_weight_buffer_size": int(smaller)}) == []


@needs_shared_memory
def test_a_bucket_is_never_larger_than_the_weights() -> None:
    launch = resolved_of({**CPU, "handoff.update_weight_buffer_size": MORE_BYTES_THAN_ANY_DISK_HAS})
    assert check_shared_memory(launch, weights_bytes=4096) == []


@needs_shared_memory
def test_a_bucket_that_goes_by_way_of_the_gpu_takes_no_shared_memory() -> None:
    launch = resolved_of({"handoff.update_weight_buffer_size": 512 * 2**20})
    assert check_shared_memory(launch, free_bytes=2**20) == []
    (arena,) = check_shared_memory(launch, arena_bytes=80 * GIB, free_bytes=64 * GIB)
    assert arena.message == "the arenas of a node need 81920 MiB of shared memory, /dev/shm has 65536 MiB free"


@needs_shared_memory
def test_shared_memory_holds_the_megatron_trainers_bucket_and_arenas() -> None:
    launch = resolved_of({
        "handoff.update_weight_buffer_size": 512 * 2**20, "handoff.offload_train_buffers": "shared", "rollout.backend": "embedded",
    })  # fmt: skip
    (bucket,) = check_shared_memory(launch, free_bytes=64 * 2**20)
    assert (bucket.level, bucket.fix) == (
        "warning",
        "--update-weight-buffer-size 33554432, or more /dev/shm (docker: --shm-size)",
    )
    (arena,) = check_shared_memory(launch, arena_bytes=80 * GIB, free_bytes=64 * GIB)
    assert arena.level == "error"
    assert arena.message == (
        "a bucket of the weight update and the arenas need 512 MiB + 81920 MiB of shared memory, "
        "/dev/shm has 65536 MiB free"
    )
    assert arena.fix == "--offload-train-buffers fresh, or more /dev/shm (docker: --shm-size)"
    assert check_shared_memory(launch, arena_bytes=80 * GIB, free_bytes=81 * GIB) == []


@needs_shared_memory
def test_the_arenas_of_a_node_are_as_large_as_the_plan_says(rllaunch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2 * GIB))
    launch = ("--model", "qwen3-8b", "--hardware", "H200", "--colocate-memory-peak-device", "gpu", "--json")
    found = {}
    for buffers in ("shared", "fresh"):
        answer = rllaunch("doctor", *launch, "--offload-train-buffers", buffers, "--engine-weights", "mirror").json()
        found[buffers] = [f["message"] for f in answer["findings"] if f["code"] == "RL506" and "arenas" in f["message"]]
    plan = rllaunch("plan", *launch, "--offload-train-buffers", "shared", "--engine-weights", "mirror").json()
    arena = max(step["host"].get("arena", 0) for step in plan["steps"])
    assert f" {arena / 2**20:.0f} MiB of shared memory" in found["shared"][0]
    assert found["fresh"] == []


# RL349


def test_prompt_files_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").touch()
    there, gone = str(tmp_path / "prompts.jsonl"), str(tmp_path / "held-out.jsonl")
    assert found("RL349", {"task.prompt_data": there}) == []
    (finding,) = found("RL349", {"task.prompt_data": there, "task.eval_prompt_data": gone})
    assert finding.message == f"the prompt file {gone} does not exist"
    assert finding.fix == "--eval-prompt-data with a JSONL file"
    (finding,) = found("RL349", {"task.prompt_data": str(tmp_path)})
    assert finding.message == f"the prompt file {tmp_path} is a directory"


# RL346


def test_a_checkpoint_in_a_directory_is_looked_for(tmp_path: Path) -> None:
    file, gone = tmp_path / "config.json", str(tmp_path / "gone")
    shape = {"model.architecture": {"model_type": "qwen3", "hidden_size": 2560}}

    def of(checkpoint: str, **values: Any) -> list[Finding]:
        return found("RL346", {"model.hf_checkpoint": checkpoint, **shape, **values})

    assert of("org/model") == of("gpt2") == of("") == []
    (finding,) = of(gone)
    assert finding.message == f"there is no directory {gone}"
    (finding,) = of(str(tmp_path))
    assert finding.message == f"there is no {file} that can be read"
    file.write_text("{", encoding="utf-8")
    (finding,) = of(str(tmp_path))
    assert finding.message.startswith(f"{file} is not JSON: ")
    file.write_text(json.dumps({"model_type": "qwen3", "hidden_size": 2560}), encoding="utf-8")
    (finding,) = of(str(tmp_path))
    assert finding.message == f"there are no weights (*.safetensors) in {tmp_path}"
    (tmp_path / "pytorch_model.bin").touch()
    assert of(str(tmp_path), **{"trainer.backend": "embedded"}) == [], "transformers loads these too"
    assert len(of(str(tmp_path))) == 1
    (tmp_path / "model.safetensors").touch()
    file.write_text(json.dumps({"model_type": "qwen3", "hidden_size": 1024}), encoding="utf-8")
    (finding,) = of(str(tmp_path))
    assert finding.message == (
        f"the checkpoint is of another model: hidden_size is 1024 in {file}, 2560 in this launch"
    )
    assert finding.fix == f"--model {tmp_path} takes the model from the checkpoint, or another --hf-checkpoint"
    assert of(str(tmp_path), **{"trainer.backend": "embedded", "rollout.backend": "embedded"}) == []
    file.write_text(json.dumps({"model_type": "qwen3", "hidden_size": 2560}), encoding="utf-8")
    assert of(str(tmp_path)) == []


def test_a_multi_modal_checkpoint_is_held_against_the_model_by_its_language_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    text = {"model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64, "vocab_size": 248320}
    release = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"hidden_size": 1152}}
    (tmp_path / "config.json").write_text(json.dumps(release), encoding="utf-8")

    def of(architecture: dict[str, Any]) -> list[str]:
        values = {"model.hf_checkpoint": str(tmp_path), "model.architecture": architecture}
        return [finding.message for finding in found("RL346", values)]

    assert of(text) == of(release) == [], "a profile has the text model's facts, `--model DIR` the release's"
    other = "the checkpoint is of another model: {} in this launch"
    file = tmp_path / "config.json"
    layers = other.format(f"num_hidden_layers is 64 in {file}, 32")
    assert of(text | {"num_hidden_layers": 32}) == [layers]
    other_text = {"text_config": text | {"num_hidden_layers": 32}}
    assert of(release | other_text) == [layers]
    values = {"model.hf_checkpoint": str(tmp_path), "model.architecture": release | other_text}
    (finding,) = found("RL346", values)
    where = finding.origins[1]
    assert where.startswith("model.architecture.text_config.num_hidden_layers = 32   flag: --set model.architecture=")
    assert of(text | {"model_type": "qwen3_next"}) == [
        other.format(f"model_type is 'qwen3_5_text' in {file}, 'qwen3_next'")
    ]


def test_a_download_that_stopped_is_told_by_the_checkpoint_s_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    files = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]
    index = {"weight_map": {f"model.layers.{i}.mlp.up_proj.weight": file for i, file in enumerate(files * 2)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (tmp_path / files[1]).touch()
    (finding,) = found("RL346", {"model.hf_checkpoint": str(tmp_path)})
    missing = f"{files[0]}, {files[2]}, {files[3]}"
    assert finding.message == f"3 of the checkpoint's files are not in {tmp_path}: {missing}"
    for file in files:
        (tmp_path / file).touch()
    assert found("RL346", {"model.hf_checkpoint": str(tmp_path)}) == []
    (tmp_path / "model.safetensors.index.json").write_text("[]", encoding="utf-8")
    assert found("RL346", {"model.hf_checkpoint": str(tmp_path)}) == [], "told by whoever loads it"


# RL347


def test_random_weights_of_a_directory_without_any_are_told(rllaunch: Any, tmp_path: Path) -> None:
    facts = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 512}
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(facts), encoding="utf-8")

    def told(*words: str) -> list[str]:
        answer = rllaunch("doctor", "--model", "model", "--hardware", "cpu", "--json", *words).json()
        return [f["message"] for f in answer["findings"] if (f["code"], f["level"]) == ("RL347", "warning")]

    message = f"training would start from random weights: no *.safetensors in {directory}"
    for backend in ("embedded", "megatron"):
        assert told("--trainer-backend", backend) == [message]
    assert told("--hf-checkpoint=") == told("--hf-checkpoint", "org/model") == [], "whoever says so means it"
    assert told("--model", "tiny") == [], "a profile without a checkpoint"
    (directory / "model.safetensors").touch()
    assert told() == []


# RL509, RL510

GIB = 2**30
NO_GPU = MachineFacts()
H100_NODE = MachineFacts(("NVIDIA H100 80GB HBM3",) * 8, (85520809984,) * 8)


def machine_with(root: Path, ram_gib: int, job_gib: int | None = None) -> Path:
    """Files of a machine whose job stands in a cgroup below the top, as Slurm puts it."""
    files = {"proc/meminfo": f"MemTotal:  {ram_gib * 2**20} kB\n", "proc/self/cgroup": "0::/slurm/job_7\n"}
    if job_gib is not None:
        files["sys/fs/cgroup/slurm/job_7/memory.max"] = f"{job_gib * GIB}\n"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_c031_a_job_with_less_host_memory_than_planned_with(tmp_path: Path) -> None:
    launch = resolved_of({"hardware.host_memory_bytes": 1500 * GIB})
    root = machine_with(tmp_path, 1536)
    slurm = {"SLURM_MEM_PER_NODE": str(1200 * 1024)}
    (finding,) = check_profile_memory(launch, machine=H100_NODE, root=root, environ=slurm)
    assert (finding.code, finding.level) == ("RL509", "warning")
    assert finding.message == "a job here may use 1200.0 GiB of host RAM, the launch counts on 1500.0 GiB"
    assert finding.origins == (
        launch.describe("hardware.host_memory_bytes"),
        f"{1200 * GIB} bytes   SLURM_MEM_PER_NODE",
        f"{1536 * GIB} bytes   MemTotal in {root}/proc/meminfo",
    )
    assert finding.fix == f"--set hardware.host_memory_bytes={1200 * GIB}, or a job with more memory"
    fixed = resolved_of({"hardware.host_memory_bytes": 1200 * GIB})
    assert check_profile_memory(fixed, machine=H100_NODE, root=root, environ=slurm) == []
    assert check_profile_memory(launch, machine=H100_NODE, root=root) == []


def test_what_firmware_and_kernel_keep_is_no_warning(tmp_path: Path) -> None:
    launch = resolved_of({"hardware.host_memory_bytes": 2000 * GIB})
    levels = [
        finding.level
        for ram_gib in (2000, 1960, 1890)
        for finding in check_profile_memory(launch, machine=H100_NODE, root=machine_with(tmp_path, ram_gib))
    ]
    assert levels == ["info", "warning"]


def test_on_a_cpu_whose_memory_nobody_stated_the_launch_itself_is_held_against_this_machine(tmp_path: Path) -> None:
    launch = resolved("--model qwen3-8b --hardware cpu")
    (finding,) = check_profile_memory(launch, machine=NO_GPU, root=machine_with(tmp_path / "small", 64))
    # float32 weights, gradients, masters and moments, and the backup of all but the gradients: 8.19 B × 28 bytes.
    assert (finding.code, finding.level) == ("RL509", "error")
    assert finding.message == "a job here may use 64.0 GiB of host RAM, this launch needs 213.6 GiB in train"
    assert check_profile_memory(launch, machine=NO_GPU, root=machine_with(tmp_path / "large", 1000)) == []
    assert check_profile_memory(resolved("--model tiny --hardware cpu"), machine=NO_GPU, root=tmp_path / "small") == []


def test_memory_of_a_machine_that_the_launch_does_not_run_on_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = machine_with(tmp_path, 64, job_gib=8)
    on_gpus = resolved_of({"hardware.host_memory_bytes": 1500 * GIB})
    for elsewhere in (NO_GPU, MachineFacts(("NVIDIA L4",), (24152899584,))):
        assert check_profile_memory(on_gpus, machine=elsewhere, root=root) == []
        assert check_ray_total(on_gpus, machine=elsewhere, root=root) == []
    on_cpu = resolved_of({**CPU, "hardware.host_memory_bytes": 1500 * GIB})
    assert len(check_profile_memory(on_cpu, machine=NO_GPU, root=root)) == 1
    assert len(check_ray_total(on_cpu, machine=NO_GPU, root=root)) == 1
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert check_profile_memory(on_cpu, machine=NO_GPU, root=root) == []
    assert check_ray_total(on_cpu, machine=NO_GPU, root=root) == []


def test_a_machine_is_known_by_the_size_of_its_gpus_too(tmp_path: Path) -> None:
    values = {"hardware.name": "our-nodes", "hardware.host_memory_bytes": 100 * GIB}
    root = machine_with(tmp_path, 64)
    assert check_profile_memory(resolved_of(values), machine=H100_NODE, root=root) == []
    values["hardware.gpu_memory_bytes"] = 85520809984
    assert len(check_profile_memory(resolved_of(values), machine=H100_NODE, root=root)) == 1


def test_c033_ray_takes_the_node_for_more_than_the_job_has(tmp_path: Path) -> None:
    root = machine_with(tmp_path, 1000, job_gib=800)
    (finding,) = check_ray_total(resolved_of(), machine=H100_NODE, root=root)
    assert (finding.code, finding.level) == ("RL510", "warning")
    assert finding.message == (
        "Ray takes the memory of this node for 1000.0 GiB, the job may use 800.0 GiB\n"
        f"Ray kills a worker at {950 * GIB} bytes in use, the limit is {800 * GIB} bytes"
    )
    assert finding.origins == (
        f"{1000 * GIB} bytes   Ray: MemTotal in {root}/proc/meminfo",
        f"{800 * GIB} bytes   cgroup v2 limit in {root}/sys/fs/cgroup/slurm/job_7/memory.max",
        f"{1000 * GIB} bytes   MemTotal in {root}/proc/meminfo",
    )
    assert finding.fix == "RAY_memory_usage_threshold=0.76 where the job has the node to itself"


def test_ray_and_the_job_agree(tmp_path: Path) -> None:
    root = machine_with(tmp_path, 1000)
    assert check_ray_total(resolved_of(), machine=H100_NODE, root=root) == []
    off = {"RAY_memory_monitor_refresh_ms": "0"}
    limited = machine_with(tmp_path, 1000, job_gib=800)
    assert check_ray_total(resolved_of(), machine=H100_NODE, root=limited, environ=off) == []


def test_both_rules_look_at_this_machine() -> None:
    limit = host_limit(environ=os.environ)
    assert limit is not None
    assert found("RL509", {**CPU, "hardware.host_memory_bytes": limit.bytes}) == []
    (finding,) = found("RL509", {**CPU, "hardware.host_memory_bytes": MORE_BYTES_THAN_ANY_DISK_HAS})
    assert f"may use {gib(limit.bytes)} of host RAM" in finding.message
    agree = ray_total() == limit
    assert bool(found("RL510", CPU)) != agree
