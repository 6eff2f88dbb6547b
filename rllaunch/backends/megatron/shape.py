"""A causal language model as Megatron-core needs to know it, from the facts of its Hugging Face `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rllaunch.errors import ConfigError
from rllaunch.plan.architecture import text_facts
from rllaunch.plan.sizes import padded_vocab

_WHERE = "model.architecture"
# `rotary_pos_embedding.py` of Megatron-core 0.16.1 has these three as constants.
_LLAMA3_FIXED = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: `default`, `llama3` (one factor) or `yarn`.

    Args:
        share: of a head's dimensions, from the first, that are rotated; the rest stay as they are.
        rounds: the dimensions between which yarn blends are whole numbers.
    """

    kind: str
    theta: float
    share: float = 1.0
    factor: float = 1.0
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    rounds: bool = True


@dataclass(frozen=True)
class Latent:
    """Widths of multi-head latent attention; `q_rank` is None where queries come from the hidden state."""

    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int


@dataclass(frozen=True)
class Compressed:
    """Attention over a window of tokens, and over entries that stand for several tokens each, as DeepSeek-V4 has it.

    Args:
        kinds: of each layer, what it sees beside the window: `window` nothing, `sparse` the entries that an indexer
            chooses, `heavy` all entries.
        q_rank: width of the latent that queries are made of; keys and values are one head of their own.
        window: how many positions a query sees, its own among them.
        groups, group_rank: of the projection of the output: each group of heads is made so wide by itself.
        sparse_rate, heavy_rate: tokens of an entry.
        index_heads, index_dim, index_top_k: of the indexer, and how many entries it chooses.
        rope: of layers with entries; those without have the model's.
    """

    kinds: tuple[Literal["window", "sparse", "heavy"], ...]
    q_rank: int
    window: int
    groups: int
    group_rank: int
    sparse_rate: int
    heavy_rate: int
    index_heads: int
    index_dim: int
    index_top_k: int
    rope: Rope


@dataclass(frozen=True)
class Streams:
    """Residual streams that layers mix, where there are several.

    Args:
        iterations: in which their mixing is made doubly stochastic, with `eps` in every quotient.
    """

    number: int
    iterations: int
    eps: float


