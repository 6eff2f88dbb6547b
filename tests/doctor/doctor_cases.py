"""A resolved launch from a few dotted keys, as the resolver hands it to the doctor."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllaunch.resolve.origins import Origin, Resolved, show_value
from rllaunch.resolve.resolve import _derive, known_keys
from rllaunch.resolve.schema import LaunchConfig

CASES = Path(__file__).parent / "cases"

# A launch without a mistake: one H100 node, a task, everything else the schema's default.
BASE = {
    "hardware.name": "H100",
    "hardware.accelerator": "cuda",
    "hardware.gpus_per_node": 8,
    "task.prompt_data": "prompts.jsonl",
    "task.reward": "rewards:exact_match",
}


def resolved_of(values: Mapping[str, Any] | None = None, *, derive: bool = True) -> Resolved:
    """The launch of `BASE` with `values` as `--set key=value` on top.

    Args:
        derive: fill in what follows from others, as the resolver does before any rule runs.
    """
    values = values or {}
    defaults = Resolved(LaunchConfig(), {})
    origins: dict[str, tuple[Origin, ...]] = {key: (defaults.origin(key),) for key in known_keys()}
    for layer, given in (("hardware profile", BASE), ("flag", values)):
        for key, value in given.items():
            source = f"--set {key}={show_value(value)}" if layer == "flag" else "test H100.toml:1"
            origins[key] = (*origins.get(key, ()), Origin(value, layer, source))
    final = {**BASE, **values}
    config = LaunchConfig.model_validate(nested(final))
    if derive:
        for setting in _derive(config, origins):
            origins[setting.key] = (*origins[setting.key], Origin(setting.value, "derived", setting.source))
            final[setting.key] = setting.value
        config = LaunchConfig.model_validate(nested(final))
    return Resolved(config, origins)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *parents, leaf = key.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value
    return tree


@dataclass(frozen=True)
class Case:
    """One case of a rule: what is set, and the whole text of each finding of the rule.

    Args:
        also: codes of other rules that the same values break.
        environ: variables of the user's environment.
    """

    code: str
    name: str
    set: Mapping[str, Any]
    findings: tuple[str, ...]
    level: str
    fix: str | None
    origins: tuple[str, ...] | None
    also: tuple[str, ...]
    environ: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.code}: {self.name}"


def load_cases() -> list[Case]:
    cases = []
    for path in sorted(CASES.glob("RL*.toml")):
        for row in tomllib.loads(path.read_text(encoding="utf-8"))["case"]:
            finding = row.pop("finding", [])
            origins = row.pop("origins", None)
            cases.append(
                Case(
                    code=path.stem,
                    name=row.pop("name"),
                    set=row.pop("set", {}),
                    findings=(finding,) if isinstance(finding, str) else tuple(finding),
                    level=row.pop("level", "error"),
                    fix=row.pop("fix", None),
                    origins=None if origins is None else tuple(origins),
                    also=tuple(row.pop("also", ())),
                    environ=row.pop("environ", {}),
                )
            )
            assert not row, f"{path.name}: unknown keys {sorted(row)} in a case"
    return cases
