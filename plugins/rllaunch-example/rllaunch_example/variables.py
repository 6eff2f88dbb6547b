"""An export target: `rllaunch train` without flags, all that was set as `RLLAUNCH_SECTION__KEY`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rllaunch.export import Export, LeftOut
from rllaunch.resolve.origins import Resolved

PROFILES = ("hardware.", "model.architecture", "task.")


def as_variables(resolved: Resolved, environment: Mapping[str, str]) -> Export:
    """What the profiles give again is left to them; a launch's own variables (`env`) are variables already."""
    names = {"model.name": resolved.config.model.name, "hardware.name": resolved.config.hardware.name}
    if resolved.config.task.name:
        names["task.name"] = resolved.config.task.name
    left_out = []
    for key in resolved.origins:
        if not resolved.is_set(key) or key.startswith((*PROFILES, "env.")) or key in names:
            continue
        if isinstance(resolved.value(key), dict):
            left_out.append(LeftOut(key, resolved.value(key), "a variable holds no table: give it in a --config file"))
        else:
            names[key] = resolved.value(key)
    variables = {f"RLLAUNCH_{k.replace('.', '__').upper()}": _text(v) for k, v in names.items() if v is not None}
    return Export(("rllaunch", "train"), (), {**environment, **variables}, tuple(left_out))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