@dataclass(frozen=True)
class Experts:
    """A mixture of experts.

    Args:
        is_sparse: for every layer, whether it has experts.
        shared_width: of all shared experts together; 0: none.
        normalizes: the weights of the chosen experts sum to one before `scaling`.
        groups: groups of experts and how many of them a token may use; None: no groups.
        has_bias: a bias decides, beside the scores, which experts are chosen.
        clamp: bound of what is gated and of its gate, where that is not SiLU but gpt-oss's: (up + 1) · gate ·
            sigmoid(1.702 gate); None: SiLU.
        silu_clamp: bound of what is gated and of its gate before SiLU; None: they have none.
        hashed: of each layer, whether a table of token ids says which experts are chosen; empty: scores always do.
        is_stacked: checkpoints have one tensor of all experts, each input features first, and rows of gate and up
            projection in turn.
        has_shared_gate: what the shared experts say of a token is multiplied by a number it is asked for.
    """

    number: int
    top_k: int
    width: int
    is_sparse: tuple[bool, ...]
    score: str = "softmax"
    normalizes: bool = True
    scaling: float | None = None
    groups: tuple[int, int] | None = None
    shared_width: int = 0
    has_bias: bool = False
    clamp: float | None = None
    is_stacked: bool = False
    has_shared_gate: bool = False
    silu_clamp: float | None = None
    hashed: tuple[bool, ...] = ()

    def is_hashed(self, layer: int) -> bool:
        return bool(self.hashed) and self.hashed[layer]


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention by the gated delta rule, in some of the layers.

    Args:
        is_linear: for every layer, whether it has that instead of full attention.
        value_heads: a multiple of `key_heads`, each of which several of them share.
        kernel: positions that the convolution before it sees.
        is_fused: a checkpoint has all inputs in two projections, by key head, and not each by itself.
    """

    is_linear: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    is_fused: bool


@dataclass(frozen=True)
class ModelShape:
    """Everything that decides the tensors and the arithmetic of the model.

    Args:
        qk_norm: of queries and keys: none, one of a head's width, or one over all heads.
        linear_bias: of every linear layer but the head: attention's output, routers and experts as well.
        has_sinks: every head has a learned logit in its softmax that adds nothing to the sum.
        windows: of each layer, how many positions a query sees, its own among them; 0: all before it. Empty: all see
            all.
        has_output_gate: the projection of queries also gives a gate for what attention puts out.
        has_centered_norms: weights of norms are stored less one.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    norm_eps: float
    max_length: int
    rope: Rope
    is_tied: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    qkv_bias: bool = False
    linear_bias: bool = False
    has_sinks: bool = False
    windows: tuple[int, ...] = ()
    latent: Latent | None = None
    compressed: Compressed | None = None
    streams: Streams | None = None
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    has_output_gate: bool = False
    has_centered_norms: bool = False
    pad_id: int | None = None
    """A token whose embedding is not trained, as transformers has it of a `pad_token_id`."""

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of embedding and head: each of `tp` ranks holds the same number of them, as the plan counts them."""
        return padded_vocab(self.vocab_size, tp)

    def is_sparse(self, layer: int) -> bool:
        return self.experts is not None and self.experts.is_sparse[layer]

    def is_linear(self, layer: int) -> bool:
        return self.delta_net is not None and self.delta_net.is_linear[layer]


def read_shape(facts: Mapping[str, Any]) -> ModelShape:
    """
    Args:
        facts: of `config.json`, complete with the defaults of transformers' class (`PreTrainedConfig.to_dict`). Of a
            multi-modal Qwen3.5 the text model is taken.
    Raises:
        ConfigError: a family this trainer does not build, or something in it that Megatron-core computes otherwise.
    """
    model_type = facts.get("model_type", "")
    if model_type in _WITH_TEXT and isinstance(facts.get("text_config"), Mapping):
        return read_shape(text_facts(facts))
    family = _FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(
            f"the megatron trainer does not build models of type {model_type!r}",
            f"{_WHERE}.model_type",
            f"it builds {', '.join(built_types())}; `--rehearse` runs others in small, on the embedded backend",
        )
    if facts.get("hidden_act", "silu") != "silu":
        raise _unlike("hidden_act", facts["hidden_act"], "only silu")
    slides = facts.get("use_sliding_window") or "sliding_attention" in (facts.get("layer_types") or ())
    if slides and model_type not in _WINDOWED:
        raise _unlike("sliding_window", facts.get("sliding_window"), "only full attention")
    return family(facts)


def built_types() -> list[str]:
    """The `model_type`s that `read_shape` takes."""
    return sorted(_FAMILIES)


def refusal_of(facts: Mapping[str, Any]) -> ConfigError | None:
    """Why `read_shape` will refuse a model, from facts that may lack transformers' defaults; None if none says so."""
    try:
        read_shape(facts)
    except KeyError:
        return None  # a default of transformers' class: known once a run has imported it
    except ConfigError as err:
        return err
    return None


def _llama(facts: Mapping[str, Any]) -> ModelShape:
    for name in ("attention_bias", "mlp_bias"):
        if facts.get(name):
            raise _unlike(name, True, "no biases in these layers")
    return ModelShape(**_common(facts))


def _qwen2(facts: Mapping[str, Any]) -> ModelShape:
    return ModelShape(**_common(facts), qkv_bias=True)


def _qwen3(facts: Mapping[str, Any]) -> ModelShape:
    if facts.get("attention_bias"):
        raise _unlike("attention_bias", True, "no biases in these layers")
    return ModelShape(**_common(facts), qk_norm="head")


