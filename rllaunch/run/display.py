"""What a person sees while a run goes: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rllaunch.backends.base import MemoryReading
from rllaunch.console import say, wants_colour
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.units import count, gib

LINE_EVERY_SECONDS = 2.0


class StartUp:
    """A line for each step of a start that takes long enough to be waited for, with its seconds.

    Args:
        parameters: of the model, told when the trainer is up; None where that is not known.
    """

    def __init__(self, tell: Callable[[str], None] = say, parameters: int | None = None) -> None:
        size = f": {count(parameters)} parameters" if parameters is not None else ""
        self._lines = {"trainer.init": f"the trainer is up{size}", "update_weights": "the engines have its weights"}
        self._tell = tell
        self._began = 0.0

    def step(self, name: str, memory: MemoryReading | None) -> None:
        """As a watcher is told of it: before a call without memory, after each of its steps with it."""
        if memory is None:
            self._began = time.monotonic()
        elif name in self._lines:
            self._tell(f"{self._lines[name]} ({time.monotonic() - self._began:.1f} s)")


class PlainWatcher:
    """A line every few seconds, on every evaluation and at the end: for logs and pipes."""

    def __init__(self, config: LaunchConfig, start_up: StartUp, tell: Callable[[str], None] = say) -> None:
        self.total = config.run.num_rollout
        self.start_up = start_up
        self.tell = tell
        self._last = 0.0

    def step(self, name: str, rollout_id: int | None, memory: MemoryReading | None) -> None:
        if rollout_id is None:
            self.start_up.step(name, memory)

    def rollout(self, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        last = metrics["rollout_id"] + 1 == self.total
        if not (last or "eval_exact_match" in metrics or now - self._last >= LINE_EVERY_SECONDS):
            return
        self._last = now
        self.tell(line_of(metrics, self.total))


def line_of(metrics: Mapping[str, Any], total: int) -> str:
    """One rollout in one line."""
    parts = [f"rollout {metrics['rollout_id'] + 1}/{total}", f"reward {metrics['reward_mean']:.3f}"]
    if metrics.get("exact_match") is not None:
        parts.append(f"exact {metrics['exact_match']:.3f}")
    if metrics.get("eval_exact_match") is not None:
        parts.append(f"held-out exact {metrics['eval_exact_match']:.3f}")
    elif metrics.get("eval_reward_mean") is not None:
        parts.append(f"held-out reward {metrics['eval_reward_mean']:.3f}")
    parts.append(f"loss {metrics['loss']:+.3f}")
    parts.append(f"{metrics['seconds']['step'] * 1000:.0f} ms")
    return "  ".join(parts)


class LiveWatcher:
    """Progress, reward, phase and memory in place, redrawn a few times a second."""

    def __init__(self, config: LaunchConfig, start_up: StartUp) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.config = config
        self.start_up = start_up
        self.phase = "start-up"
        self.memory: MemoryReading | None = None
        self.metrics: Mapping[str, Any] = {}
        self.rewards: list[float] = []
        self.held_out: str = ""
        self.progress = Progress(
            TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        )
        self.task = self.progress.add_task("rollout", total=config.run.num_rollout)
        console = Console(stderr=True, no_color=not wants_colour(sys.stderr))
        self.live = Live(get_renderable=self._view, console=console, refresh_per_second=8, transient=False)

    def step(self, name: str, rollout_id: int | None, memory: MemoryReading | None) -> None:
        self.phase = name
        self.memory = memory or self.memory
        if rollout_id is None:
            self.start_up.step(name, memory)

    def rollout(self, metrics: Mapping[str, Any]) -> None:
        self.metrics = metrics
        self.rewards.append(metrics["reward_mean"])
        if metrics.get("eval_exact_match") is not None:
            self.held_out = f"   held-out exact {metrics['eval_exact_match']:.3f}"
        self.progress.update(self.task, completed=metrics["rollout_id"] + 1)

    def _view(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        lines: list[Any] = [self.progress]
        if self.metrics:
            exact = self.metrics.get("exact_match")
            exact_text = f"   exact {exact:.3f}" if exact is not None else ""
            reward = self.metrics["reward_mean"]
            lines.append(Text(f"reward {reward:.3f} {sparkline(self.rewards)}{exact_text}{self.held_out}"))
        memory = ""
        if self.memory:
            memory = f"   device {gib(self.memory.gpu_bytes)}   host {gib(self.memory.host_bytes)}"
        lines.append(Text(f"{self.phase:<24}{memory}", style="dim"))
        return Group(*lines)


def sparkline(values: list[float], width: int = 40) -> str:
    """The course of a value in one line of block characters, from its least to its greatest."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join("▁▂▃▄▅▆▇█"[min(7, int((m - low) / span * 8))] for m in means)


@contextmanager
def watching(config: LaunchConfig, parameters: int | None) -> Iterator[PlainWatcher | LiveWatcher]:
    """The watcher that suits stderr.

    Args:
        parameters: as `StartUp` takes them.
    """
    start_up = StartUp(parameters=parameters)
    if not sys.stderr.isatty():
        yield PlainWatcher(config, start_up)
        return
    watcher = LiveWatcher(config, start_up)
    with watcher.live:
        yield watcher
