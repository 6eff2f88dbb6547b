"""Which positions and entries of a row each query sees, and attention to them in blocks of queries.

No more than `_MOST_SCORES` scores are held at a time, whatever the length of a sample: the backward pass makes them
again from the logarithm of each query's sum.
"""

# R positions of a row, its samples one after the other, r of them on this rank; M entries of all samples, C positions
# of one; N query heads, D width of a head, K entries chosen for a query
# of a block: t queries, k keys, m entries, x both

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from rllaunch.backends.megatron.context import moved, positions_here

# Scores that are held at a time, and numbers of gathered entries: 256 MiB of float32.
_MOST_SCORES = 2**26
_MOST_QUERIES = 256


@dataclass(frozen=True)
class Windows:
    """Positions that entries stand for.

    Args:
        row_MC: where they are in the row.
        position_M: the first of them, in its sample.
        is_first_M: whether it is the first of its sample.
    """

    row_MC: Tensor
    position_M: Tensor
    is_first_M: Tensor


@dataclass(frozen=True)
class Block:
    """Queries that stand one after the other in the row, and all that some of them may see."""

    queries: slice
    keys: slice
    entries: slice

    @property
    def num_entries(self) -> int:
        return int(self.entries.stop - self.entries.start)


@dataclass(frozen=True)
class Row:
    """A row of samples, and this rank's queries in it.

    Args:
        position_R, position_r: of each in its sample.
        at_r, start_r: where in the row a query, and its sample's first position, is.
        entry_begin_r, entry_end_r: entries of its sample that end before it does, or where it is.
        runs: first and last of queries that stand one after the other in the row, and where the first is.
    """

    position_R: Tensor
    position_r: Tensor
    at_r: Tensor
    start_r: Tensor
    entry_begin_r: Tensor
    entry_end_r: Tensor
    windows: Windows | None
    num_entries_of_longest: int
    runs: tuple[tuple[int, int, int], ...]
    starts: tuple[int, ...]
    first_entries: tuple[int, ...]
    rate: int
    kept: dict[tuple[int, int], list[Block]] = field(default_factory=dict, compare=False, repr=False)

    def blocks(self, step: int, window: int) -> list[Block]:
        """All queries, no more than `step` in a block."""
        if (step, window) not in self.kept:
            self.kept[step, window] = list(self._blocks(step, window))
        return self.kept[step, window]

    def _blocks(self, step: int, window: int) -> Iterator[Block]:
        for begin, end, at in self.runs:
            for first in range(begin, end, step):
                last = min(first + step, end)
                low, high = at + first - begin, at + last - begin
                keys = slice(max(self.starts[self._sample(low)], low - window + 1), high)
                entries = slice(self.first_entries[self._sample(low)], self._entries_before(high))
                yield Block(slice(first, last), keys, entries)

    def _sample(self, at: int) -> int:
        return bisect_right(self.starts, at) - 1

    def _entries_before(self, end: int) -> int:
        sample = self._sample(end - 1)
        return self.first_entries[sample] + ((end - self.starts[sample]) // self.rate if self.rate else 0)


@lru_cache(maxsize=8)
def row_of(lens_n: tuple[int, ...], size: int, rank: int, rate: int, device: torch.device) -> Row:
    """
    Args:
        lens_n: of whole samples, none of which is 0, all context-parallel ranks' positions together.
        size, rank: of the context-parallel ranks.
        rate: positions of an entry; 0: there are no entries.
    """
    starts = [end - length for end, length in zip(accumulate(lens_n), lens_n, strict=True)]
    counts = [length // rate if rate else 0 for length in lens_n]
    firsts = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
    lengths = torch.tensor(lens_n)
    at_r = positions_here(lens_n, size, rank)
    start_R = torch.repeat_interleave(torch.tensor(starts), lengths)
    first_R = torch.repeat_interleave(torch.tensor(firsts), lengths)
    position_R = torch.arange(sum(lens_n)) - start_R
    ends_R = first_R + ((position_R + 1) // rate if rate else 0)
    tables = [position_R, position_R[at_r], at_r, start_R[at_r], first_R[at_r], ends_R[at_r]]
    windows = None
    if rate:
        of_sample = torch.tensor(counts)
        position_M = (torch.arange(sum(counts)) - torch.repeat_interleave(torch.tensor(firsts), of_sample)) * rate
        row_M = torch.repeat_interleave(torch.tensor(starts), of_sample) + position_M
        tables += [row_M[:, None] + torch.arange(rate), position_M]
    at_all, at_each, at, start, first, end, *of_entries = moved(*tables, device=device)
    if rate:
        windows = Windows(of_entries[0], of_entries[1], of_entries[1] == 0)
    return Row(
        position_R=at_all,
        position_r=at_each,
        at_r=at,
        start_r=start,
        entry_begin_r=first,
        entry_end_r=end,
        windows=windows,
        num_entries_of_longest=max(counts),
        runs=tuple(_runs(at_r.tolist())),
        starts=tuple(starts),
        first_entries=tuple(firsts),
        rate=rate,
    )


def _runs(at: list[int]) -> Iterator[tuple[int, int, int]]:
    begin = 0
    for i in range(1, len(at) + 1):
        if i == len(at) or at[i] != at[i - 1] + 1:
            yield begin, i, at[begin]
            begin = i


def attend_to_row(
    q_rND: Tensor,
    key_RD: Tensor,
    entry_MD: Tensor | None,
    sink_N: Tensor,
    chosen_rK: Tensor | None,
    row: Row,
    *,
    window: int,
    scale: float,
) -> Tensor:
    """[r, N, D], of keys and entries that are the values too.

    Args:
        entry_MD: None: queries see keys only.
        sink_N: a logit of each head that takes its share of the softmax and adds nothing to the sum.
        chosen_rK: the entries that each query sees, -1 for none; None: all that end before it does.
        window: how many keys a query sees, the last of which is its own.
    """
    out_rND: Tensor = _Attention.apply(q_rND, key_RD, entry_MD, sink_N, chosen_rK, row, window, scale)  # type: ignore[no-untyped-call]
    return out_rND


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_rND: Tensor,
        key_RD: Tensor,
        entry_MD: Tensor | None,
        sink_N: Tensor,
        chosen_rK: Tensor | None,
        row: Row,
        window: int,
        scale: float,
    ) -> Tensor:
        view = _View(key_RD, entry_MD, chosen_rK, row, window, scale, q_rND.shape[1])
        out_rND = torch.empty_like(q_rND)
        lse_rN = torch.empty(q_rND.shape[:2], dtype=torch.float32, device=q_rND.device)
        sink_11N = sink_N.float()[None, :, None]
        for block, scores_tNx in view.blocks(q_rND):
            with_sink = torch.cat([scores_tNx, sink_11N.expand(len(scores_tNx), -1, 1)], dim=-1)
            lse_tN = torch.logsumexp(with_sink, dim=-1)
            lse_rN[block.queries] = lse_tN
            out_rND[block.queries] = view.sums(block, torch.exp(scores_tNx - lse_tN[..., None])).to(q_rND.dtype)
        ctx.how = row, window, scale
        ctx.save_for_backward(q_rND, key_RD, entry_MD, sink_N, chosen_rK, out_rND, lse_rN)
        return out_rND

    @staticmethod
    def backward(ctx: Any, grad_rND: Tensor) -> tuple[Tensor | None, ...]:
        q_rND, key_RD, entry_MD, sink_N, chosen_rK, out_rND, lse_rN = ctx.saved_tensors
        row, window, scale = ctx.how
        view = _View(key_RD, entry_MD, chosen_rK, row, window, scale, q_rND.shape[1])
        dkey_RD = torch.zeros_like(key_RD, dtype=torch.float32)
        dentry_MD = torch.zeros_like(entry_MD, dtype=torch.float32) if entry_MD is not None else None
        dq_rND = torch.empty_like(q_rND)
        delta_rN = (grad_rND.float() * out_rND.float()).sum(dim=-1)
        dsink_N = -(torch.exp(sink_N.float() - lse_rN) * delta_rN).sum(dim=0).to(sink_N.dtype)
        for block, scores_tNx in view.blocks(q_rND):
            queries = block.queries
            grad_tND = grad_rND[queries]
            shares = torch.exp(scores_tNx - lse_rN[queries][..., None])
            of_scores = shares * (view.products(block, grad_tND) - delta_rN[queries][..., None]) * scale
            dq_rND[queries] = view.sums(block, of_scores).to(q_rND.dtype)
            view.add(block, of_scores, q_rND[queries], dkey_RD, dentry_MD)
            view.add(block, shares, grad_tND, dkey_RD, dentry_MD)
        dentry_MD = dentry_MD.to(q_rND.dtype) if dentry_MD is not None else None
        return dq_rND, dkey_RD.to(q_rND.dtype), dentry_MD, dsink_N, None, None, None, None


class _View:
    """What queries see, with the products that both passes make of it: of a block's keys and entries together."""

    def __init__(
        self,
        key_RD: Tensor,
        entry_MD: Tensor | None,
        chosen_rK: Tensor | None,
        row: Row,
        window: int,
        scale: float,
        N: int,
    ) -> None:
        self._key_RD, self._entry_MD, self._chosen_rK, self._row = key_RD, entry_MD, chosen_rK, row
        self._window, self._scale, D = window, scale, key_RD.shape[-1]
        seen = row.num_entries_of_longest if entry_MD is not None else 0
        step = _MOST_QUERIES
        if chosen_rK is not None:
            seen = chosen_rK.shape[1]
            step = min(step, _MOST_SCORES // (seen * D))
        self._step = max(1, min(step, _MOST_SCORES // (N * (window + _MOST_QUERIES + seen))))

    def blocks(self, q_rND: Tensor) -> Iterator[tuple[Block, Tensor]]:
        """Each with its scores, [t, N, x], of what a query does not see -inf."""
        for block in self._row.blocks(self._step, self._window):
            scores_tNx = self.products(block, q_rND[block.queries]) * self._scale
            yield block, scores_tNx.masked_fill_(self._hidden(block)[:, None], -torch.inf)

    def _hidden(self, block: Block) -> Tensor:
        """[t, x]."""
        row, queries = self._row, block.queries
        at_t1, start_t1 = row.at_r[queries, None], row.start_r[queries, None]
        key_k = torch.arange(block.keys.start, block.keys.stop, device=at_t1.device)
        hidden_tk = (key_k > at_t1) | (key_k <= at_t1 - self._window) | (key_k < start_t1)
        if self._entry_MD is None:
            return hidden_tk
        if self._chosen_rK is not None:
            return torch.cat([hidden_tk, self._chosen_rK[queries] < 0], dim=1)
        entry_m = torch.arange(block.entries.start, block.entries.stop, device=at_t1.device)
        before, after = entry_m < row.entry_begin_r[queries, None], entry_m >= row.entry_end_r[queries, None]
        return torch.cat([hidden_tk, before | after], dim=1)

    def products(self, block: Block, x_tND: Tensor) -> Tensor:
        """[t, N, x] of each head with each key and entry."""
        flat_XD = x_tND.flatten(0, 1)
        made = [torch.unflatten(_product(flat_XD, self._key_RD[block.keys].t()), 0, x_tND.shape[:2])]
        if self._chosen_rK is not None:
            made.append(_product(x_tND, self._taken(block).transpose(1, 2)))
        elif self._entry_MD is not None:
            made.append(torch.unflatten(_product(flat_XD, self._entry_MD[block.entries].t()), 0, x_tND.shape[:2]))
        return torch.cat(made, dim=-1)

    def sums(self, block: Block, share_tNx: Tensor) -> Tensor:
        """[t, N, D] of keys and entries, each by its share."""
        of_keys, of_entries = self._parts(block, share_tNx.to(self._key_RD.dtype))
        out = torch.unflatten(_product(of_keys.flatten(0, 1), self._key_RD[block.keys]), 0, share_tNx.shape[:2])
        if self._chosen_rK is not None:
            out += _product(of_entries, self._taken(block))
        elif self._entry_MD is not None:
            out += torch.unflatten(
                _product(of_entries.flatten(0, 1), self._entry_MD[block.entries]), 0, share_tNx.shape[:2]
            )
        return out

    def add(self, block: Block, share_tNx: Tensor, x_tND: Tensor, dkey_RD: Tensor, dentry_MD: Tensor | None) -> None:
        """To the gradients of keys and entries what each head gives them."""
        of_keys, of_entries = self._parts(block, share_tNx.to(x_tND.dtype))
        flat_XD = x_tND.flatten(0, 1)
        dkey_RD[block.keys] += _product(of_keys.flatten(0, 1).t(), flat_XD)
        if dentry_MD is None:
            return
        if self._chosen_rK is not None:
            of_each = _product(of_entries.transpose(1, 2), x_tND)
            # What stands for nothing has no share of anything: zeros are added to the first entry.
            dentry_MD.index_add_(0, self._chosen_rK[block.queries].clamp(min=0).flatten(), of_each.flatten(0, 1))
        else:
            dentry_MD[block.entries] += _product(of_entries.flatten(0, 1).t(), flat_XD)

    def _parts(self, block: Block, share_tNx: Tensor) -> tuple[Tensor, Tensor]:
        num_keys = block.keys.stop - block.keys.start
        return share_tNx[..., :num_keys], share_tNx[..., num_keys:]

    def _taken(self, block: Block) -> Tensor:
        """[t, K, D] the entries chosen for each query."""
        assert self._entry_MD is not None, "entries are chosen where there are some"
        assert self._chosen_rK is not None, "asked where entries are chosen"
        return self._entry_MD[self._chosen_rK[block.queries].clamp(min=0)]


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of matrices, in float32; on a GPU their factors stay as narrow as they are, and are added in float32."""
    if a.is_cuda and a.dtype != torch.float32:
        return (torch.bmm if a.dim() == 3 else torch.mm)(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
