"""The loop over workers that only count: versions, calls, and a stop at any moment."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rllaunch.backends.base import MemoryReading, StepResult
from rllaunch.errors import RllaunchError, RunError
from rllaunch.plan.handoff import HandoffOptions, Region, build_schedule
from rllaunch.resolve.schema import LaunchConfig, Pools
from rllaunch.run.loop import Loop
from rllaunch.run.record import RunDirectory

NOTHING = MemoryReading(0, 0, 0, 0)
CONFIG = LaunchConfig.model_validate(
    {"run": {"num_rollout": 6, "save_interval": 2, "eval_interval": 3}, "task": {"eval_prompt_data": "held-out"}}
)


class Workers:
    """Answers every step with figures that follow from the rollout; stops at call number `stop_at`."""

    def __init__(self, record: RunDirectory, stop_at: int | None = None) -> None:
        self.record = record
        self.stop_at = stop_at
        self.calls: list[tuple[tuple[str, ...], int | None, int]] = []
        self.sizes: dict[Region, int] = {}

    def region_bytes(self) -> Mapping[Region, int]:
        return self.sizes

    def call(
        self,
        steps: Sequence[str],
        rollout_id: int | None,
        version: int,
        metrics: Mapping[str, Any],
        then: Sequence[str] = (),
    ) -> tuple[Sequence[StepResult], RllaunchError | None]:
        if len(self.calls) == self.stop_at:
            raise KeyboardInterrupt
        self.calls.append((tuple(steps), rollout_id, version))
        if steps[0] == "save":
            assert rollout_id is not None
            with self.record.new_checkpoint(rollout_id, {"metrics": dict(metrics)}, keep=2):
                pass
        return [StepResult(NOTHING, 0.0, self.report(step, rollout_id)) for step in steps], None

    @staticmethod
    def report(step: str, rollout_id: int | None) -> dict[str, Any]:
        match step:
            case "generate":
                return {"reward_mean": rollout_id}
            case "train":
                return {"loss": -(rollout_id or 0)}
            case "eval":
                return {"reward_mean": (rollout_id or 0) / 2, "exact_match": 0.5, "tokens": 3}
            case "update_weights":
                return {"update_bytes": 7}
        return {}


class Silent:
    def step(self, *_: Any) -> None: ...

    def rollout(self, *_: Any) -> None: ...


def started(path: Path, stop_at: int | None = None, options: HandoffOptions | None = None) -> tuple[Loop, Workers]:
    record = RunDirectory(path)
    record.create(CONFIG, {})
    workers = Workers(record, stop_at)
    loop = Loop(CONFIG, build_schedule(options or HandoffOptions()), workers, record, Silent(), 1)
    checkpoints = record.list_checkpoints()
    first = checkpoints[-1][0] + 1 if checkpoints else 0
    record.open(first)
    return loop, workers


def run(loop: Loop, first: int) -> None:
    """As the driver does it."""
    loop.start_up(first)
    if (unfinished := loop.record.unfinished(first)) is not None:
        loop.finish_rollout(first - 1, unfinished)
    loop.run()


def first_of(loop: Loop) -> int:
    checkpoints = loop.record.list_checkpoints()
    return checkpoints[-1][0] + 1 if checkpoints else 0


def rows(path: Path) -> list[dict[str, Any]]:
    lines = (path / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def test_a_stop_at_any_call_loses_no_row_of_metrics(tmp_path: Path):
    """Between save and the end of its rollout too, where the checkpoint is further than the metrics."""
    whole, workers = started(tmp_path / "whole")
    run(whole, 0)
    whole.record.close({})
    expected = rows(tmp_path / "whole")
    assert [row["rollout_id"] for row in expected] == list(range(6))
    assert ["eval_exact_match" in row for row in expected] == [False, False, True, False, False, True]
    assert len(workers.calls) > 20
    for stop_at in range(len(workers.calls)):
        path = tmp_path / f"stopped-{stop_at}"
        loop, _ = started(path, stop_at)
        with pytest.raises(KeyboardInterrupt):
            run(loop, 0)
        loop.record.close({})
        again, _ = started(path)
        run(again, first_of(again))
        again.record.close({})
        assert rows(path) == expected, stop_at


def test_versions_are_the_number_of_updates_and_neighbours_go_out_as_one_call(tmp_path: Path):
    loop, workers = started(tmp_path / "run", options=HandoffOptions("gpu", engine_weights="mirror", buffers="shared"))
    loop.start_up(0)
    loop.cycle(0)
    loop.cycle(1)
    assert workers.calls == [
        (("engine.offload_kv",), None, 0),
        (("trainer.init",), None, 0),
        (("trainer.offload",), None, 0),
        (("update_weights",), None, 0),
        (("engine.onload_kv",), None, 0),
        (("generate", "engine.offload_kv"), 0, 0),
        (("trainer.onload",), 0, 1),
        (("engine.offload_weights",), 0, 1),
        (("train", "trainer.clear_memory"), 0, 1),
        (("engine.onload_weights",), 0, 1),
        (("trainer.offload",), 0, 1),
        (("update_weights",), 0, 1),
        (("engine.onload_kv", "generate", "engine.offload_kv"), 1, 1),
        (("trainer.onload",), 1, 2),
        (("engine.offload_weights",), 1, 2),
        (("train",), 1, 2),
        (("save",), 1, 2),
        (("trainer.clear_memory",), 1, 2),
        (("engine.onload_weights",), 1, 2),
        (("trainer.offload",), 1, 2),
        (("update_weights",), 1, 2),
    ]
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    returns = [event["rollout_id"] for event in events if event["step"] == "engine.onload_kv"]
    assert returns == [None, 0], "the return of the KV cache counts for the rollout it ends"


def test_a_cycle_in_cpu_order_is_three_calls(tmp_path: Path):
    """The return of the weights goes with the update, that of the KV cache with the next rollout; the last waits."""
    loop, workers = started(tmp_path / "run")
    loop.start_up(0)
    del workers.calls[:]
    for rollout_id in range(6):
        loop.cycle(rollout_id)
    assert [steps for steps, rollout_id, _ in workers.calls if rollout_id == 1] == [
        ("engine.onload_kv", "generate", "engine.offload_kv", "engine.offload_weights"),
        ("trainer.onload", "train"),
        ("save",),
        ("trainer.offload",),
        ("engine.onload_weights", "update_weights"),
    ]
    assert [steps for steps, rollout_id, _ in workers.calls if rollout_id == 4] == [
        ("engine.onload_kv", "generate", "engine.offload_kv", "engine.offload_weights"),
        ("trainer.onload", "train", "trainer.offload"),
        ("engine.onload_weights", "update_weights"),
    ]
    assert workers.calls[-1] == (("engine.onload_kv", "eval"), 5, 6)


def test_what_was_done_before_an_error_is_recorded(tmp_path: Path):
    loop, workers = started(tmp_path / "run")
    loop.start_up(0)
    call = workers.call

    def failing(steps: Sequence[str], *rest: Any) -> tuple[Sequence[StepResult], RllaunchError | None]:
        results, _ = call(steps, *rest)
        return (results[:1], RunError("no memory")) if "train" in steps else (results, None)

    workers.call = failing  # type: ignore[method-assign, assignment]
    with pytest.raises(RunError, match="no memory"):
        loop.cycle(0)
    events = [json.loads(line)["step"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "trainer.onload"


def test_a_run_directory_serves_one_process_at_a_time(tmp_path: Path):
    holder, _ = started(tmp_path / "run")
    with pytest.raises(RllaunchError, match="another process is running"):
        started(tmp_path / "run")
    copy = os.dup(holder.record._lock.fileno())  # type: ignore[union-attr]  # as a process has it that is being started
    holder.record.close({})
    started(tmp_path / "run")
    os.close(copy)


def test_static_bytes_are_planned_once_a_node_and_copies_once_a_slot(tmp_path: Path):
    config = CONFIG.model_copy(update={"pools": Pools(device_static_bytes=11, host_static_bytes=1000)})
    record = RunDirectory(tmp_path)
    record.create(config, {})
    workers = Workers(record)
    workers.sizes = {"params": 7, "optimizer": 13}
    loop = Loop(config, build_schedule(HandoffOptions(engine_weights="discard")), workers, record, Silent(), 3)
    record.open(0)
    loop.start_up(0)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    planned = {e["step"]: (e["planned_gpu_bytes"], e["planned_host_bytes"]) for e in events}
    assert planned["trainer.init"] == (11 + 7 + 13, 1000)
    assert planned["trainer.offload"] == (11, 1000 + 3 * (7 + 13))


class Recorded:
    """Stands where an actor's method would, and keeps what it was called with."""

    def __init__(self) -> None:
        self.arguments: list[tuple[Any, ...]] = []

    def remote(self, *arguments: Any) -> str:
        self.arguments.append(arguments)
        return f"answer {len(self.arguments)}"


