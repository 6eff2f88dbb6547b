"""`rllaunch resolve`: the launch as it resolves, every value with the layer that decided it."""

from __future__ import annotations

from typing import Annotated

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.pipeline import launch, plugin_findings, resolved_json
from rllaunch.resolve.origins import show_value
from rllaunch.resolve.secrets import HIDDEN, is_secret

app = command_app()


@app.command(cls=LaunchCommand)
def resolve(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="config, origins and command as JSON.")] = False,
    all_keys: Annotated[bool, typer.Option("--all", help="Keys at their schema default too.")] = False,
) -> None:
    """Show the launch: every value and the layer that decided it.

    Layers, lowest first: schema default, model profile, hardware profile, cell, task, --config,
    environment RLLAUNCH_SECTION__KEY, flags.
    """
    resolved = launch(request_of(ctx))
    if json:
        console.data_json(resolved_json(resolved))
        return
    rows = []
    for key, origins in resolved.resolved.origins.items():
        origin = origins[-1]
        if origin.layer != "default" or all_keys:
            hidden = is_secret(key, origin.value)
            value = HIDDEN if hidden else show_value(origin.value)
            source = origin.source.replace(str(origin.value), HIDDEN) if hidden else origin.source
            rows.append((key, value, origin.layer, source))
    console.print_table(("key", "value", "layer", "source"), rows)
    for finding in plugin_findings(resolved.plugins):
        console.say(f"warning[{finding.code}]: {finding.message}")
