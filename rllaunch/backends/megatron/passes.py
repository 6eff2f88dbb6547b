"""A model's passes over this rank's share of some samples, through Megatron-core's schedules."""

# b samples of a micro-batch, S positions, X what the model puts out for each

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rllaunch.backends.megatron.batch import MicroBatch, Work, micro_batch_rows, take
from rllaunch.resolve.schema import LaunchConfig

Figures = dict[str, Tensor]
LossOf = Callable[[MicroBatch, Tensor], tuple[Tensor, Figures]]


def run_passes(
    model: Any, work: Work, rows: Tensor, config: LaunchConfig, loss_of: LossOf, *, forward_only: bool
) -> list[Figures]:
    """Pass this data-parallel rank's share of `rows` through `model`; figures of each micro-batch on the last stage.

    Args:
        rows: of the work, the same on every rank.
        loss_of: on the last stage, the loss and figures of a micro-batch from the model's output, [b, S, X].
    """
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    micros = micro_batch_rows(rows, rank, size, config, work.width)

    def step(remaining: Iterator[Tensor], stage: Any) -> tuple[Tensor, Any]:
        micro = take(work, next(remaining))
        output = stage(micro.ids_bS, micro.position_bS, None)

        def loss(output_bSX: Tensor) -> tuple[Tensor, Tensor, Figures]:
            total, figures = loss_of(micro, output_bSX)
            # Megatron-core divides by these tokens; the loss is divided already.
            return total, torch.zeros((), dtype=torch.int, device=total.device), figures

        return output, loss

    outputs: list[Figures] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(micros),
        model=model,
        num_microbatches=len(micros),
        seq_length=work.width,
        micro_batch_size=len(micros[0]),
        forward_only=forward_only,
    )
    return outputs


def of_every_sample(
    model: Any, work: Work, config: LaunchConfig, read: Callable[[MicroBatch, Tensor], Tensor]
) -> Tensor:
    """[B, L] of what `read` makes of the model's output for a micro-batch, [b, L]; no gradient is kept.

    On the last stage it holds all samples, whichever data-parallel rank computed them; on the others only zeros,
    which nobody reads.
    """
    values_BL = torch.zeros_like(work.mask_BL)

    def keep(micro: MicroBatch, output_bSX: Tensor) -> tuple[Tensor, Figures]:
        values_bL = read(micro, output_bSX)
        # Rows that only fill up are row 0 with an empty mask: they must not overwrite it.
        is_real_b = micro.mask_bL.any(dim=1)
        values_BL[micro.rows_b[is_real_b]] = values_bL[is_real_b].to(values_BL.dtype)
        return values_bL.sum(), {}

    with torch.no_grad():
        run_passes(model, work, torch.arange(len(work.mask_BL)), config, keep, forward_only=True)
    torch.distributed.all_reduce(values_BL, group=parallel_state.get_data_parallel_group())
    return values_BL
