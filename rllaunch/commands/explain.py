"""`rllaunch explain KEY`: what a key means and who set it, layer by layer."""

from __future__ import annotations

from typing import Annotated

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.errors import UsageError
from rllaunch.flags import launch_flags
from rllaunch.pipeline import Launch, launch
from rllaunch.resolve.origins import Origin, show_value
from rllaunch.resolve.resolve import NoModelError, find_key, known_keys
from rllaunch.resolve.schema import LaunchConfig, descriptions

app = command_app()


@app.command(cls=LaunchCommand)
def explain(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(help="section.key, a bare key, or a flag's name without its dashes.")],
    json: Annotated[bool, typer.Option("--json", help="key, value and origins as JSON.")] = False,
) -> None:
    """Who set a key, layer by layer (highest first), and what it means.

    What a launch leaves to `auto` is told as the memory plan takes it. Without --model: what the key means.
    """
    key = find_key(key.replace("-", "_"))
    try:
        origins = _origins(launch(request_of(ctx)), key)
    except NoModelError:
        if key not in known_keys():
            raise
        section, _, name = key.partition(".")
        default = LaunchConfig().model_dump(mode="json")[section][name]
        origins = (Origin(default, "default", "schema default"),)
        console.say("note: no model is named; with --model NAME it says who sets the key")
    origins = tuple(o.shown(key) for o in origins)
    if json:
        rows = [{"value": o.value, "layer": o.layer, "source": o.source} for o in origins]
        console.data_json({"key": key, "value": origins[-1].value, "origins": rows})
        return
    last = origins[-1]
    console.data(f"{key} = {show_value(last.value)}   {last.layer}: {last.source}")
    for origin in reversed(origins[:-1]):
        console.data(f"  over {show_value(origin.value)}   {origin.layer}: {origin.source}")
    if meaning := descriptions().get(key):
        console.data(f"  {meaning}")
    if flag := next((f for f in launch_flags().values() if f.key == key), None):
        name = f"{flag.name}, --no-{flag.name[2:]}" if flag.is_bool else f"{flag.name} {flag.metavar}"
        console.data(f"  flag: {name}")


def _origins(made: Launch, key: str) -> tuple[Origin, ...]:
    """Who set the key, lowest first, and on top what the memory plan takes where it is left open."""
    from rllaunch.plan.choose import DECIDABLE

    resolved = made.decided().resolved if key in DECIDABLE else made.resolved
    origins = resolved.origins.get(key)
    if origins is None:
        if key.startswith(("megatron.", "sglang.", "env.", "model.architecture.")):
            raise UsageError(f"nobody sets {key}", "", "it passes through; set it with --set")
        return (Origin(resolved.value(key), "default", "schema default"),)
    return origins
