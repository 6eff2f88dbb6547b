"""Engines in Ray actors: where they are, asked at the same time, over several nodes, and what is said when one fails.

Ray is real; in the place of SGLang are stand-in processes that write down what they are asked.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_engines
import numpy as np
import psutil
import pytest
import ray
from ray._private.state import actors as actor_table
from ray.util.placement_group import placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from rig import PROMPTS, make_context

from rllaunch.backends.base import BackendSpec, Bucket, LaunchContext, Slot, TensorSlice
from rllaunch.backends.embedded.model import build_model
from rllaunch.errors import ConfigError, EnvironmentProblem, RllaunchError, RunError
from rllaunch.plan.handoff import HandoffOptions
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.engines import engines_in_actors
from rllaunch.run.placement import place
from rllaunch.run.rollout_manager import RolloutManager, make_manager
from rllaunch.run.told import told

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Ray with two nodes of four slots each, on this machine."""
    from ray.cluster_utils import Cluster

    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0", RAY_AUTH_MODE="disabled")
    nodes = Cluster()
    for _ in range(2):
        nodes.add_node(num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False)
    ray.init(
        address=nodes.address,
        namespace="test-engines",
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": ENVIRONMENT},
    )
    try:
        yield
    finally:
        ray.shutdown()
        nodes.shutdown()


