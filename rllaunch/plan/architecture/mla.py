"""Families with latent attention: DeepSeek-V3 (and Kimi-K2, Moonlight), DeepSeek-V3.2, GLM-4.7-Flash, GLM-5.

Source: transformers 5.24.0 models/{deepseek_v3,deepseek_v32,glm4_moe_lite,glm_moe_dsa}; defaults are the class
defaults of their configuration files. The correction biases of the routers are buffers and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rllaunch.plan.architecture.facts import TAKE_IT_OVER, Facts
from rllaunch.plan.architecture.parts import (
    Heads,
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

INDEXER_KINDS = ("full", "shared")


@dataclass(frozen=True)
class LatentAttention:
    """Keys and values from one latent; queries from another, or from the hidden state where `q_latent` is 0."""

    heads: int
    q_latent: int
    kv_latent: int
    nope: int
    rope: int
    value: int
    bias: bool

    @property
    def size(self) -> Heads:
        return Heads(self.heads, self.heads, self.nope + self.rope)

    @property
    def kv_elements(self) -> int:
        return self.kv_latent + self.rope

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        at = "self_attn"
        return (
            *self._queries(hidden),
            *linear(f"{at}.kv_a_proj_with_mqa", (self.kv_latent + self.rope, hidden), bias=self.bias),
            norm(f"{at}.kv_a_layernorm", self.kv_latent),
            *linear(f"{at}.kv_b_proj", (self.heads * (self.nope + self.value), self.kv_latent), "column"),
            *linear(f"{at}.o_proj", (hidden, self.heads * self.value), "row", self.bias),
        )

    def _queries(self, hidden: int) -> tuple[Weight, ...]:
        query = self.heads * (self.nope + self.rope)
        if not self.q_latent:
            return linear("self_attn.q_proj", (query, hidden), "column")
        return (
            *linear("self_attn.q_a_proj", (self.q_latent, hidden), bias=self.bias),
            norm("self_attn.q_a_layernorm", self.q_latent),
            *linear("self_attn.q_b_proj", (query, self.q_latent), "column"),
        )


@dataclass(frozen=True)
class Indexer:
    """Chooses the tokens a query attends to. Small, and whole on every rank."""

    heads: int
    head_dim: int

    def weights(self, hidden: int, q_latent: int) -> tuple[Weight, ...]:
        at = "self_attn.indexer"
        return (
            *linear(f"{at}.wq_b", (self.heads * self.head_dim, q_latent)),
            *linear(f"{at}.wk", (self.head_dim, hidden)),
            norm(f"{at}.k_norm", self.head_dim),
            Weight(f"{at}.k_norm.bias", (self.head_dim,)),
            *linear(f"{at}.weights_proj", (self.heads, hidden)),
        )


def deepseek_v3(facts: Facts) -> Architecture:
    return _build(facts, _attention(facts), _sparse_after_dense(facts), mtp_default=1)


def glm4_moe_lite(facts: Facts) -> Architecture:
    return _build(facts, _attention(facts), _listed_mlps(facts, first_dense=1))


def deepseek_v32(facts: Facts) -> Architecture:
    layers = facts.count("num_hidden_layers")
    return _build(facts, _attention(facts), _listed_mlps(facts), ["full"] * layers)


def glm_moe_dsa(facts: Facts) -> Architecture:
    return _build(facts, _attention(facts), _listed_mlps(facts), _glm_indexers(facts))


def _attention(facts: Facts) -> LatentAttention:
    # The class default is a width, so that a fact left out could mean either.
    if not facts.names("q_lora_rank"):
        raise facts.error(
            f"the architecture of model_type {facts.model_type!r} lacks the fact 'q_lora_rank'",
            f"{TAKE_IT_OVER}; 0 for null",
        )
    return LatentAttention(
        heads=facts.count("num_attention_heads"),
        q_latent=facts.count("q_lora_rank", 0, minimum=0),
        kv_latent=facts.count("kv_lora_rank"),
        nope=facts.count("qk_nope_head_dim"),
        rope=facts.count("qk_rope_head_dim"),
        value=facts.count("v_head_dim"),
        bias=facts.flag("attention_bias"),
    )


def _sparse_after_dense(facts: Facts) -> list[bool]:
    dense = facts.count("first_k_dense_replace", minimum=0)
    return [i >= dense for i in range(facts.count("num_hidden_layers"))]


def _listed_mlps(facts: Facts, first_dense: int | None = None) -> list[bool]:
    layers = facts.count("num_hidden_layers")
    if listed := facts.per_layer("mlp_layer_types", ("dense", "sparse"), layers):
        return [kind == "sparse" for kind in listed]
    dense = facts.count("first_k_dense_replace", first_dense, minimum=0)
    return [i >= dense for i in range(layers)]


def _glm_indexers(facts: Facts) -> list[str]:
    """Which layers own an indexer; the others share the choice of the last one that does.

    Listed in `indexer_types`, or spelled F and S in `index_topk_pattern`, or every `index_topk_freq`-th layer from
    `index_skip_topk_offset` on, in that order.
    """
    layers = facts.count("num_hidden_layers")
    if listed := facts.per_layer("indexer_types", INDEXER_KINDS, layers):
        return listed
    if facts.has("index_topk_pattern"):
        pattern = facts.text("index_topk_pattern")
        if len(pattern) != layers or set(pattern) - {"F", "S"}:
            what = f"index_topk_pattern = {pattern!r} is not an F or S for each of {layers} layers"
            raise facts.error(what, TAKE_IT_OVER)
        return [{"F": "full", "S": "shared"}[letter] for letter in pattern]
    freq = facts.count("index_topk_freq", 1)
    offset = facts.count("index_skip_topk_offset", 2, minimum=0)
    return [INDEXER_KINDS[max(i - offset + 1, 0) % freq != 0] for i in range(layers)]


def _build(
    facts: Facts,
    attention: LatentAttention,
    is_sparse: list[bool],
    indexers: list[str] | None = None,
    mtp_default: int = 0,
) -> Architecture:
    """Layers of (sparse or dense, indexer owned, shared or none)."""
    hidden, moe = facts.count("hidden_size"), deepseek_moe(facts)
    width = 0 if all(is_sparse) else facts.count("intermediate_size")
    indexer = Indexer(facts.count("index_n_heads"), facts.count("index_head_dim")) if indexers else None

    def build(kind: tuple[bool, str]) -> Layer:
        sparse, owns = kind[0], kind[1] == "full"
        name = {"": "latent_attention", "full": "indexed_attention", "shared": "shared_index_attention"}[kind[1]]
        weights = (
            *attention.weights(hidden),
            *(indexer.weights(hidden, attention.q_latent) if indexer and owns else ()),
            *(moe.routed_and_shared(hidden) if sparse else gated_mlp("mlp", hidden, width)),
            *layer_norms(hidden),
        )
        kv = attention.kv_elements + (indexer.head_dim if indexer and owns else 0)
        return Layer(f"{name}+{'moe' if sparse else 'dense'}", weights, kv, kv_heads=1)

    layers = each_kind_once(list(zip(is_sparse, indexers or [""] * len(is_sparse), strict=True)), build)
    mtp = mtp_layers(facts, layers[-1], mtp_default)
    return causal_lm(facts, layers, attention.size, ffn=width, moe=moe, mtp=mtp)
