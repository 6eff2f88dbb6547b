"""What happens to the engine's weights while the trainer trains, and where the host copies lie."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import either
from rllaunch.plan.handoff import options_of
from rllaunch.resolve.origins import Resolved

WEIGHTS = "handoff.engine_weights"


def _check_lora(resolved: Resolved) -> Iterator[Finding]:
    options = options_of(resolved.config)
    if options.lora and options.weights_mode == "discard":
        yield LORA.error(
            resolved,
            "with LoRA an engine keeps its base weights: from an update of adapters they would never come back",
            [WEIGHTS, "algorithm.lora_rank"],
            either("--engine-weights mirror", "--lora-rank 0"),
        )


def _check_shared(resolved: Resolved) -> Iterator[Finding]:
    options = options_of(resolved.config)
    # `auto` chooses a legal order by itself.
    is_cpu_order = resolved.config.handoff.colocate_memory_peak_device == "cpu"
    if is_cpu_order and options.offload_train and options.buffers == "shared" and options.has_mirror:
        yield SHARED.error(
            resolved,
            "in cpu order the engine's mirror and the trainer's backup are on the host together, "
            "so they cannot share one arena",
            ["handoff.colocate_memory_peak_device", "handoff.offload_train_buffers", WEIGHTS],
            either(
                "--offload-train-buffers retained",
                "--colocate-memory-peak-device gpu" if options.may_be_gpu_order else "",
            ),
        )


def _check_experts(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    discards = config.handoff.engine_weights == "discard" and options_of(config).releases_weights
    if discards and config.sglang.ep_size > 1 and config.rollout.backend == "sglang":
        yield EXPERTS.finding(
            "warning",
            resolved,
            "an expert-parallel engine may hold tensors that no update re-sends; discarded, they are lost",
            [WEIGHTS, "sglang.ep_size"],
            "--engine-weights mirror, unless engine and trainer weights compared equal after a cycle",
        )


LORA = Rule(
    code="RL331",
    name="LoRA keeps the engine's base weights",
    reason="rollouts ran on uninitialised weights (verl-project/verl#3461, verl-project/verl#3541)",
    check=_check_lora,
)
SHARED = Rule(
    code="RL334",
    name="one arena holds one copy at a time",
    reason="the arena is as large as the larger copy, and cpu order needs both at once",
    check=_check_shared,
)
EXPERTS = Rule(
    code="RL335",
    name="expert-parallel engines keep their weights",
    reason="after the first wake rollouts were gibberish (radixark/miles#835)",
    check=_check_experts,
)
RULES = (LORA, SHARED, EXPERTS)
