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
class Chunks:
    """Where the positions of a row are found in chunks of each sample; R stands for no position.

    Args:
        of_chunks_CL: chunks in the order of `steps`.
        in_chunks_R: of each position, in the chunks one after the other.
        steps: first and last of the chunks that are the first of their samples, then the second, and so on: so many
            samples, the longest first, are as long.
    """

    of_chunks_CL: Tensor
    in_chunks_R: Tensor
    steps: tuple[tuple[int, int], ...]


@lru_cache(maxsize=8)
def apart(lens_n: tuple[int, ...], kernel: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[X] samples with W - 1 zeros before each, R standing for a zero, and [R] where each position is in what a
    convolution makes of that.

    Args:
        lens_n: of samples, none of which is 0.
        kernel: W, positions that a convolution sees.
    """
    before, samples = kernel - 1, _samples(lens_n)
    nothing = torch.full((before,), sum(lens_n))
    parts = [part for start, length in samples for part in (nothing, torch.arange(start, start + length))]
    together = [torch.arange(start, start + length) + i * before for i, (start, length) in enumerate(samples)]
    apart_X, together_R = moved(torch.cat(parts), torch.cat(together), device=device)
    return apart_X, together_R


@lru_cache(maxsize=8)
def chunks_of(lens_n: tuple[int, ...], device: torch.device) -> Chunks:
    """
    Args:
        lens_n: of samples, none of which is 0.
    """
    R = sum(lens_n)
    chunks, steps = _chunks(sorted(_samples(lens_n), key=lambda sample: -sample[1]), R)
    in_chunks = torch.empty(R + 1, dtype=torch.long)
    in_chunks[chunks.flatten()] = torch.arange(chunks.numel())
    of_chunks_CL, in_chunks_R = moved(chunks, in_chunks[:R], device=device)
    return Chunks(of_chunks_CL, in_chunks_R, steps)


def _samples(lens_n: tuple[int, ...]) -> list[tuple[int, int]]:
    """Where each sample begins in the row, and its length."""
    return [(end - length, length) for end, length in zip(accumulate(lens_n), lens_n, strict=True)]


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
