"""`rllaunch export`: a launch as the command line of another program."""

from __future__ import annotations

import shlex
from typing import Annotated, Any

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.doctor.engine import render
from rllaunch.errors import EXIT_CONFIG, PluginError, RllaunchError, UsageError, did_you_mean
from rllaunch.export import Export, Exporter
from rllaunch.installing import plugin
from rllaunch.pipeline import Launch, launch
from rllaunch.plugins import PluginInfo, load_plugins
from rllaunch.resolve.origins import Origin
from rllaunch.resolve.secrets import HIDDEN, is_secret

app = command_app()
# Whoever exports may have prompts of their own there.
TASK_RULE = "RL333"
HOW_TO_GET_ONE = f"plugins bring them: {plugin('rllaunch-miles')} brings miles"

Targets = dict[str, tuple[PluginInfo, Exporter]]


@app.command(cls=LaunchCommand)
def export(
    ctx: typer.Context,
    to: Annotated[str, typer.Option("--to", metavar="NAME", help="The program that is to take the launch.")] = "",
    list_targets: Annotated[bool, typer.Option("--list", help="List what plugins can export to.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Arguments, environment and what is left out as JSON.")] = False,
) -> None:
    """Show a launch as another program's command line.

    What that program has no option for is listed with the reason, never dropped. Findings about memory are told
    and do not stop it: they are about rllaunch's own handoff.
    """
    if list_targets:
        _list(load_plugins().exporters(), json)
        return
    if not to:
        targets = load_plugins().exporters()
        known = ", ".join(f"--to {name}" for name in targets)
        raise UsageError("export needs a target", "--to NAME", known or HOW_TO_GET_ONE)
    made = launch(request_of(ctx)).decided()
    targets = made.plugins.exporters()
    if to not in targets:
        hint = did_you_mean(to, targets) if targets else HOW_TO_GET_ONE
        raise UsageError(f"no plugin exports to {to!r}", f"--to {to}", hint)
    errors = [f for f in made.findings(probe=False) if f.level == "error" and f.code != TASK_RULE]
    if any(f.exit_code == EXIT_CONFIG for f in errors):
        if json:
            console.data_json({"ok": False, "findings": [f.to_json() for f in errors]})
        else:
            console.tinted_data(render(errors))
        raise typer.Exit(EXIT_CONFIG)
    if errors:
        console.say(render(errors))
    made_of_it = _exported(made, *targets[to])
    if json:
        console.data_json(_to_json(made, to, made_of_it))
        return
    _show(made, to, made_of_it)


def _exported(made: Launch, info: PluginInfo, exporter: Exporter) -> Export:
    where = f"--to {exporter.name}, module {info.module}"
    fix = "update or uninstall the plugin"
    try:
        answer = exporter.export(made.resolved, made.environment({}))
    except RllaunchError:
        raise
    except (Exception, SystemExit) as err:
        what = f"plugin {info.label} failed to export: {type(err).__name__}: {err}"
        raise PluginError(what, where, fix) from err
    if not isinstance(answer, Export):
        raise PluginError(f"plugin {info.label} exported {type(answer).__name__}, which is no Export", where, fix)
    return answer


def _list(targets: Targets, json: bool) -> None:
    rows = [(name, exporter.description, info.label) for name, (info, exporter) in targets.items()]
    if json:
        console.data_json([dict(zip(("name", "description", "plugin"), row, strict=True)) for row in rows])
    elif rows:
        console.print_table(("target", "what it is", "from"), rows)
    else:
        console.say(f"no plugin exports to anything; {HOW_TO_GET_ONE}")


def _origin(made: Launch, key: str) -> Origin:
    return made.resolved.origin(key).shown(key)


def _to_json(made: Launch, to: str, exported: Export) -> dict[str, Any]:
    left_out = [
        {
            "key": item.key,
            "value": HIDDEN if is_secret(item.key, item.value) else item.value,
            "reason": item.reason,
            "origin": _origin(made, item.key).source,
        }
        for item in exported.left_out
    ]
    return {
        "target": to,
        "program": list(exported.program),
        "substitutions": list(exported.substitutions),
        "arguments": [word for option in exported.arguments for word in option],
        "environment": dict(exported.environment),
        "left_out": left_out,
        "notes": list(exported.notes),
    }


def _show(made: Launch, to: str, exported: Export) -> None:
    """A script for a shell on stdout; what is not in it on stderr."""
    for name, value in exported.environment.items():
        console.data(f"export {name}={shlex.quote(value)}")
    lines = [shlex.join(exported.program), *exported.substitutions, *map(shlex.join, exported.arguments)]
    console.data(" \\\n  ".join(lines))
    for item in exported.left_out:
        console.say(f"left out: {made.resolved.describe(item.key)}\n  {item.reason}")
    for note in exported.notes:
        console.say(f"note: {note}")
    config = made.config
    slots = f"{config.cluster.num_nodes} × {config.cluster.num_gpus_per_node} {config.hardware.name}"
    counts = f"{len(exported.arguments)} options, {len(exported.environment)} variables"
    console.say(f"{config.model.name} on {slots} for {to}: {counts}, {len(exported.left_out)} left out")
