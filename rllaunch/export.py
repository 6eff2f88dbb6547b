"""A launch in the words of another program: what a plugin makes of it, and `rllaunch export` shows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rllaunch.resolve.origins import Resolved


@dataclass(frozen=True)
class LeftOut:
    """A setting the other program has no option for.

    Args:
        key: `section.key` of the launch.
        reason: what the other program does instead, or what to do by hand.
    """

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Export:
    """A launch as another program takes it. Nothing of the launch is missing: it is an argument, in the environment,
    or left out with a reason.

    Args:
        program: what is started, such as `("python3", "train.py")`.
        arguments: one tuple an option: its flag and its values.
        environment: variables of the launch itself, without those of whoever exports it.
        substitutions: shell text that stands before the arguments as it is, such as `$(command)`: arguments that only
            the other program's own files give.
        notes: what has to be done by hand before this starts.
    """

    program: tuple[str, ...]
    arguments: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[LeftOut, ...] = ()
    substitutions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exporter:
    """A target of `rllaunch export`.

    Args:
        name: what `--to` says.
        description: one line for `rllaunch export --list`.
        export: called with a launch whose configuration is sound and the variables its processes would have.
            An `RllaunchError` it raises is the user's, told as it is.
    """

    name: str
    description: str
    export: Callable[[Resolved, Mapping[str, str]], Export]
