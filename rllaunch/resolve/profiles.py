"""Profiles: TOML files of facts (with their source) and choices, found through plugins.

    [profile]  kind, name, aliases, description, source, extends; a cell names its model and hardware
    [facts]    what is; goes to section `hardware` or `model`; `{ value = …, source = "…" }` or a plain value
    [choices.SECTION]  what was chosen for it: a layer of values
    [detect]   how `--hardware auto` recognises a machine
    [[verified]]  model × hardware × mode, who says so

No code and no conditionals: a second case is a second profile that `extends` the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, cast

from rllaunch.errors import ConfigError, PluginError, did_you_mean
from rllaunch.resolve.toml_lines import key_lines, line_of, parse_toml
from rllaunch.resolve.user_dirs import ProfileDir
from rllaunch.units import parse_amount

Kind = Literal["hardware", "model", "task", "cell"]
KINDS: tuple[Kind, ...] = ("hardware", "model", "task", "cell")
_TABLES = {"profile", "facts", "choices", "detect", "verified"}
# Where facts live among the values; the rest of a section may be chosen.
_FACTS = {"hardware": "hardware.", "model": "model.architecture."}
FIND = "a file of yours is found in ./profiles or with --profile-dir DIR"
# Files of a task that are given relative to the profile naming them.
_FILES = ("task.prompt_data", "task.eval_prompt_data")
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
        base: what it extends, once that is merged into `values`.
        inherited: the keys of those values that are the base's.
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
    base: Profile | None = None
    inherited: frozenset[str] = frozenset()

    @property
    def origin(self) -> str:
        return f"{self.name} ({self.plugin}) {self.place}"


class _Parsed(Mapping[str, Value]):
    """Values of a parsed profile; the lines they stand on are found when one is asked for.

    A launch reads a few of all the profiles there are.
    """

    def __init__(self, makers: Mapping[str, Callable[[], Value]]) -> None:
        self._makers = makers

    def __getitem__(self, key: str) -> Value:
        return self._makers[key]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def read_profile(
    text: str, place: str, plugin: str, directory: Path | None = None
) -> tuple[Profile | None, list[ConfigError]]:
    """A profile from the text of its file, and every mistake in it; each names `place:line`.

    With mistakes the profile is what the rest of the file says, for further checks only; None where not even that
    can be said.
    """
    try:
        data = parse_toml(text, place)
    except ConfigError as err:
        return None, [ConfigError(err.what, [f"{line} ({plugin})" for line in err.where], err.fix)]
    reader = _Reader(data, text, place, plugin)
    profile = reader.profile(directory)
    return profile, [mistake for _, mistake in sorted(reader.mistakes, key=lambda found: found[0])]


class _Reader:
    """A profile's file, read to its end whatever is wrong on the way."""

    def __init__(self, data: Mapping[str, Any], text: str, place: str, plugin: str) -> None:
        self.place, self.plugin = place, plugin
        self.mistakes: list[tuple[int, ConfigError]] = []
        """Each with its line."""
        self._lines = cache(lambda: key_lines(text))
        self._tables: dict[str, Mapping[str, Any]] = {}
        for name in data:
            if name not in _TABLES:
                self._wrong(name, f"unknown table [{name}] in a profile", did_you_mean(name, _TABLES))
        for name in _TABLES - {"verified"}:
            found = data.get(name, {})
            is_table = isinstance(found, Mapping)
            if not is_table:
                self._wrong(name, f"[{name}] is a table, not {found!r}", f"write [{name}] on a line of its own")
            self._tables[name] = found if is_table else {}
        self._head = self._tables["profile"]
        self._verified = data.get("verified", [])

    def profile(self, directory: Path | None) -> Profile | None:
        kind = self._kind()
        name = self._text("name")
        if self._head.get("name", "") == "":
            self._wrong("profile.name", "a profile needs a name", "set [profile] name")
        if kind is None:
            return None
        self._check_cell(kind)
        self._check_detect(kind)
        profile = Profile(
            kind=kind,
            name=name,
            plugin=self.plugin,
            place=self.place,
            values=_Parsed(self._values(kind)),
            aliases=self._texts("profile", "aliases"),
            description=self._text("description"),
            source=self._text("source"),
            extends=self._text("extends"),
            model=self._text("model"),
            hardware=self._text("hardware"),
            gpu_names=self._texts("detect", "gpu_names"),
            verified=self._rows(),
            directory=directory,
        )
        return profile if name else None

    def _wrong(self, key: str, what: str, fix: str) -> None:
        line = line_of(self._lines(), key)
        if (line, what) not in ((seen, mistake.what) for seen, mistake in self.mistakes):
            self.mistakes.append((line, ConfigError(what, f"{self.place}:{line} ({self.plugin})", fix)))

    def _text(self, key: str) -> str:
        found = self._head.get(key, "")
        if isinstance(found, str):
            return found
        self._wrong(f"profile.{key}", f"{key!r} in [profile] is a text, not {found!r}", "write it in quotes")
        return ""

    def _texts(self, section: str, key: str) -> tuple[str, ...]:
        found = self._tables[section].get(key, [])
        if isinstance(found, list) and all(isinstance(item, str) and item for item in found):
            return tuple(found)
        self._wrong(f"{section}.{key}", f"{key!r} in [{section}] is a list of texts, not {found!r}", f'{key} = ["…"]')
        return ()

    def _kind(self) -> Kind | None:
        for key in self._head:
            if key not in _PROFILE_KEYS:
                self._wrong(f"profile.{key}", f"unknown key {key!r} in [profile]", did_you_mean(key, _PROFILE_KEYS))
        kind = self._head.get("kind")
        if kind in KINDS:
            return cast("Kind", kind)
        given = f"profile kind {kind!r} is none of" if kind else "a profile needs a kind:"
        self._wrong("profile.kind", f"{given} {', '.join(KINDS)}", "set [profile] kind")
        return None

    def _check_cell(self, kind: Kind) -> None:
        if kind == "cell" and not (self._text("model") and self._text("hardware")):
            self._wrong("profile", "a cell names its model and its hardware", "set [profile] model and hardware")
        for key in ("model", "hardware"):
            if kind != "cell" and key in self._head:
                fix = f"take {key!r} out, or set kind to 'cell'"
                self._wrong(f"profile.{key}", f"only a cell names its {key}", fix)

    def _check_detect(self, kind: Kind) -> None:
        detect = self._tables["detect"]
        if detect and kind != "hardware":
            self._wrong("detect", f"a {kind} profile detects nothing", "move [detect] to a hardware profile")
            return
        for key in detect:
            if key != "gpu_names":
                self._wrong(f"detect.{key}", f"unknown key {key!r} in [detect]", did_you_mean(key, ["gpu_names"]))

    def _rows(self) -> tuple[Mapping[str, Any], ...]:
        rows = self._verified
        if isinstance(rows, list) and all(isinstance(row, Mapping) for row in rows):
            return tuple(rows)
        self._wrong("verified", "what was verified is a list of tables", "write [[verified]] above each")
        return ()

    def _values(self, kind: Kind) -> dict[str, Callable[[], Value]]:
        """Facts and choices by dotted key; where their lines are is found when one is asked for."""
        values: dict[str, Callable[[], Value]] = {}

        def note(key: str, written: str, value: Any, source: str = "") -> None:
            values[key] = lambda: Value(
                _in_its_unit(key, value), f"{self.place}:{line_of(self._lines(), written)}", source
            )

        facts = self._tables["facts"]
        if facts and kind not in ("hardware", "model"):
            self._wrong("facts", f"a {kind} profile has no facts", "move the values to [choices.SECTION]")
            facts = {}
        for key, value, source in _facts(facts, self._text("source")):
            if not isinstance(source, str) or not source:
                how = 'write { value = …, source = "…" } or [profile] source'
                self._wrong(f"facts.{key}", f"fact {key!r} has no source", how)
                source = "none is stated"
            note(f"{kind}.{key}", f"facts.{key}", value, source)
        for key, value in flatten(self._tables["choices"]):
            if "." in key:
                note(key, f"choices.{key}", value)
            else:
                where = "write it under [choices.SECTION]"
                self._wrong(f"choices.{key}", f"choice {key!r} stands outside a section", where)
        return values


