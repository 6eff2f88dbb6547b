"""What a code of the doctor stands for, as `rllaunch doctor --explain CODE` and docs/rules.md tell it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rllaunch.doctor.engine import ENGINE_CODES
from rllaunch.doctor.finding import Rule
from rllaunch.doctor.profile_facts import CODES
from rllaunch.errors import UsageError, did_you_mean

# What is found before rules are asked: while plugins, backends and the task are looked up.
LAUNCH_CODES = {
    "RL010": "a plugin or a profile cannot be used",
    "RL337": "no plugin brings the backend",
    "RL340": "prompts or reward cannot be used (not with --no-probe)",
    "RL508": "a backend that this version cannot start yet",
    "RL512": "a model that the megatron trainer of this version does not build (a warning with --no-probe)",
    "RL513": "engines whose weights no update brings in the type they hold (a warning with --no-probe)",
}
_SECTION = re.compile(r"^(Args|Raises|Source):", re.MULTILINE)


@dataclass(frozen=True)
class Explanation:
    """A code in words.

    Args:
        rule: None for what rllaunch finds without one.
        more: paragraphs from the docstring of the rule's check; empty where it has none.
    """

    code: str
    name: str
    rule: Rule | None = None
    more: str = ""

    def lines(self) -> list[str]:
        """Why, what it looks at, whether it can be allowed, and who brings it unless that is rllaunch."""
        if self.rule is None:
            return ["found without a rule: by rllaunch itself", "can be allowed: no"]
        rule = self.rule
        allowed = f"yes, `--allow {rule.code}` turns its errors into warnings" if rule.overridable else "no"
        lines = [f"why: {' '.join(rule.reason.split())}", f"probes: {_probes(rule)}", f"can be allowed: {allowed}"]
        return lines if rule.plugin.split()[0] == "rllaunch" else [*lines, f"from: {rule.plugin}"]

    def text(self) -> str:
        head = "\n".join([f"{self.code}: {self.name}", *(f"  {line}" for line in self.lines())])
        return f"{head}\n\n{self.more}" if self.more else head

    def to_json(self) -> dict[str, Any]:
        rule = self.rule
        return {
            "code": self.code,
            "name": self.name,
            "reason": " ".join(rule.reason.split()) if rule else "",
            "probes": bool(rule and rule.probes),
            "tests_gpu": bool(rule and rule.tests_gpu),
            "overridable": bool(rule and rule.overridable),
            "plugin": rule.plugin if rule else "rllaunch",
            "text": self.more,
        }


def explanations(rules: Iterable[Rule]) -> Mapping[str, Explanation]:
    """Every code there is, in order; of two rules with one code the first, which is the one that runs."""
    found = {code: Explanation(code, name) for code, name in (ENGINE_CODES | CODES | LAUNCH_CODES).items()}
    for rule in rules:
        found.setdefault(rule.code, Explanation(rule.code, rule.name, rule, _longer(rule)))
    return dict(sorted(found.items()))


def explain(code: str, rules: Iterable[Rule]) -> Explanation:
    """The code in words, in whatever case it is written.

    Raises:
        UsageError: there is no such code; it names the nearest.
    """
    known = explanations(rules)
    found = known.get(code.strip().upper())
    if found is None:
        raise UsageError(f"no rule has the code {code!r}", "--explain", did_you_mean(code, known, "codes"))
    return found


def _probes(rule: Rule) -> str:
    if rule.tests_gpu:
        return "yes, it runs a program on the GPU; only with `--gpu-test`"
    return (
        "yes, it reads this machine; not with `--no-probe`"
        if rule.probes
        else "no, it looks at the values of the launch"
    )


def _longer(rule: Rule) -> str:
    """The docstring of the check up to its sections, which are for callers."""
    doc = inspect.getdoc(rule.check) if inspect.isroutine(rule.check) else ""
    return _SECTION.split(doc or "", maxsplit=1)[0].strip()
