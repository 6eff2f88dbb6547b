"""A row of samples in chunks, and with room between them: for linear attention, whose states are each sample's own."""

# R positions of a row, its samples one after the other; n samples; W positions of a convolution; C chunks, L positions
# of one

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from rllaunch.backends.megatron.context import moved

CHUNK = 64


@dataclass(frozen=True)
class Tables:
    """Where the positions of a row are found in other arrangements of them; R stands for no position.

    Args:
        apart_X: samples with W - 1 zeros before each.
        together_R: of each position, in what a convolution makes of that.
        of_chunks_CL: chunks in the order of `steps`.
        in_chunks_R: of each position, in the chunks one after the other.
        steps: first and last of the chunks that are the first of their samples, then the second, and so on: so many
            samples, the longest first, are as long.
    """

    apart_X: Tensor
    together_R: Tensor
    of_chunks_CL: Tensor
    in_chunks_R: Tensor
    steps: tuple[tuple[int, int], ...]


@lru_cache(maxsize=8)
def tables_of(lens_n: tuple[int, ...], kernel: int, device: torch.device) -> Tables:
    """
    Args:
        lens_n: of samples, none of which is 0.
        kernel: W, positions that a convolution sees.
    """
    R, before = sum(lens_n), kernel - 1
    starts = [end - length for end, length in zip(accumulate(lens_n), lens_n, strict=True)]
    samples = list(zip(starts, lens_n, strict=True))
    nothing = torch.full((before,), R)
    apart = [part for start, length in samples for part in (nothing, torch.arange(start, start + length))]
    together = [torch.arange(start, start + length) + i * before for i, (start, length) in enumerate(samples)]
    longest_first = sorted(samples, key=lambda sample: -sample[1])
    chunks, steps = _chunks(longest_first, R)
    in_chunks = torch.empty(R + 1, dtype=torch.long)
    in_chunks[chunks.flatten()] = torch.arange(chunks.numel())
    tables = moved(torch.cat(apart), torch.cat(together), chunks, in_chunks[:R], device=device)
    return Tables(tables[0], tables[1], tables[2], tables[3], steps)


def _chunks(longest_first: Sequence[tuple[int, int]], nothing: int) -> tuple[Tensor, tuple[tuple[int, int], ...]]:
    """[C, L] positions of all chunks, and the steps they are in."""
    chunks: list[Tensor] = []
    steps = []
    for offset in range(0, longest_first[0][1], CHUNK):
        begin = len(chunks)
        for start, length in longest_first:
            if length > offset:
                positions = torch.arange(start + offset, start + offset + CHUNK)
                chunks.append(torch.where(positions < start + length, positions, nothing))
        steps.append((begin, len(chunks)))
    return torch.stack(chunks), tuple(steps)
