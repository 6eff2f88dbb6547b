"""Attention over a window and over compressed entries, from one head of keys that are the values: DeepSeek-V4's.

Beside the positions of a window a query sees entries, each of which stands for several positions of its sample: all of
them, or those that an indexer chooses. Tensor-parallel ranks have some of the query heads and groups of the output
each; what keys, entries and choices are made of is whole on all of them. Context-parallel ranks gather it for the whole
row, and attend with the queries they have.
Source: DeepSeek-AI, "DeepSeek-V4", 2026; what is computed is what transformers 5.24.0 models/deepseek_v4 computes.
"""

# R positions of a row, its samples one after the other, r of them on this rank; T positions, B rows, H hidden size;
# M entries, C positions of one, F numbers of a position; N query heads on this rank, D width of a head; K entries
# chosen; J heads of the indexer

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rllaunch.backends.megatron.context import gather_row, packed_lengths
from rllaunch.backends.megatron.entries import Row, Windows, attend_to_row, row_of
from rllaunch.backends.megatron.shape import Compressed, ModelShape, Rope
from rllaunch.backends.megatron.wide import WholeLinear, WideNorm, float32_parameter, over_root_mean_square

# Scores of an indexer that are held at a time: 256 MiB of float32.
_MOST_SCORES = 2**26


