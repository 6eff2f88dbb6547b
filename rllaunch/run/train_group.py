"""The trainer: one Ray actor a rank, called all at the same moment."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from rllaunch.backends.base import (
    BackendSpec,
    Bucket,
    LaunchContext,
    MemoryReading,
    RankInfo,
    Slot,
    StepResult,
    TrainBatch,
    TrainerBackend,
    fullest,
)
from rllaunch.backends.node_memory import gpu_of_process, recorded_pss
from rllaunch.errors import RllaunchError, RunError
from rllaunch.plan.handoff import Region
from rllaunch.run.ledgers import hold, is_held
from rllaunch.run.steps import run_steps
from rllaunch.run.told import own


class ManagerSink:
    """Sends an update's buckets to the rollout manager's engines.

    An engine that refuses is an error here: a launcher that goes on after a refused update trains
    against stale weights.

    Args:
        before: steps of the engines that come right before the update; they go with its first word.
    """

    def __init__(self, manager: Any, before: Sequence[str]) -> None:
        self._manager = manager
        self._before = before
        self.results: list[StepResult] = []
        """What the steps before the update gave."""

    def begin_weight_update(self, version: int) -> None:
        self.results, error = ray.get(self._manager.begin_weight_update.remote(version, self._before))
        if error is not None:
            raise error

    def load_bucket(self, bucket: Bucket) -> None:
        ray.get(self._manager.load_bucket.remote(bucket))

    def end_weight_update(self, version: int) -> None:
        ray.get(self._manager.end_weight_update.remote(version))


class TrainerRank:
    """One rank, in its own process. Built in `build`, whose errors reach the driver in their own words."""

    backend: TrainerBackend
    _is_well = True

    def __init__(self) -> None:
        self._ledgers = contextlib.ExitStack()

    def build(self, context: LaunchContext, slot: Slot, target: str) -> None:
        if slot.index % context.config.gpus_per_node == 0 and not is_held(Path(slot.ledger_dir)):
            # The driver is on another node: on this one nobody else would clear up.
            self._ledgers.enter_context(hold(Path(slot.ledger_dir)))
        self._config = context.config
        self.backend = BackendSpec(context.config.trainer.backend, target).load()(context, slot)

    def gpu(self) -> str:
        """UUID of this rank's GPU."""
        return gpu_of_process()

    def sees(self, path: str) -> bool:
        """Whether a file of the driver's is on this node too: checkpoints are written from here."""
        return Path(path).exists()

    def region_bytes(self) -> Mapping[Region, int]:
        return self.backend.region_bytes()

    def address(self) -> tuple[str, int]:
        """Where rank 0 listens: this node's address and a port that is free now."""
        host = ray.util.get_node_ip_address()
        with contextlib.closing(socket.socket()) as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def init(self, rank: RankInfo, checkpoint: str | None) -> MemoryReading:
        self.backend.init(rank)
        if checkpoint is not None:
            self.backend.load(checkpoint)
        return self._memory()

    def _memory(self) -> MemoryReading:
        return replace(self.backend.memory(), pss_bytes=recorded_pss(self._config, [os.getpid()]))

    def run(
        self, steps: Sequence[str], batch: TrainBatch | None, is_after_rollout: bool, *others: Any
    ) -> tuple[list[StepResult], RllaunchError | None]:
        """`train` and `trainer.…` steps in order; none of them if the rollout before them gave no samples.

        What is called after an error does nothing: the driver sends steps ahead, before it knows of it.

        Args:
            others: as `update_weights` takes them.
        """
        if not self._is_well or (is_after_rollout and batch is None) or _any_failed(others):
            self._is_well = False
            return [], None
        self._is_well = False

        def one(step: str) -> tuple[MemoryReading, Mapping[str, Any]]:
            report: Mapping[str, Any] = {}
            if step == "train":
                assert batch is not None, "train comes after generate"
                report = self.backend.train(batch).values
            else:
                getattr(self.backend, step.removeprefix("trainer."))()
            return self._memory(), report

        self.backend.memory()  # a peak belongs to the step in which it was
        results, error = run_steps(steps, one)
        self._is_well = error is None
        return results, error

    def update_weights(
        self, version: int, manager: Any, before: Sequence[str], *others: Any
    ) -> tuple[list[StepResult], RllaunchError | None]:
        """The engines' steps `before`, told by rank 0 alone, and the update; nothing after an error.

        Args:
            others: what the steps before this gave on every rank; Ray runs this once they are there.
        """
        if not self._is_well or _any_failed(others):
            self._is_well = False
            return [], None
        self._is_well = False
        sink = ManagerSink(manager, before)
        self.backend.memory()
        started = time.perf_counter()
        try:
            sent = self.backend.update_weights(version, sink)
        except RllaunchError as err:
            return sink.results, own(err)
        self._is_well = True
        if not sent:
            # A rank that sends nothing is done while rank 0 and the engines are at it: what it would read
            # of the memory is some moment between.
            return [], None
        seconds = time.perf_counter() - started - sum(r.seconds for r in sink.results)
        return [*sink.results, StepResult(self._memory(), seconds, {"update_bytes": sent})], None

    def save(self, directory: str) -> MemoryReading:
        self.backend.save(directory)
        return self._memory()

    def shutdown(self) -> None:
        with self._ledgers:
            self.backend.shutdown()


