"""`auto`: every legal schedule priced, the fastest that fits taken, and one line on why each other lost.

What a layer set stays as it was set. Open is what says `auto`, and with `colocate_memory_peak_device = auto`
also what nobody set: whether to offload at all, what an engine releases, where the optimizer lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Literal

from rllaunch.errors import ConfigError
from rllaunch.plan.architecture import Architecture, read_architecture
from rllaunch.plan.embedded import NUM_SPECIAL, embedded_sizes, read_prompts
from rllaunch.plan.forecast import Break, Limits, MemoryPlan, forecast, limits_of
from rllaunch.plan.handoff import TIERS, Buffers, HandoffOptions, Order, Tier, UpdateFrom, options_of
from rllaunch.plan.sizes import LaunchSizes, sizes_of
from rllaunch.resolve.origins import Origin, Resolved
from rllaunch.resolve.schema import LaunchConfig, UpdateSource
from rllaunch.units import gib

ORDER = "handoff.colocate_memory_peak_device"
BUFFERS = "handoff.offload_train_buffers"
WEIGHTS = "handoff.engine_weights"
UPDATE_FROM = "handoff.update_weights_from"
OPTIMIZER = "trainer.optimizer_cpu_offload"
# A plan that leaves a smaller share of a limit free is warned of, whatever headroom was asked for.
TIGHT = 0.05


@dataclass(frozen=True)
class Candidate:
    """One way to hand over, priced.

    Args:
        optimizer_cpu_offload: where this candidate's optimizer lives.
        why_not: empty for the one that was taken.
    """

    plan: MemoryPlan
    optimizer_cpu_offload: bool
    why_not: str = ""

    @property
    def label(self) -> str:
        return self.plan.label + (", optimizer on the host" if self.optimizer_cpu_offload else "")


@dataclass(frozen=True)
class Choice:
    """What was taken and what else there was, best first."""

    taken: Candidate
    others: tuple[Candidate, ...]

    @property
    def fits(self) -> bool:
        return self.taken.plan.fits


@dataclass(frozen=True)
class Unknown:
    """Why a launch cannot be planned: what is not known, and where it would stand."""

    what: str
    where: tuple[str, ...] = ()
    fix: str = ""


def plan_launch(resolved: Resolved) -> Choice | Unknown:
    """The launch's plan, with what it leaves open decided; the last answer is kept for the next reader."""
    global _last
    if _last is None or _last[0] is not resolved.config:
        _last = (resolved.config, _plan(resolved))
    return _last[1]


_last: tuple[LaunchConfig, Choice | Unknown] | None = None


def _plan(resolved: Resolved) -> Choice | Unknown:
    config = resolved.config
    if not config.handoff.colocate:
        return Unknown(
            "trainer and engines on GPUs of their own are not planned",
            (resolved.describe("handoff.colocate"),),
            "--colocate plans them in turns on the same GPUs",
        )
    try:
        architecture = architecture_of(resolved)
        return choose(resolved, architecture)
    except ConfigError as err:
        return Unknown(err.what, tuple(err.where), err.fix)


def architecture_of(resolved: Resolved) -> Architecture:
    """
    Raises:
        ConfigError: the facts name no architecture that is known, or leave one open.
    """
    facts = resolved.config.model.architecture
    where = resolved.profiles.get("model", "model.architecture")
    if not facts:
        raise ConfigError(
            "the model has no architecture facts",
            where,
            "set model.architecture, or give --model a directory with a config.json",
        )
    # A character vocabulary decides the size where no checkpoint has one of its own.
    has_own = "vocab_size" in facts and resolved.config.model.hf_checkpoint
    if resolved.config.model.vocabulary and not has_own:
        facts = facts | {"vocab_size": NUM_SPECIAL + len(read_prompts(resolved.config).characters)}
    return read_architecture(facts, where)


