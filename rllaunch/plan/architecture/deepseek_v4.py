"""DeepSeek-V4: one latent KV head, compressed attention, grouped output projection, hyper-connections.

Source: transformers 5.24.0 models/deepseek_v4; defaults are the class defaults of its configuration file. The
id-to-expert tables of hash-routed layers and the routers' correction biases are buffers and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from rllaunch.plan.architecture.facts import TAKE_IT_OVER, Facts
from rllaunch.plan.architecture.parts import (
    Heads,
    Moe,
    causal_lm,
    each_kind_once,
    layer_norms,
    linear,
    mtp_layers,
    norm,
)
from rllaunch.plan.architecture.tensors import Architecture, Layer, Weight

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
KIND_OF_RATIO = {0: SLIDING, 4: SPARSE, 128: HEAVY}


@dataclass(frozen=True)
class CompressedAttention:
    """Attention over a window of tokens and over entries that stand for `rates[kind]` tokens each.

    Args:
        index_heads, index_dim: of the indexer that chooses entries in sparse layers.
    """

    size: Heads
    q_latent: int
    o_groups: int
    o_latent: int
    index_heads: int
    index_dim: int
    window: int
    rates: dict[str, int]

    def weights(self, kind: str, hidden: int) -> tuple[Weight, ...]:
        at, heads, width = "self_attn", self.size.heads, self.size.head_dim
        return (
            Weight(f"{at}.sinks", (heads,), "column"),
            *linear(f"{at}.q_a_proj", (self.q_latent, hidden)),
            norm(f"{at}.q_a_norm", self.q_latent),
            *linear(f"{at}.q_b_proj", (heads * width, self.q_latent), "column"),
            *linear(f"{at}.kv_proj", (width, hidden)),
            norm(f"{at}.kv_norm", width),
            # Block-diagonal: each group of heads has its own rows.
            *linear(f"{at}.o_a_proj", (self.o_groups * self.o_latent, heads * width // self.o_groups), "column"),
            *linear(f"{at}.o_b_proj", (hidden, self.o_groups * self.o_latent), "row"),
            *self._compressors(kind, hidden),
        )

    def _compressors(self, kind: str, hidden: int) -> tuple[Weight, ...]:
        at, rate = "self_attn.compressor", self.rates.get(kind, 0)
        if kind == SLIDING:
            return ()
        if kind == HEAVY:
            return _compressor(at, rate, self.size.head_dim, self.size.head_dim, hidden)
        return (
            *_compressor(at, rate, 2 * self.size.head_dim, self.size.head_dim, hidden),
            *_compressor(f"{at}.indexer", rate, 2 * self.index_dim, self.index_dim, hidden),
            *linear(f"{at}.indexer.q_b_proj", (self.index_heads * self.index_dim, self.q_latent)),
            *linear(f"{at}.indexer.scorer.weights_proj", (self.index_heads, hidden)),
        )

    def kv_elements(self, kind: str) -> int:
        """Of the compressed entries, keys and values being the same; a sliding layer keeps only its window."""
        if kind == SLIDING:
            return 0
        entry = self.size.head_dim + (self.index_dim if kind == SPARSE else 0)
        return -(-entry // self.rates[kind])

    def state_elements(self, kind: str) -> int:
        """The window; of compressors, KV and gate of a block not yet full, in sparse layers also of the block before.

        Source: DeepseekV4HCACache and DeepseekV4CSACache in modeling_deepseek_v4.py.
        """
        window = self.window * self.size.head_dim
        if kind == SLIDING:
            return window
        # Sparse: two series in the open block, of which one is kept of the block before.
        series = self.size.head_dim if kind == HEAVY else 3 * (self.size.head_dim + self.index_dim)
        return window + 2 * self.rates[kind] * series


def _compressor(at: str, rate: int, width: int, entry: int, hidden: int) -> tuple[Weight, ...]:
    return (
        Weight(f"{at}.position_bias", (rate, width)),
        *linear(f"{at}.kv_proj", (width, hidden)),
        *linear(f"{at}.gate_proj", (width, hidden)),
        norm(f"{at}.kv_norm", entry),
    )


def deepseek_v4(facts: Facts) -> Architecture:
    hidden, streams = facts.count("hidden_size"), facts.count("hc_mult")
    attention, moe = _attention(facts), _moe(facts)

    def build(kind: tuple[str, str]) -> Layer:
        weights = (
            *attention.weights(kind[0], hidden),
            *moe.routed_and_shared(hidden),
            *layer_norms(hidden),
            *_hyper_connection("attn_hc", streams, hidden),
            *_hyper_connection("ffn_hc", streams, hidden),
        )
        kv, state = attention.kv_elements(kind[0]), attention.state_elements(kind[0])
        return Layer("+".join(kind), weights, kv, kv_heads=1, state_elements=state)

    layers = each_kind_once(list(zip(_attention_kinds(facts), _mlp_kinds(facts), strict=True)), build)
    return causal_lm(
        facts,
        layers,
        attention.size,
        moe=moe,
        mtp=mtp_layers(facts, layers[-1], default=1),
        beside_head=(
            Weight("model.hc_head.hc_fn", (streams, streams * hidden)),
            Weight("model.hc_head.hc_base", (streams,)),
            Weight("model.hc_head.hc_scale", (1,)),
        ),
    )


def _hyper_connection(at: str, streams: int, hidden: int) -> tuple[Weight, ...]:
    """Weights that mix the residual streams: into the block, out of it, and among each other."""
    mixes = streams * (2 + streams)
    return (
        Weight(f"{at}.fn", (mixes, streams * hidden)),
        Weight(f"{at}.base", (mixes,)),
        Weight(f"{at}.scale", (3,)),
    )


def _attention(facts: Facts) -> CompressedAttention:
    rates = {SPARSE: 4, HEAVY: 128} | dict(facts.table("compress_rates"))
    if not all(isinstance(rate, int) and rate > 0 for rate in rates.values()):
        raise facts.error(f"compress_rates = {rates} are not whole numbers of at least 1", TAKE_IT_OVER)
    return CompressedAttention(
        size=Heads(facts.count("num_attention_heads"), 1, facts.count("head_dim")),
        q_latent=facts.count("q_lora_rank"),
        o_groups=facts.count("o_groups"),
        o_latent=facts.count("o_lora_rank"),
        index_heads=facts.count("index_n_heads"),
        index_dim=facts.count("index_head_dim"),
        window=facts.count("sliding_window"),
        rates=rates,
    )


def _moe(facts: Facts) -> Moe:
    """One shared expert of a routed one's width; the number of shared experts is not looked at by the class."""
    width = facts.count("moe_intermediate_size")
    return Moe(
        experts=facts.count("n_routed_experts", also=("num_local_experts",)),
        top_k=facts.count("num_experts_per_tok"),
        width=width,
        shared_width=width,
    )


def _attention_kinds(facts: Facts) -> list[str]:
    """From `layer_types`, or from `compress_ratios`, which may go on into the MTP layers.

    The class has a default schedule, but it is none of the released models', so one of the two facts is required.
    """
    layers = facts.count("num_hidden_layers")
    if listed := facts.per_layer("layer_types", tuple(KIND_OF_RATIO.values()), layers):
        return listed
    ratios = facts.entries("compress_ratios")
    if not ratios:
        raise facts.missing("compress_ratios")
    if len(ratios) < layers:
        raise facts.error(f"compress_ratios has {len(ratios)} entries for {layers} layers", "one for each layer")
    for ratio in ratios:
        if ratio not in KIND_OF_RATIO:
            raise facts.error(f"compress_ratios holds {ratio!r}", "known: 0, 4, 128")
    return [KIND_OF_RATIO[ratio] for ratio in ratios[:layers]]


def _mlp_kinds(facts: Facts) -> list[str]:
    layers = facts.count("num_hidden_layers")
    if listed := facts.per_layer("mlp_layer_types", ("hash_moe", "moe"), layers):
        return listed
    hashed = facts.count("num_hash_layers", 3, minimum=0)
    return ["hash_moe" if i < hashed else "moe" for i in range(layers)]
