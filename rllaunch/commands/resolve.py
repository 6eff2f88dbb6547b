"""`rllaunch resolve`: the launch as it resolves, every value with the layer that decided it."""

from __future__ import annotations

from typing import Annotated

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.pipeline import launch, plugin_findings, resolved_json
from rllaunch.resolve.origins import Resolved, show_value
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

    Layers, lowest first: schema default, model profile, hardware profile, cell, task, --config,
    environment RLLAUNCH_SECTION__KEY, flags.
    """
    resolved = launch(request_of(ctx))
    if json:
        console.data_json(resolved_json(resolved))
        return
    console.data(as_toml(resolved.resolved, all_keys=all_keys))
    for finding in plugin_findings(resolved.plugins):
        console.say(f"warning[{finding.code}]: {finding.message}")


def as_toml(resolved: Resolved, *, all_keys: bool = False) -> str:
    """The launch as a TOML file for `--config`, who set each value behind it as a comment."""
    lines: dict[str, list[str]] = {}
    for key, origins in resolved.origins.items():
        origin = origins[-1]
        if origin.layer == "default" and not all_keys:
            continue
        table, _, name = key.rpartition(".")
        hidden = is_secret(key, origin.value)
        text = f"{name} = {HIDDEN if hidden else show_value(origin.value)}"
        unset = "# " if origin.value is None or hidden else ""
        lines.setdefault(table, []).append(f"{unset}{text:<44}  # {origin.layer}: {origin.shown(key).source}")
    ordered = sorted(lines, key=lambda table: list(LaunchConfig.model_fields).index(table.partition(".")[0]))
    return "\n\n".join("\n".join([f"[{table}]", *lines[table]]) for table in ordered)