def choose(resolved: Resolved, architecture: Architecture, *, compare: bool = True) -> Choice:
    """Price every candidate and take the fastest that fits with the asked headroom.

    Args:
        compare: also price what was not asked for: the other order, updates from elsewhere.
    Raises:
        ConfigError: what was set leaves no legal schedule.

    Where none fits, the one that exceeds its limits least is taken, so that there is something to look at.
    """
    config = resolved.config
    limits = limits_of(config)
    sizes = {on_host: _sizes(config, architecture, on_host) for on_host in _placements(resolved)}

    def priced(options: Iterable[HandoffOptions]) -> list[Candidate]:
        made = [Candidate(forecast(config, o, sizes[h], limits), h) for o in dict.fromkeys(options) for h in sizes]
        return sorted(made, key=lambda candidate: _rank(candidate, headroom))

    headroom = config.handoff.memory_headroom
    asked = config.handoff.update_weights_from
    offered = list(_options(resolved, asked))
    ordered = priced(offered)
    if not ordered:
        reasons = options_of(config).illegal() or ("what was set excludes every schedule",)
        where = [resolved.describe(key) for key in (ORDER, UPDATE_FROM) if key == ORDER or resolved.is_set(key)]
        raise ConfigError(f"no handoff is legal: {'; '.join(reasons)}", where, "`rllaunch doctor`")
    taken, *others = ordered
    lost = [replace(o, why_not=_why_not(o, taken, headroom)) for o in others]
    set_by = f"{ORDER} is set ({resolved.origin(ORDER).source})"
    for other in priced(_other_order(resolved))[:1] if compare else []:
        lost.append(replace(other, why_not=f"{_why_not(other, taken, headroom)}; not open: {set_by}"))
    if asked != "auto" and config.handoff.colocate_memory_peak_device == "auto" and compare:
        set_by = f"{UPDATE_FROM} is set ({resolved.origin(UPDATE_FROM).source})"
        for other in priced(o for o in _options(resolved, "auto") if o not in offered)[:1]:
            lost.append(replace(other, why_not=f"{_why_not(other, taken, headroom)}; not open: {set_by}"))
    return Choice(taken, tuple(lost))


def _sizes(config: LaunchConfig, architecture: Architecture, on_host: bool) -> LaunchSizes:
    if config.trainer.optimizer_cpu_offload != on_host:
        trainer = config.trainer.model_copy(update={"optimizer_cpu_offload": on_host})
        config = config.model_copy(update={"trainer": trainer})
    if config.trainer.backend == "embedded":
        return embedded_sizes(config, architecture, read_prompts(config))
    return sizes_of(config, architecture)


def _placements(resolved: Resolved) -> list[bool]:
    given = resolved.config.trainer.optimizer_cpu_offload
    is_open = resolved.config.handoff.colocate_memory_peak_device == "auto" and not resolved.is_set(OPTIMIZER)
    return [False, True] if is_open else [given]


def _options(resolved: Resolved, update_from: UpdateSource) -> Iterator[HandoffOptions]:
    """Every legal way that what was set leaves open, with updates from where they are asked for."""
    config, handoff = resolved.config, resolved.config.handoff
    base = options_of(config)
    is_auto = handoff.colocate_memory_peak_device == "auto"

    def left(key: str, value: Any, all_values: Sequence[Any]) -> Sequence[Any]:
        return all_values if is_auto and not resolved.is_set(key) else [value]

    orders: Sequence[Order] = ["cpu", "gpu"] if is_auto else [base.order]
    # Communicators that are to go with the trainer go only if it does.
    may_stay = [] if handoff.offload_train_process_groups else [False]
    trains = left("handoff.offload_train", base.offload_train, [True, *may_stay])
    rollouts = left("handoff.offload_rollout", base.offload_rollout, [True, False])
    both, kv_only = frozenset({"kv_cache", "weight"}), frozenset({"kv_cache"})
    levels = left("handoff.offload_rollout_level", base.level, [both, kv_only])
    # What an update does not send again has to be mirrored; `options_of` knows when that is.
    weights: Sequence[Literal["mirror", "discard"]] = (
        ["mirror", "discard"]
        if handoff.engine_weights == "auto" and base.engine_weights == "discard"
        else [base.engine_weights]
    )
    buffers: Sequence[Buffers] = (
        ["retained", "shared", "fresh"] if handoff.offload_train_buffers == "auto" else [base.buffers]
    )
    for order, train, rollout, level, kept, held in product(orders, trains, rollouts, levels, weights, buffers):
        options = replace(
            base,
            order=order,
            offload_train=train,
            offload_rollout=rollout,
            level=level if rollout else both,
            engine_weights=kept if rollout and "weight" in level else base.engine_weights,
            buffers=held if train else "retained",
        )
        if not (train and rollout) and order == "gpu":
            continue
        yield from _with_sources(options, update_from)


def _with_sources(options: HandoffOptions, asked: UpdateSource) -> Iterator[HandoffOptions]:
    """The legal ways among these where the update reads what is asked for, or anything it can."""
    sources: Sequence[UpdateFrom] = ("gpu", "host") if asked == "auto" else (asked,)
    if not options.offload_train:
        sources = ("gpu",)  # there is no other
    yield from (one for source in sources if not (one := replace(options, update_from=source)).illegal())


