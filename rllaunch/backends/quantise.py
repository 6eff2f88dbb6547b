"""Weights in FP8 with a scale for each block of 128 × 128, and back; and those in MXFP4, read alone."""

# G groups of 32 input features, P pairs of them
# O output features (rows), I input features (columns), R and C blocks of them, the last ones perhaps narrower

from __future__ import annotations

import torch
from torch import Tensor

from rllaunch.backends.block_fp8 import BLOCK
from rllaunch.plan.sizes import QUANTISER_ROWS

E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(E4M3).max  # 448
# Below it the reciprocal of a scale would overflow; no block of a model is so small.
_SMALLEST = 1e-30


def quantise(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """The weight as float8_e4m3fn [O, I], and `scale_inv` in float32 [R, C], by which a block is multiplied to have it
    back. Some rows are in float32 at a time, never all (`plan.sizes.quantiser_bytes`).

    The largest value of a block becomes 448, the largest of the type; a block of zeros has the scale 1. The steps are
    those of transformers 5.24.0 (`Fp8Quantize` in integrations/finegrained_fp8.py), so that the bits are its bits, and
    the same on CPU and GPU: a reciprocal is rounded alike by both, a division by a number is not.
    """
    assert weight_OI.dim() == 2, "a linear layer's weight"
    O, I = weight_OI.shape  # noqa: E741
    quantised_OI = torch.empty(O, I, dtype=E4M3, device=weight_OI.device)
    scale_inv_RC = torch.empty(-(-O // BLOCK), -(-I // BLOCK), dtype=torch.float32, device=weight_OI.device)
    for first in range(0, O, QUANTISER_ROWS):
        rows, block = slice(first, first + QUANTISER_ROWS), first // BLOCK
        # In a call of its own: what it takes is free before the next rows are in float32.
        _quantise_rows(weight_OI[rows], quantised_OI[rows], scale_inv_RC[block : block + QUANTISER_ROWS // BLOCK])
    return quantised_OI, scale_inv_RC


def _quantise_rows(weight_OI: Tensor, quantised_OI: Tensor, scale_inv_RC: Tensor) -> None:
    O, I = weight_OI.shape  # noqa: E741
    blocks = _in_blocks(weight_OI.to(torch.float32))
    amax = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(amax > 0, _LARGEST / amax.clamp(min=_SMALLEST), 1.0)
    scaled = (blocks * scale[:, None, :, None]).clamp_(-_LARGEST, _LARGEST)
    quantised_OI.copy_(scaled.flatten(0, 1).flatten(1)[:O, :I])
    scale_inv_RC.copy_(1.0 / scale)


def dequantise(quantised_OI: Tensor, scale_inv_RC: Tensor) -> Tensor:
    """The weight in float32 [O, I].

    Raises:
        ValueError: the scales are of a matrix of another size.
    """
    O, I = quantised_OI.shape  # noqa: E741
    expected = (-(-O // BLOCK), -(-I // BLOCK))
    if tuple(scale_inv_RC.shape) != expected:
        raise ValueError(f"scales of {list(scale_inv_RC.shape)} for a weight of {[O, I]}, which has {list(expected)}")
    weight_OI = quantised_OI.to(torch.float32)
    for row, scale_C in enumerate(scale_inv_RC.to(torch.float32)):
        weight_OI[row * BLOCK : (row + 1) * BLOCK] *= scale_C.repeat_interleave(BLOCK)[:I]
    return weight_OI


def _in_blocks(weight_OI: Tensor) -> Tensor:
    """[R, 128, C, 128], filled up with zeros."""
    O, I = weight_OI.shape  # noqa: E741
    padded = torch.nn.functional.pad(weight_OI, (0, -I % BLOCK, 0, -O % BLOCK))
    return padded.view(-(-O // BLOCK), BLOCK, -(-I // BLOCK), BLOCK)


# Of four bits the first is the sign; the others count these up.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PAIRS = 16


def dequantise_mxfp4(blocks_OGP: Tensor, scale_OG: Tensor) -> Tensor:
    """The weight in bfloat16 [O, 32 G], which has every value of the format within its range.

    Args:
        blocks_OGP: bytes of two values each, the first in the lower four bits.
        scale_OG: exponents of two, 127 too large.
    Raises:
        ValueError: blocks and scales are of other sizes.
    """
    if blocks_OGP.shape[-1] != _PAIRS or blocks_OGP.shape[:-1] != scale_OG.shape:
        raise ValueError(f"scales of {list(scale_OG.shape)} for blocks of {list(blocks_OGP.shape)}")
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.bfloat16, device=blocks_OGP.device)
    byte = torch.arange(256, device=blocks_OGP.device)
    # Both values of a byte are looked up as one number. Value by value the larger matrix of an expert of gpt-oss-120b
    # took 0.5 s on one thread, which is what a rank has, and all experts most of an hour; so it is a tenth.
    both = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).view(torch.int32)[:, 0]
    found = both.index_select(0, blocks_OGP.flatten().int()).view(torch.bfloat16)
    powers_OG = torch.ldexp(torch.ones_like(scale_OG, dtype=torch.float32), scale_OG.int() - 127).to(torch.bfloat16)
    return found.view(*scale_OG.shape, 2 * _PAIRS).mul_(powers_OG[..., None]).flatten(-2)
