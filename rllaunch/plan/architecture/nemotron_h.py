"""Nemotron-H: layers that are each one block, Mamba-2, attention, feed-forward or experts.

Source: transformers 5.24.0 models/nemotron_h; defaults are the class defaults of its configuration file.
"""

from __future__ import annotations

from dataclasses import dataclass

from rllaunch.plan.architecture.facts import Facts
from rllaunch.plan.architecture.parts import Heads, Moe, causal_lm, each_kind_once, linear, mtp_layer, norm
from rllaunch.plan.architecture.tensors import Architecture, Layer, Weight

BLOCK_OF_LETTER = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}
DEFAULT_MTP = ["full_attention", "moe"]


@dataclass(frozen=True)
class Mamba:
    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    bias: bool
    conv_bias: bool

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        return self.inner + 2 * self.groups * self.state

    @property
    def state_elements(self) -> int:
        """Recurrent state, and the inputs of the convolution that lie before the token."""
        return self.inner * self.state + self.convolved * (self.kernel - 1)

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        conv_bias = (Weight("mixer.conv1d.bias", (self.convolved,), "column"),) if self.conv_bias else ()
        return (
            *(Weight(f"mixer.{name}", (self.heads,), "column") for name in ("dt_bias", "A_log", "D")),
            Weight("mixer.conv1d.weight", (self.convolved, 1, self.kernel), "column"),
            *conv_bias,
            *linear("mixer.in_proj", (self.inner + self.convolved + self.heads, hidden), "column", self.bias),
            # By group, so each rank normalizes the channels it has.
            Weight("mixer.norm.weight", (self.inner,), "column"),
            *linear("mixer.out_proj", (hidden, self.inner), "row", self.bias),
        )


def nemotron_h(facts: Facts) -> Architecture:
    hidden, blocks = facts.count("hidden_size"), _blocks(facts, "layers_block_type", "hybrid_override_pattern")
    heads = Heads(facts.count("num_attention_heads"), facts.count("num_key_value_heads"), facts.count("head_dim"))
    moe = _moe(facts) if "moe" in blocks else Moe(0, 0, 0)
    width = facts.count("intermediate_size") if "mlp" in blocks else 0

    def build(kind: str) -> Layer:
        if kind == "full_attention":
            attention = (norm("norm", hidden), *_attention(heads, hidden))
            return Layer(kind, attention, 2 * heads.kv_heads * heads.head_dim, heads.kv_heads)
        if kind == "linear_attention":
            mamba = _mamba(facts)
            state = mamba.state_elements
            return Layer(kind, (norm("norm", hidden), *mamba.weights(hidden)), 0, kv_heads=1, state_elements=state)
        mlp = _experts(facts, moe, hidden) if kind == "moe" else _mlp("mixer", hidden, width, facts.flag("mlp_bias"))
        return Layer(kind, (norm("norm", hidden), *mlp), 0, kv_heads=1)

    return causal_lm(
        facts,
        each_kind_once(blocks, build),
        heads,
        ffn=width,
        moe=moe,
        mtp=tuple(_mtp(facts, [build(kind) for kind in _mtp_blocks(facts)])),
        can_tie=False,
        embedding="model.embeddings",
        final_norm="model.norm_f",
    )


def _blocks(facts: Facts, listed: str, pattern: str) -> list[str]:
    known = tuple(BLOCK_OF_LETTER.values())
    if facts.has(listed):
        values = [OLD_NAMES.get(value, value) for value in facts.entries(listed)]
    elif facts.has(pattern):
        values = [BLOCK_OF_LETTER.get(letter, letter) for letter in facts.text(pattern)]
    else:
        raise facts.missing(listed)
    for value in values:
        if value not in known:
            name = listed if facts.has(listed) else pattern
            raise facts.error(f"{name} holds {value!r}", f"known: {', '.join(known)}")
    return values


def _mtp_blocks(facts: Facts) -> list[str]:
    names = ("mtp_layers_block_type", "mtp_hybrid_override_pattern")
    if not facts.count("num_nextn_predict_layers", 0, minimum=0):
        return []
    return _blocks(facts, *names) if any(map(facts.has, names)) else DEFAULT_MTP


def _mtp(facts: Facts, blocks: list[Layer]) -> list[Layer]:
    """Per predicted token its own run of blocks behind one projection."""
    if not blocks:
        return []
    joined = Layer(
        kind="+".join(block.kind for block in blocks),
        weights=tuple(weight for block in blocks for weight in block.weights),
        kv_elements_per_token=sum(block.kv_elements_per_token for block in blocks),
        kv_heads=max(block.kv_heads for block in blocks),
        state_elements=sum(block.state_elements for block in blocks),
    )
    return [mtp_layer(facts.count("hidden_size"), joined)] * facts.count("num_nextn_predict_layers")


def _mamba(facts: Facts) -> Mamba:
    return Mamba(
        heads=facts.count("mamba_num_heads"),
        head_dim=facts.count("mamba_head_dim"),
        state=facts.count("ssm_state_size"),
        groups=facts.count("n_groups", also=("mamba_n_groups",)),
        kernel=facts.count("conv_kernel", 4, also=("mamba_d_conv",)),
        bias=facts.flag("use_bias"),
        conv_bias=facts.flag("use_conv_bias", default=True),
    )


def _attention(heads: Heads, hidden: int) -> tuple[Weight, ...]:
    query, key = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
    return (
        *linear("mixer.q_proj", (query, hidden), "column"),
        *linear("mixer.k_proj", (key, hidden), "column"),
        *linear("mixer.v_proj", (key, hidden), "column"),
        *linear("mixer.o_proj", (hidden, query), "row"),
    )


def _mlp(name: str, hidden: int, width: int, bias: bool) -> tuple[Weight, ...]:
    """Without a gate: the activation is a squared ReLU."""
    return (
        *linear(f"{name}.up_proj", (width, hidden), "column", bias),
        *linear(f"{name}.down_proj", (hidden, width), "row", bias),
    )


def _moe(facts: Facts) -> Moe:
    return Moe(
        experts=facts.count("n_routed_experts", also=("num_local_experts",)),
        top_k=facts.count("num_experts_per_tok"),
        width=facts.count("moe_intermediate_size"),
        shared_width=facts.count("moe_shared_expert_intermediate_size"),
    )


def _experts(facts: Facts, moe: Moe, hidden: int) -> tuple[Weight, ...]:
    """Routed experts, which see the hidden state through a smaller latent where there is one, and a shared expert."""
    latent, bias = facts.count("moe_latent_size", 0, minimum=0), facts.flag("mlp_bias")
    seen = latent or hidden
    latents = (
        *linear("mixer.fc1_latent_proj", (latent, hidden), bias=bias),
        *linear("mixer.fc2_latent_proj", (hidden, latent), bias=bias),
    )
    return (
        Weight("mixer.gate.weight", (moe.experts, hidden)),
        Weight("mixer.experts.up_proj", (moe.width, seen), "column", moe.experts, is_expert=True),
        Weight("mixer.experts.down_proj", (seen, moe.width), "row", moe.experts, is_expert=True),
        *_mlp("mixer.shared_experts", hidden, moe.shared_width, bias),
        *(latents if latent else ()),
    )
