"""A model's passes over this rank's share of some samples, through Megatron-core's schedules."""

# b samples of a micro-batch, r positions of this rank, X what the model puts out for each

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from rllaunch.backends.megatron.batch import MicroBatch, Work, micro_batches, take
from rllaunch.backends.megatron.dealing import Part, Share
from rllaunch.backends.megatron.options import MegatronConfigs, qkv_format
from rllaunch.resolve.schema import LaunchConfig

Figures = dict[str, Tensor]
LossOf = Callable[[MicroBatch, Tensor], tuple[Tensor, Figures]]


def share_here(config: LaunchConfig, configs: MegatronConfigs, device: str) -> Share:
    """Of this rank, by Megatron-core's groups."""
    transformer = configs.transformer
    context_size = parallel_state.get_context_parallel_world_size()
    return Share(
        is_packed=qkv_format(config) == "thd",
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        context_size=context_size,
        context_group=parallel_state.get_context_parallel_group() if context_size > 1 else None,
        sequence_size=transformer.tensor_model_parallel_size if transformer.sequence_parallel else 1,
        num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
        # Local layers read them on the host, every one of them: on the device each would wait for all that is queued.
        bounds_on=device if configs.uses_te or transformer.apply_rope_fusion else "cpu",
    )


def run_passes(
    model: Any, work: Work, rows: Tensor, config: LaunchConfig, loss_of: LossOf, *, forward_only: bool
) -> list[Figures]:
    """Pass this data-parallel rank's share of `rows` through `model`; figures of each micro-batch on the last stage.

    Args:
        rows: of the work, the same on every rank.
        loss_of: on the last stage, the loss and figures of a micro-batch from the model's output, [b, r/b, X], or
            [1, r, X] where samples are packed.
    """
    parts = micro_batches(work, rows, config)

    def step(remaining: Iterator[Part], stage: Any) -> tuple[Tensor, Any]:
        micro = take(work, next(remaining))
        output = stage(micro.ids, micro.position, None, packed_seq_params=micro.packed)

        def loss(output: Tensor) -> tuple[Tensor, Tensor, Figures]:
            total, figures = loss_of(micro, output)
            # Megatron-core divides by these tokens; the loss is divided already.
            return total, torch.zeros((), dtype=torch.int, device=total.device), figures

        return output, loss

    # Between stages all residual streams of a position lie beside each other; Megatron-core knows of one.
    streams = getattr(model.module, "num_streams", 1)
    wider = {"adjust_tensor_shapes_fn": partial(_wider, streams)} if streams > 1 and work.share.num_stages > 1 else {}
    outputs: list[Figures] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(parts),
        model=model,
        num_microbatches=len(parts),
        seq_length=parts[0].num_positions,
        micro_batch_size=1 if work.share.is_packed else len(parts[0].rows_b),
        forward_only=forward_only,
        **wider,
    )
    return outputs


def _wider(streams: int, *shapes: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], ...]:
    return tuple([(*shape[:-1], shape[-1] * streams) if shape else shape for shape in one] for one in shapes)


def of_every_sample(
    model: Any, work: Work, config: LaunchConfig, read: Callable[[MicroBatch, Tensor], Tensor]
) -> Tensor:
    """[B, L] of what `read` makes of the model's output for a micro-batch, [b, L]; no gradient is kept.

    On the last stage it holds all samples, whichever data-parallel rank computed them; on the others only zeros,
    which nobody reads.
    """
    values_BL = torch.zeros_like(work.mask_BL)

    def keep(micro: MicroBatch, output: Tensor) -> tuple[Tensor, Figures]:
        values_bL = read(micro, output)
        # Rows that only fill up are row 0 with an empty mask: they add 0 to it.
        values_BL.index_add_(0, micro.rows_b, values_bL.to(values_BL.dtype))
        return values_bL.sum(), {}

    with torch.no_grad():
        run_passes(model, work, torch.arange(len(work.mask_BL)), config, keep, forward_only=True)
    torch.distributed.all_reduce(values_BL, group=parallel_state.get_data_parallel_group())
    return values_BL
