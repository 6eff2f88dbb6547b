"""A model in small for a rehearsal: the same architecture with every kind of layer it has, few and narrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

from rllaunch.backends.embedded.tokenizer import BOS_ID, EOS_ID, PAD_ID
from rllaunch.errors import ConfigError

# Upper limits under the names of transformers' configs (5.24.0), aliases left out: what a model has less of, it keeps.
# Windows are so short that answers of a dozen tokens reach beyond them. The indexer's top-k stays: many of its scores
# are 0 after their ReLU, and which of equal ones is taken depends on the length of the tensor. Cut to 4 of 16 tokens,
# sampling and training disagreed by whole nats.
_LIMITS = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 32,
    "sliding_window": 8,
    "sliding_window_size": 8,
    # experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": 16,
    "n_group": 2,
    "topk_group": 1,
    # multi-head latent attention and its indexer
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    # compressed attention and hyper-connections
    "o_groups": 2,
    "o_lora_rank": 8,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 4,
    # gated delta net
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # Mamba
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 16,
    # relative attention
    "swa_num_attention_heads": 4,
    "swa_head_dim": 32,
    "d_rel": 4,
    "rel_extent": 16,
    # multi-token prediction
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
}
_KV_HEADS = {"num_key_value_heads": "num_attention_heads", "swa_num_key_value_heads": "swa_num_attention_heads"}
_MAX_KV_HEADS = 2
_COMPRESS_RATE = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}

# Lists with one entry a layer.
_PER_LAYER = ("layer_types", "layers_block_type", "mlp_layer_types", "indexer_types")
# Other ways to say what those lists say; the lists have the last word.
_SCHEDULES = {
    "compress_ratios",
    "compress_rate_csa",
    "compress_rate_hca",
    "dense_mlp_idx",
    "full_attention_interval",
    "hybrid_override_pattern",
    "index_skip_topk_offset",
    "index_topk_freq",
    "index_topk_pattern",
    "local_layer_ids",
    "max_window_layers",
    "mtp_hybrid_override_pattern",
    "mtp_local_layer_ids",
    "num_hash_layers",
}
# Facts of files and formats, which a model of random weights has no use for.
_FILES = {"architectures", "auto_map", "quantization_config", "torch_dtype", "dtype", "transformers_version"}
_MIN_LAYERS = 2


def shrink(architecture: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """Facts of a tiny model of the same `model_type`, under the names of the Hugging Face `config.json`.

    Two to four layers, at least one of every kind of attention and of feed-forward the model has, in its order;
    below 200,000 parameters with a vocabulary of some hundred tokens; no multi-token prediction. What is not
    a size (activations, norms, routing, rotary base) stays. Of a model with several towers it is the text model.

    Args:
        architecture: facts of the full-size model; what it leaves open is transformers' default for its type.
        vocab_size: tokens of the rehearsal's tokenizer, whose special ids it takes too.
    Raises:
        ConfigError: `model_type` is missing, or transformers cannot make a config of the facts.
    """
    architecture = deepcopy(dict(architecture))  # transformers completes nested facts in place
    if architecture.get("q_lora_rank") == 0:  # TOML has no null
        architecture = {**architecture, "q_lora_rank": None}
    full = _config(deepcopy(architecture))
    layers = _representatives(_kinds(full), _MIN_LAYERS)
    facts = dict(architecture.get("text_config") or architecture)
    for name in _SCHEDULES | _FILES:
        facts.pop(name, None)
    facts |= _sizes(full) | _schedule(full, layers)
    if rope := facts.get("rope_parameters"):
        facts["rope_parameters"] = _narrow_mrope(rope, facts.get("head_dim", _LIMITS["head_dim"]))
    special = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    return facts | special | {"model_type": full.model_type, "vocab_size": vocab_size}


def _config(architecture: Mapping[str, Any]) -> Any:
    """The text model's config as transformers completes it."""
    from transformers import AutoConfig

    facts = dict(architecture)
    model_type = facts.pop("model_type", None)
    if not model_type:
        raise ConfigError(
            "a rehearsal needs the model's architecture, and its model_type is not known",
            "model.architecture",
            "choose a model profile (--model) that has facts of the architecture",
        )
    try:
        return AutoConfig.for_model(model_type, **facts).get_text_config(decoder=True)
    except (ValueError, TypeError, KeyError) as err:
        raise ConfigError(
            f"transformers cannot make a {model_type!r} of the architecture: {err}", "model.architecture"
        ) from err


