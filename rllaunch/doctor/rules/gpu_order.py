"""What `gpu` order of the handoff needs: both offloads, no critic, no LoRA; and what only it can do."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import either, undo
from rllaunch.plan.choose import reopened
from rllaunch.plan.handoff import options_of
from rllaunch.resolve.origins import Resolved

PEAK = "handoff.colocate_memory_peak_device"
UPDATE_FROM = "handoff.update_weights_from"
IN_CPU_ORDER = "--colocate-memory-peak-device cpu"
IN_GPU_ORDER = "--colocate-memory-peak-device gpu"
_IN_CPU_ORDER = "in cpu order the trainer has left the GPU when the engines are updated"


def _is_gpu_order(resolved: Resolved) -> bool:
    # `auto` only ever chooses among the orders that are legal.
    return resolved.config.handoff.colocate_memory_peak_device == "gpu"


def _check_offloads(resolved: Resolved) -> Iterator[Finding]:
    flags = {"handoff.offload_train": "--offload-train", "handoff.offload_rollout": "--offload-rollout"}
    missing = [key for key in flags if not resolved.value(key)]
    if _is_gpu_order(resolved) and missing:
        back_on = " and ".join(undo(resolved, key, True, flags[key]) for key in missing)
        yield OFFLOADS.error(
            resolved,
            "gpu order needs both offloads on",
            [PEAK, *missing],
            either(back_on.replace(" and remove ", " and "), IN_CPU_ORDER),
        )


def _check_critic(resolved: Resolved) -> Iterator[Finding]:
    if _is_gpu_order(resolved) and resolved.config.has_critic:
        yield CRITIC.error(
            resolved,
            "gpu order cannot run with a critic",
            [PEAK, "algorithm.advantage_estimator"],
            either(IN_CPU_ORDER, "--advantage-estimator grpo"),
        )


def _check_lora(resolved: Resolved) -> Iterator[Finding]:
    if _is_gpu_order(resolved) and resolved.config.has_lora:
        yield LORA.error(
            resolved,
            "gpu order cannot run with LoRA",
            [PEAK, "algorithm.lora_rank"],
            either(IN_CPU_ORDER, "--lora-rank 0"),
        )


def _check_update(resolved: Resolved) -> Iterator[Finding]:
    """Under `auto` order only where that cannot take `gpu` order: a warning if the trainer may stay on the GPU."""
    left_open = reopened(resolved)
    if left_open.config.handoff.colocate_memory_peak_device == "auto":
        yield from _check_update_under_auto(left_open)
        return
    options, handoff = options_of(resolved.config), resolved.config.handoff
    if handoff.colocate_memory_peak_device == "cpu" and handoff.offload_train and options.update_from == "gpu":
        yield UPDATE.error(
            resolved,
            _IN_CPU_ORDER,
            [PEAK, UPDATE_FROM],
            either("--update-weights-from auto", IN_GPU_ORDER if options.may_be_gpu_order else ""),
        )


def _check_update_under_auto(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    needs = next((n for n, is_there in (("a critic", config.has_critic), ("LoRA", config.has_lora)) if is_there), None)
    if config.handoff.update_weights_from != "gpu" or needs is None or not config.handoff.offload_train:
        return
    keys = [UPDATE_FROM, "algorithm.lora_rank" if needs == "LoRA" else "algorithm.advantage_estimator"]
    why = f"gpu order cannot run with {needs}, and {_IN_CPU_ORDER}"
    if resolved.is_set("handoff.offload_train"):
        what = f"no handoff updates from the GPU: {why}"
        yield UPDATE.error(resolved, what, [*keys, "handoff.offload_train"], "--update-weights-from auto")
    else:
        what = f"only ways in which the trainer stays on the GPU are left: {why}"
        yield UPDATE.finding("warning", resolved, what, keys, "--update-weights-from auto")


OFFLOADS = Rule(
    code="RL301",
    name="gpu order needs both offloads",
    reason="a side that is never offloaded leaves the other no room to wake in (radixark/miles#2781)",
    check=_check_offloads,
)
CRITIC = Rule(
    code="RL302",
    name="gpu order runs without a critic",
    reason="a second trained model would wake beside the engine's weights (radixark/miles#2781)",
    check=_check_critic,
)
LORA = Rule(
    code="RL303",
    name="gpu order runs without LoRA",
    reason="a LoRA trainer's gradients stay on the GPU beside the engine's weights (radixark/miles#3100)",
    check=_check_lora,
)

UPDATE = Rule(
    code="RL344",
    name="an update from the GPU needs gpu order",
    reason="before the update the trainer is offloaded, so that the engine's weights have room to return",
    check=_check_update,
)


def _check_auto(resolved: Resolved) -> Iterator[Finding]:
    if resolved.config.handoff.colocate_memory_peak_device == "auto":
        yield AUTO.finding(
            "info",
            resolved,
            "auto takes cpu order: the memory of this launch cannot be planned",
            ["handoff.colocate_memory_peak_device"],
            f"{IN_GPU_ORDER} where host RAM is the tight side",
        )


AUTO = Rule(
    code="RL306",
    name="auto order is decided by what is known",
    reason="the fastest order that fits needs a forecast of host and GPU memory; `rllaunch plan` says what it lacks",
    check=_check_auto,
)
RULES = (OFFLOADS, CRITIC, LORA, UPDATE, AUTO)
