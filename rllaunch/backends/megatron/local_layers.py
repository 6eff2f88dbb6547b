"""Attention and norms through torch, for Megatron-core's local layers: what runs where Transformer Engine is not.

Megatron-core's own local attention holds all scores, [B, heads, T, T], and knows no latent attention (the
`DotProductAttention` of 0.16.1 has one width for keys and values); its own local norm refuses sequence parallelism.
"""

# T tokens, B sequences, N query heads and G key heads on this rank, D width of a head, E width of a value

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
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


class TorchNorm(nn.RMSNorm):
    """RMSNorm that tells Megatron-core whether each rank saw only its part of the sequence.

    Then the ranks' gradients of its weight are added, in `finalize_model_grads`.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention with the norms of its spec.

    Without a query latent Megatron-core 0.19.2 refuses the norms that its own spec asks for, and without them, too.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def use_torch(block_spec: Any) -> None:
    """Put both into every layer of a block of local layers, and whole projections to the latents.

    Those of the local layers are shared by ranks, and of their gathered output each rank gets back only its own part of
    the gradient of the rotated keys: the other ranks' heads would not count (0.16.1; the tests compare with one rank).
    """
    block_spec.layer_norm = TorchNorm
    for layer in block_spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = TorchAttention
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            if hasattr(attention, name):
                setattr(attention, name, Linear)
        if layer.submodules.self_attention.module is MLASelfAttention:
            layer.submodules.self_attention.module = LatentAttention
        for part in (layer.submodules, attention):
            for field in fields(part):
                # With Apex installed some would be its `FusedLayerNorm`, which knows no RMSNorm.
                if getattr(part, field.name) is WrappedTorchNorm:
                    setattr(part, field.name, TorchNorm)
