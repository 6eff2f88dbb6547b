"""Attention with sinks, over samples of any length and through windows: gpt-oss's.

A sink is a learned logit of a head that takes its share of the softmax and adds nothing to the sum. With lse, the
logarithm of the sum of a query's exponentials, the output is that without a sink times sigmoid(lse - sink); and since a
backward pass makes the probabilities anew from lse, one that is given log(exp(lse) + exp(sink)) and the output with the
sink gives the right gradients of queries, keys and values. So FlashAttention's kernels do, which know no sinks.
"""

# T positions of this rank, K keys they read, N query heads and G key heads on this rank, D width of a head
# of a block of queries: t queries, k keys they may read, n query heads of a key head

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rllaunch.backends.megatron.context import Segments

# Scores that are held at a time where no kernel does without them: 256 MiB of float32.
_MOST_SCORES = 2**26


def attend_with_sinks(
    q_TND: Tensor,
    k_KGD: Tensor,
    v_KGD: Tensor,
    sink_N: Tensor,
    found: Segments,
    *,
    window: int,
    scale: float | None,
    uses_kernel: bool,
) -> Tensor:
    """[T, N, D].

    Args:
        window: how many keys a query sees, the last of which is its own; 0: all before it.
        scale: of the scores; None: 1 / √D.
        uses_kernel: FlashAttention's for samples of any length, which is on GPUs and for half precision only.
    """
    scale = q_TND.shape[-1] ** -0.5 if scale is None else scale
    out_TND: Tensor = _SinkAttention.apply(q_TND, k_KGD, v_KGD, sink_N, found, window, scale, uses_kernel)  # type: ignore[no-untyped-call]
    return out_TND


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_TND: Tensor,
        k_KGD: Tensor,
        v_KGD: Tensor,
        sink_N: Tensor,
        found: Segments,
        window: int,
        scale: float,
        uses_kernel: bool,
    ) -> Tensor:
        ctx.kernel = (_Flash if uses_kernel else _Blocks)(found, window, scale)
        out_TND, lse_NT = ctx.kernel.forward(q_TND, k_KGD, v_KGD)
        sink_N1 = sink_N.float()[:, None]
        with_sink: Tensor = (out_TND * torch.sigmoid(lse_NT - sink_N1).t()[..., None]).to(q_TND.dtype)
        ctx.save_for_backward(q_TND, k_KGD, v_KGD, sink_N, with_sink, torch.logaddexp(lse_NT, sink_N1))
        return with_sink

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor | None, ...]:
        q_TND, k_KGD, v_KGD, sink_N, out_TND, lse_NT = ctx.saved_tensors
        grad_sink = None
        if ctx.needs_input_grad[3]:
            share_NT = torch.exp(sink_N.float()[:, None] - lse_NT)
            grad_sink = -(share_NT * _inner(grad_TND, out_TND)).sum(dim=1).to(sink_N.dtype)
        grads = ctx.kernel.backward(grad_TND.contiguous(), q_TND, k_KGD, v_KGD, out_TND, lse_NT)
        return *grads, grad_sink, None, None, None, None


def _inner(a_TND: Tensor, b_TND: Tensor) -> Tensor:
    """[N, T] in float32; no more than one wide copy is held."""
    product_TND = a_TND.to(torch.float32, copy=True).mul_(b_TND)
    return product_TND.sum(dim=-1).t()


def _by_key_head(of_each_head: Tensor, G: int, *, dim: int) -> Tensor:
    """With N heads in dimension `dim`: G, and those that share a key head, in two."""
    shape = of_each_head.shape
    return of_each_head.reshape(*shape[:dim], G, -1, *shape[dim + 1 :])


class _Flash:
    """FlashAttention as torch has it, behind `torch.nn.attention.varlen`, which lets no one change lse between its two
    passes (2.13)."""

    def __init__(self, found: Segments, window: int, scale: float) -> None:
        self._bounds, self._longest = found.bounds, (max(found.num_queries), max(found.num_keys))
        left = window - 1 if window else -1
        # `is_causal` is for no window to the left: with both, torch 2.13 would set it aside.
        self._is_causal = not window
        self._options = {"scale": scale, "window_size_left": left, "window_size_right": 0}

    def forward(self, q_TND: Tensor, k_KGD: Tensor, v_KGD: Tensor) -> tuple[Tensor, Tensor]:
        out_TND, lse_NT, self._random, self._unused, _ = torch.ops.aten._flash_attention_forward(
            q_TND, k_KGD, v_KGD, *self._bounds, *self._longest, 0.0, self._is_causal, False, **self._options
        )
        assert lse_NT.shape == (q_TND.shape[1], q_TND.shape[0]), "lse of each head and query, without padding"
        return out_TND, lse_NT

    def backward(
        self, grad_TND: Tensor, q_TND: Tensor, k_KGD: Tensor, v_KGD: Tensor, out_TND: Tensor, lse_NT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_TND, q_TND, k_KGD, v_KGD, out_TND, lse_NT.contiguous(), *self._bounds, *self._longest, 0.0,
            self._is_causal, self._random, self._unused, **self._options,
        )  # fmt: skip
        return dq, dk, dv


