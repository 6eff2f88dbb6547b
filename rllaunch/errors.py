"""What rllaunch raises for a user's mistake: what is wrong, where the value came from, what to do.

Every error names its exit code by kind, prints without a traceback, and survives pickling (Ray
carries exceptions between processes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher, get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traceback import FrameSummary

EXIT_OK = 0
"""It was done: the run ended, nothing that was looked at has an error."""
EXIT_RUN_FAILED = 1
"""The run failed after it started, or rllaunch itself has a bug."""
EXIT_USAGE = 2
"""The command line is malformed: an unknown command or flag, two that exclude each other."""
EXIT_CONFIG = 3
"""The configuration is invalid: a key, a value, a profile, a file; findings `RL3xx` and `RL6xx`."""
EXIT_DOES_NOT_FIT = 4
"""It does not fit in memory; findings `RL2xx`."""
EXIT_ENVIRONMENT = 5
"""This machine or the cluster lacks something; findings `RL4xx` and `RL5xx`."""
EXIT_INTERRUPTED = 130
"""Ctrl-C, or whoever read the output went away."""


class RllaunchError(Exception):
    """A mistake or failure that is told to the user in three parts.

    Args:
        what: what is wrong, with the numbers or names involved.
        where: where the value came from: `file:line`, a flag, a variable, a plugin.
        fix: what to do about it.
    """

    exit_code = EXIT_RUN_FAILED
    code: str | None = None
    told = False
    """Whether the command has already printed it as data."""

    def __init__(self, what: str, where: str | Sequence[str] = (), fix: str = "") -> None:
        super().__init__(what, where, fix)
        self.what = what
        lines = (where,) if isinstance(where, str) else where
        self.where: tuple[str, ...] = tuple(line for line in lines if line)
        self.fix = fix

    def __str__(self) -> str:
        head = f"error[{self.code}]" if self.code else "error"
        lines = [f"{head}: {self.what}"]
        lines += [f"  {line}" for line in self.where if line]
        if self.fix:
            lines.append(f"hint: {self.fix}")
        return "\n".join(lines)


class UsageError(RllaunchError):
    """The command line itself is malformed."""

    exit_code = EXIT_USAGE


class ConfigError(RllaunchError):
    """A value, key, profile or file that the configuration cannot use."""

    exit_code = EXIT_CONFIG


class PluginError(ConfigError):
    """A plugin failed to import, claimed a taken name or answered a hook with nonsense."""


class ScheduleError(RllaunchError):
    """A handoff schedule that cannot be built or is not safe."""

    exit_code = EXIT_CONFIG


class FitError(RllaunchError):
    """Memory that is asked for does not fit into a pool's capacity."""

    exit_code = EXIT_DOES_NOT_FIT


class EnvironmentProblem(RllaunchError):
    """Something the machine or the cluster lacks."""

    exit_code = EXIT_ENVIRONMENT


RESUME = "--resume goes on from the last checkpoint, if there is one"


class RunError(RllaunchError):
    """The run failed after it started."""


class DataError(ConfigError):
    """A prompt file that cannot be used."""


def did_you_mean(name: str, known: Iterable[str], what: str = "known") -> str:
    """A hint naming the nearest of `known`, several only if they are about as near; else all of them."""
    names = sorted(set(known))
    by_fold = {n.casefold(): n for n in names}
    given = name.casefold()
    near = get_close_matches(given, list(by_fold), n=3, cutoff=0.6)
    ratios = {n: SequenceMatcher(None, n, given).ratio() for n in near}
    near = [n for n in near if ratios[n] > max(ratios.values()) - 0.05]
    if near:
        return "did you mean " + " or ".join(repr(by_fold[n]) for n in near) + "?"
    return f"{what}: {', '.join(names)}" if names else f"{what}: none"


def own_frame(frames: Sequence[FrameSummary], home: Path) -> FrameSummary:
    """Where code from under `home` failed: its own last line, rather than that of a library it called.

    Args:
        frames: of a traceback, at least one; the last is the answer where none is from there.
    """
    return ([f for f in frames if Path(f.filename).parent.is_relative_to(home)] or frames)[-1]