def _sizes(full: Any) -> dict[str, Any]:
    """Each size the config has, at most its limit."""
    real_names = {name for name in _LIMITS if name not in full.attribute_map}
    sizes: dict[str, Any] = {
        name: min(value, _LIMITS[name])
        for name in real_names
        if isinstance(value := getattr(full, name, None), int) and not isinstance(value, bool)
    }
    for kv_name, name in _KV_HEADS.items():
        kv_heads, heads = getattr(full, kv_name, None), getattr(full, name, None)
        if kv_heads and heads:
            sizes[kv_name] = sizes[name] if kv_heads == heads else min(kv_heads, _MAX_KV_HEADS)
    if rates := getattr(full, "compress_rates", None):
        sizes["compress_rates"] = {kind: min(rate, _COMPRESS_RATE.get(kind, rate)) for kind, rate in rates.items()}
    if getattr(full, "kv_lora_rank", None):
        sizes["head_dim"] = sizes["qk_rope_head_dim"]  # of latent attention: the part that is rotated
    else:
        sizes.pop("qk_rope_head_dim", None)  # follows from head_dim and the rotated share of it
    return sizes


def _kinds(full: Any) -> list[tuple[Any, ...]]:
    """For each layer what it is, column by column: its attention, its feed-forward, its indexer."""
    columns = [values for name in _PER_LAYER if (values := getattr(full, name, None))]
    columns.append(_is_dense(full))
    return list(zip(*columns, strict=True))


def _is_dense(full: Any) -> list[bool]:
    """Layers with a dense feed-forward, of the architectures that say so by counts."""
    num_layers = full.num_hidden_layers
    first = getattr(full, "first_k_dense_replace", None) or 0
    dense = set(range(first)) | set(getattr(full, "mlp_only_layers", None) or ())
    step = getattr(full, "decoder_sparse_step", None) or 1
    return [i in dense or (i + 1) % step != 0 for i in range(num_layers)]


def _representatives(kinds: Sequence[tuple[Any, ...]], at_least: int) -> list[int]:
    """Layers, in order, with which every value of every column is there."""
    chosen: list[int] = []
    seen: set[tuple[int, Any]] = set()
    for layer, kind in enumerate(kinds):
        values = set(enumerate(kind))
        if not values <= seen:
            chosen.append(layer)
            seen |= values
    others = (layer for layer in range(len(kinds)) if layer not in chosen)
    while len(chosen) < min(at_least, len(kinds)):
        chosen.append(next(others))
    return sorted(chosen)


def _schedule(full: Any, layers: Sequence[int]) -> dict[str, Any]:
    """What says which layer is of which kind, for the chosen layers."""
    facts: dict[str, Any] = {"num_hidden_layers": len(layers)}
    for name in _PER_LAYER:
        if name not in full.attribute_map and (values := getattr(full, name, None)):
            facts[name] = [values[layer] for layer in layers]
    is_dense = _is_dense(full)
    dense = [new for new, layer in enumerate(layers) if is_dense[layer]]
    if getattr(full, "first_k_dense_replace", None) is not None:
        facts["first_k_dense_replace"] = len(dense)
    if getattr(full, "mlp_only_layers", None) is not None:
        facts |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
    return facts


def _narrow_mrope(rope: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Sections of a rotary embedding over time, height and width cut to a narrow head."""
    if "mrope_section" not in rope:
        return dict(rope)
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    return {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
