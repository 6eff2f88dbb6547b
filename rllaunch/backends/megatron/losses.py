"""Log-probabilities and entropy from logits whose vocabulary is shared by ranks.

The same numbers as `rllaunch.algo.losses.token_logprobs` on the gathered logits; KL terms follow from the
log-probabilities. Neither the forward nor the backward pass holds float32 values of more than a chunk of tokens.
"""

# N rows of logits, M of them asked for, m of those in a chunk, V columns of this rank

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 512


def vocab_parallel_logprobs(
    logits_NV: Tensor,
    row_M: Tensor,
    token_M: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    group: dist.ProcessGroup | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token and entropy of its distribution, in nats, [M] each; the same on every rank.

    Args:
        logits_NV: rank r has the columns from r·V on; the gradient comes in their dtype.
        row_M: which row predicts which token; no row twice.
        token_M: ids of the whole vocabulary.
        vocab_size: columns from here on are padding and have probability 0; None: there are none.
        group: the ranks that share the vocabulary; None: this one alone.
    Raises:
        ValueError: `temperature` is not above 0, or the two index tensors differ in shape.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: must be above 0")
    if row_M.shape != token_M.shape or row_M.dim() != 1:
        raise ValueError(f"rows {list(row_M.shape)} and tokens {list(token_M.shape)}: want one [M] each")
    size, rank = (dist.get_world_size(group), dist.get_rank(group)) if group is not None else (1, 0)
    width, first = logits_NV.shape[-1], rank * logits_NV.shape[-1]
    real = width if vocab_size is None else max(0, min(width, vocab_size - first))
    part = _Part(first, real, 1.0 / temperature, group if size > 1 else None, chunk_tokens)
    logp_M, entropy_M = _Logprobs.apply(logits_NV, row_M, token_M, part)  # type: ignore[no-untyped-call]
    return logp_M, entropy_M


class _Part:
    """This rank's part of the vocabulary and how it is read.

    Args:
        first: id of its first column.
        real: columns that are no padding.
        group: None where no other rank has a part.
    """

    def __init__(self, first: int, real: int, scale: float, group: dist.ProcessGroup | None, chunk_tokens: int) -> None:
        self.first, self.real, self.scale, self.group, self.chunk_tokens = first, real, scale, group, chunk_tokens

    def read(self, logits_NV: Tensor, row_m: Tensor) -> Tensor:
        """[m, V] logits over the temperature, in float32 or wider, -inf in the padding; a copy."""
        x_mV = logits_NV[row_m]
        if x_mV.itemsize < 4:
            x_mV = x_mV.float()
        x_mV.mul_(self.scale)
        x_mV[:, self.real :] = float("-inf")
        return x_mV

    def column(self, token_m: Tensor) -> tuple[Tensor, Tensor]:
        """[m] column of each token here, and whether it is here at all; column 0 for one that is not."""
        is_here_m = (token_m >= self.first) & (token_m < self.first + self.real)
        return torch.where(is_here_m, token_m - self.first, 0), is_here_m

    def reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        if self.group is not None:
            dist.all_reduce(x, op=op, group=self.group)
        return x


class _Logprobs(Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, row_M: Tensor, token_M: Tensor, part: _Part) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        # Of each token: the largest logit, the log of the sum of exponentials beyond it, log-probability, entropy.
        out_4M = torch.zeros(4, len(row_M), dtype=wide, device=logits_NV.device)
        for begin in range(0, len(row_M), part.chunk_tokens):
            chunk = slice(begin, begin + part.chunk_tokens)
            x_mV = part.read(logits_NV, row_M[chunk])
            top_m = part.reduce(x_mV.amax(dim=-1), dist.ReduceOp.MAX)
            x_mV.sub_(top_m[:, None])
            column_m, is_here_m = part.column(token_M[chunk])
            chosen_m = torch.where(is_here_m, x_mV.gather(1, column_m[:, None])[:, 0], 0.0)
            e_mV = x_mV.exp()
            # 0 · -inf would be NaN: a token that cannot occur adds nothing.
            weighted_m = x_mV.masked_fill_(e_mV == 0, 0.0).mul_(e_mV).sum(dim=-1)
            total_m, weighted_m, chosen_m = part.reduce(torch.stack([e_mV.sum(dim=-1), weighted_m, chosen_m]))
            log_m = total_m.log()
            out_4M[:, chunk] = torch.stack([top_m, log_m, chosen_m - log_m, log_m - weighted_m / total_m])
        ctx.part = part
        ctx.save_for_backward(logits_NV, row_M, token_M, out_4M)
        return out_4M[2].clone(), out_4M[3].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp_M: Tensor, grad_entropy_M: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, row_M, token_M, out_4M = ctx.saved_tensors
        part: _Part = ctx.part
        grad_NV = torch.zeros_like(logits_NV)
        for begin in range(0, len(row_M), part.chunk_tokens):
            chunk = slice(begin, begin + part.chunk_tokens)
            top_m, log_m, _, entropy_m = out_4M[:, chunk]
            logp_mV = part.read(logits_NV, row_M[chunk]).sub_((top_m + log_m)[:, None])
            p_mV = logp_mV.exp()
            # d logp = [token] - p and d entropy = -p (log p + entropy), each over the temperature.
            slope_mV = logp_mV.masked_fill_(p_mV == 0, 0.0).add_(entropy_m[:, None]).mul_(grad_entropy_M[chunk, None])
            slope_mV.add_(grad_logp_M[chunk, None]).mul_(p_mV).neg_()
            column_m, is_here_m = part.column(token_M[chunk])
            slope_mV.scatter_add_(1, column_m[:, None], torch.where(is_here_m, grad_logp_M[chunk], 0.0)[:, None])
            grad_NV[row_M[chunk]] = slope_mV.mul_(part.scale).to(grad_NV.dtype)
        return grad_NV, None, None, None