def _other_order(resolved: Resolved) -> Iterator[HandoffOptions]:
    """What the order that was not asked for would take, for comparison."""
    if resolved.config.handoff.colocate_memory_peak_device == "auto":
        return
    base = options_of(resolved.config)
    order: Order = "cpu" if base.order == "gpu" else "gpu"
    held = resolved.config.handoff.offload_train_buffers
    buffers: Sequence[Buffers] = ("retained", "shared", "fresh") if held == "auto" else (base.buffers,)
    asked = resolved.config.handoff.update_weights_from if order == "gpu" else "auto"
    for one in buffers:
        yield from _with_sources(replace(base, order=order, buffers=one), asked)


def _rank(candidate: Candidate, headroom: float) -> tuple[Any, ...]:
    """First what fits with headroom, then what fits, then what exceeds least; the faster and the leaner of equals."""
    plan = candidate.plan
    room, _ = least_room(plan)
    if room >= headroom:
        # Of equally fast ones the one with the fewest moves: what stays where it is cannot go wrong.
        moves = sum(step.phase == "cycle" for step in plan.steps)
        return (0, round(candidate.plan.seconds_added, 2), moves, plan.peak("host"), plan.options.order)
    if room >= 0:
        return (1, -round(room, 3), round(candidate.plan.seconds_added, 3), plan.peak("gpu"), plan.options.order)
    return (2, round(_excess(plan), 4), plan.peak("host"), round(plan.seconds_added, 2), plan.options.order)


def _excess(plan: MemoryPlan) -> float:
    """How much a plan exceeds its limits, as shares of both together."""
    return sum(max(0.0, -room) for tier in TIERS if (room := plan.headroom(tier)) is not None)


def verdict(plan: MemoryPlan) -> str:
    """Whether a plan fits, in words that claim nothing of memory nobody stated."""
    open_tiers = [tier for tier in TIERS if plan.limits.of(tier) is None]
    if not plan.fits:
        return "does not fit"
    if len(open_tiers) == len(TIERS):
        return NO_VERDICT
    known = "".join(_MEMORIES[tier] for tier in TIERS if tier not in open_tiers)
    return (
        f"fits in {known}; whether in {_MEMORIES[open_tiers[0]]} is open, no limit is stated" if open_tiers else "fits"
    )


NO_VERDICT = "no limit is stated, so nothing says whether it fits"
_MEMORIES: Mapping[Tier, str] = {"gpu": "a GPU's memory", "host": "a node's host memory"}


def way_to_limits(resolved: Resolved, limits: Limits) -> str:
    """What to do where nothing limits a launch; empty where something does."""
    if any(limits.of(tier) is not None for tier in TIERS):
        return ""
    hardware = resolved.config.hardware.name
    states, another = f"profile {hardware} states no memory", "another machine"
    if resolved.origin("hardware.name").layer in ("default", "derived"):
        states, another = f"without --hardware this machine was taken, and {states}", "another"
    here = "`rllaunch plan --here` for what a job may use on this one"
    return f"{states}: --hardware NAME plans for {another}, {here}"


def least_room(plan: MemoryPlan) -> tuple[float, Tier]:
    """The smaller of the two headrooms, and whose it is; all of it where no limit is known."""
    return min(((room, tier) for tier in TIERS if (room := plan.headroom(tier)) is not None), default=(1.0, "host"))


def _why_not(other: Candidate, taken: Candidate, headroom: float) -> str:
    if (broken := other.plan.first_break) is not None:
        limit = other.plan.limits.of(broken.tier)
        assert limit is not None, "a break has a limit"
        most = other.plan.peak(broken.tier) - limit
        worse = f", at its peak by {gib(most)}" if gib(most) != gib(broken.excess) else ""
        return told_break(broken, other.plan.limits) + worse
    if other.plan.options == taken.plan.options:
        added = other.plan.seconds_added - taken.plan.seconds_added
        return f"its training step waits {added:.1f} s {'longer' if other.optimizer_cpu_offload else 'less'} for Adam"
    share, tier = least_room(other.plan)
    if share < headroom and share < least_room(taken.plan)[0] - 0.001 and taken.plan.fits:
        return f"leaves {share:.1%} of the {_TIER_NAMES[tier]} free at its peak, {headroom:.0%} are asked for"
    if not taken.plan.fits:
        return "fits"
    slower = other.plan.seconds_added - taken.plan.seconds_added
    what = "hands over" if other.optimizer_cpu_offload == taken.optimizer_cpu_offload else "hands over and steps"
    is_known = all(other.plan.limits.of(tier) is not None for tier in TIERS)
    fits_and, fits_but = ("fits and ", "fits, but ") if is_known else ("", "")
    if slower >= 0.05:
        return f"{fits_but}{what} {slower:.1f} s slower a cycle"
    if slower <= -0.05:
        return f"{fits_and}{what} {-slower:.1f} s faster a cycle"
    more = other.plan.peak("host") - taken.plan.peak("host")
    if more > 0:
        return f"{fits_and}is as fast, but takes {gib(more)} more on the host"
    holds_more = other.plan.peak("gpu") > taken.plan.peak("gpu")
    return f"{fits_and}is as fast; holds more on the GPU" if holds_more else f"{fits_and}is as good"


