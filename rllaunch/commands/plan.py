"""`rllaunch plan`: will it fit? Bytes of every step, both orders, and what else there is."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from rllaunch import console
from rllaunch.commands import LaunchCommand, command_app, request_of
from rllaunch.doctor.engine import render
from rllaunch.doctor.rules.fits import is_sound
from rllaunch.errors import EXIT_CONFIG, EXIT_DOES_NOT_FIT, ConfigError, UsageError
from rllaunch.pipeline import launch, plugin_findings
from rllaunch.plan.choose import (
    NO_VERDICT,
    Candidate,
    Choice,
    Unknown,
    architecture_of,
    plan_launch,
    verdict,
    way_to_limits,
)
from rllaunch.plan.fit import FitAnswer
from rllaunch.plan.fit import fit as search
from rllaunch.plan.forecast import MemoryPlan, PlannedStep, name_of, update_speed
from rllaunch.plan.handoff import TIERS, HandoffOptions, Tier
from rllaunch.resolve.origins import Origin, Resolved
from rllaunch.units import count, gib

app = command_app()
# Of what else there is; the rest is in --json.
MOST_ROWS = 12
# Of the node counts that are too few: the first, and those before what fits.
MOST_COUNTS = 4
TASK_RULE = "RL333"
LAYOUT_RULES = ("RL31", "RL32")
_TIER_NAMES = {"gpu": "a GPU", "host": "a node's host"}


@app.command(cls=LaunchCommand)
def plan(
    ctx: typer.Context,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it, as .svg or .png.")] = None,
    fit: Annotated[bool, typer.Option("--fit", help="How few nodes, and which layout? Plans every legal one.")] = False,
    max_nodes: Annotated[int, typer.Option("--max-nodes", min=1, help="With --fit: how far to look.")] = 64,
    here: Annotated[
        bool, typer.Option("--here", help="Take the limits of this machine where they are lower than the profile's.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The plan as data.")] = False,
) -> None:
    """Will it fit? GPU and host memory of every step, before anything is booked.

    Start-up and one cycle in the order that is taken and in the other, each with its peaks, limits and
    the first step that breaks one. Exit code 4 if it does not fit.
    """
    if fit and plot is not None:
        raise UsageError("--plot draws one plan, --fit looks at many", f"--plot {plot}", "one of the two")
    made = launch(request_of(ctx))
    for finding in plugin_findings(made.plugins):
        console.say("\n  ".join([f"{finding.level}[{finding.code}]: {finding.message}", *finding.origins]))
    if here:
        made = replace(made, resolved=_here(made.resolved))
    if fit:
        _fit(made.resolved, max_nodes, json)
        return
    # Of a launch that cannot be, no bytes: what is wrong with it comes first.
    # What it trains on takes no memory.
    if wrong := [f for f in made.findings(probe=False) if f.exit_code == EXIT_CONFIG and f.code != TASK_RULE]:
        if json:
            console.data_json({"ok": False, "findings": [f.to_json() for f in wrong]})
        else:
            console.tinted_data(render(wrong))
            nodes = made.config.cluster.num_nodes
            if any(f.code.startswith(LAYOUT_RULES) for f in wrong):
                console.say(
                    f"hint: `rllaunch plan --fit --num-nodes {nodes}` looks for a layout on as many nodes or more"
                )
        raise typer.Exit(EXIT_CONFIG)
    choice = plan_launch(made.resolved)
    if isinstance(choice, Unknown):
        raise ConfigError(f"the launch cannot be planned: {choice.what}", choice.where, choice.fix)
    if plot is not None:
        from rllaunch.plan.picture import draw

        draw(_heading(made.resolved, choice), [_picture(c, c is choice.taken) for c in shown(choice)], plot)
        console.say(f"drawn: {plot}")
    if json:
        console.data_json(_to_json(choice) | {"link": _link_json(made.resolved)})
    else:
        _show(made.resolved, choice)
    if not choice.fits:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _here(resolved: Resolved) -> Resolved:
    """The launch with what a job may use on this machine, where that is less than what the profile says."""
    from rllaunch.resolve.limits import gpu_limits, host_limit

    host, gpus = host_limit(), gpu_limits()
    seen: dict[str, tuple[int, str]] = {}
    if host is not None:
        seen["hardware.host_memory_bytes"] = (host.bytes, f"this machine: {host.source}")
    if any(gpus):
        seen["hardware.gpu_memory_bytes"] = (min(gpus), "this machine: the driver")
    values, origins = resolved.config.hardware, dict(resolved.origins)
    for key, (found, source) in seen.items():
        stated = resolved.value(key)
        if stated is None or found < stated:
            values = values.model_copy(update={key.partition(".")[2]: found})
            origins[key] = (*origins.get(key, ()), Origin(found, "derived", source))
    config = resolved.config.model_copy(update={"hardware": values})
    return replace(resolved, config=config, origins=origins)


def shown(choice: Choice) -> list[Candidate]:
    """What was taken, and the best of the other order."""
    order = choice.taken.plan.options.order
    other = [c for c in choice.others if c.plan.options.order != order]
    same = [c for c in choice.others if c.plan.options.order == order]
    return [choice.taken, *(other or same)[:1]]


def _to_json(choice: Choice) -> dict[str, Any]:
    alternatives = []
    for other in choice.others:
        row = other.plan.to_json()
        del row["steps"], row["parameters"], row["limits"]
        alternatives.append(row | {"optimizer_cpu_offload": other.optimizer_cpu_offload, "why_not": other.why_not})
    return choice.taken.plan.to_json() | {"alternatives": alternatives}


def _heading(resolved: Resolved, choice: Choice) -> str:
    config = resolved.config
    nodes, gpus = config.cluster.num_nodes, config.cluster.num_gpus_per_node
    parameters = count(choice.taken.plan.sizes.parameters)
    return f"{config.model.name} ({parameters} parameters) on {nodes} × {gpus} {config.hardware.name}"


def _show(resolved: Resolved, choice: Choice) -> None:
    taken = choice.taken
    console.data(f"{_heading(resolved, choice)}: {verdict(taken.plan)}")
    console.data(f"  {taken.label}")
    for told in _told_speeds(resolved, taken.plan.options):
        console.data(f"  {told}")
    rows = []
    for tier in TIERS:
        limit, step, room = taken.plan.limits.of(tier), taken.plan.peak_step(tier), taken.plan.headroom(tier)
        rows.append(
            [
                _TIER_NAMES[tier],
                gib(step.total(tier)),
                "not known" if limit is None else gib(limit),
                "" if room is None else f"{room:.1%}",
                _step(step),
                _parts(step, tier),
            ]
        )
    console.print_table(["of", "peak", "limit", "free", "in", "of which"], rows)
    from rich.columns import Columns

    tables = [_steps(candidate, candidate is taken) for candidate in shown(choice)]
    console.stdout_console().print(Columns(tables, padding=(0, 4)))
    if sys.stdout.isatty():
        from rllaunch.plan.picture import in_terminal

        width = shutil.get_terminal_size().columns
        console.stdout_console().print(in_terminal([_picture(taken, True)], width))
    if choice.others:
        rows = [
            [c.label, gib(c.plan.peak("gpu")), gib(c.plan.peak("host")), f"{c.plan.seconds:.1f}", c.why_not]
            for c in choice.others
        ]
        title = "What else there is"
        console.print_table(["", "GPU", "host", "handoff s", "why not"], rows[:MOST_ROWS], title)
        if len(rows) > MOST_ROWS:
            console.data(f"… and {len(rows) - MOST_ROWS} more: --json has them all")
    if resolved.config.hardware.host_link_bytes_per_second is None and resolved.config.trainer.backend != "embedded":
        console.say("note: the profile states no link to the host that is known; the seconds are of PCIe Gen4")
    if resolved.config.rollout.rollout_max_context_len is None and resolved.config.trainer.backend != "embedded":
        console.say("note: prompts are not counted in samples: set --rollout-max-context-len")
    for note in taken.plan.sizes.notes:
        console.say(f"note: {note}")
    if not choice.fits:
        nodes = resolved.config.cluster.num_nodes
        console.say(
            "hint: `rllaunch doctor` says what would free how much; "
            f"`rllaunch plan --fit --num-nodes {nodes}` looks for a layout on as many nodes or more"
        )
    if hint := way_to_limits(resolved, taken.plan.limits):
        console.say(f"hint: {hint}")


# What the seconds of a plan come from, and what a person calls it.
_SPEEDS = {"hardware.host_link_bytes_per_second": "host link", "hardware.host_pin_bytes_per_second": "fresh pages"}


def _told_speeds(resolved: Resolved, options: HandoffOptions) -> list[str]:
    """`host link 55.3 GB/s (measured …)`: the speeds that the seconds come from, and who says so; none where no
    seconds are of a machine."""
    told = []
    for key, name in _SPEEDS.items():
        rate, origin = resolved.value(key), resolved.origin(key)
        if rate is not None and resolved.config.trainer.backend != "embedded":
            told.append(f"{name} {rate / 1e9:.1f} GB/s ({origin.fact_source or origin.source})")
    if not told:
        return []
    speed = update_speed(resolved.config, options).value
    return ["; ".join(told), f"updates {speed / 1e9:.1f} GB/s (assumed, as on one H200)"]


def _link_json(resolved: Resolved) -> dict[str, Any]:
    origin = resolved.origin("hardware.host_link_bytes_per_second")
    source = origin.fact_source or origin.source
    return {"bytes_per_second": origin.value, "source": source, "measured": origin.is_measured}


def _steps(candidate: Candidate, is_taken: bool) -> Any:
    """The steps of one schedule as a table; ✗ at the first that breaks a limit."""
    plan = candidate.plan
    broken = plan.first_break
    rows, phase = [], ""
    for index, step in enumerate(plan.steps):
        mark = "✗" if broken and index == broken.index else ""
        seconds = f"{step.seconds:.1f}" if step.seconds and step.seconds >= 0.05 else ""
        begins = {"init": "start-up"}.get(step.phase, step.phase) if step.phase != phase else ""
        phase = step.phase
        rows.append([begins, mark, step.name, gib(step.total("gpu")), gib(step.total("host")), seconds])
    title = f"{candidate.label} ({'taken' if is_taken else 'the other order'})"
    return console.table(["", "", "step", "GPU", "host", "s"], rows, title)


def _parts(step: PlannedStep, tier: Tier) -> str:
    parts = sorted((step.gpu if tier == "gpu" else step.host).items(), key=lambda item: -item[1])
    return ", ".join(f"{name_of(name, tier)} {gib(size)}" for name, size in parts[:4])


def _step(step: PlannedStep) -> str:
    return f"{step.name} (start-up)" if step.phase == "init" else step.name


def _picture(candidate: Candidate, is_chosen: bool) -> Any:
    from rllaunch.plan.picture import PlanPicture, StepPicture

    plan = candidate.plan
    broken = plan.first_break
    return PlanPicture(
        candidate.label,
        [StepPicture(s.phase, s.name, _regions(s, "gpu"), _regions(s, "host")) for s in plan.steps],  # type: ignore[arg-type]
        plan.limits.gpu,
        plan.limits.host,
        broken.index if broken else None,
        is_chosen,
    )


# What stands beside the regions in every step, drawn as one.
_STATIC = {"trainer_residual", "engine_residual", "nccl", "processes", "distributed", "update_heap", "object_store"}


def _regions(step: PlannedStep, tier: Tier) -> dict[str, int]:
    """Regions by name, and what is always there as one."""
    parts = step.gpu if tier == "gpu" else step.host
    moving = {name: size for name, size in parts.items() if name not in _STATIC}
    return moving | {"static": sum(size for name, size in parts.items() if name in _STATIC)}


def _fit(resolved: Resolved, max_nodes: int, json: bool) -> None:
    answer = search(resolved, architecture_of(resolved), max_nodes=max_nodes, is_sound=is_sound)
    if json:
        console.data_json(
            {
                "found": [
                    {"nodes": f.layout.nodes, "layout": f.layout.label, "flags": f.flags, **_summary(f.candidate)}
                    for f in answer.found
                ],
                "smaller": [{"nodes": nodes, "why_not": why} for nodes, why in answer.smaller.items()],
                "considered": answer.considered,
            }
        )
    else:
        _show_fit(resolved, answer, max_nodes)
    if not answer.found:
        raise typer.Exit(EXIT_DOES_NOT_FIT)


def _show_fit(resolved: Resolved, answer: FitAnswer, max_nodes: int) -> None:
    name = f"{resolved.config.model.name} on {resolved.config.hardware.name}"
    rows = []
    for fitted in answer.found:
        p, layout = fitted.candidate.plan, fitted.layout
        memory = [text for tier in TIERS for text in (gib(p.peak(tier)), _free(p, tier))]
        rows.append([str(layout.nodes), layout.label, *memory, f"{p.sizes.tokens_in_kv:,}", fitted.candidate.label])
    if rows:
        title = f"{name}: the best of {answer.considered} layouts that were planned"
        console.print_table(["nodes", "layout", "GPU", "free", "host", "free", "KV tokens", "handoff"], rows, title)
        hint = way_to_limits(resolved, answer.found[0].candidate.plan.limits)
        if hint:
            console.data(NO_VERDICT)
            console.say(f"hint: {hint}")
        flags = answer.found[0].flags
        console.data(f"as flags: {flags}" if flags else "the best is the launch's own layout: no flags are needed")
    else:
        console.data(f"{name}: no layout on up to {max_nodes} nodes fits")
    counts = list(answer.smaller.items())
    # The count that was asked for, and those just below what does.
    first, between, last = counts[:1], counts[1 : 1 - MOST_COUNTS], counts[1:][1 - MOST_COUNTS :]
    for nodes, why in first:
        console.data(f"{_nodes(nodes)}: {why}")
    if between:
        also = f"{between[0][0]} to {_nodes(between[-1][0])}" if len(between) > 1 else _nodes(between[0][0])
        console.data(f"{also}: too few too; --json says what each lacks")
    for nodes, why in last:
        console.data(f"{_nodes(nodes)}: {why}")


def _nodes(number: int) -> str:
    return f"{number} node{'s' if number > 1 else ''}"


def _summary(candidate: Candidate) -> dict[str, Any]:
    row = candidate.plan.to_json()
    del row["steps"]
    return row


def _free(plan: MemoryPlan, tier: Tier) -> str:
    room = plan.headroom(tier)
    return "" if room is None else f"{room:.0%}"
