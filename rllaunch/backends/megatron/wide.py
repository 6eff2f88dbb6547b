"""A norm in float32, and parts of DeepSeek-V4's layers that are whole on each tensor-parallel rank.

Of a whole matrix and of a norm each rank sees its own positions, or computes with its own heads what comes of them: in
both cases its gradient is a part of the sum, which Megatron-core makes of parameters marked `sequence_parallel`.
"""

# T positions, B rows, I inputs and O outputs

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def float32_parameter(*shape: int, is_summed: bool = False) -> nn.Parameter:
    """Zeros, which stay float32 whatever the other parameters are.

    Args:
        is_summed: tensor-parallel ranks' gradients are added.
    """
    parameter = nn.Parameter(torch.zeros(*shape, dtype=torch.float32))
    parameter.stays_float32 = True  # type: ignore[attr-defined]
    parameter.sequence_parallel = is_summed  # type: ignore[attr-defined]
    return parameter


class WholeLinear(nn.Module):
    """[T, B, I] → [T, B, O], of a matrix that no rank shares."""

    def __init__(self, config: Any, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_outputs, num_inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x_TBI: Tensor) -> Tensor:
        return F.linear(x_TBI, self.weight)


class WideNorm(nn.Module):
    """RMSNorm in float32 with a float32 weight, rounded once; a norm of a layer spec."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = float32_parameter(hidden_size, is_summed=config.sequence_parallel)
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return wide_norm(x, self.weight, self._eps)


def wide_norm(x: Tensor, weight: Tensor, eps: float, *, is_centered: bool = False) -> Tensor:
    """RMSNorm computed in float32.

    Args:
        is_centered: the weight is stored less one: in bfloat16 one and a small weight are no sum.
    """
    normed: Tensor = _WideNorm.apply(x, weight, eps, float(is_centered))  # type: ignore[no-untyped-call]
    return normed


class _WideNorm(torch.autograd.Function):
    """Kept for the backward pass is x as it is, not a wider copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, less: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.how = eps, less
        return _normed(x, weight, eps, less)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            again = _normed(x, weight, *ctx.how)
        return *torch.autograd.grad(again, (x, weight), grad), None, None


def _normed(x: Tensor, weight: Tensor, eps: float, less: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, less + weight.float(), eps=eps).to(x.dtype)


def over_root_mean_square(x: Tensor, eps: float) -> Tensor:
    """x over the root of its last dimension's mean square, in its own type."""
    # So written, the backward pass keeps x as it is and no copy of it in float32.
    squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square()
    return x * torch.rsqrt(squares / x.shape[-1] + eps).to(x.dtype)
