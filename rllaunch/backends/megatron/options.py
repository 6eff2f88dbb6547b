"""The config dataclasses of the installed Megatron-core, from a launch's sections and the model's shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from torch import Tensor

from rllaunch.backends.megatron.option_names import ALIASES, FOREIGN, OWN, UNSERVED
from rllaunch.backends.megatron.served import require_served
from rllaunch.backends.megatron.shape import SIGMOID_SLOPE, Experts, Latent, ModelShape, Rope
from rllaunch.errors import ConfigError, did_you_mean
from rllaunch.resolve.schema import LaunchConfig

# Names of miles and slime: samples one after another in one row, or each in a row of its own.
QKV_FORMATS = ("thd", "bshd")


@dataclass(frozen=True)
class MegatronConfigs:
    """What Megatron-core is built with.

    Args:
        notes: a sentence for each option that has no effect here; to be told once.
    """

    transformer: Any
    ddp: Any
    optimizer: Any
    uses_te: bool
    notes: tuple[str, ...]


def has_transformer_engine() -> bool:
    return find_spec("transformer_engine") is not None


def megatron_configs(config: LaunchConfig, shape: ModelShape, *, on_cpu: bool) -> MegatronConfigs:
    """
    Raises:
        ConfigError: an option that the installed Megatron-core does not have, that another key decides, or whose value
            it refuses; or a layout this trainer does not serve.
    """
    _check_served(config, shape)
    _check_heads(config, shape)
    if shape.compressed:
        require_served(config, shape.compressed.groups)
    given, notes = _given(config.megatron.model_extra or {})
    # Adapters read the inputs of linear layers, which those of Transformer Engine hide behind a fused norm.
    uses_te_unless_told = (
        has_transformer_engine() and not config.has_lora and not shape.has_sinks and not shape.compressed
    )
    impl = given.get("transformer_impl", "transformer_engine" if uses_te_unless_told else "local")
    if impl not in ("local", "transformer_engine") or (impl == "transformer_engine" and not has_transformer_engine()):
        raise ConfigError(
            f"transformer_impl = {impl!r} cannot be built here: "
            + ("Transformer Engine is not installed" if impl == "transformer_engine" else "it is for inference"),
            "[megatron] transformer_impl",
            "install transformer-engine, or set it to 'local'",
        )
    uses_te = impl == "transformer_engine"
    if config.has_lora and (uses_te or config.trainer.precision == "fp8"):
        raise ConfigError(
            "LoRA adapters are built beside Megatron-core's local layers only, not those of Transformer Engine",
            "[megatron] transformer_impl" if uses_te else "trainer.precision = fp8",
            "leave transformer_impl out and use --train-precision bf16, or --lora-rank 0",
        )
    if shape.has_sinks and (uses_te or config.trainer.precision == "fp8"):
        raise ConfigError(
            "attention sinks and biases of experts are built in local layers only, not in those of Transformer Engine",
            "[megatron] transformer_impl" if uses_te else "trainer.precision = fp8",
            "leave transformer_impl out and use --train-precision bf16",
        )
    if not uses_te and (how := given.get("cp_comm_type", "all_gather")) != "all_gather":
        raise ConfigError(
            f"cp_comm_type = {how!r} is for layers of Transformer Engine; local layers gather keys and values",
            "[megatron] cp_comm_type",
            "leave it out",
        )
    is_fp32 = config.trainer.precision == "fp32"
    types = {"bf16": not is_fp32, "params_dtype": torch.float32 if is_fp32 else torch.bfloat16}
    transformer_class = MLATransformerConfig if shape.latent else TransformerConfig
    fixed = {**_model(shape), **_layout(config), **types, "pipeline_dtype": types["params_dtype"]}
    fixed |= {"calculate_per_token_loss": True, "use_cpu_initialization": on_cpu}
    free = {**_free(config, shape, uses_te), "transformer_impl": impl}
    optimizer = {**_optimizer(config), **types}
    sums = {"average_in_collective": False}
    sharded = {"use_distributed_optimizer": True}
    _check_given(given, fixed | optimizer | sums)
    # Megatron-core refuses biases of experts that ranks share, which it would add on each; `biased_experts` does not.
    transformer = _build(transformer_class, fixed | {"add_bias_linear": False}, free, given)
    transformer.add_bias_linear = shape.linear_bias
    if shape.rope.kind == "yarn" and not shape.latent:
        for name, value in _yarn(shape.rope).items():
            setattr(transformer, name, value)
    return MegatronConfigs(
        transformer,
        _build(DistributedDataParallelConfig, sums, sharded | {"grad_reduce_in_fp32": True}, given),
        _build(OptimizerConfig, optimizer, sharded, given),
        uses_te,
        notes,
    )


def qkv_format(config: LaunchConfig) -> str:
    return str((config.megatron.model_extra or {}).get("qkv_format", "thd"))


def known_options() -> set[str]:
    """Fields that the installed dataclasses have, functions and private ones left out."""
    fields = (
        f
        for cls in (TransformerConfig, MLATransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
        for f in dataclasses.fields(cls)
    )
    return {f.name for f in fields if not f.name.startswith("_") and "Callable" not in str(f.type)}


def _given(options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options under the installed names, and a word on each that has no effect."""
    known = known_options()
    given: dict[str, Any] = {}
    notes = []
    for key, value in options.items():
        if key in known:
            given[key] = value
        elif key in ALIASES:
            name, converted = ALIASES[key]
            given[name] = converted(value)
        elif key in OWN:
            continue
        elif key in FOREIGN:
            notes.append(f"[megatron] {key} = {value!r} has no effect: {FOREIGN[key]}")
        else:
            hint = did_you_mean(key, known | OWN | set(FOREIGN) | set(ALIASES), "see TransformerConfig; known")
            raise ConfigError(
                f"the installed Megatron-core has no option {key!r}",
                f"[megatron] {key}",
                hint
                if len(hint) < 200
                else "its options are the fields of TransformerConfig, "
                "DistributedDataParallelConfig and OptimizerConfig",
            )
    return given, tuple(notes)


