"""`rllaunch doctor`: every finding about a launch at once."""

from __future__ import annotations

from typing import Annotated

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.doctor.engine import exit_code, render
from rllaunch.doctor.explain import explain
from rllaunch.errors import UsageError
from rllaunch.pipeline import launch, soundness
from rllaunch.plan.choose import NO_VERDICT, Unknown, plan_launch, way_to_limits
from rllaunch.plugins import load_plugins

app = command_app()


@app.command(cls=LaunchCommand)
def doctor(
    ctx: typer.Context,
    json: Annotated[bool, typer.Option("--json", help="ok and findings as JSON.")] = False,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Look at this machine and the cluster too.")] = True,
    gpu_test: Annotated[
        bool, typer.Option("--gpu-test", help="Run the tests that need a GPU too (seconds to minutes).")
    ] = False,
    code: Annotated[
        str | None, typer.Option("--explain", metavar="CODE", help="What a rule is and why; needs no launch.")
    ] = None,
) -> None:
    """Would it run? Every finding at once.

    Exit code: 0 it would; 3 the configuration is invalid; 4 it does not fit; 5 the machine or the
    cluster lacks something.
    """
    if code is not None:
        if gpu_test or not probe or request_of(ctx).flags or request_of(ctx).config_files:
            raise UsageError("--explain looks at no launch", fix="leave out the other flags, except --json")
        explained = explain(code, load_plugins().rules())
        if json:
            console.data_json(explained.to_json())
        else:
            console.data(explained.text())
        return
    if gpu_test and not probe:
        raise UsageError("--gpu-test and --no-probe exclude each other", fix="leave one of them out")
    made = launch(request_of(ctx)).decided()
    findings = made.findings(probe=probe, gpu_test=gpu_test) + (made.task_findings() if probe else [])
    errors = [f for f in findings if f.level == "error"]
    if json:
        console.data_json({"ok": not errors, "findings": [f.to_json() for f in findings]})
    else:
        if findings:
            console.tinted_data(render(findings))
        config = made.config
        slots = f"{config.cluster.num_nodes} × {config.cluster.num_gpus_per_node}"
        where = f"{config.model.name} on {slots} {config.hardware.name}"
        verdict = f"{len(errors)} error{'s' if len(errors) != 1 else ''}" if errors else "would run"
        hint = ""
        if not errors and not probe:
            verdict = f"{soundness(findings)} (this machine was not looked at)"
            choice = plan_launch(made.resolved)
            hint = "" if isinstance(choice, Unknown) else way_to_limits(made.resolved, choice.taken.plan.limits)
            verdict += f"; {NO_VERDICT}" if hint else ""
        console.say(f"{where}: {verdict}")
        if hint:
            console.say(f"hint: {hint}")
    raise typer.Exit(exit_code(findings))
