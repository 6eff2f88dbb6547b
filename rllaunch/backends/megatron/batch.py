"""A rollout as Megatron-core reads it: prompts beside their responses, in micro-batches of one size on every rank."""

# B samples of a rollout, b of a micro-batch, P prompt tokens (left-padded), L response tokens, S positions of the
# longest sample, R positions of a micro-batch, its rows one after the other, r of them on this rank

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from rllaunch.algo.advantages import Judgement, group_advantages
from rllaunch.backends.base import TrainBatch
from rllaunch.backends.megatron.context import moved, positions_here
from rllaunch.backends.megatron.dealing import Part, Share, deal, round_up
from rllaunch.resolve.schema import LaunchConfig


@dataclass(frozen=True)
class Work:
    """All samples. A row's first token stands in its first column, padding only at its end, so that causal attention
    needs no mask.

    What micro-batches are put together of is on the host, since asking the device would wait for all that is queued
    there; what losses are made of is on the device.

    Args:
        num_tokens_B: positions of each sample that are needed; at least one.
        ids_BS, num_tokens_B, prompt_lens_B, response_BL, is_response_BL: on the host.
        advantage_BL: 0 until a critic has judged the work, where there is one.
        parts: micro-batches of the rows asked for already: every pass over them asks.
    """

    share: Share
    ids_BS: Tensor
    num_tokens_B: Tensor
    prompt_lens_B: Tensor
    response_BL: Tensor
    is_response_BL: Tensor
    mask_BL: Tensor
    old_logp_BL: Tensor
    reward_B: Tensor
    advantage_BL: Tensor
    judgement: Judgement | None = None
    parts: dict[tuple[int, ...], list[Part]] = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        return self.ids_BS.shape[1]


@dataclass(frozen=True)
class MicroBatch:
    """Some samples of the work; those that fill it up have an empty mask.

    Args:
        ids, position: of this rank, [b, r/b], or [1, r] where samples are packed.
        place_M, row_M, token_M: for each real response token that this rank predicts where it stands in [b·L], the
            position here, [r], that predicts it, and the token.
        packed: of packed samples, whole, with what fills up the row as one more.
    """

    rows_b: Tensor
    ids: Tensor
    position: Tensor
    mask_bL: Tensor
    place_M: Tensor
    row_M: Tensor
    token_M: Tensor
    packed: Any = None
    context_group: Any = None

    def per_response(self, values_M: Tensor) -> Tensor:
        """[M] → [b, L], 0 where there is no real token, the same on all context-parallel ranks.

        Gradients flow back, each to the rank that has the value: every rank computes the same loss from them.
        """
        found_bL = torch.zeros_like(self.mask_bL, dtype=values_M.dtype)
        found_bL = found_bL.flatten().scatter(0, self.place_M, values_M).view_as(found_bL)
        if self.context_group is None:
            return found_bL
        whole_bL: Tensor = reduce_from_tensor_model_parallel_region(found_bL, group=self.context_group)
        return whole_bL


def make_work(batch: TrainBatch, config: LaunchConfig, device: torch.device | str, share: Share) -> Work:
    P = batch.prompt_ids_BP.shape[1]
    lens_B1 = batch.prompt_lens_B[:, None]
    num_response_B1 = batch.mask_BL.astype(bool).sum(1, keepdims=True)
    ids_BT = np.concatenate([batch.prompt_ids_BP, batch.response_ids_BL], axis=1)
    # The last token predicts nothing that is asked for.
    num_tokens_B = np.maximum(lens_B1 + num_response_B1 - 1, 1)[:, 0]
    width = round_up(int(num_tokens_B.max()), share.row_multiple)
    column_BS = np.arange(width)[None] + P - lens_B1
    taken_BS = np.take_along_axis(ids_BT, np.minimum(column_BS, ids_BT.shape[1] - 1), axis=1)
    reward_B = torch.from_numpy(batch.reward_B)
    if config.has_critic:
        advantage_B = torch.zeros_like(reward_B)
    else:
        group_size, normalize = config.rollout.n_samples_per_prompt, config.algorithm.normalize_advantages
        advantage_B = group_advantages(reward_B, group_size, normalize=normalize)
    return Work(
        share=share,
        ids_BS=torch.from_numpy(taken_BS),
        num_tokens_B=torch.from_numpy(num_tokens_B),
        prompt_lens_B=torch.from_numpy(batch.prompt_lens_B),
        response_BL=torch.from_numpy(batch.response_ids_BL),
        is_response_BL=torch.from_numpy(batch.mask_BL.astype(bool)),
        mask_BL=torch.from_numpy(batch.mask_BL).to(device),
        old_logp_BL=torch.from_numpy(batch.logprob_BL).to(device),
        reward_B=reward_B.to(device),
        advantage_BL=advantage_B[:, None].expand(-1, batch.mask_BL.shape[1]).to(device),
    )


