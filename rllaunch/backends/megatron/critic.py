"""The critic of PPO: a second model that starts as the policy, with one number per token on top.

The same numbers as the embedded trainer's `rllaunch.algo.value_head`.
"""

# B samples of a rollout, b of a micro-batch, L response tokens, T positions of a row (t of this rank), H hidden size

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor, nn

from rllaunch.algo.advantages import Judgement, outcome_advantages
from rllaunch.algo.losses import aggregate, value_loss
from rllaunch.backends.megatron.batch import MicroBatch, Work
from rllaunch.backends.megatron.passes import Figures, of_every_sample, run_passes
from rllaunch.backends.megatron.shape import ModelShape
from rllaunch.backends.megatron.weights import Entry, entries
from rllaunch.resolve.schema import LaunchConfig


class ValueHead(nn.Module):
    """Takes the place of a model's `output_layer`: value after each token, starting at 0.

    Whole on every tensor-parallel rank, and float32 whatever the model is: returns are small differences that bf16
    rounds away.
    """

    def __init__(self, config: Any, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=torch.float32, device=device))
        self._is_split = bool(config.sequence_parallel)
        # Then each rank saw only its part of the sequence, and Megatron-core adds the ranks' gradients.
        self.weight.sequence_parallel = self._is_split  # type: ignore[attr-defined]

    def forward(self, hidden_tbH: Tensor, **_: Any) -> tuple[Tensor, None]:
        """[T, b, 1] and no bias, as an output layer gives logits."""
        value_tb1 = nn.functional.linear(hidden_tbH.to(self.weight.dtype), self.weight)
        if self._is_split:
            # Every rank computes the same loss: a rank's part of the gradient is that of its own positions.
            value_tb1 = gather_from_sequence_parallel_region(value_tb1, tensor_parallel_output_grad=False)
        return value_tb1, None


def put_value_head(model: Any, device: torch.device | str) -> None:
    """Give the last stage of a model built with an output layer of its own a value head instead."""
    if model.post_process:
        model.output_layer = ValueHead(model.config, device)


def critic_entries(shape: ModelShape) -> list[Entry]:
    """Where the parameters of a critic are; its head has no place in a checkpoint of transformers."""
    return [*entries(replace(shape, is_tied=False))[:-1], Entry(("output_layer.weight",), ("value_head.weight",))]


class Critic:
    """What the critic says of a rollout, and its part of each optimizer step.

    Args:
        ddp: the model as Megatron-core wraps it.
    """

    def __init__(self, ddp: Any, config: LaunchConfig) -> None:
        self.ddp, self.config = ddp, config

    def judge(self, work: Work) -> Work:
        """The work with the values of now, the returns to fit them to, and the advantages over them.

        Right on the last stage only, where the losses are.
        """
        algorithm = self.config.algorithm
        value_BL = of_every_sample(self.ddp, work, self.config, _values)
        advantage_BL, return_BL = outcome_advantages(
            work.reward_B,
            value_BL,
            work.mask_BL,
            algorithm.gamma,
            algorithm.lambd,
            normalize=algorithm.normalize_advantages,
        )
        return replace(work, advantage_BL=advantage_BL, judgement=Judgement(value_BL, return_BL))

    def backward(self, work: Work, rows: Tensor, denominator: Tensor) -> list[Figures]:
        """Add the gradients of the value loss over `rows` to the critic's; `value_loss` of each micro-batch."""
        algorithm, judged = self.config.algorithm, work.judgement
        assert judged is not None, "the critic judges the work before the first step"

        def loss_of(micro: MicroBatch, value: Tensor) -> tuple[Tensor, Figures]:
            old_value_bL, return_bL = judged.value_BL[micro.rows_b], judged.return_BL[micro.rows_b]
            losses_bL = value_loss(_values(micro, value), old_value_bL, return_bL, algorithm.value_clip)
            total = aggregate(losses_bL, micro.mask_bL, algorithm.loss_aggregation, denominator=denominator)
            return total, {"value_loss": total.detach()}

        return run_passes(self.ddp, work, rows, self.config, loss_of, forward_only=False)


def _values(micro: MicroBatch, value: Tensor) -> Tensor:
    """Value before each response token, [b, L]: what the critic says after the token before it."""
    return micro.per_response(value.flatten()[micro.row_M])
