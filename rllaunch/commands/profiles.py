"""`rllaunch profiles list|show|new|check|detect`: what there is with the source of every fact, and making one's own."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rllaunch import console
from rllaunch.commands import command_app
from rllaunch.errors import ConfigError, UsageError, did_you_mean
from rllaunch.pipeline import plugin_findings
from rllaunch.plugins import Plugins, load_plugins
from rllaunch.resolve.origins import show_value
from rllaunch.resolve.profiles import FIND, KINDS, Profile, Value, nearest_profile
from rllaunch.resolve.resolve import Setting, typed, value_of
from rllaunch.resolve.template import SCHEMA_FILE, UNSOURCED, fact_keys, profile_text
from rllaunch.resolve.user_dirs import LOCAL, config_dir, is_found, profile_dirs

if TYPE_CHECKING:
    from rllaunch.conformance import Checked

app = command_app()
ProfileDirs = Annotated[
    list[Path] | None,
    typer.Option("--profile-dir", metavar="DIR", help="Folder of profiles of your own; repeatable."),
]


@app.callback(no_args_is_help=True)
def profiles() -> None:
    """List, show, make and check profiles: hardware, models, tasks and cells (a model on a hardware)."""


@app.command("list")
def list_profiles(
    kind: Annotated[str, typer.Option("--kind", help=f"Only one kind: {', '.join(KINDS)}.")] = "",
    profile_dir: ProfileDirs = None,
    json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
) -> None:
    """List the profiles, and where each comes from.

    First what ships and what plugins bring, then your own: of --profile-dir, of RLLAUNCH_PROFILE_DIR, of ./profiles,
    and of the platform's config folder. A name belongs to whoever has it first.
    """
    if kind and kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}", "--kind", did_you_mean(kind, KINDS))
    found = _plugins(profile_dir)
    chosen = [p for k in KINDS if kind in ("", k) for p in found.profiles().of_kind(k)]
    if json:
        console.data_json([_summary(p) for p in chosen])
        return
    rows = [(p.kind, p.name, ", ".join(p.aliases), p.description, _from(found, p)) for p in chosen]
    console.print_table(("kind", "name", "also called", "what it is", "from"), rows)
    for finding in plugin_findings(found):
        console.say("\n  ".join([f"warning[{finding.code}]: {finding.message}", *finding.origins]))


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name or alias of a profile.")],
    kind: Annotated[str, typer.Option("--kind", help="When several kinds have that name.")] = "",
    profile_dir: ProfileDirs = None,
    json: Annotated[bool, typer.Option("--json", help="The profile as JSON.")] = False,
) -> None:
    """Show one profile: facts with their source, choices, verified cells."""
    profile = _find(_plugins(profile_dir), name, kind)
    if json:
        values = {k: {"value": v.value, "place": v.place, "source": v.fact_source} for k, v in profile.values.items()}
        console.data_json(_summary(profile) | {"values": values, "verified": list(profile.verified)})
        return
    extends = f", extends {profile.extends}" if profile.extends else ""
    console.data(
        f"{profile.kind} {profile.name}   {profile.description}\n  {profile.place} ({profile.plugin}){extends}"
    )
    facts = [(k, show_value(v.value), v.fact_source) for k, v in profile.values.items() if v.fact_source]
    choices = [(k, show_value(v.value), v.place) for k, v in profile.values.items() if not v.fact_source]
    if facts:
        console.print_table(("fact", "value", "source"), facts)
    if choices:
        console.print_table(("choice", "value", "where"), choices)
    if profile.verified:
        columns = list(dict.fromkeys(key for row in profile.verified for key in row))
        rows = [[str(row.get(c, "")) for c in columns] for row in profile.verified]
        console.print_table(columns, rows, "verified")


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(help="What --hardware will call the machine.")],
    base: Annotated[str, typer.Option("--from", metavar="NAME", help="Hardware profile to extend.")] = "",
    fact: Annotated[
        list[str] | None, typer.Option("--fact", metavar="KEY=VALUE", help="A fact, 180GiB for bytes; repeatable.")
    ] = None,
    source: Annotated[str, typer.Option("--source", help="Where the facts are from.")] = "",
    description: Annotated[str, typer.Option("--description", help="One line for the list.")] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Default: ./profiles, else the config folder."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    profile_dir: ProfileDirs = None,
    json: Annotated[bool, typer.Option("--json", help="The name and the file as JSON.")] = False,
) -> None:
    """Write a hardware profile to fill in: every fact with its unit and how to find it out.

    It goes to ./profiles if there is such a folder, else to the config folder. It asks nothing. The path is the only
    line on stdout.
    """
    plugins = _plugins(profile_dir)
    store = plugins.profiles()
    extended = store.get("hardware", base, f"--from {base}") if base else None
    facts = dict(_fact_of(text) for text in fact or [])
    file = output or _default_file(name)
    text = profile_text(
        _free_name(name, plugins, file),
        description=description or (f"{extended.name}, as ours are" if extended else "TODO: one line"),
        source=source or UNSOURCED,
        base=extended,
        facts=facts,
    )
    _write(file, text, force, tell=not json)
    if json:
        console.data_json({"name": name, "file": str(file)})
    console.say(f"fill it in, then: rllaunch profiles check {shlex.quote(str(file))}")
    _tell_where(file)


@app.command("check")
def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of profiles, or files.", metavar="NAME|FILE…")
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help="When several kinds have that name.")] = "",
    every: Annotated[bool, typer.Option("--all", help="All profiles there are.")] = False,
    profile_dir: ProfileDirs = None,
    json: Annotated[bool, typer.Option("--json", help="ok, profiles and findings as JSON.")] = False,
) -> None:
    """Is a profile in order? Keys, units, the chain it extends, plausible facts; launches with it resolve and plan.

    A hardware profile is tried with three models of different kinds, a model on three machines, a cell and a task as
    they are. Exit code: 0 in order; 3 not.
    """
    if bool(names) == every:
        raise UsageError("name the profiles to check, or --all", "", "rllaunch profiles check NAME|FILE")
    from rllaunch.conformance import check_profile
    from rllaunch.doctor.engine import exit_code, render

    plugins = _plugins(profile_dir)
    if every:
        checked = [check_profile(p, plugins) for p in plugins.profiles().profiles]
    else:
        found = [_checked(name, kind, plugins) for name in names or []]
        checked = list({(c.kind, c.name, c.place): c for c in found}.values())
    others = plugin_findings(plugins) if every else []
    findings = [*(f for c in checked for f in c.findings), *others]
    if json:
        ok = not any(f.level == "error" for f in findings)
        told = [f.to_json() | {"profile": c.name} for c in checked for f in c.findings]
        told += [f.to_json() | {"profile": None} for f in others]
        console.data_json({"ok": ok, "profiles": [c.to_json() for c in checked], "findings": told})
        raise typer.Exit(exit_code(findings))
    if findings:
        console.tinted_data(render(findings))
    for c in checked:
        console.say(_verdict(c, with_launches=not every))
    raise typer.Exit(exit_code(findings))


@app.command("detect")
def detect(
    write: Annotated[
        Path | None, typer.Option("--write", metavar="FILE", help="The profile's file; without it, it is printed.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Time copies, pinned pages and the disk too: a minute or so.")
    ] = False,
    measure_mib: Annotated[
        int | None, typer.Option("--measure-mib", min=1, metavar="MIB", help="MiB that each measurement moves.")
    ] = None,
    name: Annotated[str, typer.Option("--name", help="What --hardware will call it; else the file's name.")] = "",
    base: Annotated[
        str, typer.Option("--from", metavar="NAME", help="Hardware profile to extend; else the one that fits.")
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    profile_dir: ProfileDirs = None,
    json: Annotated[bool, typer.Option("--json", help="What was seen and measured, as JSON.")] = False,
) -> None:
    """Read this machine into a hardware profile: GPUs, links, host memory, NUMA, disk, each fact with its source.

    What cannot be read or measured here is said in the file, and never guessed silently.
    """
    from rllaunch.commands.detection import detected

    if measure_mib and not measure:
        raise UsageError("--measure-mib says how much --measure moves", f"--measure-mib {measure_mib}", "add --measure")
    plugins = _plugins(profile_dir)
    if base:
        plugins.profiles().get("hardware", base, f"--from {base}")
    if write is not None:
        _refuse_to_write(write, force)
    name = name or (write.stem if write is not None else "") or "this-machine"
    name = _free_name(name, plugins, write)
    seen = detected(name, base, plugins, measures=measure, mib=measure_mib)
    if json:
        console.data_json(seen.to_json())
    elif write is None:
        console.data(seen.text.rstrip())
    for sentence in seen.missing:
        console.say(f"note: {sentence}")
    if write is not None:
        file = _write(write, seen.text, force, tell=not json)
        console.say(f"look through it, then: rllaunch profiles check {shlex.quote(str(file))}")
        _tell_where(file)


def _checked(name: str, kind: str, plugins: Plugins) -> Checked:
    from rllaunch.conformance import check_file, check_profile, check_unusable

    if name.endswith(".toml") or "/" in name:
        return check_file(Path(name).expanduser(), plugins)
    try:
        own = _find(plugins, name, kind, merged=False)
    except ConfigError:
        if not (unusable := check_unusable(name, plugins)):
            raise
        return unusable
    return check_profile(own, plugins)


def _verdict(checked: Checked, *, with_launches: bool) -> str:
    """One line; where it is in order also which trial launches want more than the profiles give by themselves."""
    what = f"{checked.kind} {checked.name} ({checked.place})".lstrip()
    if checked.errors:
        return f"{what}: {checked.errors} error{'s' if checked.errors > 1 else ''}"
    other = "hardware" if checked.kind == "model" else "model"
    sorted_out: dict[bool, list[str]] = {True: [], False: []}
    for tried in checked.launches:
        sorted_out[bool(tried.fits)].append(getattr(tried, other))
    told = [f"{', '.join(sorted_out[True])} as it is"] if sorted_out[True] else []
    told += [f"{', '.join(sorted_out[False])} with more nodes or a layout of its own"] if sorted_out[False] else []
    return f"{what}: in order" + (f"; tried and planned: {'; '.join(told)}" if told and with_launches else "")


def _fact_of(text: str) -> tuple[str, Value]:
    key, equals, value = text.partition("=")
    key = key.strip().removeprefix("hardware.")
    where = f"--fact {text}"
    if not equals:
        raise UsageError(f"--fact {text!r} is not KEY=VALUE", where, "--fact host_memory_bytes=1TiB")
    if key not in fact_keys():
        raise ConfigError(f"there is no fact {key!r}", where, did_you_mean(key, fact_keys()))
    return key, Value(value_of(typed(Setting(f"hardware.{key}", value.strip(), where, text=True))), where)


def _free_name(name: str, plugins: Plugins, file: Path | None) -> str:
    """The name, if nobody has it but the profile in the file that is to be written."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
        raise UsageError(f"{name!r} cannot be a profile's name", "NAME", "letters, digits, and . _ + - after the first")
    for taken in plugins.profiles().of_kind("hardware"):
        if file and taken.directory and (taken.directory / Path(taken.place).name).resolve() == file.resolve():
            continue
        if name.casefold() in {n.casefold() for n in (taken.name, *taken.aliases)}:
            where = f"{taken.place} ({taken.plugin})"
            fix = f"another name; `--from {taken.name}` extends it"
            if taken.plugin in {d.origin for d in plugins.profile_dirs}:
                fix += f"; `-o {shlex.quote(taken.place)} --force` writes that file anew"
            raise ConfigError(f"hardware profile name {name!r} is taken", where, fix)
    return name


