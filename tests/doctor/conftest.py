"""A resolved launch from a few dotted keys, as the resolver would hand it to the doctor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from rllaunch.doctor.rules.allocator import ALLOCATOR_VARIABLES
from rllaunch.resolve.origins import Origin, Resolved, show_value
from rllaunch.resolve.resolve import _derive
from rllaunch.resolve.schema import LaunchConfig

# A launch without a mistake: one H100 node, a task, everything else the schema's default.
BASE = {
    "hardware.name": "H100",
    "hardware.accelerator": "cuda",
    "hardware.gpus_per_node": 8,
    "task.prompt_data": "prompts.jsonl",
    "task.reward": "rewards:exact_match",
}


def resolved_of(values: Mapping[str, Any], *, derive: bool = False) -> Resolved:
    """The launch of `BASE` with `values` as flags on top.

    Args:
        derive: fill in what follows from others, as the resolver does before the rules run.
    """
    config = LaunchConfig.model_validate(nested({**BASE, **values}))
    default = Resolved(LaunchConfig(), {})
    origins: dict[str, tuple[Origin, ...]] = {}
    for layer, given in (("hardware profile", BASE), ("flag", values)):
        for key, value in given.items():
            source = "H100.toml:1" if given is BASE else f"--set {key}={show_value(value)}"
            below = origins.get(key) or _default_origin(default, key)
            origins[key] = (*below, Origin(value, layer, source))
    if derive:
        for setting in _derive(config, {key: origins.get(key, default.origins.get(key, ())) or _origin_of(config, key) for key in _keys(config)}):
            origins[setting.key] = (*origins.get(setting.key, ()), Origin(setting.value, "derived", setting.source))
            values = {**values, setting.key: setting.value}
        config = LaunchConfig.model_validate(nested({**BASE, **values}))
    return Resolved(config, origins)