class CompressedAttention(nn.Module):
    """`self_attention` of a layer spec.

    Args:
        layer_number: of the whole model, from 1 on.
    """

    frequencies: Tensor

    def __init__(self, config: Any, shape: ModelShape, layer_number: int, **_: Any) -> None:
        super().__init__()
        how = shape.compressed
        assert how is not None, "built for models with compressed attention"
        self.config, self._how = config, how
        self._kind = how.kinds[layer_number - 1]
        ranks, self._context_size = int(config.tensor_model_parallel_size), int(config.context_parallel_size)
        self._N, self._D, self._groups = shape.num_heads // ranks, shape.head_dim, how.groups // ranks
        hidden, eps = shape.hidden_size, shape.norm_eps
        self._eps = eps
        self.linear_q_down_proj = WholeLinear(config, hidden, how.q_rank)
        self.q_norm = WideNorm(config, how.q_rank, eps)
        self.linear_q_up_proj = ColumnParallelLinear(
            how.q_rank,
            shape.num_heads * self._D,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        self.linear_kv_proj = WholeLinear(config, hidden, self._D)
        self.kv_norm = WideNorm(config, self._D, eps)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        self._rate = 0
        if self._kind != "window":
            self._rate = how.sparse_rate if self._kind == "sparse" else how.heavy_rate
            self.compressor = Compressor(config, hidden, self._D, self._rate, eps, overlaps=self._kind == "sparse")
        if self._kind == "sparse":
            self.indexer = Indexer(config, hidden, how, eps)
        self.linear_o_low = GroupedLinear(config, self._groups, shape.num_heads * self._D // how.groups, how.group_rank)
        self.linear_proj = RowParallelLinear(
            how.groups * how.group_rank,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        self.sinks = float32_parameter(self._N)
        set_tensor_model_parallel_attributes(self.sinks, True, 0, 1)
        rope = shape.rope if self._kind == "window" else how.rope
        self.register_buffer("frequencies", frequencies(rope, int(self._D * rope.share)), persistent=False)
        self._recomputes = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(self, hidden_TBH: Tensor, *, packed_seq_params: Any = None) -> Tensor:
        """[T, B, H] → [T, B, H]; with sequence parallelism T is this rank's part of them.

        It needs no mask: a sample is padded at its end, which no real token of it sees.

        Args:
            packed_seq_params: Megatron-core's, with the bounds of whole samples; best on the host.
        """
        latent_TBF = self.q_norm(self.linear_q_down_proj(hidden_TBH))
        query_TBF, _bias = self.linear_q_up_proj(latent_TBF)
        T, B = query_TBF.shape[:2]
        lens: tuple[int, ...] = (T * self._context_size,) * B
        if packed_seq_params is not None:
            lens = packed_lengths(packed_seq_params)
        device = hidden_TBH.device
        rank = parallel_state.get_context_parallel_rank() if self._context_size > 1 else 0
        row = row_of(lens, self._context_size, rank, self._rate, device)
        parts = [self.kv_norm(self.linear_kv_proj(hidden_TBH))]
        if self.compressor is not None:
            parts += [self.compressor.kv_proj(hidden_TBH), self.compressor.gate_proj(hidden_TBH)]
        whole_RF = self._whole(torch.cat(parts, dim=-1), lens)
        chosen_rK = None
        if self.indexer is not None and row.num_entries_of_longest > self._how.index_top_k:
            chosen_rK = self._chosen(hidden_TBH, latent_TBF, row, lens)
        query_rF = query_TBF.transpose(0, 1).flatten(0, 1)
        if self._recomputes and torch.is_grad_enabled():
            out_rF = checkpoint(self._core, query_rF, whole_RF, chosen_rK, row, use_reentrant=False)
        else:
            out_rF = self._core(query_rF, whole_RF, chosen_rK, row)
        low_rF = self.linear_o_low(out_rF)
        out_TBH: Tensor = self.linear_proj(low_rF.view(B, T, -1).transpose(0, 1).contiguous())[0]
        return out_TBH

    def _whole(self, x_TBF: Tensor, lens: tuple[int, ...]) -> Tensor:
        """[R, F] of the whole row, of all that ranks have some positions of; gradients go back to who has them."""
        if self.config.sequence_parallel:
            x_TBF = gather_from_sequence_parallel_region(x_TBF.contiguous())
        return gather_row(x_TBF.transpose(0, 1).flatten(0, 1), lens, self._context_size)

    @torch.no_grad()
    def _chosen(self, hidden_TBH: Tensor, latent_TBF: Tensor, row: Row, lens: tuple[int, ...]) -> Tensor:
        """[r, K] entries of the row that each query may see, -1 where it may see fewer."""
        assert self.indexer is not None, "asked for sparse layers only"
        assert row.windows is not None, "a sparse layer has entries"
        index = self.indexer
        made = [index.compressor.kv_proj(hidden_TBH), index.compressor.gate_proj(hidden_TBH)]
        whole_RF = self._whole(torch.cat(made, dim=-1), lens)
        keys_MD = index.compressor(*whole_RF.chunk(2, dim=-1), row.windows, self.frequencies)
        asked = [latent_TBF, index.scorer(hidden_TBH)]
        asked_TBF = torch.cat(asked, dim=-1)
        if self.config.sequence_parallel:
            asked_TBF = gather_from_sequence_parallel_region(asked_TBF.contiguous())
        asked_rF = asked_TBF.transpose(0, 1).flatten(0, 1)
        latent_rF, weight_rJ = torch.split(asked_rF, [latent_TBF.shape[-1], self._how.index_heads], dim=-1)
        return index.choose(latent_rF, weight_rJ, keys_MD, row, self.frequencies)

    def _core(self, query_rF: Tensor, whole_RF: Tensor, chosen_rK: Tensor | None, row: Row) -> Tensor:
        """[r, N·D]."""
        query_rND = over_root_mean_square(torch.unflatten(query_rF, -1, (self._N, self._D)), self._eps)
        turn_r = angles(row.position_r, self.frequencies)
        query_rND = rotated(query_rND, turn_r)
        key_RD = rotated(whole_RF[:, None, : self._D], angles(row.position_R, self.frequencies))[:, 0]
        entry_MD = None
        if self.compressor is not None and row.windows is not None and len(row.windows.position_M):
            kv_RF, gate_RF = whole_RF[:, self._D :].chunk(2, dim=-1)
            entry_MD = self.compressor(kv_RF, gate_RF, row.windows, self.frequencies)
        out_rND = attend_to_row(
            query_rND, key_RD, entry_MD, self.sinks, chosen_rK, row, window=self._how.window, scale=self._D**-0.5
        )
        return rotated(out_rND, (turn_r[0], -turn_r[1])).flatten(1)


class GroupedLinear(nn.Module):
    """[r, N·D] → [r, outputs], each group of heads by a matrix of its own; ranks have whole groups."""

    def __init__(self, config: Any, groups: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self._groups = groups
        self.weight = nn.Parameter(torch.zeros(groups * num_outputs, num_inputs, dtype=config.params_dtype))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x_rF: Tensor) -> Tensor:
        x_GrF = torch.unflatten(x_rF, -1, (self._groups, -1)).transpose(0, 1)
        weight_GFO = torch.unflatten(self.weight, 0, (self._groups, -1)).transpose(1, 2)
        return torch.bmm(x_GrF, weight_GFO).transpose(0, 1).flatten(1)


class Compressor(nn.Module):
    """Makes entries of what `kv_proj` and `gate_proj` make of positions.

    Args:
        overlaps: an entry is made of its own positions and of those of the entry before it, by matrices of each.
    """

    def __init__(self, config: Any, hidden: int, width: int, rate: int, eps: float, *, overlaps: bool) -> None:
        super().__init__()
        outputs = 2 * width if overlaps else width
        self._overlaps = overlaps
        self.kv_proj = WholeLinear(config, hidden, outputs)
        self.gate_proj = WholeLinear(config, hidden, outputs)
        self.position_bias = float32_parameter(rate, outputs, is_summed=config.sequence_parallel)
        self.norm = WideNorm(config, width, eps)

    def forward(self, kv_RF: Tensor, gate_RF: Tensor, windows: Windows, turns: Tensor) -> Tensor:
        """[M, D] entries, rotated to where their positions begin."""
        pooled_MD = checkpoint(
            pooled, kv_RF, gate_RF, self.position_bias, windows, self._overlaps, use_reentrant=False,
            preserve_rng_state=False,
        )  # fmt: skip
        return rotated(self.norm(pooled_MD)[:, None], angles(windows.position_M, turns))[:, 0]


def pooled(kv_RF: Tensor, gate_RF: Tensor, bias_CF: Tensor, windows: Windows, overlaps: bool) -> Tensor:
    """[M, D] means of the positions of each window, weighted by softmax of their gates."""
    kv_MCF, gate_MCF = kv_RF[windows.row_MC], gate_RF[windows.row_MC] + bias_CF
    if overlaps:
        # The first half of what a position gives belongs to the next window of its sample.
        kv_MCF = torch.cat([_of_window_before(kv_MCF, windows, 0.0), kv_MCF.chunk(2, dim=-1)[1]], dim=1)
        gate_MCF = torch.cat([_of_window_before(gate_MCF, windows, -torch.inf), gate_MCF.chunk(2, dim=-1)[1]], dim=1)
    shares = gate_MCF.softmax(dim=1, dtype=torch.float32).to(kv_MCF.dtype)
    return (kv_MCF * shares).sum(dim=1)


def _of_window_before(x_MCF: Tensor, windows: Windows, nothing: float) -> Tensor:
    before = x_MCF.chunk(2, dim=-1)[0].roll(1, dims=0)
    return before.masked_fill(windows.is_first_M[:, None, None], nothing)


class Indexer(nn.Module):
    """Chooses the entries that a query sees. What it chooses by has no gradient: no loss here trains it."""

    def __init__(self, config: Any, hidden: int, how: Compressed, eps: float) -> None:
        super().__init__()
        self._J, self._D, self._top_k = how.index_heads, how.index_dim, how.index_top_k
        self.compressor = Compressor(config, hidden, self._D, how.sparse_rate, eps, overlaps=True)
        self.q_proj = WholeLinear(config, how.q_rank, self._J * self._D)
        self.scorer = WholeLinear(config, hidden, self._J)
        self.requires_grad_(False)

    def choose(self, latent_rF: Tensor, weight_rJ: Tensor, key_MD: Tensor, row: Row, turns: Tensor) -> Tensor:
        """[r, K] entries, the best of those that end before the query does."""
        top_k = min(self._top_k, row.num_entries_of_longest)
        chosen = latent_rF.new_full((len(latent_rF), top_k), -1, dtype=torch.long)
        weight_rJ = weight_rJ.float() * (self._D * self._J) ** -0.5
        cos, sin = angles(row.position_r, turns)
        # How many queries at a time, by the entries that the longest sample has.
        step = max(1, _MOST_SCORES // (self._J * row.num_entries_of_longest))
        for block in row.blocks(step, 1):
            if block.num_entries == 0:
                continue
            queries, entries = block.queries, block.entries
            query = torch.unflatten(self.q_proj(latent_rF[queries]), -1, (self._J, self._D))
            query = rotated(query, (cos[queries], sin[queries])).float()
            score = torch.unflatten(torch.relu(query.flatten(0, 1) @ key_MD[entries].float().t()), 0, (-1, self._J))
            score_tk = (score * weight_rJ[queries, :, None]).sum(dim=1)
            number = torch.arange(entries.start, entries.stop, device=score.device)
            hidden_tk = (number < row.entry_begin_r[queries, None]) | (number >= row.entry_end_r[queries, None])
            best = score_tk.masked_fill(hidden_tk, -torch.inf).topk(min(top_k, block.num_entries), dim=-1)
            found = torch.where(best.values == -torch.inf, -1, best.indices + entries.start)
            chosen[queries, : found.shape[1]] = found
        return chosen


def frequencies(rope: Rope, width: int) -> Tensor:
    """[width / 2] radians a position."""
    powers = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    if rope.kind == "default":
        return 1.0 / powers

    def dimension(rotations: float) -> float:
        return width * math.log(rope.original_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), width - 1)
    span = (high - low) or 0.001
    stretched = torch.clamp((torch.arange(width // 2, dtype=torch.float32) - low) / span, 0, 1)
    return stretched / (rope.factor * powers) + (1 - stretched) / powers


def angles(position_r: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [r, pairs]."""
    angle = position_r[:, None].float() * turns
    return angle.cos(), angle.sin()


def rotated(x_rND: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """With the last dimensions of each head rotated, in pairs that lie beside each other."""
    cos, sin = (t[:, None] for t in turn)
    plain, pairs = torch.split(x_rND, [x_rND.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    a, b = torch.unflatten(pairs.float(), -1, (-1, 2)).unbind(-1)
    both = torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)
    return torch.cat([plain, both.to(x_rND.dtype)], dim=-1)
