"""Families with grouped-query attention: Llama, Qwen2, Qwen3 (dense and MoE), GLM-4.5, gpt-oss, MiniMax-M2.

Source: transformers 5.24.0 models/{llama,qwen2,qwen3,qwen3_moe,glm4_moe,gpt_oss,minimax_m2}; defaults are the class
defaults of their configuration files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rllaunch.plan.architecture.facts import Facts
from rllaunch.plan.architecture.parts import (
    Heads,
    Moe,
    causal_lm,
    deepseek_moe,
    each_kind_once,
    gated_mlp,
    layer_norms,
    linear,
    mtp_layers,
    norm,
)
from rllaunch.plan.architecture.tensors import Architecture, Layer, Weight

ATTENTION_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class Attention:
    """Grouped-query attention.

    Args:
        qk_norm: of queries and keys: none, one of a head's width, or one over all heads.
        output_gate: the query projection also gives a gate for every output, so it is twice as wide.
        sinks: a learned logit for every head.
    """

    size: Heads
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: Literal["none", "head", "all"] = "none"
    output_gate: bool = False
    sinks: bool = False

    @property
    def kv_elements(self) -> int:
        return 2 * self.size.kv_heads * self.size.head_dim

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        query = self.size.heads * self.size.head_dim
        key = self.size.kv_heads * self.size.head_dim
        return (
            *((Weight("self_attn.sinks", (self.size.heads,), "column"),) if self.sinks else ()),
            *linear("self_attn.q_proj", (query * (1 + self.output_gate), hidden), "column", self.qkv_bias),
            *linear("self_attn.k_proj", (key, hidden), "column", self.qkv_bias),
            *linear("self_attn.v_proj", (key, hidden), "column", self.qkv_bias),
            *linear("self_attn.o_proj", (hidden, query), "row", self.o_bias),
            *self._norms(query, key),
        )

    def _norms(self, query: int, key: int) -> tuple[Weight, ...]:
        if self.qk_norm == "none":
            return ()
        widths = (query, key) if self.qk_norm == "all" else (self.size.head_dim,) * 2
        return (norm("self_attn.q_norm", widths[0]), norm("self_attn.k_norm", widths[1]))


def llama(facts: Facts) -> Architecture:
    bias, size = facts.flag("attention_bias"), _heads(facts)
    return _dense(facts, Attention(size, bias, bias), mlp_bias=facts.flag("mlp_bias"))


def qwen2(facts: Facts) -> Architecture:
    return _dense(facts, Attention(_heads(facts), qkv_bias=True))


def qwen3(facts: Facts) -> Architecture:
    return _dense(facts, _qwen3_attention(facts))


def qwen3_moe(facts: Facts) -> Architecture:
    moe = Moe(
        experts=facts.count("num_experts", also=("num_local_experts",)),
        top_k=facts.count("num_experts_per_tok"),
        width=facts.count("moe_intermediate_size"),
    )
    return _mixed(facts, _qwen3_attention(facts), moe, sparse_by_step(facts), moe.routed)


def glm4_moe(facts: Facts) -> Architecture:
    attention = Attention(
        _heads(facts, head_dim_is_known=True),
        qkv_bias=facts.flag("attention_bias"),
        qk_norm="head" if facts.flag("use_qk_norm") else "none",
    )
    moe = deepseek_moe(facts)
    dense = facts.count("first_k_dense_replace", minimum=0)
    is_sparse = [i >= dense for i in range(facts.count("num_hidden_layers"))]
    return _mixed(facts, attention, moe, is_sparse, moe.routed_and_shared, mtp_default=1)


def minimax_m2(facts: Facts) -> Architecture:
    attention = Attention(_heads(facts, head_dim_is_known=True), qk_norm="all")
    moe = Moe(
        experts=facts.count("num_local_experts", also=("num_experts",)),
        top_k=facts.count("num_experts_per_tok"),
        width=facts.count("intermediate_size"),
    )
    return _mixed(facts, attention, moe, [True] * facts.count("num_hidden_layers"), moe.routed)


def gpt_oss(facts: Facts) -> Architecture:
    bias = facts.flag("attention_bias", default=True)
    attention = Attention(_heads(facts, head_dim_is_known=True), bias, bias, sinks=True)
    moe = Moe(
        experts=facts.count("num_local_experts", also=("num_experts",)),
        top_k=facts.count("num_experts_per_tok"),
        width=facts.count("intermediate_size"),
    )
    layers = facts.count("num_hidden_layers")
    # The class default: every other layer, from the first on, slides.
    kinds = facts.per_layer("layer_types", ATTENTION_KINDS, layers) or [
        ATTENTION_KINDS[(i + 1) % 2] for i in range(layers)
    ]

    def build(kind: str) -> Layer:
        hidden = facts.count("hidden_size")
        weights = (*attention.weights(hidden), *_gpt_oss_moe(moe, hidden), *layer_norms(hidden))
        return Layer(f"{kind}+moe", weights, attention.kv_elements, attention.size.kv_heads)

    return causal_lm(facts, each_kind_once(kinds, build), attention.size, moe=moe)


def _gpt_oss_moe(moe: Moe, hidden: int) -> tuple[Weight, ...]:
    name, experts = "mlp.experts", moe.experts
    return (
        *linear("mlp.router", (experts, hidden), bias=True),
        Weight(f"{name}.gate_up_proj", (hidden, 2 * moe.width), "column", experts, is_expert=True),
        Weight(f"{name}.gate_up_proj_bias", (2 * moe.width,), "column", experts, is_expert=True),
        Weight(f"{name}.down_proj", (moe.width, hidden), "row", experts, is_expert=True),
        Weight(f"{name}.down_proj_bias", (hidden,), "none", experts, is_expert=True),
    )


def sparse_by_step(facts: Facts) -> list[bool]:
    """Which layers have experts: every `decoder_sparse_step`-th but those of `mlp_only_layers`."""
    dense, step = set(facts.entries("mlp_only_layers")), facts.count("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(facts.count("num_hidden_layers"))]


def _heads(facts: Facts, head_dim_is_known: bool = False) -> Heads:
    """Llama's and Qwen2's `config.json` may leave out the width of a head: the hidden size by the heads, then."""
    heads = facts.count("num_attention_heads")
    derived = None if head_dim_is_known else facts.count("hidden_size") // heads
    return Heads(heads, facts.count("num_key_value_heads", heads), facts.count("head_dim", derived))


def _qwen3_attention(facts: Facts) -> Attention:
    bias = facts.flag("attention_bias")
    return Attention(_heads(facts, head_dim_is_known=True), bias, bias, qk_norm="head")


def _attention_kinds(facts: Facts) -> list[str]:
    layers = facts.count("num_hidden_layers")
    if listed := facts.per_layer("layer_types", ATTENTION_KINDS, layers):
        return listed
    # Class default of Qwen2Config and Qwen3Config; the classes without that fact do not slide.
    first = facts.count("max_window_layers", 28, minimum=0) if facts.flag("use_sliding_window") else layers
    return [ATTENTION_KINDS[i >= first] for i in range(layers)]


def _dense(facts: Facts, attention: Attention, mlp_bias: bool = False) -> Architecture:
    hidden, width = facts.count("hidden_size"), facts.count("intermediate_size")

    def build(kind: str) -> Layer:
        weights = (
            *attention.weights(hidden),
            *gated_mlp("mlp", hidden, width, mlp_bias),
            *layer_norms(hidden),
        )
        return Layer(f"{kind}+dense", weights, attention.kv_elements, attention.size.kv_heads)

    return causal_lm(facts, each_kind_once(_attention_kinds(facts), build), attention.size, ffn=width)


def _mixed(
    facts: Facts,
    attention: Attention,
    moe: Moe,
    is_sparse: list[bool],
    experts: Callable[[int], tuple[Weight, ...]],
    mtp_default: int = 0,
) -> Architecture:
    """Layers with experts among dense ones."""
    hidden = facts.count("hidden_size")
    width = 0 if all(is_sparse) else facts.count("intermediate_size")

    def build(sparse: bool) -> Layer:
        ffn = experts(hidden) if sparse else gated_mlp("mlp", hidden, width)
        weights = (*attention.weights(hidden), *ffn, *layer_norms(hidden))
        kind = "full_attention+moe" if sparse else "full_attention+dense"
        return Layer(kind, weights, attention.kv_elements, attention.size.kv_heads)

    layers = each_kind_once(is_sparse, build)
    mtp = mtp_layers(facts, layers[-1], mtp_default)
    return causal_lm(facts, layers, attention.size, ffn=width, moe=moe, mtp=mtp)
