"""The training loop: start-up once, then one cycle of the schedule a rollout.

The loop knows the order only as data. It asks `Workers` for each step by name, holds what came back
against the plan, and records both.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from rllaunch.backends.base import MemoryReading, StepResult
from rllaunch.errors import RllaunchError
from rllaunch.plan.handoff import TIERS, Region, Schedule, Step
from rllaunch.plan.memory import Ledger, StepBytes
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.record import RunDirectory

GENERATE, TRAIN, UPDATE, SAVE, EVAL = "generate", "train", "update_weights", "save", "eval"


class Workers(Protocol):
    """The rollout manager and the trainer, wherever they run."""

    def call(
        self,
        steps: Sequence[str],
        rollout_id: int | None,
        version: int,
        metrics: Mapping[str, Any],
        then: Sequence[str] = (),
    ) -> tuple[Sequence[StepResult], RllaunchError | None]:
        """Run the steps of one call (`calls_of`) one after the other: what each gave, and the error that ended them.

        Args:
            rollout_id: of the rollout that is generated, trained, saved or evaluated in this call.
            metrics: of the rollout so far; a save keeps them.
            then: the steps of the call that will follow if this one succeeds. Its workers may begin as soon
                as these have ended, without waiting for the loop's word.
        """
        ...

    def region_bytes(self) -> Mapping[Region, int]:
        """Bytes of each region on one slot when resident, from the model's shapes."""
        ...


def side_of(step: Step) -> str:
    """Who runs a step. Neighbours of one side go out as one call: a call costs more than a small move.

    An update and a save involve both sides or the run directory.
    """
    if step.name in (UPDATE, SAVE, "trainer.init"):
        return step.name
    return "trainer" if step.name == TRAIN or step.name.startswith("trainer.") else "engine"


def calls_of(steps: Iterable[Step]) -> list[list[Step]]:
    """The steps as calls: runs of neighbours of one side, and an update with the handoff steps right before it.

    Those (the return of the engines' weights) reach the engines with the update's own first word.
    """
    calls: list[list[Step]] = []
    for side, run in groupby(steps, key=side_of):
        if side == UPDATE and calls and all(step.name.startswith("engine.") for step in calls[-1]):
            calls[-1] += run
        else:
            calls.append(list(run))
    return calls


class Planned(Protocol):
    """What each step was planned to hold, asked in the order the steps run."""

    def apply(self, phase: str, step: Step) -> StepBytes: ...


class Watcher(Protocol):
    """Who shows the run while it goes."""

    def step(self, name: str, rollout_id: int | None, memory: MemoryReading | None) -> None: ...

    def rollout(self, metrics: Mapping[str, Any]) -> None: ...


