"""`rllaunch profiles list|show`: the profiles of all plugins, with the source of every fact."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from rllaunch import console
from rllaunch.commands import command_app
from rllaunch.errors import ConfigError, UsageError, did_you_mean
from rllaunch.pipeline import plugin_findings
from rllaunch.plugins import load_plugins
from rllaunch.resolve.origins import show_value
from rllaunch.resolve.profiles import KINDS, Profile, nearest_profile

app = command_app()


@app.callback()
def profiles() -> None:
    """List and show hardware, model, task and cell profiles."""


@app.command("list")
def list_profiles(
    kind: Annotated[str, typer.Option("--kind", help=f"Only one kind: {', '.join(KINDS)}.")] = "",
    json: Annotated[bool, typer.Option("--json", help="The list as JSON.")] = False,
) -> None:
    """List the profiles."""
    if kind and kind not in KINDS:
        raise UsageError(f"unknown kind {kind!r}", "--kind", did_you_mean(kind, KINDS))
    found = load_plugins()
    chosen = [p for k in KINDS if kind in ("", k) for p in found.profiles().of_kind(k)]
    if json:
        console.data_json([_summary(p) for p in chosen])
        return
    rows = [(p.kind, p.name, ", ".join(p.aliases), p.description, p.plugin) for p in chosen]
    console.print_table(("kind", "name", "also called", "what it is", "from"), rows)
    for finding in plugin_findings(found):
        console.say(f"warning[{finding.code}]: {finding.message}")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="Name or alias of a profile.")],
    kind: Annotated[str, typer.Option("--kind", help="When several kinds have that name.")] = "",
    json: Annotated[bool, typer.Option("--json", help="The profile as JSON.")] = False,
) -> None:
    """Show one profile: facts with their source, choices, verified cells."""
    profile = _find(name, kind)
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


def _find(name: str, kind: str) -> Profile:
    store = load_plugins().profiles()
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
    raise ConfigError(f"unknown profile {name!r}", "", hint or "`rllaunch profiles list` shows them all")


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