def _check_given(given: Mapping[str, Any], decided: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in UNSERVED and value:
            raise ConfigError(
                f"{name} = {value!r} is not served: {UNSERVED[name]}", f"[megatron] {name}", "leave it out"
            )
        if name in decided and name not in UNSERVED and value != decided[name]:
            raise ConfigError(
                f"{name} = {value!r} is decided elsewhere: it follows as {decided[name]!r} from the model's "
                "architecture or from [trainer]",
                f"[megatron] {name}",
                "leave it out, or set the key of [trainer] or [model] that decides it",
            )


def _check_served(config: LaunchConfig, shape: ModelShape) -> None:
    trainer = config.trainer
    if (given := qkv_format(config)) not in QKV_FORMATS:
        raise ConfigError(
            f"qkv_format = {given!r} is not known", "[megatron] qkv_format", did_you_mean(given, QKV_FORMATS)
        )
    options = config.megatron.model_extra or {}
    for name, is_unserved, why in (
        ("attention_dropout", shape.has_sinks, "attention with sinks drops nothing"),
        ("moe_grouped_gemm", shape.linear_bias, "no grouped product adds biases of experts"),
    ):
        if is_unserved and options.get(name):
            raise ConfigError(f"{name} = {options[name]!r}: {why}", f"[megatron] {name}", "leave it out")
    expert_tp = trainer.expert_tensor_parallel_size or trainer.tensor_model_parallel_size
    if shape.linear_bias and expert_tp > trainer.tensor_model_parallel_size:
        raise ConfigError(
            "of an expert's bias, which each rank that shares the expert has whole, the norm of all gradients would "
            "count several",
            [
                f"trainer.expert_tensor_parallel_size = {expert_tp}",
                f"trainer.tensor_model_parallel_size = {trainer.tensor_model_parallel_size}",
            ],
            "use no more expert-tensor-parallel ranks than tensor-parallel ones",
        )
    if trainer.tensor_model_parallel_size > 1 and shape.latent and not trainer.sequence_parallel:
        raise ConfigError(
            "with latent attention, Megatron-core adds the gradients of tensor-parallel ranks only where they share "
            "sequences",
            ["trainer.sequence_parallel = false", "trainer.tensor_model_parallel_size > 1"],
            "use --sequence-parallel",
        )


def _check_heads(config: LaunchConfig, shape: ModelShape) -> None:
    size = config.trainer.tensor_model_parallel_size
    if shape.delta_net and shape.delta_net.key_heads % size:
        raise ConfigError(
            f"{shape.delta_net.key_heads} key heads of linear attention do not divide by {size} tensor-parallel ranks",
            ["model.architecture.linear_num_key_heads", f"trainer.tensor_model_parallel_size = {size}"],
            "choose a size that divides them: each rank has whole heads",
        )


def _build(cls: Any, fixed: Mapping[str, Any], free: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    """`cls` with what is fixed, over what was given, over our own defaults; only of fields it has."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    chosen = {n: _value(fields[n], v) for n, v in {**free, **given}.items() if n in fields}
    unknown = fixed.keys() - fields.keys()
    assert not unknown, f"{cls.__name__} of the installed Megatron-core lacks {sorted(unknown)}"
    try:
        return cls(**{**chosen, **fixed})
    except (ValueError, TypeError, AssertionError) as err:
        told = ", ".join(f"{n} = {v!r}" for n, v in given.items() if n in fields)
        raise ConfigError(
            f"Megatron-core refuses its {cls.__name__}: {err}", f"[megatron] {told}" if told else "[trainer]"
        ) from err


def _value(field: dataclasses.Field[Any], value: Any) -> Any:
    """TOML has no enumerations: their members are given by name."""
    if not (isinstance(field.default, Enum) and isinstance(value, str)):
        return value
    members = type(field.default).__members__
    if value not in members:
        raise ConfigError(
            f"{field.name} = {value!r} is not known", f"[megatron] {field.name}", did_you_mean(value, members)
        )
    return members[value]


def _model(shape: ModelShape) -> dict[str, Any]:
    fixed = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_width,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_heads if shape.latent or shape.compressed else shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        # In latent attention it stands for the norms of the latents.
        "qk_layernorm": shape.qk_norm != "none" or shape.latent is not None,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        "multi_latent_attention": shape.latent is not None,
        "softmax_type": "learnable" if shape.has_sinks else "vanilla",
        "window_size": (max(shape.windows) - 1, 0) if any(shape.windows) else None,
        "window_attn_skip_freq": [int(window > 0) for window in shape.windows] or None,
        "attention_output_gate": shape.has_output_gate,
        "layernorm_zero_centered_gamma": shape.has_centered_norms,
    }
    if shape.latent:
        fixed |= _latent(shape.latent, shape.rope)
    if shape.experts:
        fixed |= _experts(shape.experts)
    return fixed


def _latent(latent: Latent, rope: Rope) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "yarn" if rope.kind == "yarn" else "rope",
        "rotary_base": rope.theta,
        # Its logarithm scales the softmax even where `rope_type` is "rope".
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
        "beta_fast": rope.beta_fast,
        "beta_slow": rope.beta_slow,
        "mscale": rope.mscale,
        "mscale_all_dim": rope.mscale_all_dim,
    }


def sloped_silu(gate: Tensor) -> Tensor:
    """Megatron-core's `quick_gelu`, which it compiles: for that a machine without a compiler has nothing."""
    return gate * torch.sigmoid(SIGMOID_SLOPE * gate)


def _yarn(rope: Rope) -> dict[str, Any]:
    """What `GPTModel` and its attention read of a config that has no fields for it (0.16.1, 0.19.2)."""
    return {
        "yarn_rotary_scaling_factor": rope.factor,
        "yarn_original_max_position_embeddings": rope.original_length,
        "yarn_beta_fast": rope.beta_fast,
        "yarn_beta_slow": rope.beta_slow,
        "yarn_mscale": rope.mscale,
        "yarn_mscale_all_dim": rope.mscale_all_dim,
        "yarn_correction_range_round_to_int": rope.rounds,
    }


def _experts(experts: Experts) -> dict[str, Any]:
    groups, of_them = experts.groups or (None, None)
    if experts.silu_clamp is not None:
        silu = {"activation_func_clamp_value": experts.silu_clamp, "bias_activation_fusion": False}
    else:
        silu = {}
    clamped = {"activation_func": sloped_silu, "activation_func_clamp_value": experts.clamp, "glu_linear_offset": 1.0}
    return (clamped if experts.clamp is not None else silu) | {
        "num_moe_experts": experts.number,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.width,
        "moe_layer_freq": [int(sparse) for sparse in experts.is_sparse],
        "moe_shared_expert_intermediate_size": experts.shared_width or None,
        # Of scores that 0.16.1 does not know: `hash_routing` has a router of its own.
        "moe_router_score_function": "sigmoid" if experts.score == "sqrtsoftplus" else experts.score,
        # A softmax over the chosen ones alone is the normalised softmax over all.
        "moe_router_pre_softmax": experts.score == "softmax" and not experts.normalizes,
        "moe_router_topk_scaling_factor": experts.scaling,
        "moe_router_num_groups": groups,
        "moe_router_group_topk": of_them,
        "moe_router_enable_expert_bias": experts.has_bias,
        # The gate is a layer of our own (`gates`), which the overlapped parts of Megatron-core's would not ask.
        **({"moe_shared_expert_overlap": False} if experts.has_shared_gate else {}),
    }


def _layout(config: LaunchConfig) -> dict[str, Any]:
    trainer = config.trainer
    fixed: dict[str, Any] = {
        "tensor_model_parallel_size": trainer.tensor_model_parallel_size,
        "pipeline_model_parallel_size": trainer.pipeline_model_parallel_size,
        "context_parallel_size": trainer.context_parallel_size,
        "expert_model_parallel_size": trainer.expert_model_parallel_size,
        "expert_tensor_parallel_size": trainer.expert_tensor_parallel_size or trainer.tensor_model_parallel_size,
        "sequence_parallel": trainer.sequence_parallel and trainer.tensor_model_parallel_size > 1,
    }
    if trainer.pipeline_model_parallel_size > 1:
        fixed["num_layers_in_first_pipeline_stage"] = trainer.decoder_first_pipeline_num_layers
        fixed["num_layers_in_last_pipeline_stage"] = trainer.decoder_last_pipeline_num_layers
    return fixed


def _free(config: LaunchConfig, shape: ModelShape, uses_te: bool) -> dict[str, Any]:
    """Our own defaults, which an option of [megatron] may replace."""
    trainer = config.trainer
    free: dict[str, Any] = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "init_method_std": trainer.init_method_std,
        "persist_layer_norm": False,
    }
    if trainer.recompute_granularity != "none":
        free["recompute_granularity"] = trainer.recompute_granularity
    if trainer.recompute_granularity == "full":
        free |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if trainer.precision == "fp8":
        free["fp8"] = "hybrid"
    if shape.experts:
        free |= {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_bias_update_rate": 0.0,
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "moe_grouped_gemm": uses_te,
        }
    return free


def _optimizer(config: LaunchConfig) -> dict[str, Any]:
    trainer = config.trainer
    fixed: dict[str, Any] = {
        "optimizer": "adam",
        "lr": trainer.lr,
        "min_lr": trainer.min_lr,
        "weight_decay": trainer.weight_decay,
        "adam_beta1": trainer.adam_beta1,
        "adam_beta2": trainer.adam_beta2,
        "adam_eps": trainer.adam_eps,
        "clip_grad": trainer.clip_grad,
        "optimizer_cpu_offload": trainer.optimizer_cpu_offload,
    }
    if trainer.optimizer_cpu_offload:
        fixed["optimizer_offload_fraction"] = 1.0
    return fixed