class Launch:
    """The rollout side of a launch: its engines in actors, the manager in this process."""

    def __init__(self, journal: Path, context: LaunchContext, nodes: int = 1, device: str = "cpu") -> None:
        self.journal, self.context = journal, context
        per_node = context.num_slots // nodes
        self.slots = [Slot(i, i // per_node, device, str(journal)) for i in range(context.num_slots)]
        self.engines = engines_in_actors(fake_engines.SPEC, context.config, self.slots, lambda _: {"num_cpus": 0})
        try:
            with told():
                ray.get([a for e in self.engines for a in e.build(context, fake_engines.SPEC, journal)])
            target = fake_engines.SPEC.target
            self.manager: RolloutManager = make_manager(
                context, self.slots, target, PROMPTS, PROMPTS[:3], "rig:reward", self.engines
            )
        except BaseException:
            self.end()
            raise

    def tell(self, part: str, call: str, order: str) -> None:
        (self.journal / f"{part}.{call}.do").write_text(order)

    def forget(self, call: str) -> None:
        for file in self.journal.glob(f"*.{call}.*"):
            file.unlink()

    def asked(self, part: str, call: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.journal / f"{part}.{call}.json").read_text())
        return found

    def update(self, version: int, handle: Any = "file") -> None:
        """All tensors in one bucket."""
        names = [name for name, _ in build_model(self.context).named_parameters()]
        self.manager.begin_weight_update(version)
        tensors = tuple(TensorSlice(n, "float32", (2, 2), 64 * i + version) for i, n in enumerate(names))
        self.manager.load_bucket(Bucket(handle, 64 * len(names), tensors))
        self.manager.end_weight_update(version)

    def processes(self) -> list[psutil.Process]:
        """Of all parts that were started, with what is below them, those that are there."""
        found = []
        for file in self.journal.glob("*.start.json"):
            with contextlib.suppress(psutil.NoSuchProcess):
                top = psutil.Process(json.loads(file.read_text())["pid"])
                found += [top, *top.children(recursive=True)]
        return found

    def end(self) -> None:
        for engine in self.engines:
            for part in engine.parts:
                ray.kill(part)


@pytest.fixture
def launch(cluster: None, tmp_path: Path) -> Iterator[Any]:
    made: list[Launch] = []

    def start(nodes: int = 1, **options: Any) -> Launch:
        device = options.pop("device", "cpu")
        handoff = HandoffOptions("cpu", engine_weights="discard")
        context = make_context(options=handoff, **{"sglang": {}, **options})
        if device == "cuda":
            context = replace(context, gpus=tuple(f"GPU-{i}" for i in range(context.num_slots)))
        made.append(Launch(tmp_path, context, nodes, device))
        return made[-1]

    yield start
    for one in made:
        one.manager.health.stop()
        one.end()


def are_over(processes: list[psutil.Process], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            return True
        time.sleep(0.05)
    return False


def error_of(call: Any) -> RllaunchError:
    with pytest.raises(RllaunchError) as caught:
        call()
    assert type(caught.value) is RunError, "not a class that Ray made"
    return caught.value


def test_engines_start_and_generate_at_the_same_time_and_answer_in_their_order(launch: Any):
    two = launch(num_slots=2)
    for call in ("start", "release", "load_bucket", "generate"):
        for part in ("engine-0", "engine-1"):
            two.tell(part, call, "together 2")
    manager = two.manager
    sizes = manager.start()
    assert sizes["kv_cache"] == 2 * 2**30
    two.update(0)
    manager.offload_kv()
    manager.onload_kv()
    batch, _ = manager.generate(0, 0)
    assert [two.asked(f"engine-{i}", "generate")["rows"] for i in (0, 1)] == [4, 4]
    # A stand-in answers its prompt backwards: so each row has the answer to its own prompt.
    for prompt, length, answer in zip(batch.prompt_ids_BP, batch.prompt_lens_B, batch.response_ids_BL, strict=True):
        expected = prompt[::-1][: min(length, len(answer))]
        np.testing.assert_array_equal(answer[: len(expected)], expected)
    assert manager.memory().gpu_bytes == sum(sizes.values()), "of one slot"
    processes = two.processes()
    assert len(processes) == 4
    manager.shutdown()
    assert are_over(processes)
    assert {f.name for f in two.journal.glob("*.log")} == {"engine-0.log", "engine-1.log"}


def test_the_error_of_the_first_engine_is_raised_when_all_have_answered(launch: Any):
    three = launch(num_slots=3)
    three.manager.start()
    three.update(0)
    # The one that answers last waits until the others have been asked; of the two that fail the last is the faster.
    three.tell("engine-0", "generate", "together 3")
    three.tell("engine-1", "generate", "raise")
    three.tell("engine-2", "generate", "die")
    error = error_of(lambda: three.manager.generate(0, 0))
    assert error.what == "engine-1.generate was told to fail"
    assert (error.where, error.fix) == (("where it was",), "what to do")
    assert [engine.check_health() for engine in three.manager.engines] == [True, False, False]
    three.manager.health.check_once()
    assert three.manager.health.failed is not None


def test_an_engine_whose_process_or_actor_dies_is_named_with_its_log(launch: Any):
    two = launch(num_slots=2)
    two.manager.start()
    two.update(0)
    two.tell("engine-1", "generate", "die")
    error = error_of(lambda: two.manager.generate(0, 0))
    assert error.what == "engine-1: its process was killed by SIGKILL during generate"
    assert "engine-1.log" in str(error.fix)
    # An actor that dies takes its engine's processes with it, and no other's.
    processes = two.processes()
    pid = two.asked("engine-0", "start")["pid"]
    ray.kill(two.engines[0].parts[0])
    assert are_over([p for p in processes if p.pid == pid or p.ppid() == pid])
    assert error_of(two.manager.offload).what == "the actor of engine-0 died"


@pytest.mark.parametrize("failing", ["engine-0", "engine-0-node-1"])
def test_when_a_part_fails_to_start_the_other_does_not_wait_for_it(launch: Any, failing: str):
    one = launch(nodes=2, num_slots=2, rollout={"rollout_num_gpus_per_engine": 2})
    other = {"engine-0": "engine-0-node-1", "engine-0-node-1": "engine-0"}[failing]
    one.tell(other, "start", "hang")  # as the ranks of an engine wait for each other
    one.tell(failing, "start", "together 2 raise")
    assert error_of(one.manager.start).what == f"{failing}.start was told to fail"
    pid = one.asked(other, "start")["pid"]
    assert are_over([p for p in one.processes() if p.pid == pid])


def test_an_engine_over_two_nodes_has_a_part_on_each_with_the_gpus_there(launch: Any):
    pair = launch(
        nodes=4,
        num_slots=8,
        device="cuda",
        cluster={"num_nodes": 4, "num_gpus_per_node": 2},
        rollout={"rollout_num_gpus_per_engine": 4, "dtype": "bfloat16"},
    )
    pair.manager.start()
    gpus = {
        "engine-0": "GPU-0,GPU-1",
        "engine-0-node-1": "GPU-2,GPU-3",
        "engine-4": "GPU-4,GPU-5",
        "engine-4-node-1": "GPU-6,GPU-7",
    }
    asked = {part: pair.asked(part, "start") for part in gpus}
    assert {part: a["environment"]["CUDA_VISIBLE_DEVICES"] for part, a in asked.items()} == gpus
    # Without the variable SGLang would not return from the start of a further node.
    block = {part: a["environment"].get("SGLANG_BLOCK_NONZERO_RANK_CHILDREN") for part, a in asked.items()}
    assert block == {"engine-0": None, "engine-0-node-1": "0", "engine-4": None, "engine-4-node-1": "0"}
    arguments = {part: a["arguments"] for part, a in asked.items()}
    assert {a["tp_size"] for a in arguments.values()} == {4}
    assert {a["nnodes"] for a in arguments.values()} == {2}
    assert [a["node_rank"] for a in arguments.values()] == [0, 1, 0, 1]
    first, second = ([arguments[name] for name in (f"engine-{i}", f"engine-{i}-node-1")] for i in (0, 4))
    for parts in (first, second):
        assert len({a["dist_init_addr"] for a in parts}) == 1
        assert len({a["random_seed"] for a in parts}) == 1
    host = ray.util.get_node_ip_address()
    assert {a["dist_init_addr"].rpartition(":")[0] for a in arguments.values()} == {host}
    assert first[0]["dist_init_addr"] != second[0]["dist_init_addr"]
    assert len({a["port"] for a in arguments.values()}) == 4

    # One handle for each tensor-parallel rank, in order; only the first node is asked.
    pair.update(0, tuple(f"slot-{i}".encode() for i in range(8)))
    assert pair.asked("engine-4", "load_bucket")["handle"] == [str(f"slot-{i}".encode()) for i in range(4, 8)]
    assert not list(pair.journal.glob("*-node-1.load_bucket.json"))
    assert pair.manager.memory().gpu_bytes == 6, "the fullest GPU of all nodes"
    pair.manager.offload()
    pair.manager.onload()
    processes = pair.processes()
    pair.manager.shutdown()
    assert are_over(processes)


def test_the_death_of_a_part_on_a_further_node_ends_the_call_under_way_and_is_what_is_said(launch: Any):
    one = launch(nodes=2, num_slots=2, rollout={"rollout_num_gpus_per_engine": 2, "dtype": "bfloat16"}, device="cuda")
    one.manager.start()
    one.update(0, (b"", b""))
    one.tell("engine-0", "generate", "hang")  # as a collective does that lacks a rank
    pid = one.asked("engine-0-node-1", "start")["pid"]

    def kill() -> None:
        while not (one.journal / "engine-0.generate.json").exists():
            time.sleep(0.02)
        psutil.Process(pid).kill()

    thread = threading.Thread(target=kill)
    thread.start()
    error = error_of(lambda: one.manager.generate(0, 0))
    thread.join()
    assert error.what == "engine-0-node-1: its process was killed by SIGKILL"
    assert "engine-0-node-1.log" in str(error.fix)
    assert not one.engines[0].check_health()
    assert are_over(one.processes())
    # And whatever is asked of it afterwards says so again.
    assert error_of(one.manager.offload).what == error.what


@pytest.mark.usefixtures("cluster")
def test_each_part_is_on_the_node_of_its_first_slot():
    def config_of(size: int) -> LaunchConfig:
        cluster = {"num_nodes": 2, "num_gpus_per_node": 4}
        return make_context(cluster=cluster, rollout={"rollout_num_gpus_per_engine": size}).config

    group, bundles = place(config_of(1))
    node_of = placement_group_table(group)["bundles_to_node_id"]
    slots = [Slot(i, i // 4, "cpu", "") for i in range(8)]

    def at(slot: Slot) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundles[slot.index])
        return {"num_cpus": 0.3, "scheduling_strategy": strategy}

    def nodes_of(size: int) -> list[list[int]]:
        """The slots whose node the parts of each engine are on."""
        engines = engines_in_actors(fake_engines.SPEC, config_of(size), slots, at)
        parts = [part for engine in engines for part in engine.parts]
        ray.get([part.__ray_ready__.remote() for part in parts])
        ids = [[actor_table(part._actor_id.hex())["Address"]["NodeID"] for part in e.parts] for e in engines]
        for part in parts:
            ray.kill(part)
        number = {node_of[bundle]: index // 4 for index, bundle in enumerate(bundles)}
        return [[number[node] for node in of_engine] for of_engine in ids]

    try:
        assert nodes_of(2) == [[0], [0], [1], [1]]
        assert nodes_of(8) == [[0, 1]]
        with pytest.raises(ConfigError, match="an engine of 8 GPUs spans 2 nodes, and engines of mine do not"):
            engines_in_actors(BackendSpec("mine", "mine:Engine", own_process=True), config_of(8), slots, at)
        assert engines_in_actors(BackendSpec("mine", "mine:Engine"), config_of(2), slots, at) == []
    finally:
        remove_placement_group(group)


@pytest.mark.usefixtures("cluster")
def test_a_run_directory_that_a_node_does_not_see_is_said(tmp_path: Path):
    with pytest.raises(EnvironmentProblem, match="the node of engine-0 does not see the run directory"):
        Launch(tmp_path / "nowhere", make_context(sglang={}))
