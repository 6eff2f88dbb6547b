"""`rllaunch profiles list|show`: the profiles of all plugins, with the source of every fact."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rllaunch import console
from rllaunch.commands import command_app
from rllaunch.errors import ConfigError, UsageError, did_you_mean
from rllaunch.pipeline import plugin_findings
from rllaunch.plugins import Plugins, load_plugins
from rllaunch.resolve.origins import show_value
from rllaunch.resolve.profiles import KINDS, Profile, nearest_profile
from rllaunch.resolve.user_dirs import profile_dirs

app = command_app()
ProfileDirs = Annotated[
    list[Path] | None,
    typer.Option("--profile-dir", metavar="DIR", help="Folder of profiles of your own; repeatable."),
]


@app.callback()
def profiles() -> None:
    """List and show hardware, model, task and cell profiles."""


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


def _plugins(given: list[Path] | None) -> Plugins:
    return load_plugins(profile_dirs=profile_dirs(given or [], os.environ))


def _from(found: Plugins, profile: Profile) -> str:
    """The plugin; for a profile of the user's its file and how that was found."""
    is_users = profile.plugin in {d.origin for d in found.profile_dirs}
    return f"{profile.place} ({profile.plugin})" if is_users else profile.plugin


def _find(plugins: Plugins, name: str, kind: str) -> Profile:
    store = plugins.profiles()
    kinds = [k for k in KINDS if kind in ("", k)]
    matches = []
    for k in kinds:
        try:
            matches.append(store.get(k, name, "profiles show"))
        except ConfigError as err:
            if not err.what.startswith("unknown"):
                raise
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(f"{name!r} is {' and '.join(p.kind for p in matches)}", "", "say which with --kind")
    hint = nearest_profile(name, [p for p in store.profiles if p.kind in kinds])
    unusable = [f"{p.where[0]}: {p.what}" for p in store.problems_of(name)]
    raise ConfigError(f"unknown profile {name!r}", unusable, hint or "`rllaunch profiles list` shows them all")


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
