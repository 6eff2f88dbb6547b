"""Inkling's language model: sliding among full attention with relative positions, short convolutions, shared experts.

Source: transformers 5.24.0 models/inkling; defaults are the class defaults of its configuration file.
"""

from __future__ import annotations

from dataclasses import dataclass

from rllaunch.plan.architecture.facts import Facts
from rllaunch.plan.architecture.parts import (
    Heads,
    Moe,
    causal_lm,
    each_kind_once,
    gated_mlp,
    layer_norms,
    linear,
    mtp_layer,
    norm,
)
from rllaunch.plan.architecture.tensors import Architecture, Layer, Weight

# transformers' names, and what such a layer is called here.
ATTENTION = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}


@dataclass(frozen=True)
class RelativeAttention:
    """Attention whose logits get a learned bias for each of `extent` distances, by `rel` states of each head."""

    size: Heads
    rel: int
    extent: int
    kernel: int

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        at, heads = "self_attn", self.size.heads
        query, key = heads * self.size.head_dim, self.size.kv_heads * self.size.head_dim
        return (
            *linear(f"{at}.q_proj", (query, hidden), "column"),
            *linear(f"{at}.k_proj", (key, hidden), "column"),
            *linear(f"{at}.v_proj", (key, hidden), "column"),
            *linear(f"{at}.r_proj", (heads * self.rel, hidden), "column"),
            *linear(f"{at}.o_proj", (hidden, query), "row"),
            Weight(f"{at}.k_sconv.conv1d.weight", (key, 1, self.kernel), "column"),
            Weight(f"{at}.v_sconv.conv1d.weight", (key, 1, self.kernel), "column"),
            norm(f"{at}.q_norm", self.size.head_dim),
            norm(f"{at}.k_norm", self.size.head_dim),
            Weight(f"{at}.rel_logits_proj.proj", (self.rel, self.extent)),
        )

    @property
    def kv_elements(self) -> int:
        return 2 * self.size.kv_heads * self.size.head_dim


def inkling(facts: Facts) -> Architecture:
    hidden, is_sparse = facts.count("hidden_size"), _sparse(facts)
    attention = {"hybrid": _full(facts), "hybrid_sliding": _sliding(facts)}
    in_mtp_config = facts.table("mtp_config").get("num_nextn_predict_layers") or 0
    mtp_number = facts.count("num_mtp_layers", in_mtp_config, minimum=0)
    width = _dense_width(facts) if mtp_number or not all(is_sparse) else 0
    moe = _moe(facts)

    def build(kind: tuple[str, bool]) -> Layer:
        mixer, sparse = attention[kind[0]], kind[1]
        weights = (
            *mixer.weights(hidden),
            *(_experts(facts, moe, hidden) if sparse else _dense(hidden, width)),
            *layer_norms(hidden),
            # Over the hidden state, of which every rank has all.
            Weight("attn_sconv.conv1d.weight", (hidden, 1, mixer.kernel)),
            Weight("mlp_sconv.conv1d.weight", (hidden, 1, mixer.kernel)),
        )
        state = (mixer.kv_elements + 2 * hidden) * (mixer.kernel - 1)
        name = f"{ATTENTION[kind[0]]}+{'moe' if sparse else 'dense'}"
        return Layer(name, weights, mixer.kv_elements, mixer.size.kv_heads, state_elements=state)

    return causal_lm(
        facts,
        each_kind_once(list(zip(_attention_kinds(facts), is_sparse, strict=True)), build),
        attention["hybrid"].size,
        ffn=width,
        moe=moe,
        # Always dense, and full attention unless listed.
        mtp=tuple(mtp_layer(hidden, build((kind, False))) for kind in _mtp_kinds(facts, mtp_number)),
        can_tie=False,
        beside_embedding=(norm("model.embed_tokens.embed_norm", hidden),),
    )


def _full(facts: Facts) -> RelativeAttention:
    heads = Heads(facts.count("num_attention_heads"), facts.count("num_key_value_heads"), facts.count("head_dim"))
    return RelativeAttention(heads, facts.count("d_rel"), facts.count("rel_extent"), _kernel(facts))


def _sliding(facts: Facts) -> RelativeAttention:
    heads = Heads(
        facts.count("swa_num_attention_heads"),
        facts.count("swa_num_key_value_heads"),
        facts.count("swa_head_dim"),
    )
    window = facts.count("sliding_window_size", also=("sliding_window",))
    return RelativeAttention(heads, facts.count("d_rel"), window, _kernel(facts))


def _kernel(facts: Facts) -> int:
    return facts.count("conv_kernel_size", 4, also=("sconv_kernel_size",))


def _moe(facts: Facts) -> Moe:
    # With `dense_intermediate_size`, `intermediate_size` is the experts' width.
    width = facts.count("intermediate_size" if facts.has("dense_intermediate_size") else "moe_intermediate_size")
    return Moe(
        experts=facts.count("n_routed_experts", also=("num_local_experts",)),
        top_k=facts.count("num_experts_per_tok"),
        width=width,
        shared_width=width * facts.count("n_shared_experts"),
    )


def _dense_width(facts: Facts) -> int:
    return facts.count("dense_intermediate_size" if facts.has("dense_intermediate_size") else "intermediate_size")


def _dense(hidden: int, width: int) -> tuple[Weight, ...]:
    return (Weight("mlp.global_scale", (1,)), *gated_mlp("mlp", hidden, width))


def _experts(facts: Facts, moe: Moe, hidden: int) -> tuple[Weight, ...]:
    """Routed and shared experts; the router scores both."""
    at, shared = "mlp.shared_experts", facts.count("n_shared_experts")
    router, *experts = moe.routed(hidden)
    return (
        Weight(router.name, (moe.experts + shared, hidden)),
        Weight("mlp.gate.global_scale", (1,)),
        *experts,
        Weight(f"{at}.gate_proj", (moe.width, hidden), "column", shared),
        Weight(f"{at}.up_proj", (moe.width, hidden), "column", shared),
        Weight(f"{at}.down_proj", (hidden, moe.width), "row", shared),
    )


def _attention_kinds(facts: Facts) -> list[str]:
    layers = facts.count("num_hidden_layers")
    if listed := facts.per_layer("layer_types", tuple(ATTENTION), layers):
        return listed
    local = {i for i in range(layers) if (i + 1) % 6}
    if facts.has("local_layer_ids"):
        local = set(facts.entries("local_layer_ids"))
    return ["hybrid_sliding" if i in local else "hybrid" for i in range(layers)]


def _sparse(facts: Facts) -> list[bool]:
    layers = facts.count("num_hidden_layers")
    if listed := facts.per_layer("mlp_layer_types", ("dense", "sparse"), layers):
        return [kind == "sparse" for kind in listed]
    dense = facts.count("dense_mlp_idx", 0, minimum=0)
    return [i >= dense for i in range(layers)]


def _mtp_kinds(facts: Facts, number: int) -> list[str]:
    local = set(facts.entries("mtp_local_layer_ids"))
    return ["hybrid_sliding" if i in local else "hybrid" for i in range(number)]