def _in_its_unit(key: str, value: Any) -> Any:
    """The number that a text such as `180 GiB` stands for, where the key counts bytes; else the value."""
    if not isinstance(value, str):
        return value
    from rllaunch.resolve.resolve import field_of
    from rllaunch.resolve.schema import unit_of

    unit = unit_of(field_of(key))
    try:
        return parse_amount(value, unit) if unit else value
    except ValueError:
        return value  # the schema says what is wrong with it


def _facts(table: Mapping[str, Any], default_source: str, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and "value" in value and set(value) <= {"value", "source"}:
            yield prefix + key, value["value"], value.get("source", default_source)
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
    """What is wrong with files and plugins that could not be used; each becomes a finding."""
    unusable: list[tuple[Profile, list[ConfigError]]] = field(default_factory=list)
    """Profiles of files with mistakes, as far as they could be read."""
    missing: list[str] = field(default_factory=list)
    """What is wrong with plugins that might have brought more."""
    _files: set[Path] = field(default_factory=set)

    def add(self, profile: Profile, *, is_users: bool = False) -> None:
        """Take a profile in; one that is malformed, or whose name is taken, is a problem instead.

        Args:
            is_users: from a folder of the user's, no plugin.
        """
        if mistake := _mistake(profile):
            self.problems.append(
                PluginError(
                    f"a profile cannot be used: {mistake}", f"{profile.place} ({profile.plugin})", "update the plugin"
                )
            )
            return
        for taken in self.profiles:
            if clash := _clash(taken, profile):
                what, fix = clash
                if is_users and taken.kind != "cell":
                    fix += f', with extends = "{taken.name}" for what the two share'
                elif not is_users:
                    fix += ", or uninstall one of the two plugins"
                where = (f"{profile.place} ({profile.plugin})", f"already: {taken.place} ({taken.plugin})")
                self.problems.append(PluginError(f"{profile.kind} profile {what}", where, fix))
                return
        self.profiles.append(profile)

    def add_directory(self, directory: Path | Traversable, plugin: str) -> None:
        """Read every `*.toml` below a directory; a bad file is a problem, not an end."""
        if not directory.is_dir():
            self.problems.append(
                PluginError(f"profile directory does not exist: {directory.name}", plugin, "reinstall the plugin")
            )
            return
        try:
            files = list(_toml_files(directory))
        except OSError as err:
            self.problems.append(
                PluginError(f"profile directory cannot be read: {err}", plugin, "reinstall the plugin")
            )
            return
        for place, file in files:
            self._add_file(file, place, plugin)

    def add_user_dir(self, directory: ProfileDir) -> None:
        """Read the files of a folder of the user's; those that were read before are passed over."""
        try:
            files = list(_toml_files(directory.path, is_deep=directory.is_deep))
        except OSError as err:
            self.problems.append(
                PluginError(f"profile directory cannot be read: {err}", directory.origin, "check its permissions")
            )
            return
        for place, file in files:
            assert isinstance(file, Path), "a user's folder is on disk"
            if file.resolve() not in self._files:
                self._add_file(file, str(directory.path / place), directory.origin, is_users=True)

    def _add_file(self, file: Path | Traversable, place: str, plugin: str, *, is_users: bool = False) -> None:
        folder = None
        if isinstance(file, Path):
            folder = file.parent
            self._files.add(file.resolve())
        try:
            profile, mistakes = read_profile(file.read_text(encoding="utf-8"), place, plugin, folder)
        except (OSError, UnicodeDecodeError) as err:
            self.problems.append(
                PluginError(f"profile file cannot be read: {err}", f"{place} ({plugin})", "save it as UTF-8 text")
            )
            return
        self.problems += mistakes
        if profile and mistakes:
            self.unusable.append((profile, mistakes))
        elif profile:
            self.add(profile, is_users=is_users)

    def of_kind(self, kind: Kind) -> list[Profile]:
        return sorted((p for p in self.profiles if p.kind == kind), key=lambda p: p.name.casefold())

    def get(self, kind: Kind, name: str, where: str) -> Profile:
        """The profile with that name or alias, with what it extends merged in.

        Raises:
            ConfigError: no such profile, naming the nearest ones; or a chain of `extends` that ends nowhere.
        """
        for profile in self.of_kind(kind):
            if name.casefold() in _names(profile):
                return self.merged(profile)
        if name.endswith(".toml"):
            file = Path(name)
            fix = f"a profile goes by its name, which its file gives: --{kind} {file.stem} --profile-dir {file.parent}"
            raise ConfigError(f"a file is no name of a {kind} profile: {name}", where, fix)
        hint = nearest_profile(name, self.of_kind(kind)) or f"known: {', '.join(p.name for p in self.of_kind(kind))}"
        raise ConfigError(f"unknown {kind} profile {name!r}", [where, *self.why_not(name)], f"{hint} ({FIND})")

    def merged(self, profile: Profile) -> Profile:
        """The profile, whether or not it is one of these, with what it extends merged in.

        Raises:
            ConfigError: a chain of `extends` that ends nowhere.
        """
        return self._extended(profile, ())

    def why_not(self, name: str) -> list[str]:
        """What may be the reason that there is no profile of that name: its file, plugins that could not be used."""
        return [*(f"{p.where[0]}: {p.what}" for p in self.problems_of(name)), *self.missing]

    def problems_of(self, name: str) -> list[PluginError | ConfigError]:
        """What is wrong with the files of that name."""
        stem = f"{name}.toml".casefold()
        places = ((p, place.partition(".toml")[0] + ".toml") for p in self.problems for place in p.where[:1])
        return [p for p, place in places if place.casefold().rpartition("/")[2] == stem]

    def cell(self, model: str, hardware: str) -> Profile | None:
        """The cell of a model and a hardware profile, whichever of their names it gives; None if there is none."""
        wanted = (self._name("model", model), self._name("hardware", hardware))
        for profile in self.of_kind("cell"):
            if (self._name("model", profile.model), self._name("hardware", profile.hardware)) == wanted:
                return self._extended(profile, ())
        return None

    def _name(self, kind: Kind, name: str) -> str:
        """The one name by which a profile is compared: its own for an alias, in lower case."""
        known = (p.name for p in self.of_kind(kind) if name.casefold() in _names(p))
        return next(known, name).casefold()

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
        theirs, own = _inherited(base, profile.plugin), dict(profile.values)
        return replace(
            profile,
            values=theirs | own,
            gpu_names=profile.gpu_names or base.gpu_names,
            base=base,
            inherited=frozenset(theirs.keys() - own.keys()),
        )

    def detect_table(self) -> dict[str, tuple[str, ...]]:
        """Hardware profile → the GPU names by which it is recognised."""
        return {p.name: p.gpu_names for p in self.of_kind("hardware") if p.gpu_names}


def _inherited(base: Profile, plugin: str) -> dict[str, Value]:
    """The values of a base as its variant has them: files stay beside the base, another plugin's are marked as its."""
    values = {}
    for key, value in base.values.items():
        if key in _FILES and isinstance(value.value, str) and value.value and base.directory:
            value = replace(value, value=str(base.directory / value.value))
        if base.plugin != plugin:
            value = replace(value, place=f"extends {base.name} ({base.plugin}) {value.place}")
        values[key] = value
    return values


def _toml_files(
    directory: Path | Traversable, prefix: str = "", *, is_deep: bool = True
) -> Iterator[tuple[str, Path | Traversable]]:
    for entry in sorted(directory.iterdir(), key=lambda e: e.name):
        if entry.is_dir():
            if is_deep:
                yield from _toml_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".toml"):
            yield prefix + entry.name, entry