def _qwen3_moe(facts: Mapping[str, Any]) -> ModelShape:
    layers, step = facts["num_hidden_layers"], facts["decoder_sparse_step"]
    dense = set(facts["mlp_only_layers"] or ())
    experts = Experts(
        number=facts.get("num_experts") or facts["num_local_experts"],
        top_k=facts["num_experts_per_tok"],
        width=facts["moe_intermediate_size"],
        is_sparse=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
        normalizes=facts["norm_topk_prob"],
    )
    if experts.top_k == 1 and experts.normalizes:
        raise _unlike("norm_topk_prob", True, "with one expert a token the weight is the score itself")
    if facts.get("attention_bias"):
        raise _unlike("attention_bias", True, "no biases in these layers")
    return ModelShape(**_common(facts), qk_norm="head", experts=experts)


def _deepseek_v3(facts: Mapping[str, Any]) -> ModelShape:
    return _latent_with_experts(facts, _sparse_after_dense(facts))


def _glm4_moe_lite(facts: Mapping[str, Any]) -> ModelShape:
    return _latent_with_experts(facts, tuple(kind == "sparse" for kind in facts["mlp_layer_types"]))


def _glm4_moe(facts: Mapping[str, Any]) -> ModelShape:
    return ModelShape(
        **_common(facts, rotates_part=True),
        qkv_bias=bool(facts["attention_bias"]),
        qk_norm="head" if facts["use_qk_norm"] else "none",
        experts=_sigmoid_experts(facts, _sparse_after_dense(facts)),
    )


def _minimax_m2(facts: Mapping[str, Any]) -> ModelShape:
    top_k = facts["num_experts_per_tok"]
    if top_k == 1:
        raise _unlike("num_experts_per_tok", 1, "no normalised weight of one expert a token")
    if facts.get("router_jitter_noise"):
        raise _unlike("router_jitter_noise", facts["router_jitter_noise"], "no noise on what experts are given")
    experts = Experts(
        number=facts.get("num_local_experts") or facts["num_experts"],
        top_k=top_k,
        width=facts["intermediate_size"],
        is_sparse=(True,) * facts["num_hidden_layers"],
        score="sigmoid",
        has_bias=True,
    )
    return ModelShape(**_common(facts, rotates_part=True), qk_norm="all", experts=experts)


