"""`rllaunch train`: resolve, check, and run the training loop under Ray."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.commands.rehearsal import play
from rllaunch.doctor.engine import exit_code, render
from rllaunch.doctor.finding import Finding
from rllaunch.doctor.rules.run_dir import check_run_dir
from rllaunch.errors import EXIT_CONFIG, EXIT_INTERRUPTED, RllaunchError, UsageError
from rllaunch.pipeline import Launch, launch, only_here, resolved_json, soundness
from rllaunch.resolve.checkpoint import why_random
from rllaunch.resolve.resolve import Request, Setting
from rllaunch.resolve.secrets import HIDDEN, is_secret_name
from rllaunch.run.data import load_task

app = command_app()


@app.command(cls=LaunchCommand)
def train(
    ctx: typer.Context,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Start nothing: show schedule, environment, command, what this machine lacks."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir from its last checkpoint.")
    ] = False,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Play the launch in small on this machine: same schedule, same limits.")
    ] = False,
    rehearse_ranks: Annotated[
        int, typer.Option("--rehearse-ranks", min=1, max=2, help="Ranks and engines of a rehearsal.")
    ] = 1,
    json: Annotated[bool, typer.Option("--json", help="End with one summary object on stdout.")] = False,
) -> None:
    """Resolve, check, then run the training loop under Ray.

    The last line on stdout is the run directory. Ctrl-C ends everything that was started; --resume
    goes on from the last checkpoint with the same results.
    """
    request = request_of(ctx)
    if rehearse and (resume or dry_run):
        other = "--resume" if resume else "--dry-run"
        raise UsageError(f"--rehearse and {other} exclude each other", "", f"leave out {other}")
    if resume:
        request = _resumed(request)
    made = launch(request).decided()
    config = made.config
    if resume:
        from rllaunch.run.record import refuse_changes

        backend = made.plugins.backends("trainer").get(config.trainer.backend)
        any_layout = backend is not None and backend.loads_any_layout
        if moved := refuse_changes(Path(config.run.run_dir).expanduser(), config, any_layout=any_layout):
            console.say("note: resumed on another layout, so not to the bit:\n  " + "\n  ".join(moved))
            if any(text.startswith("rollout.") for text in moved):
                console.say("note: engines of another number or size may draw other samples")
    findings = made.findings(probe=False)
    if rehearse:
        # Whether it fits is what the rehearsal shows.
        if any(f.exit_code == EXIT_CONFIG for f in findings):
            _show(made, findings, dry_run)
            raise typer.Exit(EXIT_CONFIG)
        play(made, rehearse_ranks, as_json=json)
        return
    lacking: list[Finding] | None = None
    if not exit_code(findings):
        # The machine is looked at once the configuration is sound: only then is it known what it must have.
        looked = made.findings(probe=True)
        if resume:
            looked = [f for f in looked if f.code != "RL504"] + check_run_dir(made.resolved, resume=True)
        if dry_run:
            lacking = only_here(looked, findings)
            findings += [f for f in looked if f.level != "error" and f not in findings]
            findings += made.task_findings()
        else:
            findings = looked
    if dry_run or exit_code(findings):
        if json:
            console.data_json(_dry_json(made, findings, lacking))
        else:
            _show(made, findings, dry_run, lacking or ())
        raise typer.Exit(exit_code(findings))
    if findings:
        console.say(render(findings))
    console.say(_headline(made))
    if not resume and (why := why_random(made.resolved)):
        console.say(f"random weights: {why}")
    from rllaunch.run.signals import interruptible
    from rllaunch.run.start import longest_prompt, start

    run_dir = Path("")
    summary: dict[str, object] = {"status": "failed"}
    try:
        with interruptible():
            # Before there is a directory: a run that cannot start leaves none behind.
            data = load_task(made.resolved)
            for warning in data.warnings:
                console.say(f"warning: {warning}")
            longest = longest_prompt(config, data)
            run_dir = Path(config.run.run_dir).expanduser() if config.run.run_dir else _default_run_dir(made)
            summary["run_dir"] = str(run_dir)
            start(
                made.plugins,
                made.resolved,
                made.schedule(),
                data,
                longest,
                run_dir,
                made.environment(),
                {k: v for k, v in resolved_json(made).items() if k != "config"},
                summary,
                resume=resume,
                say=console.say,
            )
    except RllaunchError as err:
        if run_dir.parts:
            # Of a run that never saved, what failed would fail again.
            has_saved = any((run_dir / "checkpoints").glob("rollout_*"))
            go_on = f"; go on with: {_go_on(made, run_dir)}" if has_saved else ""
            console.say(f"the run is in {run_dir}{go_on}")
        if json:
            console.data_json(summary | {"status": "failed", "error": err.what}, one_line=True)
            err.told = True
        elif run_dir.parts:
            console.data(str(run_dir))
        raise
    except KeyboardInterrupt as err:
        if json:
            console.data_json(summary | {"status": "interrupted"}, one_line=True)
        go_on = f"; go on with: {_go_on(made, run_dir)}" if run_dir.parts else ""
        console.say(f"interrupted ({str(err) or 'SIGINT'}){go_on}")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    console.say(_verdict(summary))
    if json:
        console.data_json(summary, one_line=True)
    else:
        console.data(str(run_dir))


def _resumed(request: Request) -> Request:
    from rllaunch.run.record import saved_layer

    given = [s for s in request.flags if s.key == "run.run_dir"]
    if named := request.environ.get("RLLAUNCH_RUN__RUN_DIR"):
        given.insert(0, Setting("run.run_dir", named, "RLLAUNCH_RUN__RUN_DIR"))
    if not given:
        raise UsageError("--resume needs the run's directory", "--resume", "name it with --run-dir DIR")
    hardware = [str(s.value) for s in request.flags if s.key == "hardware.name"]
    if named := request.environ.get("RLLAUNCH_HARDWARE__NAME"):
        hardware.insert(0, named)
    base = saved_layer(Path(str(given[-1].value)).expanduser(), hardware[-1] if hardware else "")
    return replace(request, base=base)


def _default_run_dir(made: Launch) -> Path:
    from rllaunch.run.record import default_run_dir

    return default_run_dir(made.config, datetime.now())


def _headline(made: Launch) -> str:
    config, options = made.config, made.schedule().options
    slots = f"{config.cluster.num_nodes} × {config.cluster.num_gpus_per_node} {config.hardware.name}"
    who = f"{config.trainer.backend} trainer, {config.rollout.backend} rollout"
    algorithm = config.algorithm.advantage_estimator + (
        f" + LoRA {config.algorithm.lora_rank}" if config.has_lora else ""
    )
    backup = f", {options.buffers} backup" if options.offload_train else ""
    update = ", update from the host" if options.order == "gpu" and not options.updates_awake else ""
    handoff = f"{options.order} order, engine weights {options.weights_mode}{backup}{update}"
    borrowed = f"; your prompts, the reward of task {config.task.name}" if _is_own(made) else ""
    return f"{config.model.name} on {slots}: {algorithm}, {who}; handoff in {handoff}{borrowed}"


def _is_own(made: Launch) -> bool:
    """Whether prompts come from the user and the reward from a task's profile: easily not what was meant."""
    prompts, reward = made.resolved.origin("task.prompt_data"), made.resolved.origin("task.reward")
    return prompts.layer in ("config", "env", "flag") and reward.layer == "task"


