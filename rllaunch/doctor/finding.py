"""A finding: what a rule has to say about a launch, with its origins and a fix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rllaunch.errors import EXIT_CONFIG, EXIT_DOES_NOT_FIT, EXIT_ENVIRONMENT, EXIT_OK
from rllaunch.resolve.origins import Resolved

Level = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One thing wrong, or worth knowing, about a launch.

    Args:
        origins: one line for each value involved, as `Resolved.describe` gives it.
        fix: what to do; known to work.
    """

    code: str
    level: Level
    message: str
    origins: tuple[str, ...] = ()
    fix: str = ""

    @property
    def exit_code(self) -> int:
        """RL2xx: does not fit · RL4xx and RL5xx: environment · all others: the configuration."""
        if self.level != "error":
            return EXIT_OK
        family = {"2": EXIT_DOES_NOT_FIT, "4": EXIT_ENVIRONMENT, "5": EXIT_ENVIRONMENT}
        return family.get(self.code[2:3], EXIT_CONFIG)

    def with_origin(self, line: str) -> Finding:
        """The same with a line before its origins; with an empty one as it is."""
        return replace(self, origins=(line, *self.origins)) if line else self

    def to_json(self) -> dict[str, Any]:
        return {
            "code": self.code,
            "level": self.level,
            "message": self.message,
            "origins": list(self.origins),
            "fix": self.fix,
        }


Check = Callable[[Resolved], Iterable[Finding]]


@dataclass(frozen=True)
class Rule:
    """A rule of the doctor: its code, why it exists, and the check.

    Rules see final values only, after every layer. A rule says nothing where the condition that
    makes it true does not hold.

    Args:
        code: `RL3xx` for the configuration, `RL4xx` for GPUs and what drives them, `RL5xx` for the rest of the
            environment; unique over all plugins.
        name: a few words, as `rllaunch doctor --explain CODE` heads them.
        reason: why breaking it hurts, with the source of that knowledge.
        probes: reads the machine (GPUs, Ray, disk, imports); skipped by `--no-probe`; a dry run
            tells what they find and does not fail for it.
        tests_gpu: runs a program on the GPU, which takes seconds; only with `rllaunch doctor --gpu-test`.
        overridable: `--allow CODE` turns its errors into warnings.
        check: what it yields is found; a docstring of it is shown to users by `--explain`.
        plugin: who brought it; filled in on registration.
    """

    code: str
    name: str
    reason: str
    check: Check
    probes: bool = False
    tests_gpu: bool = False
    overridable: bool = False
    plugin: str = field(default="rllaunch", compare=False)

    def error(self, resolved: Resolved, message: str, keys: Sequence[str] = (), fix: str = "") -> Finding:
        return self.finding("error", resolved, message, keys, fix)

    def finding(self, level: Level, resolved: Resolved, message: str, keys: Sequence[str], fix: str) -> Finding:
        return Finding(self.code, level, message, tuple(resolved.describe(k) for k in keys), fix)