def _gpt_oss(facts: Mapping[str, Any]) -> ModelShape:
    top_k, alpha = facts["num_experts_per_tok"], facts.get("swiglu_alpha", SIGMOID_SLOPE)
    if not facts["attention_bias"]:
        raise _unlike("attention_bias", False, "biases in all layers of this family or in none")
    if top_k == 1:
        raise _unlike("num_experts_per_tok", 1, "no normalised weight of one expert a token")
    if alpha != SIGMOID_SLOPE:
        raise _unlike("swiglu_alpha", alpha, f"only {SIGMOID_SLOPE}")
    layers, window = facts["num_hidden_layers"], facts["sliding_window"]
    kinds = facts.get("layer_types") or [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    if "sliding_attention" in kinds and not window:
        raise _unlike("sliding_window", window, "a width of every window")
    experts = Experts(
        number=facts.get("num_local_experts") or facts["num_experts"],
        top_k=top_k,
        width=facts["intermediate_size"],
        is_sparse=(True,) * layers,
        clamp=float(facts["swiglu_limit"]),
        is_stacked=True,
    )
    windows = tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    return ModelShape(
        **_common(facts), qkv_bias=True, linear_bias=True, has_sinks=True, windows=windows, experts=experts
    )


def _qwen3_next(facts: Mapping[str, Any]) -> ModelShape:
    layers, step = facts["num_hidden_layers"], facts["decoder_sparse_step"]
    dense = set(facts["mlp_only_layers"] or ())
    is_sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    experts = _gated_experts(facts, is_sparse, normalizes=facts["norm_topk_prob"]) if any(is_sparse) else None
    return _with_delta_nets(facts, experts, is_fused=True)


def _qwen3_5(facts: Mapping[str, Any]) -> ModelShape:
    return _with_delta_nets(facts, None, is_fused=False)


def _qwen3_5_moe(facts: Mapping[str, Any]) -> ModelShape:
    experts = _gated_experts(facts, (True,) * facts["num_hidden_layers"], normalizes=True)
    return _with_delta_nets(facts, experts, is_fused=False)


def _gated_experts(facts: Mapping[str, Any], is_sparse: tuple[bool, ...], *, normalizes: bool) -> Experts:
    top_k = facts["num_experts_per_tok"]
    if top_k == 1 and normalizes:
        raise _unlike("num_experts_per_tok", 1, "no normalised weight of one expert a token")
    return Experts(
        number=facts.get("num_experts") or facts["num_local_experts"],
        top_k=top_k,
        width=facts["moe_intermediate_size"],
        is_sparse=is_sparse,
        normalizes=normalizes,
        shared_width=facts["shared_expert_intermediate_size"],
        has_shared_gate=True,
    )


def _with_delta_nets(facts: Mapping[str, Any], experts: Experts | None, *, is_fused: bool) -> ModelShape:
    if facts.get("attention_bias"):
        raise _unlike("attention_bias", True, "no biases in these layers")
    # SGLang (0.5.23 models/qwen3_5.py) reads these two; transformers knows neither, and computes as here.
    if (gate := facts.get("output_gate_type")) not in (None, "silu", "swish"):
        raise _unlike("output_gate_type", gate, "only silu")
    if not facts.get("attn_output_gate", True):
        raise _unlike("attn_output_gate", False, "a gate of what attention puts out")
    delta_net = DeltaNet(
        is_linear=_linear_layers(facts),
        key_heads=facts["linear_num_key_heads"],
        value_heads=facts["linear_num_value_heads"],
        key_dim=facts["linear_key_head_dim"],
        value_dim=facts["linear_value_head_dim"],
        kernel=facts["linear_conv_kernel_dim"],
        is_fused=is_fused,
    )
    if delta_net.value_heads % delta_net.key_heads:
        has = f"the same number of value heads for each of {delta_net.key_heads} key heads"
        raise _unlike("linear_num_value_heads", delta_net.value_heads, has)
    # With experts in every layer there is no dense width.
    width = {"intermediate_size": facts.get("intermediate_size") or facts.get("moe_intermediate_size")}
    return ModelShape(
        **_common({**facts, **width}, rotates_part=True),
        qk_norm="head",
        experts=experts,
        delta_net=delta_net,
        has_output_gate=True,
        has_centered_norms=True,
    )


def _linear_layers(facts: Mapping[str, Any]) -> tuple[bool, ...]:
    if kinds := facts.get("layer_types"):
        return tuple(kind == "linear_attention" for kind in kinds)
    return tuple(bool((i + 1) % facts["full_attention_interval"]) for i in range(facts["num_hidden_layers"]))


_KINDS: dict[str, Literal["window", "sparse", "heavy"]] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "sparse",
    "heavily_compressed_attention": "heavy",
}


def _deepseek_v4(facts: Mapping[str, Any]) -> ModelShape:
    # Not of a profile, which has one rope for both: known once transformers' class has parted them.
    main, compress = facts["rope_parameters"]["main"], facts["rope_parameters"]["compress"]
    for name in ("attention_bias", "mlp_bias", "attention_dropout", "router_jitter_noise"):
        if facts.get(name):
            raise _unlike(name, facts[name], "none in this family")
    if facts["scoring_func"] != "sqrtsoftplus":
        raise _unlike("scoring_func", facts["scoring_func"], "only sqrtsoftplus in this family")
    width, rates = facts["moe_intermediate_size"], facts["compress_rates"]
    common = _common({**facts, "intermediate_size": width, "rope_parameters": main}, rotates_part=True)
    compressed = Compressed(
        kinds=tuple(_KINDS[kind] for kind in facts["layer_types"]),
        q_rank=facts["q_lora_rank"],
        window=facts["sliding_window"],
        groups=facts["o_groups"],
        group_rank=facts["o_lora_rank"],
        sparse_rate=rates["compressed_sparse_attention"],
        heavy_rate=rates["heavily_compressed_attention"],
        index_heads=facts["index_n_heads"],
        index_dim=facts["index_head_dim"],
        index_top_k=facts["index_topk"],
        rope=_entries_rope(compress),
    )
    if common["rope"].kind != "default" or common["rope"].share != compressed.rope.share:
        raise _unlike("rope_parameters.main", main, "no scaling of it, and one share of a head that is rotated")
    experts = Experts(
        number=facts.get("n_routed_experts") or facts["num_local_experts"],
        top_k=facts["num_experts_per_tok"],
        width=width,
        is_sparse=(True,) * facts["num_hidden_layers"],
        score="sqrtsoftplus",
        scaling=facts["routed_scaling_factor"],
        shared_width=width,  # of one, whatever their number says
        has_bias=True,
        silu_clamp=float(facts["swiglu_limit"]),
        hashed=tuple(kind == "hash_moe" for kind in facts["mlp_layer_types"]),
    )
    streams = Streams(facts["hc_mult"], facts["hc_sinkhorn_iters"], facts["hc_eps"])
    return ModelShape(**common, compressed=compressed, streams=streams, experts=experts)


