"""Which positions of a sample each context-parallel rank computes, and what its queries read.

Every sample is cut into twice as many chunks as there are ranks, and rank r has chunks r and, counted from the end, r
again: causal attention then is the same work for each. Megatron-core gives rotary positions for this very cut
(0.16.1 `rope_utils.py`), whether samples are packed or have rows of their own.
"""

# n samples, R positions of a row, r of them on this rank, C ranks, K keys that this rank's queries read, copies counted

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor


@dataclass(frozen=True)
class Segments:
    """Runs of this rank's queries, each of which sees a run of keys that ends where it ends.

    Args:
        num_queries, num_keys: of each; together they are this rank's positions, and K.
        key_K: which of all ranks' keys, as they are gathered, those are, int32; None: this rank's own.
        bounds: cumulated numbers of queries and of keys, int32, on the device.
    """

    num_queries: tuple[int, ...]
    num_keys: tuple[int, ...]
    key_K: Tensor | None
    bounds: tuple[Tensor, Tensor]


def positions_here(lens_n: Sequence[int], size: int, rank: int) -> Tensor:
    """[r] the positions of a row of samples that rank `rank` of `size` computes, in its order.

    Args:
        lens_n: where there are several ranks, of whole chunks.
    """
    if size == 1:
        return torch.arange(sum(lens_n))
    begins = ((start + number * chunk, chunk) for start, number, chunk in _chunks(lens_n, size, rank))
    return torch.cat([torch.arange(begin, begin + chunk) for begin, chunk in begins])


def _chunks(lens_n: Sequence[int], size: int, rank: int) -> Iterator[tuple[int, int, int]]:
    """This rank's chunks: where in the row their sample begins, which of its chunks they are, their positions."""
    for end, length in zip(accumulate(lens_n), lens_n, strict=True):
        assert length % (2 * size) == 0, "samples are padded to whole chunks"
        for number in (rank, 2 * size - 1 - rank):
            yield end - length, number, length // (2 * size)


@lru_cache(maxsize=8)
def segments(lens_n: tuple[int, ...], size: int, rank: int, device: torch.device) -> Segments:
    """Of samples of these lengths, none of which is 0."""
    if size == 1:
        (bounds,) = moved(_bounds(lens_n), device=device)
        return Segments(lens_n, lens_n, None, (bounds, bounds))
    holders = torch.cat([positions_here(lens_n, size, r) for r in range(size)])
    # Where each position of the row is found once the ranks' parts stand one after the other.
    gathered_R = torch.empty_like(holders)
    gathered_R[holders] = torch.arange(len(holders))
    chunks = list(_chunks(lens_n, size, rank))
    num_queries = tuple(chunk for _, _, chunk in chunks)
    num_keys = tuple((number + 1) * chunk for _, number, chunk in chunks)
    keys = [gathered_R[start : start + count] for (start, _, _), count in zip(chunks, num_keys, strict=True)]
    key_K, *bounds_of = moved(torch.cat(keys).int(), _bounds(num_queries), _bounds(num_keys), device=device)
    return Segments(num_queries, num_keys, key_K, (bounds_of[0], bounds_of[1]))


@lru_cache(maxsize=8)
def whole_row(lens_n: tuple[int, ...], size: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[R] the row's positions among those of all ranks one after the other, and [r] this rank's among the row's."""
    holders = torch.cat([positions_here(lens_n, size, r) for r in range(size)])
    order_R, here_r = moved(holders.argsort(), positions_here(lens_n, size, rank), device=device)
    return order_R, here_r


def gather_row(x_rF: Tensor, lens_n: tuple[int, ...], size: int) -> Tensor:
    """[R, F] of the whole row, of which each of `size` ranks has some positions; gradients go back to who has them."""
    if size == 1:
        return x_rF
    order_R, _ = whole_row(lens_n, size, parallel_state.get_context_parallel_rank(), x_rF.device)
    group = parallel_state.get_context_parallel_group()
    gathered: Tensor = gather_from_sequence_parallel_region(x_rF.contiguous(), group=group)
    return gathered.index_select(0, order_R)


def packed_lengths(packed_seq_params: Any) -> tuple[int, ...]:
    """Of the whole samples in Megatron-core's `PackedSeqParams`, whose bounds are best on the host."""
    return tuple(end - begin for begin, end in pairwise(packed_seq_params.cu_seqlens_q.tolist()))


def _bounds(counts: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def moved(*on_host: Tensor, device: torch.device | str) -> tuple[Tensor, ...]:
    """Tensors of one type on `device`, in one copy that the host does not wait for: from pageable memory it would."""
    flat = torch.cat([t.flatten() for t in on_host])
    if torch.device(device).type == "cuda":
        flat = flat.pin_memory()
    parts = torch.split(flat.to(device, non_blocking=True), [t.numel() for t in on_host])
    return tuple(part.view(t.shape) for part, t in zip(parts, on_host, strict=True))
