"""The conformance test of a profile: its keys, its chain, its facts, and launches with it, resolved and planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rllaunch.doctor.engine import RANK, diagnose
from rllaunch.doctor.finding import Finding, Level
from rllaunch.doctor.profile_facts import check_facts
from rllaunch.errors import ConfigError, RllaunchError
from rllaunch.plan.choose import Unknown, plan_launch
from rllaunch.plugins import Plugins
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.profile_keys import mistaken_keys
from rllaunch.resolve.profiles import Profile, read_profile
from rllaunch.resolve.resolve import Request, Setting, resolve
from rllaunch.resolve.toml_lines import read_text

# A hardware profile is tried with models of different kinds: dense; experts with latent attention; experts with Mamba.
MODELS = ("qwen3-0.6b", "glm-4.7-flash", "nemotron-3-nano-30b-a3b")
# A model with machines of different kinds: a host over PCIe; a host over NVLink-C2C; another maker's.
MACHINES = ("H100", "GB300", "MI300X")
# Stands where a plugin's label would, for a file that was given; and where a flag would, in its trial launches.
FILE, CHECK = "given file", "profiles check"


@dataclass(frozen=True)
class Tried:
    """A launch with the profile.

    Args:
        fits: on the nodes that its profiles name; None where it could not be planned.
    """

    model: str
    hardware: str
    fits: bool | None


@dataclass
class Checked:
    """A profile, or a file that is none, and what there is to say about it."""

    kind: str
    name: str
    place: str
    findings: list[Finding] = field(default_factory=list)
    launches: list[Tried] = field(default_factory=list)

    @property
    def errors(self) -> int:
        return sum(f.level == "error" for f in self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "name": self.name,
            "place": self.place,
            "ok": not self.errors,
            "launches": [{"model": t.model, "hardware": t.hardware, "fits": t.fits} for t in self.launches],
        }


def check_file(path: Path, plugins: Plugins) -> Checked:
    """A file, whether or not it lies where profiles are looked for."""
    try:
        profile, mistakes = read_profile(read_text(path, "profile"), str(path), FILE, path.parent)
    except ConfigError as err:
        return _unusable(path.stem, str(path), [err])
    if profile is None:
        return _unusable(path.stem, str(path), mistakes)
    if mistakes:
        return check_profile(profile, plugins, mistakes)
    store = plugins.profiles()
    for known in store.profiles:
        if known.directory and (known.directory / Path(known.place).name).resolve() == path.resolve():
            return check_profile(known, plugins)
    before = len(store.problems)
    store.add(profile, is_users=True)
    if problems := store.problems[before:]:
        return check_profile(profile, plugins, problems)
    return check_profile(profile, plugins)


def check_unusable(name: str, plugins: Plugins) -> Checked | None:
    """What is wrong with the files of a name that no profile has; None where there is no such file."""
    store = plugins.profiles()
    for profile, mistakes in store.unusable:
        if name.casefold() in (profile.name.casefold(), Path(profile.place).stem.casefold()):
            return check_profile(profile, plugins, mistakes)
    problems = store.problems_of(name)
    return _unusable(name, problems[0].where[0], problems) if problems else None


def _unusable(name: str, place: str, problems: Sequence[RllaunchError]) -> Checked:
    return Checked("", name, place, _of_the_file(problems))


def _of_the_file(problems: Sequence[RllaunchError]) -> list[Finding]:
    return [Finding("RL600", "error", p.what, p.where, p.fix) for p in problems]


def check_profile(own: Profile, plugins: Plugins, mistakes: Sequence[RllaunchError] = ()) -> Checked:
    """Everything about a profile.

    Args:
        own: as it stands in its file, without what it extends.
        mistakes: why it is none of the store's.
    """
    checked = Checked(own.kind, own.name, f"{own.place} ({own.plugin})", _of_the_file(mistakes))
    found = checked.findings
    found += [Finding("RL601", "error", p.what, p.where, p.fix) for p in mistaken_keys(own)]
    store = plugins.profiles()
    try:
        profile = store.merged(own)
        base = store.get(own.kind, own.extends, own.place) if own.extends else None
    except ConfigError as err:
        found.append(Finding("RL602", "error", err.what, err.where, err.fix))
        return checked
    if own.kind == "hardware":
        found += [*check_facts(profile, own, base), *_rivals(own, plugins)]
    if not checked.errors:
        found += _launches(own, profile, plugins, checked.launches)
    found.sort(key=lambda f: (RANK[f.level], f.code))
    return checked


def _rivals(own: Profile, plugins: Plugins) -> Iterator[Finding]:
    """Other profiles that know a machine by the same words: `--hardware auto` then takes none of them."""
    mine = {name.casefold() for name in own.gpu_names}
    for other in plugins.profiles().of_kind("hardware"):
        if other.name != own.name and mine & {name.casefold() for name in other.gpu_names}:
            where = (f"detect.gpu_names   {own.origin}", f"detect.gpu_names   {other.origin}")
            text = f"{own.name} and {other.name} recognise the same GPUs: --hardware auto takes neither"
            fix = f"take gpu_names out and say --hardware {own.name}"
            yield Finding("RL609", "warning", text, where, fix)


def _pairs(own: Profile, plugins: Plugins) -> list[tuple[str, str]]:
    if own.kind == "cell":
        return [(own.model, own.hardware)]
    if own.kind == "task":
        return [("tiny", "cpu")]
    hardware, models = (plugins.profiles().of_kind(k) for k in ("hardware", "model"))
    if own.kind == "hardware":
        return [(model, own.name) for model in MODELS if any(p.name == model for p in models)]
    return [(own.name, machine) for machine in MACHINES if any(p.name == machine for p in hardware)]


def _launches(own: Profile, profile: Profile, plugins: Plugins, tried: list[Tried]) -> list[Finding]:
    """Launches that name the profile: each resolves, is planned, and breaks no rule by what the profile chose."""
    found: list[Finding] = []
    broken: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    pairs = _pairs(own, plugins)
    for model, hardware in pairs:
        name = f"{model} on {hardware}"
        names = {"model.name": model, "hardware.name": hardware}
        if own.kind == "task":
            names["task.name"] = own.name
        try:
            resolved = resolve(
                Request(flags=tuple(Setting(k, v, CHECK) for k, v in names.items()), environ={}), plugins
            )
        except ConfigError as err:
            found.append(Finding("RL606", "error", f"{name} does not resolve: {err.what}", err.where, err.fix))
            continue
        choice = plan_launch(resolved)
        tried.append(Tried(model, hardware, None if isinstance(choice, Unknown) else choice.fits))
        if isinstance(choice, Unknown):
            text = f"{name} cannot be planned: {choice.what}"
            found.append(Finding("RL607", "error", text, choice.where, choice.fix))
        for finding in _broken_rules(resolved, profile, plugins):
            broken.setdefault((finding.code, finding.message), (finding, []))[1].append(name)
    for finding, names_of in broken.values():
        # What only some launches break may be those launches' doing too.
        level: Level = "error" if len(names_of) == len(pairs) else "warning"
        text = f"{finding.code}: {finding.message}\nwith {', '.join(names_of)}"
        found.append(replace(finding, code="RL608", level=level, message=text))
    return found


def _broken_rules(resolved: Resolved, profile: Profile, plugins: Plugins) -> Iterator[Finding]:
    """Errors that involve a choice of the profile. Whether a launch fits is not the profile's to answer for."""
    places = [f" {value.place} " for value in profile.values.values() if not value.fact_source]
    for finding in diagnose(resolved, plugins.rules(), probe=False):
        named = any(place in f"{line} " for line in finding.origins for place in places)
        if finding.level == "error" and not finding.code.startswith("RL2") and named:
            yield finding
