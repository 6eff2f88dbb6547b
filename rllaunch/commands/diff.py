"""`rllaunch diff A B`: what differs between two launches, and what that does to the plan."""

from __future__ import annotations

import json as jsonlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.errors import EXIT_CONFIG, ConfigError, RllaunchError, UsageError
from rllaunch.flags import take_flags, unknown_flag
from rllaunch.pipeline import Launch, plugins_of
from rllaunch.plan.choose import Candidate, Unknown, plan_launch
from rllaunch.plan.handoff import TIERS
from rllaunch.plugins import Plugins
from rllaunch.resolve.origins import Origin, show_value
from rllaunch.resolve.profiles import KINDS, Profile, flatten, nearest_profile
from rllaunch.resolve.resolve import Layer, Request, Setting, known_keys, resolve
from rllaunch.resolve.secrets import HIDDEN, is_secret
from rllaunch.units import gib

if TYPE_CHECKING:
    from typer._click import Context

app = command_app()
# A launch without prompts has a plan all the same.
TASK_RULE = "RL333"
EXIT_DIFFERENT = 1
# What makes a launch of a profile by itself.
REST = {
    "hardware": ("model.name", "--model qwen3-4b"),
    "task": ("model.name", "--model qwen3-4b"),
    "model": ("hardware.name", "--hardware H100"),
}
_TIER_NAMES = {"gpu": "GPU peak", "host": "host peak"}


class DiffCommand(LaunchCommand):
    """A command whose arguments may be launches, written as flags in one word: `'--model dsv4 --hardware GB300'`."""

    def parse_args(self, ctx: Context, args: list[str]) -> list[str]:
        # A space before it makes an argument of what would be taken for a flag.
        return super().parse_args(ctx, [f" {word}" if _is_launch(word) else word for word in args])


def _is_launch(word: str) -> bool:
    """Whether a word is flags with their values; one flag with a value that has spaces (`--data=my file`) is none."""
    first, *others = word.split() or [""]
    return first.startswith("--") and bool(others) and ("=" not in first or any(o.startswith("--") for o in others))


@dataclass(frozen=True)
class Side:
    """One of the two: its values by key, each with the origin that decided it, and its plan if it is a whole launch.

    Args:
        text: as it was asked for.
        no_plan: why there is none; empty where there is one.
        kind: of a profile by itself; empty for a launch.
    """

    text: str
    values: Mapping[str, Origin]
    plan: Candidate | None = None
    no_plan: str = ""
    kind: str = ""


@app.command(cls=DiffCommand)
def diff(
    ctx: typer.Context,
    a: Annotated[str, typer.Argument(metavar="A", help="Profile, run directory, TOML file, or '--model X …'.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, of the other launch.")],
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if they differ.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Changed keys and both plans as JSON.")] = False,
) -> None:
    """What differs between two launches: keys with both origins, and what it does to the plan.

    Flags stand for both, below what each says itself: rllaunch diff H100 H200 --model qwen3-30b-a3b.
    """
    common = request_of(ctx)
    plugins = plugins_of(common)
    sides = [_side(text.strip(), common, plugins) for text in (a, b)]
    _check_alike(*sides)
    changed = list(_changed(*sides))
    if json:
        console.data_json(_to_json(sides, changed))
    else:
        _show(sides, changed)
    if exit_code and changed:
        raise typer.Exit(EXIT_DIFFERENT)


# -- from a word to a launch ---------------------------------------------------------------------------


def _side(text: str, common: Request, plugins: Plugins) -> Side:
    try:
        if _is_launch(text):
            return _launch_side(text, _from_flags(text, common), plugins)
        path = Path(text).expanduser()
        if path.is_dir() or path.name == "config.json":
            return _run_side(text, path if path.is_dir() else path.parent, common, plugins)
        if path.suffix == ".toml" or path.is_file():
            return _launch_side(text, replace(common, config_files=(*common.config_files, path)), plugins)
        profile = _profile(text, plugins)
        if profile.kind in REST and not _names(common, REST[profile.kind][0]):
            return _profile_side(text, profile)
        own = tuple(Setting(key, name, text) for key, name in _naming(profile))
        return _launch_side(text, replace(common, flags=(*common.flags, *own)), plugins)
    except RllaunchError as err:
        raise type(err)(err.what, (f"in {text}", *err.where), err.fix) from None