class _Blocks:
    """The same passes in float32 over blocks of queries, so that no more than `_MOST_SCORES` are held at a time."""

    def __init__(self, found: Segments, window: int, scale: float) -> None:
        self._found, self._window, self._scale = found, window, scale

    def forward(self, q_TND: Tensor, k_KGD: Tensor, v_KGD: Tensor) -> tuple[Tensor, Tensor]:
        out_TND = torch.empty_like(q_TND, dtype=torch.float32)
        lse_NT = torch.empty(q_TND.shape[1], q_TND.shape[0], dtype=torch.float32, device=q_TND.device)
        for queries, keys, hidden_tk in self._blocks(q_TND):
            scores_Gntk = self._scores(q_TND[queries], k_KGD[keys], hidden_tk)
            lse_Gnt = torch.logsumexp(scores_Gntk, dim=-1)
            shares = torch.exp(scores_Gntk - lse_Gnt[..., None])
            out_TND[queries] = torch.einsum("gntk,kgd->tgnd", shares, v_KGD[keys].float()).flatten(1, 2)
            lse_NT[:, queries] = lse_Gnt.flatten(0, 1)
        return out_TND, lse_NT

    def backward(
        self, grad_TND: Tensor, q_TND: Tensor, k_KGD: Tensor, v_KGD: Tensor, out_TND: Tensor, lse_NT: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(t, dtype=torch.float32) for t in (q_TND, k_KGD, v_KGD))
        delta_NT, G = _inner(grad_TND, out_TND), k_KGD.shape[1]
        for queries, keys, hidden_tk in self._blocks(q_TND):
            scores_Gntk = self._scores(q_TND[queries], k_KGD[keys], hidden_tk)
            shares = torch.exp(scores_Gntk - _by_key_head(lse_NT[:, queries], G, dim=0)[..., None])
            grad = _by_key_head(grad_TND[queries].float(), G, dim=1)
            dv[keys] += torch.einsum("gntk,tgnd->kgd", shares, grad)
            of_shares = torch.einsum("tgnd,kgd->gntk", grad, v_KGD[keys].float())
            of_scores = shares * (of_shares - _by_key_head(delta_NT[:, queries], G, dim=0)[..., None]) * self._scale
            dq[queries] = torch.einsum("gntk,kgd->tgnd", of_scores, k_KGD[keys].float()).flatten(1, 2)
            q = _by_key_head(q_TND[queries].float(), G, dim=1)
            dk[keys] += torch.einsum("gntk,tgnd->kgd", of_scores, q)
        return dq.to(q_TND.dtype), dk.to(k_KGD.dtype), dv.to(v_KGD.dtype)

    def _scores(self, q_tND: Tensor, k_kGD: Tensor, hidden_tk: Tensor) -> Tensor:
        q = _by_key_head(q_tND.float(), k_kGD.shape[1], dim=1)
        scores_Gntk = torch.einsum("tgnd,kgd->gntk", q, k_kGD.float()) * self._scale
        return scores_Gntk.masked_fill(hidden_tk, -torch.inf)

    def _blocks(self, q_TND: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
        """Runs of queries, the keys that any of them sees, and which of these one does not see."""
        first_query = first_key = 0
        for num_queries, num_keys in zip(self._found.num_queries, self._found.num_keys, strict=True):
            # The last query sees all keys but those before its window.
            ahead = num_keys - num_queries
            step = max(1, _MOST_SCORES // (q_TND.shape[1] * num_keys))
            for begin in range(0, num_queries, step):
                end = min(begin + step, num_queries)
                low, high = max(0, begin + ahead - self._window + 1) if self._window else 0, end + ahead
                query_t1 = torch.arange(begin, end, device=q_TND.device)[:, None] + ahead
                key_k = torch.arange(low, high, device=q_TND.device)
                hidden_tk = key_k > query_t1
                if self._window:
                    hidden_tk |= key_k <= query_t1 - self._window
                queries = slice(first_query + begin, first_query + end)
                yield queries, slice(first_key + low, first_key + high), hidden_tk
            first_query, first_key = first_query + num_queries, first_key + num_keys