def _show(made: Launch, findings: Sequence[Finding], dry_run: bool, lacking: Sequence[Finding] = ()) -> None:
    """One screen: what was resolved, what it would do, and what is missing.

    Args:
        lacking: for what this machine would refuse a launch that is only looked at.
    """
    errors = [f for f in findings if f.level == "error"]
    if findings:
        console.tinted_data(render(findings))
        console.data("")
    if any(f.exit_code == 3 for f in errors):
        where = f"{made.config.model.name} on {made.config.hardware.name}"
        console.say(f"{where}: {_count(errors, 'error')}, nothing was started")
        return
    console.data(_headline(made))
    for kind, origin in made.resolved.profiles.items():
        console.data(f"  {kind:<9} {origin}")
    schedule = made.schedule()
    console.data("schedule")
    console.data("  start-up  " + " → ".join(str(s) for s in schedule.init))
    console.data("  cycle     " + " → ".join(str(s) for s in schedule.cycle))
    if dry_run:
        console.data("environment")
        for name, value in _shown_environment(made).items():
            console.data(f"  {name}={value}")
        console.data("command")
        console.data("  " + shlex.join(made.command()))
        if lacking:
            console.data("this machine")
            for finding in lacking:
                console.data(f"  {finding.code}  {finding.message.splitlines()[0]}")
            ends = f"`rllaunch train` would end with {exit_code(lacking)}"
            console.say(f"note: on this machine {ends}; `rllaunch doctor` with the same flags says what to do")
        console.say("dry run: nothing was started" + (f", {soundness(findings)}" if not errors else ""))
    else:
        missing = _count(errors, "thing")
        console.say(f"{missing} missing, nothing was started; --dry-run shows command and environment")


def _shown_environment(made: Launch) -> dict[str, str]:
    return {name: HIDDEN if is_secret_name(name) else value for name, value in made.environment().items()}


def _go_on(made: Launch, run_dir: Path) -> str:
    return shlex.join(["rllaunch", "train", "--resume", "--run-dir", str(run_dir), *made.profile_dir_flags])


def _count(things: Sequence[object], name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _dry_json(made: Launch, findings: Sequence[Finding], lacking: Sequence[Finding] | None) -> dict[str, object]:
    errors = [f for f in findings if f.level == "error"]
    answer: dict[str, object] = {
        "ok": not errors,
        "findings": [f.to_json() for f in findings],
        "command": made.command(),
    }
    if lacking is not None:
        answer["this_machine"] = [f.to_json() for f in lacking]
    if not any(f.exit_code == 3 for f in errors):
        answer |= {"environment": _shown_environment(made), "schedule": made.schedule().to_json()}
    return answer


def _verdict(summary: dict[str, object]) -> str:
    rollouts = summary["rollouts"]
    parts = [f"finished {rollouts} rollout{'' if rollouts == 1 else 's'}"]
    if "worst_plan_ratio" not in summary:
        return f"{parts[0]} already; --num-rollout N goes on"
    for key, label in (
        ("reward_mean", "reward"),
        ("exact_match", "exact match"),
        ("eval_exact_match", "held-out exact match"),
    ):
        value = summary.get(key)
        if isinstance(value, float):
            parts.append(f"{label} {value:.3f}")
    ranges = summary["plan_ratio_ranges"]
    assert isinstance(ranges, dict), "the loop reports ratios"
    if all(ratio == 1.0 for ends in ranges.values() for ratio in ends):
        parts.append("memory as planned, to the byte")
    else:
        told = (
            f"{ranges[tier][0]:.2f} to {ranges[tier][1]:.2f} on the {name}"
            for tier, name in (("gpu", "GPU"), ("host", "host"))
            if tier in ranges
        )
        parts.append(f"measured ÷ planned {', '.join(told)}")
    return ", ".join(parts)
