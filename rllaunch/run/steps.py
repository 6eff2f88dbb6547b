"""Running steps inside a worker: each timed, and what was done before an error is not lost with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rllaunch.backends.base import MemoryReading, StepResult
from rllaunch.errors import RllaunchError

Outcome = tuple[MemoryReading, Mapping[str, Any]]


def timed(call: Callable[[], Outcome]) -> StepResult:
    started = time.perf_counter()
    memory, report = call()
    return StepResult(memory, time.perf_counter() - started, report)


def run_steps(steps: Sequence[str], one: Callable[[str], Outcome]) -> tuple[list[StepResult], RllaunchError | None]:
    """The results of the steps in order, up to the first that raised one of our errors, and that error."""
    results: list[StepResult] = []
    for step in steps:
        try:
            results.append(timed(lambda step=step: one(step)))  # type: ignore[misc]
        except RllaunchError as err:
            return results, err
    return results, None
