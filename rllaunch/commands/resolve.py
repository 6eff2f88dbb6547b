"""`rllaunch resolve`: the launch as it resolves, every value with the layer that decided it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.pipeline import Launch, launch, plugin_findings, resolved_json
from rllaunch.resolve.origins import Origin, Resolved, show_value
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.resolve.secrets import HIDDEN, is_secret

app = command_app()


@app.command(cls=LaunchCommand)
def resolve(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="config, origins and command as JSON.")] = False,
    all_keys: Annotated[bool, typer.Option("--all", help="Keys at their schema default too.")] = False,
) -> None:
    """Show the launch: every value and the layer that decided it, as TOML that --config takes.

    What the memory plan takes for `auto` stands below it as a comment, so that it stays open in the file.

    Layers, lowest first: schema default, model profile, hardware profile, cell, task, --config,
    environment RLLAUNCH_SECTION__KEY, flags.
    """
    made = launch(request_of(ctx))
    taken = _taken(made)
    if json:
        shown = {key: {"value": o.value, "layer": o.layer, "source": o.source} for key, o in taken.items()}
        console.data_json(resolved_json(made) | {"decided": shown})
        return
    console.data(as_toml(made.resolved, taken, all_keys=all_keys))
    for finding in plugin_findings(made.plugins):
        console.say(f"warning[{finding.code}]: {finding.message}")


def _taken(made: Launch) -> Mapping[str, Origin]:
    """What the memory plan takes where the launch leaves it open, by key; empty where it cannot be planned."""
    decided = made.decided().resolved.origins
    return {key: given[-1] for key, given in decided.items() if given != made.resolved.origins.get(key)}


def as_toml(resolved: Resolved, taken: Mapping[str, Origin], *, all_keys: bool = False) -> str:
    """The launch as a TOML file for `--config`, who set each value behind it as a comment.

    Args:
        taken: by key what the plan decided; a comment below what was set.
    """
    lines: dict[str, list[str]] = {}
    for key in [*resolved.origins, *(key for key in taken if key not in resolved.origins)]:
        origin = resolved.origin(key)
        table, _, name = key.rpartition(".")
        if origin.layer != "default" or all_keys:
            hidden = is_secret(key, origin.value)
            text = f"{name} = {HIDDEN if hidden else show_value(origin.value)}"
            unset = "# " if origin.value is None or hidden else ""
            lines.setdefault(table, []).append(f"{unset}{text:<44}  # {origin.layer}: {origin.shown(key).source}")
        if key in taken:
            text = f"# {name} = {show_value(taken[key].value)}"
            lines.setdefault(table, []).append(f"{text:<44}  # {taken[key].layer}: {taken[key].source}")
    ordered = sorted(lines, key=lambda table: list(LaunchConfig.model_fields).index(table.partition(".")[0]))
    return "\n\n".join("\n".join([f"[{table}]", *lines[table]]) for table in ordered)
