"""Engines in Ray actors of their own, each on the node of its GPUs, and asked all at the same time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rllaunch.backends.base import BackendSpec, LaunchContext, MemoryReading, RolloutEngine, Slot, fullest
from rllaunch.errors import ConfigError, EnvironmentProblem, RllaunchError, RunError
from rllaunch.plan.handoff import Region
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.told import told

# A call, and beside it a health check, the wait for the end, and the end.
CALLS_AT_A_TIME = 8


class EngineActor:
    """An engine, or its part on a further node. Built in `build`, whose errors reach the driver in their own words."""

    part: Any = None

    def __init__(self) -> None:
        self._ending = threading.Lock()

    def build(self, directory: str, name: str, context: LaunchContext, slot: Slot, spec: BackendSpec) -> None:
        """
        Args:
            directory: of the run; what this process prints goes to a file in it.
        """
        log = Path(directory) / f"{name}.log"
        try:
            sys.stdout = sys.stderr = log.open("a", encoding="utf-8", buffering=1)
        except FileNotFoundError:
            raise EnvironmentProblem(
                f"the node of {name} does not see the run directory {directory}",
                "run.run_dir",
                "put it on a disk that all nodes share: --run-dir",
            ) from None
        is_first = slot.index % context.config.rollout.rollout_num_gpus_per_engine == 0
        self.part = (spec.load() if is_first else spec.load_follower())(context, slot)

    def meeting_point(self) -> str:
        import ray

        address: str = self.part.meeting_point(ray.util.get_node_ip_address())
        return address

    def ask(self, name: str, *arguments: Any) -> Any:
        return getattr(self.part, name)(*arguments)

    def shutdown(self) -> None:
        """The manager asks for it, and the driver in case the manager cannot."""
        with self._ending:
            part, self.part = self.part, None
            if part is not None:
                part.shutdown()


def parts_of(config: LaunchConfig, slots: Sequence[Slot]) -> list[list[Slot]]:
    """For each engine, the first of its slots on each of its nodes."""
    size = config.rollout.rollout_num_gpus_per_engine
    engines = [slots[start : start + size] for start in range(0, len(slots), size)]
    return [[next(on_node) for _, on_node in groupby(engine, key=lambda slot: slot.node)] for engine in engines]


def engines_in_actors(
    spec: BackendSpec, config: LaunchConfig, slots: Sequence[Slot], at: Callable[[Slot], Mapping[str, Any]]
) -> list[ActorEngine]:
    """Actors for all engines, not yet built; none for a backend whose engines share the manager's process.

    Args:
        at: Ray's options for an actor on a slot.
    Raises:
        ConfigError: an engine spans nodes, and its backend's engines do not.
    """
    import ray

    if not spec.own_process:
        return []
    engines = []
    for firsts in parts_of(config, slots):
        if len(firsts) > 1 and not spec.follower:
            raise ConfigError(
                f"an engine of {config.rollout.rollout_num_gpus_per_engine} GPUs spans {len(firsts)} nodes, "
                f"and engines of {spec.name} do not",
                f"rollout.rollout_num_gpus_per_engine = {config.rollout.rollout_num_gpus_per_engine}",
                f"--rollout-num-gpus-per-engine {config.cluster.num_gpus_per_node}",
            )
        actor = ray.remote(EngineActor)
        parts = [actor.options(max_concurrency=CALLS_AT_A_TIME, **at(slot)).remote() for slot in firsts]
        engines.append(ActorEngine(parts, firsts))
    return engines


class ActorEngine:
    """An engine by its actors: the first is asked, the followers on further nodes go along.

    Args:
        slots: of each part, its first.
    """

    def __init__(self, parts: Sequence[Any], slots: Sequence[Slot]) -> None:
        self.parts = list(parts)
        self._slots = list(slots)
        # One a follower: there as soon as it has ended, with why.
        self._ends: list[Any] = []

    def name_of(self, part: int) -> str:
        return f"engine-{self._slots[0].index}" + (f"-node-{part}" if part else "")

    def build(self, context: LaunchContext, spec: BackendSpec, directory: Path) -> list[Any]:
        """Answers to come, one a part."""
        return [
            part.build.remote(str(directory), self.name_of(index), context, slot, spec)
            for index, (part, slot) in enumerate(zip(self.parts, self._slots, strict=True))
        ]

    def call(self, name: str, *arguments: Any) -> Call:
        """Ask it; `answers` waits for what comes back."""
        head, followers = self.parts[0], self.parts[1:]
        match name:
            case "start" if followers:
                return Call(self, self._starting())
            case "shutdown":
                return Call(self, iter([{i: part.shutdown.remote() for i, part in enumerate(self.parts)}]))
            case "memory" | "check_health":
                return Call(self, iter([{i: part.ask.remote(name) for i, part in enumerate(self.parts)}]))
            case "release_memory_occupation" if followers:
                return Call(self, self._releasing(*arguments), self._ends)
        return Call(self, iter([{0: head.ask.remote(name, *arguments)}]), self._ends)

    def _starting(self) -> Iterator[dict[int, Any]]:
        meeting_point = self.parts[0].meeting_point.remote()
        yield {0: meeting_point}
        rest = {i: part.ask.remote("start", meeting_point) for i, part in enumerate(self.parts) if i}
        yield {0: self.parts[0].ask.remote("start"), **rest}
        self._ends = [part.ask.remote("wait") for part in self.parts[1:]]

    def _releasing(self, tags: Sequence[Region]) -> Iterator[dict[int, Any]]:
        yield {0: self.parts[0].ask.remote("release_memory_occupation", tags)}
        yield {i: part.ask.remote("check_release", tags) for i, part in enumerate(self.parts) if i}

    def region_bytes(self) -> Mapping[Region, int]:
        [sizes] = answers([self.call("region_bytes")])
        return dict(sizes)

    def check_health(self) -> bool:
        [is_well] = answers([self.call("check_health")])
        return bool(is_well)


class Call:
    """What an engine was asked, and what has come back.

    Args:
        rounds: each the answers to come of some parts, by their number; the next is asked for when all are there.
        ends: answers to come that would be there only because a part has ended.
    """

    def __init__(self, engine: ActorEngine, rounds: Iterator[dict[int, Any]], ends: Sequence[Any] = ()) -> None:
        self.engine = engine
        self.error: RllaunchError | None = None
        self.answers: dict[int, Any] = {}
        self._rounds = rounds
        self._ends = {end: part for part, end in enumerate(ends, start=1)}
        self._waiting: dict[Any, int] = {}
        self._next_round()

    def _next_round(self) -> None:
        self._waiting = {answer: part for part, answer in next(self._rounds, {}).items()}

    @property
    def waits_for(self) -> list[Any]:
        return [*self._waiting, *self._ends] if self._waiting else []

    def take(self, reference: Any) -> None:
        """Look at an answer that is there. After an error the other parts are ended: they may wait for it for ever."""
        import ray

        is_end = reference in self._ends
        part = self._ends.pop(reference) if is_end else self._waiting.pop(reference)
        try:
            with told(f"the actor of {self.engine.name_of(part)}"):
                answer = ray.get(reference)
            if is_end:
                raise RunError(answer, "", f"the run's {self.engine.name_of(part)}.log has its last words")
            self.answers[part] = answer
        except RllaunchError as err:
            if self.error is None:
                self.error = err
                for other in set(self._waiting.values()):
                    self.engine.parts[other].ask.remote("abandon")
        if not self._waiting and self.error is None:
            self._next_round()

    def result(self) -> Any:
        """The first part's answer; of what all parts are asked, one for all."""
        values = list(self.answers.values())
        if isinstance(values[0], MemoryReading):
            return fullest(values)
        return all(values) if isinstance(values[0], bool) else self.answers[0]


@dataclass(frozen=True)
class Done:
    """What an engine in this process answered at once."""

    value: Any = None
    error: Exception | None = None


def call(engine: RolloutEngine | ActorEngine, name: str, *arguments: Any) -> Call | Done:
    if isinstance(engine, ActorEngine):
        return engine.call(name, *arguments)
    try:
        return Done(getattr(engine, name)(*arguments))
    except Exception as err:
        return Done(error=err)


def answers(calls: Sequence[Call | Done]) -> list[Any]:
    """What the engines answer, in the order of the calls.

    Raises:
        RllaunchError: of the first call in this order that failed, once all have been answered or failed.
    """
    under_way = [c for c in calls if isinstance(c, Call)]
    while owner := {reference: c for c in under_way for reference in c.waits_for}:
        import ray

        ready, _ = ray.wait(list(owner), num_returns=1)
        for reference in ready:
            owner[reference].take(reference)
    for c in calls:
        if c.error is not None:
            raise c.error
    return [c.value if isinstance(c, Done) else c.result() for c in calls]