def _from_flags(text: str, common: Request) -> Request:
    try:
        words = shlex.split(text)
    except ValueError as err:
        raise UsageError(f"not a launch: {err}", text, "write it as in a shell: '--model X --hardware Y'") from None
    settings, files, rest = take_flags(words)
    if rest and rest[0].startswith("--"):
        raise unknown_flag(rest[0], [])
    if rest:
        raise UsageError(f"{rest[0]!r} belongs to no flag", "", "write it as in a shell: '--model X --hardware Y'")
    files_of_both = (*common.config_files, *files)
    return replace(common, config_files=files_of_both, flags=(*common.flags, *settings))


def _names(request: Request, key: str) -> bool:
    """Whether flags, a file or the environment may say what a profile leaves open."""
    is_flag = any(setting.key == key for setting in request.flags)
    return is_flag or bool(request.config_files) or f"RLLAUNCH_{key.replace('.', '__').upper()}" in request.environ


def _check_alike(a: Side, b: Side) -> None:
    """
    Raises:
        UsageError: profiles of two kinds, or a profile by itself beside a whole launch.
    """
    if a.kind == b.kind:
        return
    alone = a if a.kind else b
    if a.kind and b.kind:
        raise UsageError(f"{a.text} is a {a.kind} profile, {b.text} a {b.kind} profile", "", "compare two of a kind")
    raise UsageError(f"{alone.text} alone is no launch", "", f"name the rest, such as {REST[alone.kind][1]}")


def _profile(text: str, plugins: Plugins) -> Profile:
    store = plugins.profiles()
    found = []
    for kind in KINDS:
        try:
            found.append(store.get(kind, text, "diff"))
        except ConfigError as err:
            if not err.what.startswith("unknown"):
                raise
    if len(found) == 1:
        return found[0]
    if found:
        kinds = " and ".join(profile.kind for profile in found)
        raise UsageError(f"{text!r} is {kinds}", "", f"say which: '--{found[0].kind} {text} …'")
    hint = nearest_profile(text, store.profiles)
    raise UsageError(
        f"{text!r} is no profile, no run directory and no file",
        "",
        hint or "or write a launch as one word: '--model X --hardware Y'",
    )


def _naming(profile: Profile) -> list[tuple[str, str]]:
    if profile.kind == "cell":
        return [("model.name", profile.model), ("hardware.name", profile.hardware)]
    return [(f"{profile.kind}.name", profile.name)]


def _profile_side(text: str, profile: Profile) -> Side:
    """A profile by itself: what it holds, what it inherits included."""
    layer = f"{profile.kind} profile"
    origins = {
        k: Origin(v.value, layer, f"{profile.name} ({profile.plugin}) {v.place}") for k, v in profile.values.items()
    }
    no_plan = f"no plan: a {profile.kind} profile alone is no launch; name the rest, such as {REST[profile.kind][1]}"
    return Side(text, origins, no_plan=no_plan, kind=profile.kind)


def _run_side(text: str, directory: Path, common: Request, plugins: Plugins) -> Side:
    """A run as it was started: its config, and the origins it kept. The environment of today is none of its layers."""
    from rllaunch.run.record import kept_origins

    file = directory / "config.json"
    try:
        saved = jsonlib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no run in {directory}", str(file), "name the directory of a run") from None
    except (OSError, ValueError) as err:
        raise ConfigError(f"the run's config cannot be read: {err}", str(file), "restore the file") from None
    if not isinstance(saved, dict) or "model_type" in saved or not isinstance(saved.get("model"), dict):
        fix = f"write '--model {directory} --hardware …'" if "model_type" in saved else "name the directory of a run"
        raise ConfigError(f"{file} is not the config of a run", "", fix)
    base = Layer("run", tuple(Setting(k, v, str(file)) for k, v in flatten(saved) if v != {}))
    side = _launch_side(text, replace(common, base=base, environ={}), plugins)
    kept = kept_origins(directory)
    return replace(side, values={k: kept.get(k, o) if o.layer == "run" else o for k, o in side.values.items()})


def _launch_side(text: str, request: Request, plugins: Plugins) -> Side:
    made = Launch(plugins, resolve(request, plugins)).decided()
    resolved = made.resolved
    leaves = dict(flatten(resolved.config.model_dump(mode="json")))
    values = {key: replace(resolved.origin(key), value=value) for key, value in leaves.items()}
    for key, origin in values.items():
        if is_secret(key, origin.value):
            text = text.replace(str(origin.value), HIDDEN)
    wrong = [f for f in made.findings(probe=False) if f.exit_code == EXIT_CONFIG and f.code != TASK_RULE]
    if wrong:
        return Side(
            text, values, no_plan=f"no plan: {wrong[0].message} ({wrong[0].code}; `rllaunch doctor` has it all)"
        )
    choice = plan_launch(resolved)
    if isinstance(choice, Unknown):
        return Side(text, values, no_plan=f"no plan: {choice.what}")
    return Side(text, values, choice.taken)


