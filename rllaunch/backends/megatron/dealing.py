"""How samples are dealt to micro-batches: of one number and one size on every rank, whatever their lengths."""

# B samples of a rollout, b of a micro-batch

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
class Part:
    """What one micro-batch is made of.

    Args:
        rows_b: samples of the work; those of -1 fill up.
        num_positions: of the packed row, or of each sample's.
    """

    rows_b: Tensor
    num_positions: int


def deal(rows: Tensor, num_tokens_B: Tensor, width: int, config: LaunchConfig, share: Share) -> list[Part]:
    """This data-parallel rank's micro-batches of an optimizer step, as many and as large as on every other rank.

    Args:
        rows: the samples of the step, of all ranks.
        num_tokens_B: positions that each sample needs.
        width: positions of each where they are not packed.
    """
    if share.is_packed:
        return _packed_parts(rows, num_tokens_B, config, share)
    return _padded_parts(rows, width, config, share)


def _padded_parts(rows: Tensor, width: int, config: LaunchConfig, share: Share) -> list[Part]:
    trainer = config.trainer
    most = -(-len(rows) // share.data_size)
    per_batch = trainer.micro_batch_size or most
    if trainer.micro_batch_size is None and trainer.max_tokens_per_gpu is not None:
        per_batch = trainer.max_tokens_per_gpu * share.context_size // width
    per_batch = max(1, min(per_batch, most))
    count = max(1, -(-most // per_batch))
    mine = torch.full((count * per_batch,), -1, dtype=torch.int64)
    own = rows[share.data_rank :: share.data_size]
    mine[: len(own)] = own
    return [Part(rows_b, width) for rows_b in torch.split(mine, per_batch)]


def _packed_parts(rows: Tensor, num_tokens_B: Tensor, config: LaunchConfig, share: Share) -> list[Part]:
    """Micro-batches of the same number on the ranks have rows of one length; with pipeline stages, which announce the
    length of what they send each other once, all of them."""
    lens = [round_up(n, share.sample_multiple) for n in num_tokens_B[rows].tolist()]
    groups = _groups(lens, config, share)
    loads = [sum(lens[i] for i in group) for group in groups]
    parts = []
    for first in range(0, len(groups), share.data_size):
        among = loads if share.num_stages > 1 else loads[first : first + share.data_size]
        own = groups[first + share.data_rank]
        rows_b = rows[torch.tensor(sorted(own))] if own else torch.tensor([-1])
        parts.append(Part(rows_b, round_up(max(*among, 1), share.row_multiple)))
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


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
