"""Where a value came from: the layer that set it and the place a reader can open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rllaunch.resolve.schema import LaunchConfig
from rllaunch.resolve.secrets import HIDDEN, is_secret

# Lowest to highest. `derived` values follow from others and never override what a layer set.
LAYERS = ("default", "derived", "model profile", "hardware profile", "cell", "task", "run", "config", "env", "flag")


@dataclass(frozen=True)
class Origin:
    """One layer's word on one key.

    Args:
        source: `file:line` for TOML, the variable's name, the flag as typed, or what a value is derived from.
        fact_source: of a profile's fact, where the profile has it from.
    """

    value: Any
    layer: str
    source: str
    fact_source: str = ""

    @property
    def is_measured(self) -> bool:
        """Whether a profile says so of its fact."""
        return self.fact_source.startswith("measured")

    def __str__(self) -> str:
        return f"{show_value(self.value)}   {self.layer}: {self.source}"

    def shown(self, key: str) -> Origin:
        """This origin as it may be printed: of a secret neither the value nor the flag that repeats it."""
        if not is_secret(key, self.value):
            return self
        return Origin(HIDDEN, self.layer, self.source.replace(str(self.value), HIDDEN))


@dataclass(frozen=True)
class Resolved:
    """A resolved launch: the frozen config and, for every key, who set it (lowest layer first)."""

    config: LaunchConfig
    origins: Mapping[str, tuple[Origin, ...]]
    profiles: Mapping[str, str] = field(default_factory=dict)
    """Kind of profile → name and source of the one that was used."""

    def origin(self, key: str) -> Origin:
        """The origin that decided `key`, perhaps with the table it is in; a schema default has one too."""
        if key in self.origins:
            return self.origins[key][-1]
        table = key
        while table := table.rpartition(".")[0]:
            if table in self.origins:
                decided = self.origins[table][-1]
                return Origin(self.value(key), decided.layer, decided.source)
        return Origin(self.value(key), "default", "schema default")

    def value(self, key: str) -> Any:
        node: Any = self.config
        for part in key.split("."):
            node = node[part] if isinstance(node, Mapping) else getattr(node, part)
        return node

    def is_set(self, key: str) -> bool:
        """Whether any layer above the schema's default, and not a derivation, gave `key` a value."""
        return any(o.layer not in ("default", "derived") for o in self.origins.get(key, ()))

    def describe(self, key: str) -> str:
        """`key = value   layer: source`, with the choice it replaced when a lower layer made another."""
        origin = self.origin(key)
        if is_secret(key, origin.value):
            return f"{key} = {HIDDEN}   {origin.layer}: {origin.shown(key).source}"
        text = f"{key} = {show_value(origin.value)}   " + (
            f"{origin.layer}: {origin.source}" if origin.layer != "default" else origin.source
        )
        below = [o for o in self.origins.get(key, ())[:-1] if o.value != origin.value and o.layer != "default"]
        if below:
            text += f" (was {show_value(below[-1].value)}, {below[-1].layer}: {below[-1].source})"
        return text


def show_value(value: Any) -> str:
    """A value the way TOML would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "unset"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(show_value(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{k} = {show_value(v)}" for k, v in value.items()) + "}"
    return str(value)
