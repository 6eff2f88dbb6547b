"""Families that alternate gated delta nets with full attention: Qwen3-Next, Qwen3.5 (dense and MoE).

Source: transformers 5.24.0 models/{qwen3_next,qwen3_5,qwen3_5_moe}; defaults are the class defaults of their
configuration files.
"""

from __future__ import annotations

from dataclasses import dataclass

from rllaunch.plan.architecture.facts import Facts
from rllaunch.plan.architecture.gqa import Attention, sparse_by_step
from rllaunch.plan.architecture.parts import (
    NO_MOE,
    Heads,
    Moe,
    causal_lm,
    each_kind_once,
    gated_mlp,
    layer_norms,
    linear,
    mtp_layers,
    norm,
)
from rllaunch.plan.architecture.tensors import Architecture, Layer, Weight

LINEAR, FULL = "linear_attention", "full_attention"


@dataclass(frozen=True)
class DeltaNet:
    """Linear attention with a state of `value_heads` × key_dim × value_dim.

    Args:
        fused: whether one projection gives queries, keys, values and output gate together, and another the two gates
            of the state (Qwen3-Next), or each has its own (Qwen3.5).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    fused: bool

    @property
    def convolved(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Recurrent state, and the inputs of the convolution that lie before the token."""
        return self.value_heads * self.key_dim * self.value_dim + self.convolved * (self.kernel - 1)

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        at, value = "linear_attn", self.value_heads * self.value_dim
        return (
            Weight(f"{at}.dt_bias", (self.value_heads,), "column"),
            Weight(f"{at}.A_log", (self.value_heads,), "column"),
            Weight(f"{at}.conv1d.weight", (self.convolved, 1, self.kernel), "column"),
            *self._inputs(hidden, value),
            norm(f"{at}.norm", self.value_dim),
            *linear(f"{at}.out_proj", (hidden, value), "row"),
        )

    def _inputs(self, hidden: int, value: int) -> tuple[Weight, ...]:
        widths = {"qkv": self.convolved, "z": value, "b": self.value_heads, "a": self.value_heads}
        if self.fused:
            widths = {"qkvz": self.convolved + value, "ba": 2 * self.value_heads}
        named = (linear(f"linear_attn.in_proj_{name}", (width, hidden), "column") for name, width in widths.items())
        return tuple(weight for weights in named for weight in weights)


def qwen3_next(facts: Facts) -> Architecture:
    return _build(facts, _delta_net(facts, fused=True), _moe(facts), sparse_by_step(facts))


def qwen3_5(facts: Facts) -> Architecture:
    return _build(facts, _delta_net(facts, fused=False), NO_MOE, [False] * facts.count("num_hidden_layers"))


def qwen3_5_moe(facts: Facts) -> Architecture:
    return _build(facts, _delta_net(facts, fused=False), _moe(facts), [True] * facts.count("num_hidden_layers"))


def _delta_net(facts: Facts, fused: bool) -> DeltaNet:
    return DeltaNet(
        key_heads=facts.count("linear_num_key_heads"),
        value_heads=facts.count("linear_num_value_heads"),
        key_dim=facts.count("linear_key_head_dim"),
        value_dim=facts.count("linear_value_head_dim"),
        kernel=facts.count("linear_conv_kernel_dim", 4),
        fused=fused,
    )


def _moe(facts: Facts) -> Moe:
    return Moe(
        experts=facts.count("num_experts", also=("num_local_experts",)),
        top_k=facts.count("num_experts_per_tok"),
        width=facts.count("moe_intermediate_size"),
        shared_width=facts.count("shared_expert_intermediate_size"),
    )


def _attention(facts: Facts) -> Attention:
    heads = Heads(facts.count("num_attention_heads"), facts.count("num_key_value_heads"), facts.count("head_dim"))
    bias = facts.flag("attention_bias")
    return Attention(heads, bias, bias, qk_norm="head", output_gate=True)


def _attention_kinds(facts: Facts) -> list[str]:
    layers = facts.count("num_hidden_layers")
    if listed := facts.per_layer("layer_types", (LINEAR, FULL), layers):
        return listed
    every = facts.count("full_attention_interval", 4)
    return [LINEAR if (i + 1) % every else FULL for i in range(layers)]


def _build(facts: Facts, delta_net: DeltaNet, moe: Moe, is_sparse: list[bool]) -> Architecture:
    hidden, attention = facts.count("hidden_size"), _attention(facts)
    width = 0 if all(is_sparse) else facts.count("intermediate_size")

    def build(kind: tuple[str, bool]) -> Layer:
        name, sparse = f"{kind[0]}+{'moe' if kind[1] else 'dense'}", kind[1]
        mixer = delta_net if kind[0] == LINEAR else attention
        ffn = moe.routed_and_gated_shared(hidden) if sparse else gated_mlp("mlp", hidden, width)
        weights = (*mixer.weights(hidden), *ffn, *layer_norms(hidden))
        if kind[0] == LINEAR:
            return Layer(name, weights, 0, kv_heads=1, state_elements=delta_net.state_elements)
        return Layer(name, weights, attention.kv_elements, attention.size.kv_heads)

    layers = each_kind_once(list(zip(_attention_kinds(facts), is_sparse, strict=True)), build)
    return causal_lm(facts, layers, attention.size, ffn=width, moe=moe, mtp=mtp_layers(facts, layers[-1]))
