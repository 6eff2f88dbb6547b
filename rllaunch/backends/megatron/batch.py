"""A rollout as Megatron-core reads it: prompts beside their responses, in micro-batches of one size on every rank."""

# B samples of a rollout, b of a micro-batch, P prompt tokens (left-padded), L response tokens, S positions of the
# longest sample, R positions of a micro-batch, its rows one after the other, r of them on this rank

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from rllaunch.algo.advantages import group_advantages
from rllaunch.backends.base import TrainBatch
from rllaunch.backends.megatron.context import moved, positions_here
from rllaunch.resolve.schema import LaunchConfig


@dataclass(frozen=True)
class Share:
    """How a rollout is laid out, and which part of it this rank computes.

    Args:
        is_packed: the samples of a micro-batch stand one after the other in one row; else each in a row of its own, all
            of one length.
        data_rank, data_size: of the ranks that compute different samples.
        context_rank, context_size, context_group: of those that compute different positions of the same samples.
        sequence_size: ranks that share a row's activations where they share matrices, too.
        num_stages: of the pipeline.
        bounds_on: device of the packed samples' bounds.
    """

    is_packed: bool = True
    data_rank: int = 0
    data_size: int = 1
    context_rank: int = 0
    context_size: int = 1
    context_group: Any = None
    sequence_size: int = 1
    num_stages: int = 1
    bounds_on: str = "cpu"

    @property
    def sample_multiple(self) -> int:
        """What a sample's positions must divide by."""
        return 2 * self.context_size if self.context_size > 1 else 1

    @property
    def row_multiple(self) -> int:
        """What a row's positions must divide by."""
        return math.lcm(self.sample_multiple, self.context_size * self.sequence_size)


@dataclass(frozen=True)
class Judgement:
    """A critic's values before the first step, and the returns to fit them to."""

    value_BL: Tensor
    return_BL: Tensor


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
class Part:
    """What one micro-batch is made of.

    Args:
        rows_b: samples of the work; those of -1 fill up.
        num_positions: of the packed row, or of each sample's.
    """

    rows_b: Tensor
    num_positions: int


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
    width = _up(int(num_tokens_B.max()), share.row_multiple)
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
        make = _packed_parts if work.share.is_packed else _padded_parts
        work.parts[asked] = make(work, rows, config)
    return work.parts[asked]


def _padded_parts(work: Work, rows: Tensor, config: LaunchConfig) -> list[Part]:
    trainer, share = config.trainer, work.share
    most = -(-len(rows) // share.data_size)
    per_batch = trainer.micro_batch_size or most
    if trainer.micro_batch_size is None and trainer.max_tokens_per_gpu is not None:
        per_batch = trainer.max_tokens_per_gpu * share.context_size // work.width
    per_batch = max(1, min(per_batch, most))
    count = max(1, -(-most // per_batch))
    mine = torch.full((count * per_batch,), -1, dtype=torch.int64)
    own = rows[share.data_rank :: share.data_size]
    mine[: len(own)] = own
    return [Part(rows_b, work.width) for rows_b in torch.split(mine, per_batch)]


def _packed_parts(work: Work, rows: Tensor, config: LaunchConfig) -> list[Part]:
    """Micro-batches of the same number on the ranks have rows of one length; with pipeline stages, which announce the
    length of what they send each other once, all of them."""
    share = work.share
    lens = [_up(n, share.sample_multiple) for n in work.num_tokens_B[rows].tolist()]
    groups = _groups(lens, config, share)
    loads = [sum(lens[i] for i in group) for group in groups]
    parts = []
    for first in range(0, len(groups), share.data_size):
        among = loads if share.num_stages > 1 else loads[first : first + share.data_size]
        own = groups[first + share.data_rank]
        rows_b = rows[torch.tensor(sorted(own))] if own else torch.tensor([-1])
        parts.append(Part(rows_b, _up(max(*among, 1), share.row_multiple)))
    return parts


def _groups(lens: Sequence[int], config: LaunchConfig, share: Share) -> list[list[int]]:
    """Samples of each micro-batch of all ranks, those with most positions first; none where there are too few.

    Args:
        lens: positions of each sample.
    """
    trainer, size = config.trainer, share.data_size
    if trainer.micro_batch_size is not None:
        count = max(1, -(-len(lens) // (trainer.micro_batch_size * size)))
        groups = _evenly(lens, count * size, trainer.micro_batch_size)
    elif trainer.max_tokens_per_gpu is None:
        groups = _evenly(lens, size, len(lens))
    else:
        limit = trainer.max_tokens_per_gpu * share.context_size
        if share.num_stages > 1:
            limit = max(limit, *lens)  # all rows are as long as the longest one, so they may as well be full
        groups = _within(lens, limit, size)
    return sorted(groups, key=lambda g: -sum(lens[i] for i in g))


def _within(lens: Sequence[int], limit: int, size: int) -> list[list[int]]:
    """Groups of no more than `limit` positions, or of one sample, in a number that `size` divides and nearly the least.

    More groups mostly hold less each, so where the bounds are too few the number is looked for in steps that double,
    then in halves: one by one it would take as many tries as there are samples when two of them rarely fit together.
    """

    def dealt(count: int) -> list[list[int]] | None:
        groups = _evenly(lens, count * size, len(lens))
        fits = all(len(group) <= 1 or sum(lens[i] for i in group) <= limit for group in groups)
        return groups if fits else None

    alone = sum(2 * n > limit for n in lens)
    low = max(1, -(-sum(min(n, limit) for n in lens) // (limit * size)), -(-alone // size))
    most = max(low, -(-len(lens) // size))
    high, step = low, 1
    while (found := dealt(high)) is None:
        assert high < most, "as many groups as samples hold one each"
        low, high, step = high + 1, min(high + step, most), 2 * step
    while low < high:
        middle = (low + high) // 2
        if (fewer := dealt(middle)) is None:
            low = middle + 1
        else:
            found, high = fewer, middle
    return found


def _evenly(lens: Sequence[int], number: int, most: int) -> list[list[int]]:
    """`number` groups of about the same sum, `most` samples in each at most: the longest first, to the least yet."""
    groups: list[list[int]] = [[] for _ in range(number)]
    heap = [(0, at) for at in range(number)]
    for index in sorted(range(len(lens)), key=lambda i: -lens[i]):
        load, at = heapq.heappop(heap)
        groups[at].append(index)
        if len(groups[at]) < most:
            heapq.heappush(heap, (load + lens[index], at))
    return groups


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
    lens = [_up(n, work.share.sample_multiple) for n in needed.tolist()]
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


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def step_orders(num_samples: int, steps: int, seed: int, rollout_id: int) -> list[Tensor]:
    """Which samples are in which optimizer step: by seed and rollout alone, so that a resumed run repeats it."""
    rng = np.random.Generator(np.random.Philox(key=[seed, (2 << 32) + rollout_id]))
    return list(torch.from_numpy(rng.permutation(num_samples)).chunk(steps))
