"""Norms of queries and keys over all heads at once, as MiniMax-M2 has them: Megatron-core's are of each head."""

# T positions, B sequences, N heads on this rank, D width of a head

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn


class _HeadsNorm(nn.Module):
    """RMSNorm of all heads together, of which tensor-parallel ranks have some each.

    Its weight is whole on every rank, and each uses that of its own heads: where ranks outnumber the heads of keys,
    several have the same one. Megatron-core adds the ranks' gradients of parameters called `q_layernorm` and
    `k_layernorm` (0.16.1 `finalize_model_grads`), so that each ends with all of them.

    Args:
        num_heads: of all ranks together.
    """

    def __init__(self, num_heads: int, head_dim: int, eps: float, num_ranks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(num_heads * head_dim))
        self._num_heads, self._eps, self._num_ranks = num_heads, eps, num_ranks

    def forward(self, x_TBND: Tensor) -> Tensor:
        N, D = x_TBND.shape[-2:]
        # So written, the backward pass keeps x as it is and no copy of it in float32.
        squares_TB11 = torch.linalg.vector_norm(x_TBND, dim=(-2, -1), keepdim=True, dtype=torch.float32).square()
        weight_ND = self.weight.view(-1, D)
        if self._num_ranks > 1:
            # Every rank's outputs depend on every rank's inputs: sums go both ways.
            squares_TB11 = copy_to_tensor_model_parallel_region(reduce_from_tensor_model_parallel_region(squares_TB11))
            first = parallel_state.get_tensor_model_parallel_rank() * self._num_heads // self._num_ranks
            weight_ND = weight_ND[first : first + N]
        # Heads that several ranks have are in the sum as often as in this number of elements.
        mean_TB11 = squares_TB11 / (self._num_ranks * N * D)
        return (x_TBND * torch.rsqrt(mean_TB11 + self._eps)).to(x_TBND.dtype) * weight_ND


class QueryNorm(_HeadsNorm):
    """`q_layernorm` of a layer spec: [T, B, N, D], normed."""

    def __init__(self, hidden_size: int, config: Any, eps: float, **_: Any) -> None:
        super().__init__(config.num_attention_heads, hidden_size, eps, config.tensor_model_parallel_size)


class KeyNorm(_HeadsNorm):
    """`k_layernorm` of a layer spec, as `QueryNorm`."""

    def __init__(self, hidden_size: int, config: Any, eps: float, **_: Any) -> None:
        super().__init__(config.num_query_groups, hidden_size, eps, config.tensor_model_parallel_size)


def norm_all_heads(block_spec: Any) -> None:
    """Put these norms into every layer of a block, whatever its other layers are made of."""
    for layer in block_spec.layer_specs:
        attention = layer.submodules.self_attention.submodules
        attention.q_layernorm, attention.k_layernorm = QueryNorm, KeyNorm