def micro_batches(work: Work, rows: Tensor, config: LaunchConfig) -> list[Part]:
    """This data-parallel rank's micro-batches of an optimizer step, as many and as large as on every other rank.

    Ranks exchange activations in the middle of a layer (experts) or of a pass (stages), so that none may have fewer.
    """
    asked = tuple(rows.tolist())
    if asked not in work.parts:
        work.parts[asked] = deal(rows, work.num_tokens_B, work.width, config, work.share)
    return work.parts[asked]


def take(work: Work, part: Part) -> MicroBatch:
    """The micro-batch on the work's device, put together on the host: nothing waits for the device."""
    share, device = work.share, work.mask_BL.device
    lens = _lengths(work, part)
    position_R = torch.cat([torch.arange(n) for n in lens])
    here_r = positions_here([n for n in lens if n], share.context_size, share.context_rank)
    is_real_b, rows_b = part.rows_b >= 0, part.rows_b.clamp(min=0)
    start_b = torch.tensor([0, *accumulate(lens)][: len(rows_b)])
    is_here_bL = work.is_response_BL[rows_b] & is_real_b[:, None]
    at_bL = (start_b + work.prompt_lens_B[rows_b] - 1)[:, None] + torch.arange(is_here_bL.shape[1])
    if share.context_size > 1:
        number_R = torch.full((len(position_R),), -1)
        number_R[here_r] = torch.arange(len(here_r))
        at_bL = number_R[at_bL.clamp(max=len(position_R) - 1)]
        is_here_bL &= at_bL >= 0
    # What only fills up is the beginning of the work: anything will do.
    first = torch.cat([rows_b * work.width, torch.zeros(len(lens) - len(rows_b), dtype=torch.int64)])
    source_R = torch.repeat_interleave(first, torch.tensor(lens)) + position_R % work.width
    ids_r, position_r, place_M, row_M, token_M, rows_b, is_real_b = moved(
        work.ids_BS.flatten()[source_R[here_r]],
        position_R[here_r],
        is_here_bL.flatten().nonzero()[:, 0],
        at_bL[is_here_bL],
        work.response_BL[rows_b][is_here_bL],
        rows_b,
        is_real_b.long(),
        device=device,
    )
    shape = (1, -1) if share.is_packed else (len(rows_b), -1)
    return MicroBatch(
        rows_b=rows_b,
        ids=ids_r.view(shape),
        position=position_r.view(shape),
        mask_bL=work.mask_BL[rows_b] * is_real_b[:, None],
        place_M=place_M,
        row_M=row_M,
        token_M=token_M,
        packed=_packed_params(lens, share) if share.is_packed else None,
        context_group=share.context_group,
    )


def _lengths(work: Work, part: Part) -> list[int]:
    """Positions of each sample of a micro-batch, in whole chunks, and of what fills up its row."""
    if not work.share.is_packed:
        return [part.num_positions] * len(part.rows_b)
    needed = torch.where(part.rows_b >= 0, work.num_tokens_B[part.rows_b], 0)
    lens = [round_up(n, work.share.sample_multiple) for n in needed.tolist()]
    rest = part.num_positions - sum(lens)
    return [*lens, rest] if rest else lens


def _packed_params(lens: Sequence[int], share: Share) -> PackedSeqParams:
    (bounds,) = moved(torch.tensor([0, *accumulate(n for n in lens if n)], dtype=torch.int32), device=share.bounds_on)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lens),
        max_seqlen_kv=max(lens),
    )
