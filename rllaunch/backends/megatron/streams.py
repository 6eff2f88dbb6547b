"""Layers between several residual streams, which each mixes by weights that it makes of them: DeepSeek-V4's.

Between layers, and from stage to stage, the streams of a position lie beside each other: [T, B, S·H].
Source: Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025; what is computed is what transformers 5.24.0
models/deepseek_v4 computes.
"""

# T positions of this rank, B rows, S streams, H hidden size

from __future__ import annotations

from copy import copy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rllaunch.backends.megatron.compressed_attention import CompressedAttention
from rllaunch.backends.megatron.hash_routing import SoftplusRouter
from rllaunch.backends.megatron.shape import ModelShape, Streams
from rllaunch.backends.megatron.wide import WideNorm, float32_parameter


class StreamsModel(GPTModel):  # type: ignore[misc]
    """A model whose embedding starts all streams alike; its layers are given token ids where others have a mask, which
    none of them needs: so recomputation and every stage of a pipeline has them."""

    num_streams = 1

    def start_streams(self, number: int) -> None:
        self.num_streams = number
        if self.pre_process:
            self.embedding.register_forward_hook(lambda module, args, output: output.repeat(1, 1, number))

    def forward(self, input_ids: Tensor, position_ids: Any, attention_mask: Any, **more: Any) -> Any:
        return super().forward(input_ids, position_ids, input_ids, **more)


class StreamsLayer(TransformerLayer):  # type: ignore[misc]
    """[T, B, S·H] → [T, B, S·H]."""

    def __init__(self, config: Any, submodules: Any, *args: Any, shape: ModelShape, **more: Any) -> None:
        super().__init__(config, submodules, *args, **more)
        assert shape.streams is not None, "built for models with streams"
        self.attn_hc = HyperConnection(config, shape.streams, shape.norm_eps)
        self.ffn_hc = HyperConnection(config, shape.streams, shape.norm_eps)

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """
        Args:
            attention_mask: the ids of this rank's tokens, [B, T], before ranks that share the sequence part them.
        """
        mixed, merged_TBH = self.attn_hc(hidden_states)
        out_TBH = self.self_attention(self.input_layernorm(merged_TBH), packed_seq_params=packed_seq_params)
        streams = spread(hidden_states, out_TBH, *mixed)
        mixed, merged_TBH = self.ffn_hc(streams)
        if isinstance(self.mlp.router, SoftplusRouter):
            self.mlp.router.ids_BT = attention_mask
        out_TBH, _bias = self.mlp(self.pre_mlp_layernorm(merged_TBH))
        return spread(streams, out_TBH, *mixed), None