class Rank:
    def __init__(self) -> None:
        self.run, self.update_weights = Recorded(), Recorded()


@pytest.mark.parametrize(("num_ranks", "waits"), [(1, ()), (2, ("answer 1", "answer 1"))])
def test_an_update_sent_ahead_waits_for_the_steps_of_every_rank(num_ranks: int, waits: tuple[str, ...]):
    """An engine's weights return to all GPUs at once: a rank that is late to offload would still be on its own."""
    from rllaunch.run.train_group import TrainGroup

    ranks = [Rank() for _ in range(num_ranks)]
    group = TrainGroup(ranks)
    under_way = group.start(["trainer.offload"], None)
    group.start_update(1, "manager", ["engine.onload_weights"], under_way)
    for rank in ranks:
        assert rank.update_weights.arguments == [(1, "manager", ["engine.onload_weights"], *waits)]


@pytest.mark.parametrize(("num_ranks", "waits"), [(1, ()), (2, ("answer 1",))])
def test_an_offload_sent_ahead_waits_until_the_engines_have_the_update(num_ranks: int, waits: tuple[str, ...]):
    """Else a rank that has nothing to send would offload while rank 0 reads what the update holds of the node."""
    from rllaunch.run.train_group import TrainGroup

    ranks = [Rank() for _ in range(num_ranks)]
    group = TrainGroup(ranks)
    update = group.start_update(1, "manager", [])
    group.start(["trainer.offload"], None, update[:1])
    for rank in ranks:
        assert rank.run.arguments == [(["trainer.offload"], None, False, *waits)]