def _any_failed(answers: Sequence[tuple[Sequence[StepResult], RllaunchError | None]]) -> bool:
    return any(error is not None for _, error in answers)


class TrainGroup:
    """All ranks; each call returns when the last rank has."""

    def __init__(self, ranks: Sequence[Any]) -> None:
        self.ranks = list(ranks)

    def region_bytes(self) -> Mapping[Region, int]:
        sizes: Mapping[Region, int] = ray.get(self.ranks[0].region_bytes.remote())
        return sizes

    def init(self, checkpoint: Path | None) -> MemoryReading:
        host, port = ray.get(self.ranks[0].address.remote())
        infos = [RankInfo(rank, len(self.ranks), host, port) for rank in range(len(self.ranks))]
        path = str(checkpoint) if checkpoint else None
        return fullest(ray.get([a.init.remote(i, path) for a, i in zip(self.ranks, infos, strict=True)]))

    def start(self, steps: Sequence[str], batch: Any, after: Sequence[Any] = ()) -> list[Any]:
        """Send the steps to every rank; `finish` has the answers.

        Args:
            batch: a rollout in the object store, or None; the ranks read it there, and begin when it is there.
            after: answers to come that the steps wait for. One rank takes its calls in turn anyway.
        """
        waits = self._waits(after)
        return [actor.run.remote(list(steps), batch, batch is not None, *waits) for actor in self.ranks]

    def _waits(self, after: Sequence[Any]) -> Sequence[Any]:
        return after if len(self.ranks) > 1 else ()

    def finish(self, references: Sequence[Any]) -> tuple[list[StepResult], RllaunchError | None]:
        """What steps that were started gave, each as the slowest and fullest rank had it."""
        answers = self._gather(list(references))
        if failed := [a for a in answers if a is not None and a[1] is not None]:
            return failed[0]
        merged = [
            StepResult(fullest([r.memory for r in of_step]), max(r.seconds for r in of_step), of_step[0].report)
            for of_step in zip(*(answer[0] for answer in answers if answer is not None), strict=True)
        ]
        return merged, None

    def _gather(self, references: list[Any]) -> list[tuple[list[StepResult], RllaunchError | None] | None]:
        """The ranks' answers; as soon as one has failed, without the others, which wait for it in vain."""
        if len(references) == 1:
            return [ray.get(references[0])]
        answers: dict[Any, tuple[list[StepResult], RllaunchError | None]] = {}
        waiting = list(references)
        while waiting and not any(error for _, error in answers.values()):
            ready, waiting = ray.wait(waiting, num_returns=1)
            answers |= {reference: ray.get(reference) for reference in ready}
        return [answers.get(reference) for reference in references]

    def start_update(self, version: int, manager: Any, before: Sequence[str], after: Sequence[Any] = ()) -> list[Any]:
        """Send the engines' steps `before` and the update to every rank; `finish_update` has the answers.

        Args:
            after: as `start` takes them.
        """
        waits = self._waits(after)
        return [actor.update_weights.remote(version, manager, before, *waits) for actor in self.ranks]

    def finish_update(self, references: Sequence[Any]) -> tuple[list[StepResult], RllaunchError | None]:
        """What an update that was started gave, as rank 0 had it."""
        answers = self._gather(list(references))
        if failed := [a for a in answers if a is not None and a[1] is not None]:
            return failed[0]
        results = answers[0][0] if answers[0] is not None else []
        if not results:
            raise RunError(
                "an update of the engines' weights sent nothing", "", "report this: rank 0 must send the weights"
            )
        return results, None

    def save(self, directory: Path) -> MemoryReading:
        return fullest(ray.get([actor.save.remote(str(directory)) for actor in self.ranks]))