def _mistake(profile: Profile) -> str:
    """What is wrong with a profile that was built in Python; a parsed one has been looked at before."""
    if isinstance(profile.values, _Parsed):
        return ""
    if profile.kind not in KINDS:
        return f"kind {profile.kind!r} is none of {', '.join(KINDS)}"
    if not isinstance(profile.name, str) or not profile.name:
        return f"{profile.name!r} is no name"
    if not _are_texts(profile.aliases) or not _are_texts(profile.gpu_names):
        return f"aliases and gpu_names of {profile.name!r} are tuples of texts"
    if profile.kind == "cell" and not _are_texts((profile.model, profile.hardware)):
        return f"cell {profile.name!r} names its model and its hardware"
    if not isinstance(profile.values, Mapping):
        return f"values of {profile.name!r} are a mapping, not {type(profile.values).__name__}"
    for key, value in profile.values.items():
        if not isinstance(value, Value):
            return f"{key!r} of {profile.name!r} is a Value, not {value!r}"
        if not isinstance(key, str) or "." not in key:
            return f"{key!r} of {profile.name!r} is no section.key"
        if key.startswith(_FACTS.get(profile.kind, "\0")) and not value.fact_source:
            return f"fact {key!r} of {profile.name!r} has no fact_source"
    return ""


def _are_texts(items: Any) -> bool:
    return isinstance(items, tuple) and all(isinstance(item, str) and item for item in items)


def _clash(taken: Profile, profile: Profile) -> tuple[str, str] | None:
    """What the second of two profiles claims that is the first's, and what to do: a name, an alias, a cell's pair."""
    if taken.kind != profile.kind:
        return None
    theirs = _names(taken)
    if profile.name.casefold() in theirs:
        of = "" if profile.name.casefold() == taken.name.casefold() else f" as an alias of {taken.name!r}"
        return f"name {profile.name!r} is taken{of}", "give the profile another name"
    if alias := next((a for a in profile.aliases if a.casefold() in theirs), ""):
        said = f"{profile.name!r} is left out: its alias {alias!r} is taken by {taken.name!r}"
        return said, f"take {alias!r} out of its aliases"
    pair = (profile.model.casefold(), profile.hardware.casefold())
    if profile.kind == "cell" and pair == (taken.model.casefold(), taken.hardware.casefold()):
        said = f"{profile.name!r} is left out: ({profile.model}, {profile.hardware}) is that of {taken.name!r}"
        return said, "take it out"
    return None


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