FAILED: tuple[list[StepResult], RllaunchError | None] = ([], RunError("no memory"))


def test_a_rank_does_nothing_after_another_ranks_error():
    from rllaunch.run.train_group import TrainerRank

    rank = TrainerRank()
    assert rank.update_weights(1, "manager", [], ([], None), FAILED) == ([], None)
    # It has no backend that could be told to.
    assert rank.run(["trainer.offload"], None, False) == ([], None)
    assert TrainerRank().run(["trainer.offload"], None, False, FAILED) == ([], None)


class FailingTrainer:
    """Of a trainer's calls those of an update, which fails."""

    def __init__(self) -> None:
        self.offloads = 0

    def memory(self) -> MemoryReading:
        return NOTHING

    def update_weights(self, version: int, sink: Any) -> int:
        raise RunError("an engine refuses the update")

    def offload(self) -> None:
        self.offloads += 1


def test_a_rank_does_not_offload_after_an_update_of_its_own_that_failed():
    """The offload was sent ahead, and other ranks may still be in the update."""
    from rllaunch.run.train_group import TrainerRank

    rank = TrainerRank()
    trainer: Any = FailingTrainer()
    rank.backend = trainer
    _, error = rank.update_weights(1, "manager", [])
    assert "refuses the update" in str(error)
    assert rank.run(["trainer.offload"], None, False) == ([], None)
    assert trainer.offloads == 0
