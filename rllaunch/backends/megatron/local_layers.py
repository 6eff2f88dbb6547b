"""Norms through torch and the rest of Megatron-core's local layers: what runs where Transformer Engine is not.

Megatron-core's own local norm refuses sequence parallelism.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor, nn

from rllaunch.backends.megatron.attention import TorchAttention
from rllaunch.backends.megatron.wide import wide_norm


class TorchNorm(nn.RMSNorm):
    """RMSNorm that tells Megatron-core whether each rank saw only its part of the sequence.

    Then the ranks' gradients of its weight are added, in `finalize_model_grads`.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self._eps = eps
        self._is_centered = bool(config.layernorm_zero_centered_gamma)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self._is_centered:
            return wide_norm(x, self.weight, self._eps, is_centered=True)
        return super().forward(x)


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
