"""Whether the launch fits in GPU memory and in host RAM: the memory plan held against its limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import heads_fit, kv_heads_fit, layout_of
from rllaunch.doctor.numbers import divisors
from rllaunch.doctor.rules.engines import ENGINE
from rllaunch.errors import RllaunchError
from rllaunch.plan.advice import FRACTION, Advice, advise, changed, fullest_with_kv, safe_fraction, told, usable_memory
from rllaunch.plan.choose import (
    OPTIMIZER,
    ORDER,
    TIGHT,
    WEIGHTS,
    Choice,
    Unknown,
    architecture_of,
    choose,
    plan_launch,
    reopened,
)
from rllaunch.plan.forecast import PlannedStep, forecast, name_of
from rllaunch.plan.handoff import Tier, update_rewrites_all
from rllaunch.resolve.origins import Resolved
from rllaunch.units import gib

# Ray ends workers at this share of the node's memory unless RAY_memory_usage_threshold says otherwise.
RAY_THRESHOLD = 0.95
LESS_ON_A_CPU = "a smaller model, or fewer slots: --num-gpus-per-node; `rllaunch train --rehearse` makes a launch small"
_LIMIT_KEYS: Mapping[Tier, str] = {"gpu": "hardware.gpu_memory_bytes", "host": "hardware.host_memory_bytes"}


def _choice(resolved: Resolved) -> Choice | None:
    if resolved.config.trainer.backend == "embedded" or "model_type" not in resolved.config.model.architecture:
        return None
    choice = plan_launch(resolved)
    return None if isinstance(choice, Unknown) else choice


def _check_known(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if (
        config.trainer.backend == "embedded"
        or "model_type" not in config.model.architecture
        or not config.handoff.colocate
    ):
        return
    choice = plan_launch(resolved)
    if isinstance(choice, Unknown):
        yield Finding(
            "RL200",
            "info",
            f"whether it fits is not known: {choice.what}",
            choice.where,
            choice.fix or "`rllaunch plan`",
        )
        return
    for tier, key in _LIMIT_KEYS.items():
        if choice.taken.plan.limits.of(tier) is None:
            text = f"the profile does not say how much {tier} memory there is: that side is planned without a limit"
            yield UNKNOWN.finding("info", resolved, text, [key, "hardware.name"], f"--set {key}=BYTES")


def _check_host(resolved: Resolved) -> Iterator[Finding]:
    """Every step of start-up and of a cycle is added up for the fullest node, with mirror and backup of the handoff.

    What the finding advises has been planned again. `rllaunch plan` shows all steps, in both orders.
    """
    yield from _does_not_fit(resolved, "host", HOST)


def _check_gpu(resolved: Resolved) -> Iterator[Finding]:
    """Every step of start-up and of a cycle is added up for the fullest GPU, trainer and engine together.

    What the finding advises has been planned again. `rllaunch plan` shows all steps, in both orders.
    """
    yield from _does_not_fit(resolved, "gpu", GPU)


def _does_not_fit(resolved: Resolved, tier: Tier, rule: Rule) -> Iterator[Finding]:
    choice = _choice(resolved)
    if choice is None:
        return
    plan = choice.taken.plan
    limit = plan.limits.of(tier)
    if limit is None or plan.peak(tier) <= limit:
        return
    first = next(s for s in plan.steps if s.total(tier) > limit)
    worst = plan.peak_step(tier)
    place = "a node's host memory" if tier == "host" else "a GPU's memory"
    more = "" if worst is first else f"; the worst is {_step(worst)} with {gib(worst.total(tier))}"
    message = (
        f"does not fit in {place}: {_step(first)} needs {gib(first.total(tier))}, {gib(limit)} are there"
        f" ({plan.label}{more})\n{_sum(worst, tier)}"
    )
    ways = _advice(resolved, choice, tier, 3)
    fitting = [way for way in ways if way.fits]
    told_ways = [told(way, tier) for way in (fitting or ways)[:3]]
    fix = ", or ".join(told_ways) if told_ways else f"{_search(resolved)}, or a larger machine"
    if told_ways and not fitting:
        broken = plan.first_break
        # Where both tiers break, the first finding looks for a layout.
        layout = _layout_that_fits(resolved) if broken is not None and broken.tier == tier else ""
        fix = (
            f"{layout}; `rllaunch plan --fit` shows all layouts"
            if layout
            else f"{_search(resolved)}; no single change is enough: {fix}"
        )
    keys = [_LIMIT_KEYS[tier], ORDER, *(["handoff.train_memory_margin_bytes"] if tier == "gpu" else [])]
    yield rule.error(resolved, message, keys, fix)


def _advice(resolved: Resolved, choice: Choice, tier: Tier, enough: int) -> list[Advice]:
    """Changes that lower a peak, without those that another rule would refuse."""
    return advise(resolved, architecture_of(resolved), choice, tier, enough=enough, is_sound=is_sound)


def _search(resolved: Resolved) -> str:
    nodes = resolved.config.cluster.num_nodes
    return f"`rllaunch plan --fit --num-nodes {nodes}` looks for a layout on as many nodes or more"


def _layout_that_fits(resolved: Resolved) -> str:
    """A layout on as many nodes, told as its flags; empty where none of the likely ones fits."""
    from rllaunch.plan.fit import nearest_fit

    found = nearest_fit(resolved, architecture_of(resolved), is_sound=is_sound)
    if found is None:
        return ""
    plan = found.candidate.plan
    peaks = ", ".join(f"{gib(plan.peak(tier))} at the {tier}'s peak" for tier in _LIMIT_KEYS)
    return f"another layout fits: {found.flags} ({peaks})"


def is_sound(resolved: Resolved) -> bool:
    """Whether no rule about the configuration, memory aside, has an error to tell."""
    from rllaunch.doctor.engine import builtin_rules

    # Not what it trains on, which takes no memory (RL333).
    rules = (r for r in builtin_rules() if r.code.startswith("RL3") and r.code != "RL333" and not r.probes)
    return not any(finding.level == "error" for rule in rules for finding in rule.check(resolved))


def _sum(step: PlannedStep, tier: Tier) -> str:
    parts = step.gpu if tier == "gpu" else step.host
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    shown = [f"{name_of(name, tier)} {gib(size)}" for name, size in ordered if size >= 2**26]
    return f"{_step(step)}: " + " + ".join(shown)


def _step(step: PlannedStep) -> str:
    return f"{step.name} at start-up" if step.phase == "init" else step.name


def _check_headroom(resolved: Resolved) -> Iterator[Finding]:
    """Said where the plan fits, but leaves less than 5 % of a limit free at its fullest step.

    `docs/accuracy.md` shows how near such plans came to what others measured.
    """
    choice = _choice(resolved)
    if choice is None or not choice.fits:
        return
    plan = choice.taken.plan
    for tier, key in _LIMIT_KEYS.items():
        room, limit = plan.headroom(tier), plan.limits.of(tier)
        if room is None or limit is None or room >= TIGHT:
            continue
        step = plan.peak_step(tier)
        text = (
            f"fits, but leaves {room:.1%} of the {tier}'s {gib(limit)} free: "
            f"{_step(step)} needs {gib(step.total(tier))}\n{_sum(step, tier)}"
        )
        ways = [way for way in _advice(resolved, choice, tier, 2) if way.fits]
        fix = (
            ", or ".join(told(way, tier) for way in ways) or "a forecast is no closer than this; watch the first cycle"
        )
        if tier == "host":
            text += f"\nRay ends workers at {RAY_THRESHOLD:.0%} of a node unless RAY_memory_usage_threshold says more"
        yield HEADROOM.finding("warning", resolved, text, [key], fix)


def _check_fraction(resolved: Resolved) -> Iterator[Finding]:
    """SGLang takes this share of the GPU for weights and KV cache together.

    Too small, and the weights leave no room for a cache; too large, and the fullest step beside it does not fit.
    """
    choice, config = _choice(resolved), resolved.config
    hbm = config.hardware.gpu_memory_bytes
    if choice is None or hbm is None or config.rollout.backend != "sglang":
        return
    plan = choice.taken.plan
    usable, weights = usable_memory(plan, hbm), plan.sizes.gpu["weights"]
    fraction = config.sglang.mem_fraction_static
    if plan.sizes.gpu["kv_cache"] == 0:
        least = int((weights / usable + 0.05) * 100) / 100
        text = (
            f"mem_fraction_static {fraction:g} leaves no room for a KV cache: "
            f"{fraction:g} × {gib(usable)} is less than the engine's weights, {gib(weights)} a GPU"
        )
        fix = f"--sglang-mem-fraction-static {least:.2f}" if least < 0.95 else _wider_engine(resolved)
        yield FRACTION_RULE.error(resolved, text, [FRACTION, ENGINE], fix)
        return
    largest, step = safe_fraction(plan, config), fullest_with_kv(plan)
    if largest is not None and step is not None and fraction > largest:
        others = {name: size for name, size in step.gpu.items() if name not in ("kv_cache", "weights")}
        rest = " − ".join(
            [gib(plan.limits.gpu or 0), *(f"{gib(size)} {name_of(name, 'gpu')}" for name, size in others.items())]
        )
        if "weights" not in step.gpu:
            # The fraction is of weights and KV cache together, whether or not both are there in this step.
            rest += f" + {gib(weights)} weights elsewhere"
        text = f"mem_fraction_static {fraction:g} is above what fits: ({rest}) ÷ {gib(usable)} = {largest:.2f}"
        yield FRACTION_RULE.error(
            resolved, text, [FRACTION, _LIMIT_KEYS["gpu"]], f"--sglang-mem-fraction-static {largest:.2f}"
        )


def _wider_engine(resolved: Resolved) -> str:
    """The fewest GPUs per engine with which its weights leave room for a KV cache, told as a flag: of those with which
    the launch fits, if there is one."""
    layout, architecture = layout_of(resolved), architecture_of(resolved)
    dp = resolved.config.sglang.attention_dp
    is_open, with_room = reopened(resolved), ""
    for gpus in divisors(layout.rollout_gpus or layout.world):
        sharing = max(1, gpus // dp)
        heads = heads_fit(layout.heads, sharing) and kv_heads_fit(layout.kv_heads, sharing)
        if gpus <= layout.engine_gpus or not heads:
            continue
        made = changed(is_open, {ENGINE: gpus})
        if not is_sound(made):
            continue
        try:
            plan = choose(made, architecture, compare=False).taken.plan
        except (RllaunchError, ValueError):
            continue
        flag = f"--rollout-num-gpus-per-engine {gpus}"
        if plan.sizes.gpu["kv_cache"] and plan.fits:
            return f"{flag} leaves room: its weights are {gib(plan.sizes.gpu['weights'])} a GPU"
        if plan.sizes.gpu["kv_cache"] and not with_room:
            with_room = f"{flag} leaves room for a KV cache, though the launch does not fit then; {_search(resolved)}"
    return (
        with_room
        or f"no number of GPUs per engine that these nodes allow has room for the weights; {_search(resolved)}"
    )


def _check_mirror(resolved: Resolved) -> Iterator[Finding]:
    choice, config = _choice(resolved), resolved.config
    if choice is None or not update_rewrites_all(config):
        return
    plan = choice.taken.plan
    if plan.options.has_mirror and resolved.is_set(WEIGHTS):
        saved = plan.sizes.node["weights"]
        yield MIRROR.finding(
            "warning",
            resolved,
            f"every update rewrites all of the engine's weights, yet they are mirrored: {gib(saved)} a node",
            [WEIGHTS],
            "--engine-weights discard",
        )


def _check_draft(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    draft = (config.sglang.model_extra or {}).get("speculative_algorithm")
    discards = config.handoff.engine_weights == "discard" and config.handoff.offload_rollout
    if draft and discards and "weight" in config.handoff.offload_rollout_level:
        yield DRAFT.error(
            resolved,
            "no update sends the draft model's weights again: discarded, they are lost",
            [WEIGHTS, "sglang.speculative_algorithm"],
            "--engine-weights mirror",
        )


def _check_one_memory(resolved: Resolved) -> Iterator[Finding]:
    """The pools that stand for GPUs are in host memory too, so that all of a node's slots add up there.

    Checked where the profile states the host's memory; `--here` of `rllaunch plan` takes this machine's.
    """
    config = resolved.config
    host = config.hardware.host_memory_bytes
    if (need := needed_on_a_cpu(resolved)) is None or host is None:
        return
    step, nbytes = need
    if nbytes > host:
        yield ONE_MEMORY.error(
            resolved,
            f"does not fit in host memory, where the slots of `cpu` are: {_step(step)} needs {gib(nbytes)}, "
            f"{gib(host)} are there",
            [_LIMIT_KEYS["host"], "model.name", "cluster.num_gpus_per_node"],
            LESS_ON_A_CPU,
        )


def needed_on_a_cpu(resolved: Resolved) -> tuple[PlannedStep, int] | None:
    """The step in which an embedded launch on the CPU holds most, and its bytes on a node; None for other launches."""
    config = resolved.config
    is_ours = config.trainer.backend == "embedded" and config.hardware.accelerator == "cpu"
    if not is_ours or "model_type" not in config.model.architecture:
        return None
    choice = plan_launch(resolved)
    if isinstance(choice, Unknown):
        return None
    slots = config.gpus_per_node

    def held(step: PlannedStep) -> int:
        return slots * step.total("gpu") + step.total("host")

    fullest = max(choice.taken.plan.steps, key=held)
    return fullest, held(fullest)


def _check_needless(resolved: Resolved) -> Iterator[Finding]:
    from dataclasses import replace

    choice, config = _choice(resolved), resolved.config
    if choice is None or not choice.fits:
        return
    plan = choice.taken.plan
    options = plan.options
    if not (options.offload_train or options.offload_rollout) or not plan.sizes.gpu["kv_cache"]:
        return
    none = replace(options, order="cpu", offload_train=False, offload_rollout=False, buffers="retained")
    if none.illegal():
        return
    resident = forecast(config, none, plan.sizes, plan.limits)
    rooms = [room for tier in _LIMIT_KEYS if (room := resident.headroom(tier)) is not None]
    if rooms and min(rooms) >= config.handoff.memory_headroom and plan.seconds - resident.seconds >= 0.1:
        yield NEEDLESS.finding(
            "info",
            resolved,
            f"everything fits on the GPU at once ({gib(resident.peak('gpu'))} at its peak): offloading costs "
            f"{plan.seconds - resident.seconds:.1f} s a cycle for nothing",
            ["handoff.offload_train", "handoff.offload_rollout"],
            "--no-offload-train --no-offload-rollout"
            + (" --colocate-memory-peak-device cpu" if options.order == "gpu" else ""),
        )


def _check_staging(resolved: Resolved) -> Iterator[Finding]:
    choice, config = _choice(resolved), resolved.config
    if choice is None or not config.trainer.optimizer_cpu_offload:
        return
    pinned = choice.taken.plan.sizes.static_host.get("gradients_on_host", 0)
    overlap = (config.megatron.model_extra or {}).get("overlap_cpu_optimizer_d2h_h2d", False)
    if pinned and overlap and not choice.fits:
        yield STAGING.finding(
            "warning",
            resolved,
            f"the optimizer on the host stages gradients in pinned memory: {gib(pinned)} a node",
            [OPTIMIZER, "megatron.overlap_cpu_optimizer_d2h_h2d"],
            "--no-optimizer-cpu-offload where the GPU has room",
        )


def _check_ray(resolved: Resolved) -> Iterator[Finding]:
    """Ray's monitor acts at 95 % of a node, or at `RAY_memory_usage_threshold` of Ray's own environment."""
    import os

    choice = _choice(resolved)
    if choice is None or not choice.fits:
        return
    plan = choice.taken.plan
    limit, name = plan.limits.host, "RAY_memory_usage_threshold"
    environment = {k: str(v) for k, v in (resolved.config.env.model_extra or {}).items()} | dict(os.environ)
    if limit is None or environment.get("RAY_memory_monitor_refresh_ms") == "0":
        return
    try:
        threshold = float(environment.get(name, RAY_THRESHOLD))
    except ValueError:
        return
    peak = plan.peak("host")
    # Where less than the usual share is free, RL203 has said so.
    if peak > threshold * limit and (peak <= (1 - TIGHT) * limit or threshold > 1 - TIGHT):
        share = min(0.99, int(peak / limit * 100 + 1.5) / 100)
        yield RAY.finding(
            "warning",
            resolved,
            f"Ray ends workers when a node uses {threshold:.0%} of {gib(limit)} = {gib(threshold * limit)}; "
            f"the plan's peak is {gib(peak)}",
            [_LIMIT_KEYS["host"]],
            f"{name}={share:.2f} in Ray's environment, on every node",
        )


def _rule(code: str, name: str, reason: str, check: object, *, overridable: bool = True) -> Rule:
    return Rule(code=code, name=name, reason=reason, check=check, overridable=overridable)  # type: ignore[arg-type]


UNKNOWN = _rule(
    "RL200",
    "the launch can be planned",
    "what cannot be counted is said, never guessed: a wrong layer count drops a layer without a word (THUDM/slime#309)",
    _check_known,
)
HOST = _rule(
    "RL201",
    "fits in host memory",
    "host RAM runs out at step 2 to 13, after loading and rollouts (THUDM/slime#1851, vllm-project/vime#190)",
    _check_host,
)
GPU = _rule(
    "RL202",
    "fits in GPU memory",
    "one side runs out of memory when it wakes up beside the other (sgl-project/sglang#7009, radixark/miles#3147)",
    _check_gpu,
)
HEADROOM = _rule(
    "RL203",
    "leaves headroom",
    "page cache and long samples take what a forecast does not see (ray-project/ray#59796, THUDM/slime#1951)",
    _check_headroom,
)
FRACTION_RULE = _rule(
    "RL204",
    "mem_fraction_static fits",
    "found by trial in the field, 0.9 → 0.8 → 0.7 → 0.6 (radixark/miles#580, hiyouga/EasyR1#1, huggingface/trl#2688)",
    _check_fraction,
)
MIRROR = _rule(
    "RL205",
    "no mirror that nobody reads",
    "841 of 882 GB with a mirror, 520 to 550 without, when every update re-sends all weights (vllm-project/vime#191)",
    _check_mirror,
)
DRAFT = _rule(
    "RL206",
    "draft weights survive",
    "a draft model's weights are not part of an update; miles always mirrors them (fzyzcjy/torch_memory_saver#85)",
    _check_draft,
)
NEEDLESS = _rule(
    "RL207",
    "offload only what has to go",
    "a small run went from 18.9 s to 3.3 s a step without offloading (vllm-project/vime#442, vllm-project/vime#443)",
    _check_needless,
)
STAGING = _rule(
    "RL208",
    "staging of an optimizer on the host",
    "staging is a second set beside the state (THUDM/slime#1851, PrimeIntellect-ai/prime-rl#3200)",
    _check_staging,
)
RAY = _rule(
    "RL209",
    "Ray lets the plan's peak happen",
    "Ray's monitor ends the youngest worker before the limit is reached (THUDM/slime#1851, alibaba/ROLL#234)",
    _check_ray,
)
ONE_MEMORY = _rule(
    "RL210",
    "the slots of a CPU fit in its memory",
    "without a GPU its regions are host memory as well, and the kernel ends the process that takes too much",
    _check_one_memory,
)
RULES = (UNKNOWN, HOST, GPU, HEADROOM, FRACTION_RULE, MIRROR, DRAFT, NEEDLESS, STAGING, RAY, ONE_MEMORY)
