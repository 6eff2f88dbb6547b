"""What an architecture is made of: kinds of tensors, layers of them, and their sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

Split = Literal["none", "column", "row", "vocab"]
"""How tensor parallelism cuts a tensor: by output features (and the vectors that belong to them), by input features, by
rows of the vocabulary, or not at all (every rank holds a copy)."""


@dataclass(frozen=True, slots=True)
class Weight:
    """A kind of tensor and how many there are of it in its layer.

    Args:
        name: transformers' name within the layer, e.g. `self_attn.q_proj.weight`; outside the layers the whole name.
        shape: of one copy, in transformers' order: output features first, but in gpt-oss' experts input features first.
        copies: the experts of a layer, which transformers stacks into one tensor; else 1.
        is_expert: a routed expert's, so that expert parallelism spreads its copies and `split` is for the tensor
            parallelism of experts. Shared experts are cut like any dense layer.
    """

    name: str
    shape: tuple[int, ...]
    split: Split = "none"
    copies: int = 1
    is_expert: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape) * self.copies


@dataclass(frozen=True)
class Layer:
    """One decoder layer. Layers of a kind are one object, so that sums over a model are cheap.

    Args:
        kind: what it is made of, e.g. `full_attention+moe`. Where it begins with `sliding_attention`, the KV cache need
            not hold more than a window of tokens; `kv_elements_per_token` is then an upper bound.
        kv_elements_per_token: of the rollout engine's KV cache, what a resident token takes in this layer, all heads
            together: K and V of every KV head; with a latent (MLA) the latent and the rotated key, once; the keys of
            an indexer as so many elements more (SGLang holds them in a byte each and a scale); of compressed attention
            the entries divided by the tokens that share one, rounded up; 0 in linear attention and Mamba layers.
        kv_heads: over so many ranks tensor parallelism can spread the KV cache; more ranks hold copies. 1 for a
            latent, which every rank holds whole, and where there is no KV cache.
        state_elements: of a sequence, whatever its length: recurrent and convolution states, the window and the
            unfinished blocks of compressed attention.
    """

    kind: str
    weights: tuple[Weight, ...]
    kv_elements_per_token: int
    kv_heads: int
    state_elements: int = 0

    @cached_property
    def num_parameters(self) -> int:
        return count(self.weights)

    @cached_property
    def num_expert_parameters(self) -> int:
        return count(weight for weight in self.weights if weight.is_expert)


@dataclass(frozen=True)
class Architecture:
    """A causal language model as tensors. Widths that do not occur in it are 0.

    Args:
        embedding: before layer 0.
        head: final norm and `lm_head`; a tied `lm_head` is the embedding and not listed again.
        mtp: layers for multi-token prediction, which transformers' causal LM does not build. Approximate: a decoder
            layer of the last kind, a 2·hidden to hidden projection and three norms, which is what DeepSeek-V3's
            checkpoint holds besides its copies of embedding and head.
        num_kv_heads: of a full-attention layer; layers can differ, see `Layer.kv_heads`.
        head_dim: of a query in a full-attention layer; with a latent (MLA) the rotated and the other part together.
        ffn_hidden_size: of the dense layers.
        shared_ffn_hidden_size: of all shared experts of a layer together.
    """

    model_type: str
    embedding: tuple[Weight, ...]
    layers: tuple[Layer, ...]
    head: tuple[Weight, ...]
    mtp: tuple[Layer, ...]
    hidden_size: int
    vocab_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    moe_ffn_hidden_size: int
    num_experts: int
    num_experts_per_tok: int
    shared_ffn_hidden_size: int
    tied: bool

    @cached_property
    def num_parameters(self) -> int:
        """Of transformers' causal LM: embedding, layers and head, without MTP layers and without buffers."""
        return count(self.embedding) + sum(layer.num_parameters for layer in self.layers) + count(self.head)

    @cached_property
    def num_active_parameters(self) -> int:
        """Parameters one token meets: of each layer's experts those it is routed to, everything else whole."""
        experts = sum(layer.num_expert_parameters for layer in self.layers)
        active = experts // self.num_experts * self.num_experts_per_tok if self.num_experts else 0
        return self.num_parameters - experts + active


def count(weights: Iterable[Weight]) -> int:
    return sum(weight.numel for weight in weights)
