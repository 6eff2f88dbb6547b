"""`rllaunch train --rehearse`: the launch in small, and what it showed beside the plan."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from rllaunch import console
from rllaunch.errors import EXIT_INTERRUPTED, ConfigError, FitError, RunError
from rllaunch.pipeline import Launch, resolved_json
from rllaunch.plan.choose import Choice, Unknown, plan_launch, told_break
from rllaunch.units import gib

if TYPE_CHECKING:
    from rllaunch.run.rehearse import Rehearsal, Row

# Its own task: one that a shrunk model reads character by character, whatever the launch's own needs.
TASK = "reverse"
REPORT = "report this with what `rllaunch plan --json` prints"


def play(made: Launch, ranks: int, *, as_json: bool) -> None:
    """Rehearse a launch and print its timeline; exit code 4 if it broke a limit, as the launch would."""
    choice = plan_launch(made.resolved)
    if isinstance(choice, Unknown):
        raise ConfigError(f"the launch cannot be planned, so not rehearsed: {choice.what}", choice.where, choice.fix)
    from rllaunch.run.rehearse import CYCLES, in_small
    from rllaunch.run.signals import interruptible

    plan = choice.taken.plan
    config = made.config
    console.say(
        f"rehearsing {config.model.name} on {config.cluster.num_nodes} × {config.cluster.num_gpus_per_node} "
        f"{config.hardware.name} in small: {choice.taken.label}"
    )
    summary: dict[str, Any] = {"status": "failed"}
    run_dir, refused = Path(""), None
    try:
        with interruptible():
            rehearsal = in_small(made.resolved, plan, _task(made), ranks)
            console.say(
                f"  {config.model.architecture['model_type']} shrunk, {ranks} rank{'s' if ranks > 1 else ''}, {CYCLES} "
                f"cycles; a byte here stands for {1 / rehearsal.ratio:,.0f}"
            )
            run_dir = _run_dir(made)
            summary["run_dir"] = str(run_dir)
            try:
                _start(made, rehearsal, run_dir, summary)
            except FitError as err:
                refused = err
    except KeyboardInterrupt as err:
        console.say(f"interrupted ({str(err) or 'SIGINT'})")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _tell(choice, rehearsal, run_dir, refused, summary, as_json=as_json)


def _start(made: Launch, rehearsal: Rehearsal, run_dir: Path, summary: dict[str, Any]) -> None:
    from rllaunch.run.data import load_task
    from rllaunch.run.start import longest_prompt, start

    data = load_task(rehearsal.resolved)
    start(
        made.plugins,
        rehearsal.resolved,
        rehearsal.schedule,
        data,
        longest_prompt(rehearsal.config, data),
        run_dir,
        made.environment(),
        {k: v for k, v in resolved_json(made).items() if k != "config"},
        summary,
        resume=False,
        say=console.say,
    )


def _task(made: Launch) -> dict[str, Any]:
    profile = made.plugins.profiles().get("task", TASK, "the rehearsal")
    directory = profile.directory or Path()
    return {
        key: str(directory / value.value) if key.endswith("prompt_data") else value.value
        for key, value in profile.values.items()
    } | {"task.name": TASK}


def _run_dir(made: Launch) -> Path:
    from rllaunch.run.record import default_run_dir

    named = made.config.run.run_dir
    return Path(named).expanduser() if named else default_run_dir(made.config, datetime.now())


def _tell(
    choice: Choice,
    rehearsal: Rehearsal,
    run_dir: Path,
    refused: FitError | None,
    summary: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    from rllaunch.run.rehearse import timeline

    rows = timeline(run_dir, rehearsal)
    broken = rehearsal.expected
    if as_json:
        told = None if broken is None else {"phase": broken.phase, "step": broken.step, "tier": broken.tier}
        steps = [vars(row) for row in rows]
        answer = summary | {"rehearsed": True, "fits": refused is None, "first_break": told, "steps": steps}
        console.data_json(answer, one_line=True)
    else:
        _print(rows)
        console.data(str(run_dir))
    _compare(choice, rehearsal, run_dir, refused)


def _compare(choice: Choice, rehearsal: Rehearsal, run_dir: Path, refused: FitError | None) -> None:
    """Whether the rehearsal ended as the plan says; whatever it did otherwise is worth more than the plan."""
    from rllaunch.run.rehearse import broke_at

    broken = rehearsal.expected
    if refused is None and broken is None:
        console.say(f"the rehearsal ran through: {choice.taken.label} fits, as the plan says")
        return
    foretold = "nothing" if broken is None else f"{broken.step} ({broken.phase})"
    if refused is None:
        raise RunError("the rehearsal ran through, the plan says otherwise", f"plan: {foretold} breaks", REPORT)
    phase, step = broke_at(run_dir, rehearsal)
    if broken is None or (broken.phase, broken.step) != (phase, step):
        raise RunError(
            f"the rehearsal broke in {step} ({phase}), the plan says {foretold}", [refused.what, *refused.where], REPORT
        )
    number = 1 if broken.tier == "host" else 2
    console.say(f"error[RL20{number}]: does not fit: {told_break(broken, choice.taken.plan.limits)}")
    console.say(f"  rehearsed: {refused.what}")
    console.say("hint: `rllaunch doctor` says what would free how much")
    raise typer.Exit(refused.exit_code)


def _print(rows: list[Row]) -> None:
    table = []
    phase = ""
    for row in rows:
        begins = {"init": "start-up"}.get(row.phase, row.phase) if row.phase != phase else ""
        phase = row.phase
        measured = [gib(row.gpu), gib(row.planned_gpu), gib(row.host), gib(row.planned_host)]
        table.append([begins, row.step, *measured, f"{row.seconds * 1000:.0f} ms"])
    columns = ["", "step", "GPU rehearsed", "planned", "host rehearsed", "planned", "took here"]
    console.print_table(columns, table, "Start-up and the last cycle, scaled back to full size")
