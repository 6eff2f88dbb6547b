"""Causal attention within each sample through torch, as Megatron-core's layers ask for it: without Transformer Engine.

Megatron-core's own local attention holds all scores, [B, heads, T, T], knows no packed samples, no context parallelism
and no latent attention (the `DotProductAttention` of 0.16.1 has one width for keys and values).
"""

# T positions of this rank, K keys they read, B rows, N query heads and G key heads on this rank, D width of a head,
# E width of a value, n samples

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region, set_tensor_model_parallel_attributes
from torch import Tensor, nn

from rllaunch.backends.megatron.chunks import apart, chunks_of
from rllaunch.backends.megatron.context import Segments, packed_lengths, segments, whole_row
from rllaunch.backends.megatron.entries import row_of
from rllaunch.backends.megatron.sinks import attend_with_sinks

# The widest head of FlashAttention 2, which is behind torch's attention over samples of any length.
_WIDEST_HEAD = 256


class TorchAttention(nn.Module):
    """`core_attention` of a layer spec.

    It needs no mask: a sample is padded at its end, which no real token of it sees. Context-parallel ranks gather all
    keys and values, and each attends with the queries it has; the gradients of keys and values go back to who has them.

    Args:
        layer_number: of the whole model, from 1 on: some layers see a window only.
    """

    def __init__(
        self, config: Any, *_: Any, layer_number: int = 1, softmax_scale: float | None = None, **__: Any
    ) -> None:
        super().__init__()
        self._scale = softmax_scale
        # Called as Megatron-core's own attention calls it; filled from the checkpoint.
        self.softmax_offset: nn.Parameter | None = None
        self._window = 0
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(
                torch.zeros(config.num_attention_heads // config.tensor_model_parallel_size)
            )
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
            if config.window_attn_skip_freq[layer_number - 1]:
                self._window = config.window_size[0] + 1
        self._dropout = float(config.attention_dropout)
        self._num_ranks = int(config.context_parallel_size)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Any = None, **__: Any
    ) -> Tensor:
        """[T, B, N, D], [T, B, G, D] and [T, B, G, E] → [T, B, N·E]; of packed samples [T, N, D] and so on → [T, N, E].

        Args:
            packed_seq_params: Megatron-core's, with the bounds of whole samples; best on the host.
        """
        if packed_seq_params is not None:
            return self._by_sample(query, key, value, packed_lengths(packed_seq_params))
        if self._num_ranks == 1 and self.softmax_offset is None:
            out_BNTE = self._attend(*(t.permute(1, 2, 0, 3) for t in (query, key, value)))
            return out_BNTE.permute(2, 0, 1, 3).flatten(2).contiguous()
        T, B = query.shape[:2]
        q, k, v = (t.transpose(0, 1).flatten(0, 1) for t in (query, key, value))
        out_TNE = self._by_sample(q, k, v, (T * self._num_ranks,) * B)
        return out_TNE.view(B, T, -1).transpose(0, 1).contiguous()

    def _by_sample(self, q_TND: Tensor, k_TGD: Tensor, v_TGE: Tensor, lens_n: tuple[int, ...]) -> Tensor:
        """[T, N, E].

        Args:
            lens_n: of whole samples, all ranks' positions together.
        """
        rank = parallel_state.get_context_parallel_rank() if self._num_ranks > 1 else 0
        found = segments(lens_n, self._num_ranks, rank, q_TND.device)
        k, v = k_TGD, v_TGE
        if found.key_K is not None:
            group = parallel_state.get_context_parallel_group()
            both = gather_from_sequence_parallel_region(torch.cat([k, v], dim=-1), group=group)
            k, v = torch.split(both.index_select(0, found.key_K), [k.shape[-1], v.shape[-1]], dim=-1)
        if self.softmax_offset is not None:
            return attend_with_sinks(
                q_TND,
                k,
                v,
                self.softmax_offset,
                found,
                window=self._window,
                scale=self._scale,
                uses_kernel=self._fits_varlen(q_TND, v),
            )
        if self._fits_varlen(q_TND, v):
            return _varlen(q_TND, k, v, found, self._scale)
        queries, keys = list(found.num_queries), list(found.num_keys)
        each = zip(torch.split(q_TND, queries), torch.split(k, keys), torch.split(v, keys), strict=True)
        return torch.cat([self._attend(*(t.transpose(0, 1)[None] for t in one))[0].transpose(0, 1) for one in each])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[B, N, Tq, D], [B, G, Tk, D] and [B, G, Tk, E] → [B, N, Tq, E]; the last query sees all keys."""
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        mask = None
        if num_queries != num_keys:
            # With `is_causal` the first query would see one key.
            mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).tril(num_keys - num_queries)
            # Of torch's kernels on a GPU only the one that holds all scores takes a mask beside shared keys.
            shared_by = q.shape[-3] // k.shape[-3]
            k, v = k.repeat_interleave(shared_by, dim=-3), v.repeat_interleave(shared_by, dim=-3)
        return nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self._dropout if self.training else 0.0,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=q.shape[-3] != k.shape[-3],
        )

    def _fits_varlen(self, q_TND: Tensor, v_KGE: Tensor) -> bool:
        width = q_TND.shape[-1]
        return (
            _VARLEN is not None
            and q_TND.is_cuda
            and q_TND.dtype in (torch.bfloat16, torch.float16)
            and width <= _WIDEST_HEAD
            and width % 8 == 0
            and v_KGE.shape[-1] <= width
            and not (self._dropout and self.training)
        )


def drop_tables() -> None:
    """Forget what is kept on the device for rows of lengths seen before: it is made anew for the next.

    Megatron-core (0.16.1) keeps the rotary angles of the last 32 lengths with the class, whatever becomes of the model,
    and packed rows differ in length nearly every time: 469 MiB for heads of 128 and 30 thousand positions.
    """
    ours = (segments, whole_row, apart, chunks_of, row_of)
    for kept in (RotaryEmbedding.forward, YarnRotaryEmbedding.forward, *ours):
        if clear := getattr(kept, "cache_clear", None):
            clear()


def _varlen_attention() -> Any:
    """torch's attention over samples of any length; None where it cannot be used: before 2.11 it takes no scale."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys() else None


_VARLEN = _varlen_attention()


def _varlen(q_TND: Tensor, k_KGD: Tensor, v_KGE: Tensor, found: Segments, scale: float | None) -> Tensor:
    """[T, N, E], all segments in one kernel. It has one width for keys and values: narrower values are padded."""
    width, value_width = q_TND.shape[-1], v_KGE.shape[-1]
    if value_width < width:
        v_KGE = nn.functional.pad(v_KGE, (0, width - value_width))
    # 2.11 sees in the shapes that queries share keys, and has no option for it.
    is_told = "enable_gqa" in inspect.signature(_VARLEN).parameters
    shared = {"enable_gqa": q_TND.shape[1] != k_KGD.shape[1]} if is_told else {}
    longest = max(found.num_queries), max(found.num_keys)
    out_TND: Tensor = _VARLEN(q_TND, k_KGD, v_KGE, *found.bounds, *longest, scale=scale, window_size=(-1, 0), **shared)
    return out_TND[..., :value_width]