def _entries_rope(given: Mapping[str, Any]) -> Rope:
    theta, share = float(given["rope_theta"]), float(given.get("partial_rotary_factor", 1.0))
    if given["rope_type"] == "default":
        return Rope("default", theta, share)
    if given["rope_type"] != "yarn" or given.get("attention_factor") != 1.0:
        raise _unlike("rope_parameters.compress", dict(given), "default, and yarn with attention_factor = 1")
    return _yarn(theta, given, share=share)


def _latent_with_experts(facts: Mapping[str, Any], is_sparse: tuple[bool, ...]) -> ModelShape:
    if facts.get("attention_bias"):
        raise _unlike("attention_bias", True, "no biases in these layers")
    if not facts.get("rope_interleave", True):
        raise _unlike("rope_interleave", False, "only interleaved rotary dimensions in latent attention")
    latent = Latent(
        q_rank=facts["q_lora_rank"] or None,
        kv_rank=facts["kv_lora_rank"],
        nope_dim=facts["qk_nope_head_dim"],
        rope_dim=facts["qk_rope_head_dim"],
        value_dim=facts["v_head_dim"],
    )
    common = {**_common(facts), "head_dim": latent.nope_dim + latent.rope_dim}
    return ModelShape(**common, latent=latent, experts=_sigmoid_experts(facts, is_sparse))


def _sparse_after_dense(facts: Mapping[str, Any]) -> tuple[bool, ...]:
    return tuple(i >= facts["first_k_dense_replace"] for i in range(facts["num_hidden_layers"]))


def _sigmoid_experts(facts: Mapping[str, Any], is_sparse: tuple[bool, ...]) -> Experts:
    """Experts as DeepSeek-V3 has them: a bias beside sigmoid scores chooses, and some are shared by all tokens."""
    top_k = facts["num_experts_per_tok"]
    if not facts["norm_topk_prob"]:
        raise _unlike("norm_topk_prob", False, "sigmoid scores are always normalised")
    if top_k == 1:
        raise _unlike("norm_topk_prob", True, "with one expert a token the weight is the score itself")
    return Experts(
        number=facts.get("n_routed_experts") or facts["num_local_experts"],
        top_k=top_k,
        width=facts["moe_intermediate_size"],
        is_sparse=is_sparse,
        score="sigmoid",
        scaling=facts["routed_scaling_factor"],
        groups=_groups(facts["n_group"], facts["topk_group"], top_k),
        shared_width=facts["moe_intermediate_size"] * facts["n_shared_experts"],
        has_bias=True,
    )


def _groups(number: int, chosen: int, top_k: int) -> tuple[int, int] | None:
    """None where all groups are open. Megatron ranks groups by the best `top_k // chosen` in them, the model by two."""
    if number <= 1 or chosen == number:
        return None
    if top_k // chosen != 2:
        raise _unlike("topk_group", chosen, f"with {top_k} experts a token only {top_k // 2} groups")
    return number, chosen


_FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelShape]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "deepseek_v3": _deepseek_v3,
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _glm4_moe_lite,
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5_moe,
    "deepseek_v4": _deepseek_v4,
}
# Multi-modal: their text model, of one of the types above, is what is built.
_WITH_TEXT = ("qwen3_5", "qwen3_5_moe")
# Families of which some layers see a window only.
_WINDOWED = ("gpt_oss", "deepseek_v4")
SIGMOID_SLOPE = 1.702
"""Of the gate of gpt-oss's experts: what SGLang takes it to be (0.5.23 models/gpt_oss.py)."""


def _common(facts: Mapping[str, Any], *, rotates_part: bool = False) -> dict[str, Any]:
    """
    Args:
        rotates_part: the family may rotate a part of each head.
    """
    heads, hidden = facts["num_attention_heads"], facts["hidden_size"]
    return {
        "model_type": facts["model_type"],
        "vocab_size": facts["vocab_size"],
        "hidden_size": hidden,
        "num_layers": facts["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": facts.get("num_key_value_heads") or heads,
        "head_dim": facts.get("head_dim") or hidden // heads,
        "ffn_width": facts["intermediate_size"],
        "norm_eps": facts["rms_norm_eps"],
        "max_length": facts["max_position_embeddings"],
        "rope": _rope(facts, rotates_part),
        "is_tied": bool(facts.get("tie_word_embeddings")),
        "pad_id": facts.get("pad_token_id"),
    }


def _rope(facts: Mapping[str, Any], rotates_part: bool) -> Rope:
    given = dict(facts.get("rope_parameters") or {})
    kind, theta = given.pop("rope_type", "default"), float(given.pop("rope_theta", 10000.0))
    share, is_latent = float(given.get("partial_rotary_factor", 1.0)), bool(facts.get("kv_lora_rank"))
    if share != 1.0 and not rotates_part:
        raise _unlike("partial_rotary_factor", share, "rotation of whole heads only in this family")
    if kind == "default":
        return Rope(kind, theta, share)
    if kind == "llama3" and not is_latent:
        for name, fixed in _LLAMA3_FIXED.items():
            if given.get(name, fixed) != fixed:
                raise _unlike(f"rope_parameters.{name}", given[name], f"only {fixed}")
        return Rope(kind, theta, share, float(given["factor"]))
    if kind == "yarn" and not is_latent and not rotates_part:
        return _plain_yarn(theta, given)
    if kind == "yarn" and is_latent:
        if given.get("attention_factor") is not None or not given.get("truncate", True):
            raise _unlike("rope_parameters", given, "neither attention_factor nor truncate = false")
        scales = float(given.get("mscale") or 1.0), float(given.get("mscale_all_dim") or 0.0)
        return _yarn(theta, given, share=share, mscale=scales[0], mscale_all_dim=scales[1])
    raise _unlike(
        "rope_parameters.rope_type", kind, "default, yarn of whole heads, and llama3 without latent attention"
    )


def _plain_yarn(theta: float, given: Mapping[str, Any]) -> Rope:
    if given.get("attention_factor") is not None:
        raise _unlike("rope_parameters.attention_factor", given["attention_factor"], "the one that follows from factor")
    # One without the other counts for nothing.
    scales = (given.get("mscale") or 0.0, given.get("mscale_all_dim") or 0.0)
    mscale, mscale_all_dim = scales if all(scales) else (1.0, 0.0)
    rounds = bool(given.get("truncate", True))
    return _yarn(theta, given, mscale=float(mscale), mscale_all_dim=float(mscale_all_dim), rounds=rounds)


def _yarn(theta: float, given: Mapping[str, Any], **more: Any) -> Rope:
    return Rope(
        "yarn",
        theta,
        factor=float(given["factor"]),
        original_length=int(given["original_max_position_embeddings"]),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        **more,
    )


def _unlike(name: str, value: Any, has: str) -> ConfigError:
    return ConfigError(
        f"{name} = {value!r}: Megatron-core as built here has {has}",
        f"{_WHERE}.{name}",
        "train it with another backend",
    )
