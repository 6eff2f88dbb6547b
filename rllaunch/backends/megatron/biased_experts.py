"""Biases of experts where ranks share tensors or sequences, and anywhere in training: Megatron-core's are not right.

It adds the bias of a down projection in place (0.16.1 transformer/mlp.py), which torch forbids behind the sum over
tensor-parallel ranks. Ranks that share an expert would each add it, and their outputs are then summed; Megatron-core
refuses such a layout. And it takes that bias for a parameter of which every tensor-parallel rank saw a part of the
sequence (tensor_parallel/layers.py): the ranks' gradients would be summed, though they may have other experts.
"""

# T tokens of an expert, H hidden size

from __future__ import annotations

from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor


def add_biases_once(model: Any) -> None:
    """Let the first of the ranks that share an expert add its bias, and all of them have the gradient of it: they hold
    the same copy, and are given the same tokens."""
    is_first = parallel_state.get_expert_tensor_parallel_rank() == 0
    for module in model.modules():
        if not isinstance(module, SequentialMLP):
            continue
        for expert in module.local_experts:
            bias_H = expert.linear_fc2.bias
            bias_H.sequence_parallel = False
            # The norm of all gradients counts it once for each expert: of those not so marked it takes the first
            # tensor-parallel rank's only, which may have other experts.
            bias_H.tensor_model_parallel = is_first
            expert.linear_fc2.register_forward_hook(_keep_bias)
            expert.register_forward_hook(_add_bias if is_first else _add_nothing)


def _keep_bias(layer: Any, args: Any, output: tuple[Tensor, Tensor]) -> tuple[Tensor, None]:
    return output[0], None


def _add_bias(expert: Any, args: tuple[Tensor, Tensor], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    return _weighted(output[0], expert.linear_fc2.bias, args[1]), None


def _add_nothing(expert: Any, args: tuple[Tensor, Tensor], output: tuple[Tensor, None]) -> tuple[Tensor, None]:
    bias_H = expert.linear_fc2.bias
    return _weighted(output[0], bias_H - bias_H.detach(), args[1]), None  # zeros with the gradient of the bias


def _weighted(out_TH: Tensor, bias_H: Tensor, weight_T: Tensor) -> Tensor:
    return (out_TH + weight_T[:, None] * bias_H).to(out_TH.dtype)
