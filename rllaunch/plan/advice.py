"""What would free memory: each change planned again, so that advice is known to work."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rllaunch.errors import RllaunchError
from rllaunch.flags import command_of
from rllaunch.plan.architecture import Architecture
from rllaunch.plan.choose import BUFFERS, OPTIMIZER, ORDER, UPDATE_FROM, WEIGHTS, Choice, Unknown, choose, reopened
from rllaunch.plan.forecast import MemoryPlan, PlannedStep
from rllaunch.plan.handoff import Tier, update_rewrites_all
from rllaunch.resolve.origins import Origin, Resolved
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.units import gib

FRACTION = "sglang.mem_fraction_static"


@dataclass(frozen=True)
class Advice:
    """A change and what the plan says of it."""

    flags: str
    resolved: Resolved
    plan: MemoryPlan
    freed: int
    """Bytes off the peak of the tier that was asked about."""

    @property
    def fits(self) -> bool:
        return self.plan.fits


def changed(resolved: Resolved, values: Mapping[str, Any]) -> Resolved:
    """The launch with these keys set by hand, derived values left as they are."""
    origins = dict(resolved.origins)
    by_section: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        by_section.setdefault(section, {})[name] = value
        origins[key] = (*origins.get(key, ()), Origin(value, "flag", "advice"))
    # The values are ours and of the right types: validating the whole config would be most of a search's time.
    sections = {
        section: getattr(resolved.config, section).model_copy(update=given) for section, given in by_section.items()
    }
    return replace(resolved, config=resolved.config.model_copy(update=sections), origins=origins)


def advise(
    resolved: Resolved,
    architecture: Architecture,
    choice: Choice,
    tier: Tier,
    *,
    enough: int,
    is_sound: Callable[[Resolved], bool] = lambda _: True,
) -> list[Advice]:
    """Changes that lower the peak on a tier: those that make the launch fit first, the lightest of them in front.

    Args:
        enough: fitting changes after which no further one is planned.
        is_sound: whether nothing else would be wrong with the changed launch.
    """
    peak = choice.taken.plan.peak(tier)
    is_open = reopened(resolved)
    found = []
    for values in _levers(resolved, architecture, choice):
        made = changed(is_open, values | _followers(resolved, values))
        try:
            plan = choose(made, architecture, compare=False).taken.plan
        except (RllaunchError, ValueError):
            continue
        freed = peak - plan.peak(tier)
        if freed > 0 and is_sound(made):
            found.append(Advice(" ".join(command_of(values)), made, plan, freed))
        if sum(advice.fits for advice in found) == enough:
            break
    fitting = [advice for advice in found if advice.fits]
    return fitting + sorted((a for a in found if not a.fits), key=lambda advice: -advice.freed)


def _levers(resolved: Resolved, architecture: Architecture, choice: Choice) -> Iterator[dict[str, Any]]:
    """What may be set by hand to hold less, the lightest change first."""
    config, options = resolved.config, choice.taken.plan.options
    # What somebody set of the copies and the update may not go with the other order.
    open_again = {key: "auto" for key in (BUFFERS, UPDATE_FROM) if resolved.is_set(key)}
    if options.order == "cpu" and options.may_be_gpu_order:
        yield {ORDER: "gpu", **open_again}
    if options.order == "gpu":
        yield {ORDER: "cpu", **open_again}
        if resolved.value(UPDATE_FROM) == "gpu":
            yield {UPDATE_FROM: "host"}
    if options.offload_train and options.buffers == "retained":
        yield {BUFFERS: "fresh"}
    if options.has_mirror and update_rewrites_all(config):
        yield {WEIGHTS: "discard"}
    if not options.offload_rollout:
        yield {"handoff.offload_rollout": True}
    if not options.offload_train:
        yield {"handoff.offload_train": True}
    if options.offload_rollout and not options.releases_weights:
        yield {"handoff.offload_rollout_level": ("kv_cache", "weight")}
    yield from _wider_experts(config, architecture)
    yield {OPTIMIZER: not config.trainer.optimizer_cpu_offload}
    if config.trainer.recompute_granularity != "full":
        # Megatron refuses full recompute without a method.
        yield {
            "trainer.recompute_granularity": "full",
            "megatron.recompute_method": "uniform",
            "megatron.recompute_num_layers": 1,
        }
    # Experts and latents need sequence parallelism beside it, others hold less with it.
    tp = 2 * config.trainer.tensor_model_parallel_size
    yield {"trainer.tensor_model_parallel_size": tp, "trainer.sequence_parallel": True}
    if len(architecture.layers) % (stages := 2 * config.trainer.pipeline_model_parallel_size) == 0:
        yield {"trainer.pipeline_model_parallel_size": stages}
    headroom = config.handoff.memory_headroom
    if (
        fraction := safe_fraction(choice.taken.plan, config, headroom=headroom)
    ) and fraction < config.sglang.mem_fraction_static:
        yield {FRACTION: fraction}
    nodes = config.cluster.num_nodes
    for factor in (2, 4):
        wider: dict[str, Any] = {"cluster.num_nodes": nodes * factor}
        if resolved.is_set("cluster.actor_num_nodes"):
            wider["cluster.actor_num_nodes"] = nodes * factor
        if resolved.is_set("rollout.rollout_num_gpus") and config.rollout.rollout_num_gpus is not None:
            wider["rollout.rollout_num_gpus"] = config.rollout.rollout_num_gpus * factor
        yield wider


def _wider_experts(config: LaunchConfig, architecture: Architecture) -> Iterator[dict[str, Any]]:
    """Experts over twice and four times as many GPUs of a stage."""
    trainer = config.trainer
    stage = config.world_size // trainer.pipeline_model_parallel_size
    for factor in (2, 4):
        ep = factor * trainer.expert_model_parallel_size
        if architecture.num_experts and architecture.num_experts % ep == 0 and stage % ep == 0:
            yield {"trainer.expert_model_parallel_size": ep}


def _followers(resolved: Resolved, values: Mapping[str, Any]) -> dict[str, Any]:
    """What follows from more nodes by itself."""
    nodes = values.get("cluster.num_nodes")
    if nodes is None:
        return {}
    config = resolved.config
    per_node = config.gpus_per_node
    following = {"cluster.actor_num_nodes": nodes, "rollout.rollout_num_gpus": nodes * per_node}
    return {key: value for key, value in following.items() if key not in values}


def safe_fraction(plan: MemoryPlan, config: LaunchConfig, *, headroom: float = 0.0) -> float | None:
    """The largest `mem_fraction_static`, in hundredths, with which the engines' fullest step fits on the GPU; None
    where none does, or a limit is not known.

    What the KV cache may take is the limit less everything else that is there in the step that holds it.

    Args:
        headroom: share of the limit that stays free.
    """
    limit, hbm, fullest = plan.limits.gpu, config.hardware.gpu_memory_bytes, fullest_with_kv(plan)
    if limit is None or hbm is None or fullest is None:
        return None
    spare = int(limit * (1 - headroom)) - fullest.total("gpu")
    usable = usable_memory(plan, hbm)
    fraction = config.sglang.mem_fraction_static + spare / usable
    return min(0.99, int(fraction * 100) / 100) if fraction >= 0.01 else None


def fullest_with_kv(plan: MemoryPlan) -> PlannedStep | None:
    """Of the steps that hold a KV cache the one that holds most."""
    return max((s for s in plan.steps if "kv_cache" in s.gpu), key=lambda s: s.total("gpu"), default=None)


def usable_memory(plan: MemoryPlan, hbm: int) -> int:
    """What an engine finds free on a GPU before it loads: the share `mem_fraction_static` is of."""
    residuals = ("trainer_residual", "engine_residual")
    return hbm - sum(plan.sizes.static_gpu.get(name, 0) for name in residuals)


def told(advice: Advice, tier: Tier) -> str:
    """One line: the flags, what they free, and whether that is enough."""
    verdict = "fits" if advice.fits else f"still {_excess(advice.plan, tier)} too much"
    return f"{advice.flags} frees {gib(advice.freed)} ({gib(advice.plan.peak(tier))} at the {tier}'s peak: {verdict})"


def _excess(plan: MemoryPlan, tier: Tier) -> str:
    """By how much the asked tier's limit is broken, else the other's."""
    limit = plan.limits.of(tier)
    if limit is not None and plan.peak(tier) > limit:
        return f"{gib(plan.peak(tier) - limit)} on the {tier}"
    broken = plan.first_break
    assert broken is not None, "a plan that does not fit breaks somewhere"
    return f"{gib(broken.excess)} on the {broken.tier}"


__all__ = ["Advice", "Unknown", "advise", "changed", "fullest_with_kv", "safe_fraction", "told", "usable_memory"]