def _default_file(name: str) -> Path:
    return (LOCAL if LOCAL.is_dir() else config_dir()) / f"{name}.toml"


def _refuse_to_write(file: Path, force: bool) -> None:
    if file.suffix != ".toml":
        raise UsageError(f"a profile's file ends in .toml: {file}", "", f"name it {file}.toml")
    if file.exists() and not force:
        raise ConfigError(f"the file is there already: {file}", "", "--force overwrites it; or name another file")


def _write(file: Path, text: str, force: bool, *, tell: bool = True) -> Path:
    """Write a profile, and its schema for editors beside it."""
    import json

    from rllaunch.resolve.json_schema import profile_schema

    _refuse_to_write(file, force)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        (file.parent / SCHEMA_FILE).write_text(json.dumps(profile_schema(), indent=1) + "\n", encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"cannot write {file}: {err.strerror}", "", "name a file in a folder of yours") from err
    if tell:
        console.data(str(file))
    return file


def _tell_where(file: Path) -> None:
    if not is_found(file, os.environ):
        folder = shlex.quote(str(file.parent))
        console.say(f"note: --hardware finds it with --profile-dir {folder}, or once it lies in ./profiles")


def _plugins(given: list[Path] | None) -> Plugins:
    return load_plugins(profile_dirs=profile_dirs(given or [], os.environ))


