"""What a launch asks of DeepSeek-V4 that its layers here have not. Plain data, without torch: the doctor asks, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rllaunch.errors import ConfigError
from rllaunch.resolve.schema import LaunchConfig

_WITHOUT = ("attention_dropout", "moe_router_fusion", "moe_shared_expert_overlap", "moe_latent_size")
_RECOMPUTED = {"core_attn", "shared_experts"}


def refusal_of(config: LaunchConfig) -> ConfigError | None:
    """Why a launch of this family cannot be trained as it is asked for; None: it can, or is of another family."""
    facts = config.model.architecture
    if facts.get("model_type") != "deepseek_v4" or config.trainer.backend != "megatron":
        return None
    try:
        require_served(config, facts.get("o_groups"))
    except ConfigError as err:
        return err
    return None


def require_served(config: LaunchConfig, groups: int | None) -> None:
    """
    Args:
        groups: of heads in the projection of attention's output; None: not known yet.
    Raises:
        ConfigError: an option or a layout that layers with compressed attention and several streams have not.
    """
    options, size = config.megatron.model_extra or {}, config.trainer.tensor_model_parallel_size
    if config.has_lora:
        raise ConfigError(
            "LoRA adapters stand beside Megatron-core's linear layers, and compressed attention has others",
            f"algorithm.lora_rank = {config.algorithm.lora_rank}",
            "train all of it: --lora-rank 0",
        )
    _require_local(config, options)
    if groups is not None and groups % size:
        raise ConfigError(
            f"{groups} groups of attention's output do not divide by {size} tensor-parallel ranks",
            [f"model.architecture.o_groups = {groups}", f"trainer.tensor_model_parallel_size = {size}"],
            "choose a size that divides them: each rank has whole groups of heads",
        )
    if size > 1 and not config.trainer.sequence_parallel:
        raise ConfigError(
            "what attention's keys are made of is whole on each tensor-parallel rank, whose gradients are added only "
            "where the ranks share sequences",
            ["trainer.sequence_parallel = false", f"trainer.tensor_model_parallel_size = {size}"],
            "use --sequence-parallel",
        )
    for name in _WITHOUT:
        if options.get(name):
            raise ConfigError(
                f"{name} = {options[name]!r}: attention, router and experts of this family are built without it",
                f"megatron.{name} = {options[name]!r}",
                "leave it out",
            )
    recomputed = set(options.get("recompute_modules") or ()) - _RECOMPUTED
    if config.trainer.recompute_granularity == "selective" and recomputed:
        raise ConfigError(
            f"recompute_modules has {', '.join(sorted(recomputed))}: of layers with several streams only "
            f"{' and '.join(sorted(_RECOMPUTED))} are computed again by themselves",
            "megatron.recompute_modules",
            "leave it out, or use --recompute-granularity full",
        )


def _require_local(config: LaunchConfig, options: Mapping[str, Any]) -> None:
    """All of it in one error: a shipped cell asks for several."""
    asked: dict[str, str] = {}
    if config.trainer.precision == "fp8":
        asked["trainer.precision = fp8"] = "--train-precision bf16"
    if options.get("transformer_impl", "local") != "local":
        asked[f"megatron.transformer_impl = {options['transformer_impl']}"] = "--set megatron.transformer_impl=local"
    for name in ("fp8_format", "fp8"):
        if options.get(name):
            asked[f"megatron.{name} = {options[name]}"] = f"--set megatron.{name}=false"
    if asked:
        raise ConfigError(
            "compressed attention and residual streams are built in local layers only, not in those of Transformer "
            "Engine, which alone train in FP8",
            list(asked),
            " ".join(asked.values()),
        )
