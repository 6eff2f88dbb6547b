"""Norms through torch and the rest of Megatron-core's local layers: what runs where Transformer Engine is not.

Megatron-core's own local norm refuses sequence parallelism.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from rllaunch.backends.megatron.attention import TorchAttention


class TorchNorm(nn.RMSNorm):
    """RMSNorm that tells Megatron-core whether each rank saw only its part of the sequence.

    Then the ranks' gradients of its weight are added, in `finalize_model_grads`.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self._is_centered = bool(config.layernorm_zero_centered_gamma)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self._is_centered:
            normed: Tensor = _CenteredNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
            return normed
        return super().forward(x)


class _CenteredNorm(torch.autograd.Function):
    """RMSNorm by a weight that is stored less one, in float32: one and a small weight are no sum in bfloat16.

    Kept for the backward pass is x as it is, not a wider copy.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return _centered(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            again = _centered(x, weight, ctx.eps)
        return *torch.autograd.grad(again, (x, weight), grad), None


def _centered(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps=eps).to(x.dtype)


class LatentAttention(MLASelfAttention):  # type: ignore[misc]
    """Latent attention with the norms of its spec.

    Without a query latent Megatron-core 0.19.2 refuses the norms that its own spec asks for, and without them, too.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


def use_torch(block_spec: Any) -> None:
    """Put attention and norms into every layer of a block of local layers, and whole projections to the latents.

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
