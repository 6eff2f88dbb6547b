"""Numbers of a launch that several rules need, and the words their fixes are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isqrt

from rllaunch.plan.architecture import text_facts
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.schema import LaunchConfig


def gpus_key(resolved: Resolved) -> str:
    """The key that decides how many GPUs of a node are used."""
    own = resolved.config.cluster.num_gpus_per_node
    return "hardware.gpus_per_node" if own is None else "cluster.num_gpus_per_node"


def is_decided(resolved: Resolved, key: str) -> bool:
    """Whether someone chose the value of `key`: it is neither unset nor derived from others."""
    return resolved.value(key) is not None and resolved.origin(key).layer != "derived"


def decided_int(resolved: Resolved, key: str) -> int | None:
    """The value of `key` if someone chose it."""
    value = resolved.value(key)
    return value if isinstance(value, int) and is_decided(resolved, key) else None


def architecture_int(config: LaunchConfig, name: str) -> int | None:
    """A positive whole number of the language model's architecture; None where it is unknown or differs by layer."""
    value = text_facts(config.model.architecture).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def architecture_key(config: LaunchConfig, name: str) -> str:
    """Where a fact of the language model is: of a multi-modal one it is nested."""
    text = config.model.architecture.get("text_config")
    is_nested = isinstance(text, Mapping) and text.get(name) is not None
    return f"model.architecture.{'text_config.' if is_nested else ''}{name}"


EXPERT_KEYS = ("n_routed_experts", "num_experts", "num_local_experts")


def experts_key(config: LaunchConfig) -> str | None:
    """The name under which the architecture gives its routed experts; None for a dense or unknown model."""
    return next((name for name in EXPERT_KEYS if architecture_int(config, name)), None)


def samples_per_step(config: LaunchConfig) -> int | None:
    """Samples of one optimizer step; None if they follow from others and do not come out whole."""
    if config.trainer.global_batch_size is not None:
        return config.trainer.global_batch_size
    samples, rest = divmod(config.num_samples, config.trainer.num_steps_per_rollout or 1)
    return None if rest else samples


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def nearest(candidates: Iterable[int], value: int) -> list[int]:
    """The nearest candidate below `value` and the nearest above it, as far as there are any."""
    below = [n for n in candidates if n < value]
    above = [n for n in candidates if n > value]
    return ([max(below)] if below else []) + ([min(above)] if above else [])


def flag_with(flag: str, values: Iterable[int]) -> str:
    """`--flag 2 or 4`; empty without a value."""
    text = " or ".join(str(v) for v in values)
    return f"{flag} {text}" if text else ""


def either(*alternatives: str) -> str:
    """A fix of several alternatives, without the empty ones."""
    return ", or ".join(a for a in alternatives if a)


def undo(resolved: Resolved, key: str, wanted: object, flag: str) -> str:
    """What brings `key` to `wanted`: leaving out the flag that changed it, else `flag`."""
    origins = resolved.origins.get(key, ())
    if len(origins) > 1 and origins[-1].layer == "flag" and origins[-2].value == wanted:
        return f"remove {origins[-1].source}"
    return flag


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