class HyperConnection(nn.Module):
    """What goes into a block, and how what comes out of it and the streams are mixed."""

    def __init__(self, config: Any, streams: Streams, eps: float) -> None:
        super().__init__()
        S, sums = streams.number, config.sequence_parallel
        self.fn = float32_parameter(S * (2 + S), S * config.hidden_size, is_summed=sums)
        self.base = float32_parameter(S * (2 + S), is_summed=sums)
        self.scale = float32_parameter(3, is_summed=sums)
        self._mix = partial(mix, streams=streams, eps=eps)

    def forward(self, streams_TBX: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """(to each stream, [T, B, S], and from each to each, [T, B, S, S]) and what the block is given, [T, B, H]."""
        # Its many small tensors are as large as the streams in float32, and quick to make again.
        post, comb, merged = checkpoint(
            self._mix, streams_TBX, self.fn, self.base, self.scale, use_reentrant=False, preserve_rng_state=False
        )
        return (post, comb), merged


def mix(
    streams_TBX: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, streams: Streams, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """To each stream, [T, B, S]; from each to each, [T, B, S, S], doubly stochastic; what the block is given."""
    S = streams.number
    pre, post, comb = torch.split(_projected(streams_TBX, fn, eps), [S, S, S * S], dim=-1)
    pre_base, post_base, comb_base = torch.split(base, [S, S, S * S])
    pre = torch.sigmoid(pre * scale[0] + pre_base) + streams.eps
    post = 2 * torch.sigmoid(post * scale[1] + post_base)
    comb = torch.softmax(torch.unflatten((comb * scale[2] + comb_base), -1, (S, S)), dim=-1) + streams.eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + streams.eps)
    for _ in range(streams.iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + streams.eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + streams.eps)
    return post, comb, _merged(streams_TBX, pre)


def spread(streams_TBX: Tensor, out_TBH: Tensor, post_TBS: Tensor, comb_TBSS: Tensor) -> Tensor:
    """The streams mixed, and to each its share of a block's output."""
    dtype = streams_TBX.dtype
    streams_TBSH = torch.unflatten(streams_TBX, -1, (post_TBS.shape[-1], -1))
    mixed = comb_TBSS.to(dtype).transpose(-1, -2) @ streams_TBSH
    return (post_TBS.to(dtype)[..., None] * out_TBH[..., None, :] + mixed).flatten(-2)


def _projected(streams_TBX: Tensor, fn: Tensor, eps: float) -> Tensor:
    x = streams_TBX.float()
    return F.linear(x, fn) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _merged(streams_TBX: Tensor, pre_TBS: Tensor) -> Tensor:
    weighted = pre_TBS[..., None] * torch.unflatten(streams_TBX, -1, (pre_TBS.shape[-1], -1))
    return weighted.sum(dim=-2).to(streams_TBX.dtype)


class MergedNorm(WideNorm):
    """The final norm, of the streams merged: [T, B, S·H] → [T, B, H]."""

    def __init__(self, config: Any, hidden_size: int, eps: float, *, streams: Streams) -> None:
        super().__init__(config, hidden_size, eps)
        S, sums = streams.number, config.sequence_parallel
        self.hc_fn = float32_parameter(S, S * hidden_size, is_summed=sums)
        self.hc_base = float32_parameter(S, is_summed=sums)
        self.hc_scale = float32_parameter(1, is_summed=sums)
        self._head = partial(_merge, streams=streams, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        merged: Tensor = checkpoint(
            self._head, x, self.hc_fn, self.hc_base, self.hc_scale, use_reentrant=False, preserve_rng_state=False
        )
        return super().forward(merged)


def _merge(x_TBX: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, streams: Streams, eps: float) -> Tensor:
    return _merged(x_TBX, torch.sigmoid(_projected(x_TBX, fn, eps) * scale + base) + streams.eps)


def put_streams(block_spec: Any, shape: ModelShape, config: Any) -> None:
    """Make the local layers of this stage those of DeepSeek-V4: of their own only the experts stay."""
    first = get_transformer_layer_offset(config)
    for number, layer in enumerate(block_spec.layer_specs):
        assert shape.experts is not None, "every layer of this family has experts"
        own = copy(layer)  # layers of a kind share their spec
        own.module, own.params = StreamsLayer, {"shape": shape}
        own.submodules = copy(layer.submodules)
        own.submodules.input_layernorm = own.submodules.pre_mlp_layernorm = WideNorm
        own.submodules.self_attention = ModuleSpec(module=CompressedAttention, params={"shape": shape})
        router = partial(SoftplusRouter, experts=shape.experts, num_tokens=shape.vocab_size, layer=first + number)
        own.submodules.mlp = _routed_by(layer.submodules.mlp, router)
        block_spec.layer_specs[number] = own
    block_spec.layer_norm = ModuleSpec(module=MergedNorm, params={"streams": shape.streams})


def _routed_by(experts: Any, router: Any) -> Any:
    """The spec of a layer of experts with another router; 0.19.2 has a partial where 0.16.1 has a spec."""
    if isinstance(experts, partial):
        parts = copy(experts.keywords["submodules"])
        parts.router = router
        return partial(experts.func, *experts.args, **{**experts.keywords, "submodules": parts})
    own = copy(experts)
    own.submodules = copy(experts.submodules)
    own.submodules.router = router
    return own