@dataclass
class Progress:
    """Where a run stands."""

    next_rollout: int = 0
    version: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    ratio_ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Of measured to planned bytes the smallest and the largest on each tier."""

    @property
    def worst_ratios(self) -> dict[str, float]:
        """The one furthest from 1 on each tier."""
        return {tier: _furthest(self.ratio_ranges.get(tier, ())) for tier in TIERS}

    @property
    def worst_plan_ratio(self) -> float:
        return _furthest(self.worst_ratios.values())


def _furthest(ratios: Iterable[float]) -> float:
    return max(ratios, key=lambda ratio: abs(ratio - 1), default=1.0)


class Loop:
    """Runs a schedule over the workers.

    Args:
        slots_per_node: engines and ranks that share one host.
        plan: what the steps are held against; without one the books of the embedded backend's pools.
    """

    def __init__(
        self,
        config: LaunchConfig,
        schedule: Schedule,
        workers: Workers,
        record: RunDirectory,
        watcher: Watcher,
        slots_per_node: int,
        plan: Planned | None = None,
    ) -> None:
        self.config = config
        self.schedule = schedule
        self.workers = workers
        self.record = record
        self.watcher = watcher
        self.progress = Progress()
        self.measures = plan is not None
        self.plan = plan or Ledger(
            schedule,
            workers.region_bytes(),
            static_gpu=config.pools.device_static_bytes,
            static_host=config.pools.host_static_bytes,
            trainer_host=config.pools.host_trainer_bytes,
            save_host=config.pools.host_save_bytes,
            slots_per_node=slots_per_node,
        )
        self._seconds: dict[str, float] = {}
        self._update_bytes = 0
        # The end of a cycle that waits to travel with the next cycle's first call, and its rollout.
        self._held: tuple[Sequence[Step], int] = ((), -1)

    def start_up(self, first_rollout: int) -> None:
        """Bring the trainer up and the first weights to the engines."""
        self.progress = Progress(next_rollout=first_rollout, version=first_rollout)
        for steps in calls_of(self.schedule.init):
            for result in self._call("init", steps, None, first_rollout):
                self._update_bytes = result.report.get("update_bytes", self._update_bytes)

    def finish_rollout(self, rollout_id: int, metrics: Mapping[str, Any]) -> None:
        """What a stop after a rollout's save left undone: its evaluation and its row of metrics.

        Start-up has just sent the weights that the save held, so what follows the save in the cycle can
        follow here.

        Args:
            metrics: the rollout's, up to its save; they lie in the checkpoint.
        """
        started = time.perf_counter()
        self._seconds = {}
        row = dict(metrics) | {"update_bytes": self._update_bytes}
        steps = [s for s in self.schedule.cycle if s.when == "eval"] if self._evaluates(rollout_id) else []
        if steps:
            for result in self._call("cycle", steps, rollout_id, rollout_id + 1):
                row |= _eval_report(result.report)
        row["seconds"] = self._phases(time.perf_counter() - started)
        self._end_rollout(row)

    def run(self) -> Progress:
        """All remaining rollouts."""
        while self.progress.next_rollout < self.config.run.num_rollout:
            self.cycle(self.progress.next_rollout)
        return self.progress

    def cycle(self, rollout_id: int) -> None:
        """Generate, hand over, train, hand back, update.

        What the engines do after the last update or evaluation (the return of the KV cache) goes out with the
        next rollout's first call, and its seconds count there; its events keep this rollout's number.
        """
        save, evaluate = self._due(rollout_id, self.config.run.save_interval), self._evaluates(rollout_id)
        metrics: dict[str, Any] = {"rollout_id": rollout_id}
        self._seconds = {}
        started = time.perf_counter()
        calls = calls_of(self.schedule.steps(save=save, evaluate=evaluate))
        is_last = rollout_id + 1 == self.config.run.num_rollout
        if not is_last and all(step.name.startswith("engine.") for step in calls[-1]):
            held = calls.pop()
        else:
            held = []
        for steps, following in zip(calls, [*calls[1:], []], strict=True):
            # Training makes the next version; what comes after it sends and uses that one.
            version = rollout_id if steps[0].name == GENERATE else rollout_id + 1
            # A checkpoint carries its rollout's metrics, so that a stop right after it loses no row.
            self.progress.metrics = metrics
            for step, result in zip(steps, self._call("cycle", steps, rollout_id, version, following), strict=True):
                metrics.update(_eval_report(result.report) if step.name == EVAL else result.report)
        self._held = held, rollout_id
        metrics["seconds"] = self._phases(time.perf_counter() - started)
        self._end_rollout(metrics)

    def _end_rollout(self, metrics: dict[str, Any]) -> None:
        self.progress.next_rollout = metrics["rollout_id"] + 1
        self.progress.version = self.progress.next_rollout
        self.progress.metrics = metrics
        self.record.metrics(metrics)
        self.watcher.rollout(metrics)

    def _due(self, rollout_id: int, interval: int) -> bool:
        """Whether something done every `interval` rollouts, and after the last, is due after this one."""
        return rollout_id + 1 == self.config.run.num_rollout or (interval > 0 and (rollout_id + 1) % interval == 0)

    def _evaluates(self, rollout_id: int) -> bool:
        return bool(self.config.task.eval_prompt_data) and self._due(rollout_id, self.config.run.eval_interval)

    def _phases(self, whole: float) -> dict[str, float]:
        """Seconds by phase; `handoff` is all moving of memory, `own` what the loop itself takes of `step`."""
        known = {name: self._seconds.get(name, 0.0) for name in (GENERATE, TRAIN, UPDATE, SAVE, EVAL)}
        handoff = sum(s for name, s in self._seconds.items() if name not in known)
        own = whole - sum(self._seconds.values())
        return {k: round(v, 6) for k, v in {**known, "handoff": handoff, "own": own, "step": whole}.items()}

    def _call(
        self, phase: str, steps: Sequence[Step], rollout_id: int | None, version: int, following: Sequence[Step] = ()
    ) -> Sequence[StepResult]:
        (held, held_id), self._held = self._held, ((), -1)
        names = [step.name for step in (*held, *steps)]
        self.watcher.step(next((n for n in names if "." not in n), names[0]), rollout_id, None)
        results, error = self.workers.call(
            names, rollout_id, version, self.progress.metrics, [step.name for step in following]
        )
        owners = [held_id] * len(held) + [rollout_id] * len(steps)
        for step, owner, result in zip((*held, *steps), owners, results, strict=False):
            self._seconds[step.name] = self._seconds.get(step.name, 0.0) + result.seconds
            self.watcher.step(step.name, owner, result.memory)
            self.record.event(self._event(step, owner, result, self.plan.apply(phase, step)))
        if error is not None:
            raise error
        return results[len(held) :]

    def _event(self, step: Step, rollout_id: int | None, result: StepResult, planned: StepBytes) -> dict[str, Any]:
        memory = result.memory
        row: dict[str, Any] = {
            "rollout_id": rollout_id,
            "step": step.name,
            "seconds": round(result.seconds, 6),
            # What was copied between device and host, or sent in an update: counted where it was done.
            "bytes_moved": result.report.get("update_bytes", memory.moved_bytes),
            "gpu_bytes": memory.gpu_bytes,
            "host_bytes": memory.host_bytes,
            "own_gpu_bytes": memory.own_gpu_bytes,
            "pinned_bytes": memory.pinned_bytes,
            "pss_bytes": memory.pss_bytes,
            "communicator_seconds": _rounded(memory.communicator_seconds),
            "communicator_bytes": memory.communicator_bytes,
            "gpu_peak_bytes": memory.gpu_peak_bytes,
            "host_peak_bytes": memory.host_peak_bytes,
            # How much an update sends is not planned as a copy.
            "planned_bytes_moved": None if step.name == UPDATE else planned.bytes_moved,
            "planned_gpu_bytes": planned.gpu_total,
            "planned_host_bytes": planned.host_total,
            "planned_gpu_peak_bytes": planned.gpu_peak,
            "planned_host_peak_bytes": planned.host_peak,
        }
        for what in ("gpu_bytes", "host_bytes", "gpu_peak_bytes", "host_peak_bytes"):
            measured, expected = row[what], row[f"planned_{what}"]
            # While the run starts not everything is there yet that a plan counts as always there.
            if not expected or (rollout_id is None and self.measures):
                continue
            ratio, tier, progress = measured / expected, what.partition("_")[0], self.progress
            low, high = progress.ratio_ranges.get(tier, (ratio, ratio))
            progress.ratio_ranges[tier] = min(low, ratio), max(high, ratio)
        return row


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _eval_report(report: Mapping[str, Any]) -> dict[str, Any]:
    return {f"eval_{k}": v for k, v in report.items() if k in ("reward_mean", "exact_match")}
