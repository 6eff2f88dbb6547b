"""Causal attention through torch, for Megatron-core's local layers.

Megatron-core's own local attention holds all scores, [B, heads, T, T], and knows no latent attention (the
`DotProductAttention` of 0.16.1 has one width for keys and values); torch chooses a fused kernel that does better.
"""

# T tokens, B sequences, N query heads and G key heads on this rank, D width of a head, E width of a value

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class TorchAttention(nn.Module):
    """`core_attention` of a layer spec. It needs no mask: rows are padded at their end, which no real token sees."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        assert config.context_parallel_size == 1, "whole sequences are on every rank"
        self._scale = softmax_scale
        self._dropout = float(config.attention_dropout)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[T, B, N, D], [T, B, G, D] and [T, B, G, E] → [T, B, N·E]."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        out_BNTE = nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=True,
            scale=self._scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out_BNTE.permute(2, 0, 1, 3).flatten(2).contiguous()


def use_torch_attention(block_spec: Any) -> None:
    """Put it into every layer of a block of local layers."""
    for layer in block_spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = TorchAttention
