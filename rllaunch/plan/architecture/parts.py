"""The parts that families share: linear layers, norms, feed-forward blocks, and the frame around the layers.

Names and shapes are those of transformers 5.24.0, which keeps the experts of a layer in one stacked tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rllaunch.plan.architecture.facts import Facts
from rllaunch.plan.architecture.tensors import Architecture, Layer, Split, Weight

Kind = TypeVar("Kind", bound=Hashable)


def linear(name: str, features: tuple[int, int], split: Split = "none", bias: bool = False) -> tuple[Weight, ...]:
    """A linear layer of (output, input) features. Its bias is cut with the output features, else every rank has it."""
    weight = Weight(f"{name}.weight", features, split)
    if not bias:
        return (weight,)
    return (weight, Weight(f"{name}.bias", features[:1], "column" if split == "column" else "none"))


def norm(name: str, width: int) -> Weight:
    return Weight(f"{name}.weight", (width,))


def layer_norms(hidden: int) -> tuple[Weight, ...]:
    return (norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden))


def gated_mlp(name: str, hidden: int, width: int, bias: bool = False) -> tuple[Weight, ...]:
    return (
        *linear(f"{name}.gate_proj", (width, hidden), "column", bias),
        *linear(f"{name}.up_proj", (width, hidden), "column", bias),
        *linear(f"{name}.down_proj", (hidden, width), "row", bias),
    )


@dataclass(frozen=True)
class Moe:
    """The sizes of a mixture of experts; `shared_width` is of all shared experts together."""

    experts: int
    top_k: int
    width: int
    shared_width: int = 0

    def routed(self, hidden: int) -> tuple[Weight, ...]:
        """The router and gated experts, gate and up projection in one tensor."""
        return (
            Weight("mlp.gate.weight", (self.experts, hidden)),
            Weight("mlp.experts.gate_up_proj", (2 * self.width, hidden), "column", self.experts, is_expert=True),
            Weight("mlp.experts.down_proj", (hidden, self.width), "row", self.experts, is_expert=True),
        )

    def routed_and_shared(self, hidden: int) -> tuple[Weight, ...]:
        shared = gated_mlp("mlp.shared_experts", hidden, self.shared_width) if self.shared_width else ()
        return (*self.routed(hidden), *shared)

    def routed_and_gated_shared(self, hidden: int) -> tuple[Weight, ...]:
        """A shared expert behind a gate of its own."""
        return (
            *self.routed(hidden),
            *gated_mlp("mlp.shared_expert", hidden, self.shared_width),
            *linear("mlp.shared_expert_gate", (1, hidden)),
        )


NO_MOE = Moe(0, 0, 0)


def deepseek_moe(facts: Facts) -> Moe:
    """Sizes under DeepSeek's names, which GLM shares."""
    width = facts.count("moe_intermediate_size")
    return Moe(
        experts=facts.count("n_routed_experts", also=("num_local_experts", "num_experts")),
        top_k=facts.count("num_experts_per_tok"),
        width=width,
        shared_width=width * facts.count("n_shared_experts", minimum=0),
    )


def each_kind_once(kinds: Sequence[Kind], build: Callable[[Kind], Layer]) -> tuple[Layer, ...]:
    built = {kind: build(kind) for kind in dict.fromkeys(kinds)}
    return tuple(built[kind] for kind in kinds)


def mtp_layers(facts: Facts, last: Layer, default: int = 0) -> tuple[Layer, ...]:
    """The multi-token-prediction layers, each around a decoder layer like the last one.

    Args:
        default: the class default of the family in transformers; 0 where it has none.
    """
    names = ("num_mtp_layers", "mtp_num_hidden_layers")
    number = facts.count("num_nextn_predict_layers", default, also=names, minimum=0)
    return (mtp_layer(facts.count("hidden_size"), last),) * number


def mtp_layer(hidden: int, around: Layer) -> Layer:
    weights = (
        *linear("eh_proj", (hidden, 2 * hidden), "column"),
        norm("enorm", hidden),
        norm("hnorm", hidden),
        *around.weights,
        norm("shared_head.norm", hidden),
    )
    return Layer(f"mtp+{around.kind}", weights, around.kv_elements_per_token, around.kv_heads, around.state_elements)


@dataclass(frozen=True)
class Heads:
    """Attention heads of the full-attention layers."""

    heads: int
    kv_heads: int
    head_dim: int


def causal_lm(
    facts: Facts,
    layers: tuple[Layer, ...],
    heads: Heads,
    *,
    ffn: int = 0,
    moe: Moe = NO_MOE,
    mtp: tuple[Layer, ...] = (),
    can_tie: bool = True,
    embedding: str = "model.embed_tokens",
    final_norm: str = "model.norm",
    beside_embedding: Iterable[Weight] = (),
    beside_head: Iterable[Weight] = (),
) -> Architecture:
    """The layers with embedding and head around them.

    Args:
        can_tie: some of transformers' classes build an `lm_head` of their own whatever `tie_word_embeddings` says.
    """
    hidden, vocab = facts.count("hidden_size"), facts.count("vocab_size")
    # Every class that has the fact has false as its default.
    tied = can_tie and facts.flag("tie_word_embeddings")
    lm_head = () if tied else (Weight("lm_head.weight", (vocab, hidden), "vocab"),)
    return Architecture(
        model_type=facts.model_type,
        embedding=(Weight(f"{embedding}.weight", (vocab, hidden), "vocab"), *beside_embedding),
        layers=layers,
        head=(norm(final_norm, hidden), *beside_head, *lm_head),
        mtp=mtp,
        hidden_size=hidden,
        vocab_size=vocab,
        num_attention_heads=heads.heads,
        num_kv_heads=heads.kv_heads,
        head_dim=heads.head_dim,
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=moe.width,
        num_experts=moe.experts,
        num_experts_per_tok=moe.top_k,
        shared_ffn_hidden_size=moe.shared_width,
        tied=tied,
    )