_TIER_NAMES = {"gpu": "GPU", "host": "host"}


def told_break(broken: Break, limits: Limits) -> str:
    """`exceeds host 898.0 GiB by 12.0 GiB in trainer.offload (cycle)`."""
    limit = limits.of(broken.tier)
    assert limit is not None, "a break has a limit"
    phase = "start-up" if broken.phase == "init" else "cycle"
    return f"exceeds the {_TIER_NAMES[broken.tier]}'s {gib(limit)} by {gib(broken.excess)} in {broken.step} ({phase})"


# How the source of a value begins that `decided` filled in.
_DECIDED = " = auto: "
# What `decided` may fill in.
DECIDABLE = (
    ORDER,
    BUFFERS,
    WEIGHTS,
    UPDATE_FROM,
    "handoff.offload_train",
    "handoff.offload_rollout",
    "handoff.offload_rollout_level",
    OPTIMIZER,
)


def reopened(resolved: Resolved) -> Resolved:
    """The launch with what `decided` filled in open again, as it would be with another flag on its command line."""
    origins = dict(resolved.origins)
    values: dict[str, dict[str, Any]] = {}
    for key in DECIDABLE:
        of_key = origins.get(key, ())
        if of_key and of_key[-1].layer == "derived" and _DECIDED in of_key[-1].source:
            origins[key] = of_key[:-1]
            section, _, name = key.partition(".")
            default = type(getattr(resolved.config, section)).model_fields[name].default
            values.setdefault(section, {})[name] = origins[key][-1].value if origins[key] else default
    sections = {s: getattr(resolved.config, s).model_copy(update=given) for s, given in values.items()}
    return replace(resolved, config=resolved.config.model_copy(update=sections), origins=origins)


def decided(resolved: Resolved) -> Resolved:
    """The launch with what `auto` took in its config, each value derived; unchanged where it cannot be planned.

    Only what was open is written: a key that says `auto`, and under `auto` order what nobody set.
    """
    choice = plan_launch(resolved)
    if isinstance(choice, Unknown):
        return resolved
    options = choice.taken.plan.options
    is_auto = resolved.value(ORDER) == "auto"
    decided: dict[str, Any] = {
        ORDER: options.order,
        BUFFERS: options.buffers,
        WEIGHTS: options.engine_weights,
        UPDATE_FROM: options.update_from,
    }
    taken = {key: value for key, value in decided.items() if resolved.value(key) == "auto"}
    if is_auto:
        left: dict[str, Any] = {
            "handoff.offload_train": options.offload_train,
            "handoff.offload_rollout": options.offload_rollout,
            OPTIMIZER: choice.taken.optimizer_cpu_offload,
        }
        if options.offload_rollout:
            level = tuple(name for name in ("kv_cache", "weight") if name in options.level)
            left["handoff.offload_rollout_level"] = level
        taken |= {k: v for k, v in left.items() if not resolved.is_set(k) and v != resolved.value(k)}
    if not taken:
        return resolved
    how = "the fastest that fits" if choice.fits else "nothing fits, this exceeds its limits least"
    values, origins = resolved.config.model_dump(), dict(resolved.origins)
    for key, value in taken.items():
        section, _, name = key.partition(".")
        values[section][name] = value
        source = f"{ORDER if is_auto else key}{_DECIDED}{how}"
        shown = list(value) if isinstance(value, tuple) else value
        origins[key] = (*origins.get(key, ()), Origin(shown, "derived", source))
    config = LaunchConfig.model_validate(values)
    global _last
    _last = (config, choice)
    return replace(resolved, config=config, origins=origins)
