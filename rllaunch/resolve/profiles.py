"""Profiles: TOML files of facts (with their source) and choices, found through plugins.

    [profile]  kind, name, aliases, description, source, extends; a cell names its model and hardware
    [facts]    what is; goes to section `hardware` or `model`; `{ value = …, source = "…" }` or a plain value
    [choices.SECTION]  what was chosen for it: a layer of values
    [detect]   how `--hardware auto` recognises a machine
    [[verified]]  model × hardware × mode, who says so

No code and no conditionals: a second case is a second profile that `extends` the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from rllaunch.errors import ConfigError, PluginError, did_you_mean
from rllaunch.resolve.toml_lines import key_lines, line_of, parse_toml

Kind = Literal["hardware", "model", "task", "cell"]
KINDS: tuple[Kind, ...] = ("hardware", "model", "task", "cell")
_TABLES = {"profile", "facts", "choices", "detect", "verified"}
_PROFILE_KEYS = {"kind", "name", "aliases", "description", "source", "extends", "model", "hardware"}


@dataclass(frozen=True)
class Value:
    """One value a profile sets: where its line is, and for a fact its source."""

    value: Any
    place: str
    fact_source: str = ""


@dataclass(frozen=True)
class Profile:
    """A profile, parsed and checked.

    Args:
        values: dotted config key → value with its place.
        plugin: name and version of the plugin that brought it.
        directory: where the profile's data files lie; relative task paths are relative to it.
    """

    kind: Kind
    name: str
    plugin: str
    place: str
    values: Mapping[str, Value]
    aliases: tuple[str, ...] = ()
    description: str = ""
    source: str = ""
    extends: str = ""
    model: str = ""
    hardware: str = ""
    gpu_names: tuple[str, ...] = ()
    verified: tuple[Mapping[str, Any], ...] = ()
    directory: Path | None = None

    @property
    def origin(self) -> str:
        return f"{self.name} ({self.plugin}) {self.place}"


def parse_profile(text: str, place: str, plugin: str, directory: Path | None = None) -> Profile:
    """A profile from the text of its file.

    Raises:
        ConfigError: malformed, incomplete or with unknown tables; the text names `place:line`.
    """
    data = parse_toml(text, place)
    lines = key_lines(text)

    def fail(key: str, what: str, fix: str) -> ConfigError:
        return ConfigError(what, f"{place}:{line_of(lines, key)} ({plugin})", fix)

    for table in data:
        if table not in _TABLES:
            raise fail(table, f"unknown table [{table}] in a profile", did_you_mean(table, _TABLES))
    head = data.get("profile", {})
    for key in head:
        if key not in _PROFILE_KEYS:
            raise fail(f"profile.{key}", f"unknown key {key!r} in [profile]", did_you_mean(key, _PROFILE_KEYS))
    kind, name = head.get("kind"), head.get("name")
    if kind not in KINDS:
        raise fail("profile.kind", f"profile kind {kind!r} is none of {', '.join(KINDS)}", "set [profile] kind")
    if not isinstance(name, str) or not name:
        raise fail("profile.name", "a profile needs a name", "set [profile] name")
    if kind == "cell" and not (head.get("model") and head.get("hardware")):
        raise fail("profile", "a cell names its model and its hardware", "set [profile] model and hardware")
    values: dict[str, Value] = {}
    if facts := data.get("facts"):
        if kind not in ("hardware", "model"):
            raise fail("facts", f"a {kind} profile has no facts", "move the values to [choices.SECTION]")
        for key, value, source in _facts(facts, head.get("source", "")):
            if not source:
                raise fail(f"facts.{key}", f"fact {key!r} has no source", "write { value = …, source = \"…\" } or [profile] source")
            values[f"{kind}.{key}"] = Value(value, f"{place}:{line_of(lines, f'facts.{key}')}", source)
    for key, value in flatten(data.get("choices", {})):
        values[key] = Value(value, f"{place}:{line_of(lines, f'choices.{key}')}")
    return Profile(
        kind=kind,
        name=name,
        plugin=plugin,
        place=place,
        values=values,
        aliases=tuple(head.get("aliases", ())),
        description=head.get("description", ""),
        source=head.get("source", ""),
        extends=head.get("extends", ""),
        model=head.get("model", ""),
        hardware=head.get("hardware", ""),
        gpu_names=tuple(data.get("detect", {}).get("gpu_names", ())),
        verified=tuple(data.get("verified", ())),
        directory=directory,
    )


def _facts(table: Mapping[str, Any], default_source: str, prefix: str = "") -> Iterator[tuple[str, Any, str]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and set(value) == {"value", "source"}:
            yield prefix + key, value["value"], value["source"]
        elif isinstance(value, Mapping) and prefix == "" and key == "architecture":
            yield from _facts(value, default_source, "architecture.")
        else:
            yield prefix + key, value, default_source


def flatten(nested: Mapping[str, Any], depth: int = 2) -> Iterator[tuple[str, Any]]:
    """`section.key` (for `model.architecture` one level more) → value."""
    for section, table in nested.items():
        if not isinstance(table, Mapping):
            yield section, table
            continue
        for key, value in table.items():
            if f"{section}.{key}" == "model.architecture" and isinstance(value, Mapping):
                for name, fact in value.items():
                    yield f"{section}.{key}.{name}", fact
            else:
                yield f"{section}.{key}", value


@dataclass
class ProfileStore:
    """All profiles of all plugins, found by name or alias, case-insensitively."""

    profiles: list[Profile] = field(default_factory=list)
    problems: list[PluginError | ConfigError] = field(default_factory=list)
    """Files and plugins that could not be used; each becomes a finding."""

    def add(self, profile: Profile) -> None:
        for taken in self.profiles:
            if taken.kind == profile.kind and (clash := _names(taken) & _names(profile)):
                self.problems.append(
                    PluginError(
                        f"{profile.kind} profile name {sorted(clash)[0]!r} is taken",
                        (f"{profile.place} ({profile.plugin})", f"already: {taken.place} ({taken.plugin})"),
                        "give the profile another name, or uninstall one of the two plugins",
                    )
                )
                return
        self.profiles.append(profile)

    def add_directory(self, directory: Path | Traversable, plugin: str) -> None:
        """Read every `*.toml` below a directory; a bad file is a problem, not an end."""
        root = Path(str(directory))
        if not root.is_dir():
            self.problems.append(
                PluginError(f"profile directory does not exist: {root.name}", plugin, "reinstall the plugin")
            )
            return
        for path in sorted(root.rglob("*.toml")):
            place = str(path.relative_to(root))
            try:
                self.add(parse_profile(path.read_text(encoding="utf-8"), place, plugin, path.parent))
            except (ConfigError, OSError, UnicodeDecodeError) as err:
                self.problems.append(err if isinstance(err, ConfigError) else PluginError(f"{place}: {err}", plugin))

    def of_kind(self, kind: Kind) -> list[Profile]:
        return sorted((p for p in self.profiles if p.kind == kind), key=lambda p: p.name.casefold())

    def get(self, kind: Kind, name: str, where: str) -> Profile:
        """The profile with that name or alias, with what it extends merged in.

        Raises:
            ConfigError: no such profile, naming the nearest ones; or a chain of `extends` that ends nowhere.
        """
        for profile in self.of_kind(kind):
            if name.casefold() in _names(profile):
                return self._extended(profile, ())
        hint = nearest_profile(name, self.of_kind(kind)) or f"known: {', '.join(p.name for p in self.of_kind(kind))}"
        raise ConfigError(f"unknown {kind} profile {name!r}", where, hint)

    def cell(self, model: str, hardware: str) -> Profile | None:
        for profile in self.of_kind("cell"):
            if profile.model.casefold() == model.casefold() and profile.hardware.casefold() == hardware.casefold():
                return self._extended(profile, ())
        return None

    def _extended(self, profile: Profile, seen: tuple[str, ...]) -> Profile:
        if not profile.extends:
            return profile
        if profile.name in seen:
            raise ConfigError(
                f"profile {profile.name!r} extends itself: {' → '.join([*seen, profile.name])}",
                profile.origin,
                "break the circle",
            )
        try:
            base = next(p for p in self.of_kind(profile.kind) if profile.extends.casefold() in _names(p))
        except StopIteration:
            known = [p.name for p in self.of_kind(profile.kind)]
            raise ConfigError(
                f"profile {profile.name!r} extends unknown {profile.kind} profile {profile.extends!r}",
                profile.origin,
                did_you_mean(profile.extends, known),
            ) from None
        base = self._extended(base, (*seen, profile.name))
        values = dict(base.values) | dict(profile.values)
        return replace(profile, values=values, gpu_names=profile.gpu_names or base.gpu_names)

    def detect_table(self) -> dict[str, tuple[str, ...]]:
        """Hardware profile → the GPU names by which it is recognised."""
        return {p.name: p.gpu_names for p in self.of_kind("hardware") if p.gpu_names}


def _names(profile: Profile) -> set[str]:
    names: Iterable[str] = (profile.name, *profile.aliases)
    return {n.casefold() for n in names}


def nearest_profile(name: str, profiles: Sequence[Profile]) -> str:
    """A hint naming the nearest profiles, by name before by alias; empty when none is near."""
    for known in ([p.name for p in profiles], [a for p in profiles for a in p.aliases]):
        hint = did_you_mean(name, known)
        if hint.startswith("did you mean"):
            return hint
    return ""