# -- what differs --------------------------------------------------------------------------------------


def _changed(a: Side, b: Side) -> Iterator[tuple[str, Origin | None, Origin | None]]:
    """Keys that have another value, in the order of the schema; None where a side does not have the key."""
    order = {key: place for place, key in enumerate(known_keys())}
    for key in sorted({**a.values, **b.values}, key=lambda k: (order.get(_home(k, order), len(order)), k)):
        one, other = a.values.get(key), b.values.get(key)
        if one is None or other is None or one.value != other.value:
            yield key, one, other


def _home(key: str, known: Mapping[str, int]) -> str:
    """The key of the schema that `key` is, or lies in."""
    while key not in known and "." in key:
        key = key.rpartition(".")[0]
    return key


def _to_json(sides: list[Side], changed: list[tuple[str, Origin | None, Origin | None]]) -> dict[str, Any]:
    a, b = sides
    return {
        "a": a.text,
        "b": b.text,
        "changed": [
            {"key": key, "a": _origin_json(key, one), "b": _origin_json(key, other)} for key, one, other in changed
        ],
        "plan": {"a": _plan_json(a), "b": _plan_json(b)},
    }


def _origin_json(key: str, origin: Origin | None) -> dict[str, Any] | None:
    if origin is None:
        return None
    shown = origin.shown(key)
    return {"value": shown.value, "layer": shown.layer, "source": shown.source}


def _plan_json(side: Side) -> dict[str, Any]:
    if side.plan is None:
        return {"why_not": side.no_plan}
    row = side.plan.plan.to_json()
    del row["steps"]
    return row | {"optimizer_cpu_offload": side.plan.optimizer_cpu_offload}


def _show(sides: list[Side], changed: list[tuple[str, Origin | None, Origin | None]]) -> None:
    a, b = sides
    for key, one, other in changed:
        console.data(key)
        console.data(f"  - {_line(key, one)}")
        console.data(f"  + {_line(key, other)}")
    if a.plan is not None and b.plan is not None:
        rows = [(what, one, other if other != one else "the same") for what, one, other in _plan_rows(a.plan, b.plan)]
        console.print_table(("plan", f"- {a.text}", f"+ {b.text}"), rows)
    else:
        for side in sides:
            if side.no_plan:
                console.say(f"note: {side.text}: {side.no_plan}")
    keys = f"{len(changed)} key{'' if len(changed) == 1 else 's'} changed"
    console.say(f"{a.text} → {b.text}: {keys if changed else 'the same launch'}")


def _line(key: str, origin: Origin | None) -> str:
    if origin is None:
        return "not there"
    shown = origin.shown(key)
    value = shown.value if is_secret(key, origin.value) else show_value(shown.value)
    return f"{value}   {shown.layer}: {shown.source}" if shown.layer != "default" else f"{value}   {shown.source}"


def _plan_rows(a: Candidate, b: Candidate) -> Iterator[tuple[str, str, str]]:
    def row(what: str, *texts: str) -> tuple[str, str, str]:
        return what, texts[0], texts[1]

    both = (a, b)
    yield row("fits", *(_fits(c) for c in both))
    yield row("handoff", *(c.label for c in both))
    for tier in TIERS:
        peaks = [gib(c.plan.peak(tier)) for c in both]
        limits = [c.plan.limits.of(tier) for c in both]
        texts = [f"{peak} of {'?' if limit is None else gib(limit)}" for peak, limit in zip(peaks, limits, strict=True)]
        moved = b.plan.peak(tier) - a.plan.peak(tier)
        change = f" ({'+' if moved > 0 else '−'}{gib(abs(moved))})" if moved else ""
        yield row(_TIER_NAMES[tier], texts[0], texts[1] + change)
        yield row(
            "  in",
            *(f"{s.name}{' (start-up)' if s.phase == 'init' else ''}" for s in (c.plan.peak_step(tier) for c in both)),
        )
    yield row("handoff s", *(f"{c.plan.seconds:.1f}" for c in both))


def _fits(candidate: Candidate) -> str:
    broken, limits = candidate.plan.first_break, candidate.plan.limits
    if broken is None:
        unknown = [told for told, limit in (("a GPU", limits.gpu), ("the host", limits.host)) if limit is None]
        return "yes" if not unknown else f"not known: no limit of {' and '.join(unknown)}"
    return f"no: {broken.step} is {gib(broken.excess)} over on the {'GPU' if broken.tier == 'gpu' else 'host'}"