def _from(found: Plugins, profile: Profile) -> str:
    """The plugin; for a profile of the user's its file and how that was found."""
    is_users = profile.plugin in {d.origin for d in found.profile_dirs}
    return f"{profile.place} ({profile.plugin})" if is_users else profile.plugin


def _find(plugins: Plugins, name: str, kind: str, *, merged: bool = True) -> Profile:
    """By name or alias, of whichever kind has it; unless `merged`, without what it extends."""
    store = plugins.profiles()
    kinds = [k for k in KINDS if kind in ("", k)]
    matches = []
    for k in kinds:
        try:
            found = next(p for p in store.of_kind(k) if name.casefold() in {n.casefold() for n in (p.name, *p.aliases)})
        except StopIteration:
            continue
        matches.append(store.get(k, name, "profiles show") if merged else found)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{name!r} is {' and '.join(p.kind for p in matches)}", "", "say which with --kind")
    hint = nearest_profile(name, [p for p in store.profiles if p.kind in kinds])
    hint = hint or "`rllaunch profiles list` shows them all"
    raise ConfigError(f"unknown profile {name!r}", store.why_not(name), f"{hint} ({FIND})")


def _summary(profile: Profile) -> dict[str, Any]:
    return {
        "kind": profile.kind,
        "name": profile.name,
        "aliases": list(profile.aliases),
        "description": profile.description,
        "plugin": profile.plugin,
        "place": profile.place,
        "extends": profile.extends,
    }
