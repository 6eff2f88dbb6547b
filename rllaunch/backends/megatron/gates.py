"""Gates of Qwen3-Next and Qwen3.5 that Megatron-core's layers lack, or have in a form that does not serve here."""

# T positions of this rank, B sequences, N query heads on this rank, H hidden size, O outputs

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn


class GatedAttention(SelfAttention):  # type: ignore[misc]
    """Attention whose output gate has the heads of the queries where ranks outnumber the heads of keys.

    Each rank then computes all queries of its keys and takes its own. Of the gates 0.16.1 takes all, and stops at their
    shape; 0.19.2 takes the right ones.
    """

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> Any:
        found = super().get_query_key_value_tensors(*args, **options)
        if len(found) != 4:
            return found
        query, key, value, gate_TBNO = found
        N = query.shape[2]
        if gate_TBNO.shape[2] != N:
            part = self.pg_collection.tp.rank() % (gate_TBNO.shape[2] // N)
            gate_TBNO = gate_TBNO[:, :, part * N : (part + 1) * N]
        return query, key, value, gate_TBNO


class _Gate(nn.Module):
    """One number of a token; whole on each rank, as layers are that no rank shares."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        # With sequence parallelism each rank's gradient is that of its own positions, and Megatron-core adds them.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_TBH: Tensor) -> tuple[Tensor, None]:
        """[T, B, 1], and no bias, as a linear layer of Megatron-core gives it: LoRA's adapters add to that."""
        return F.linear(hidden_TBH, self.weight), None


def gate_attention(block_spec: Any) -> None:
    """Put this attention into every layer of a block that has Megatron-core's."""
    for layer in block_spec.layer_specs:
        if layer.submodules.self_attention.module is SelfAttention:
            layer.submodules.self_attention.module = GatedAttention


def gate_shared_experts(model: Any) -> None:
    """Give the shared experts of a model a gate that is a layer, for Megatron-core's own is a tensor among theirs.

    LoRA's adapters stand beside layers.
    """
    for experts in [m for m in model.modules() if isinstance(m, SharedExpertMLP)]:
        experts.use_shared_expert_gate, experts.gate_weight = False, None
        experts.gate = _Gate(experts.config)
        experts.register_forward_hook(_gated)


def _gated(experts: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    logits_TB1, _ = experts.gate(args[0])
    return output * torch.sigmoid(logits_TB1)
