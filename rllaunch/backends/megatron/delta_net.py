"""Linear attention by the gated delta rule, as Qwen3-Next and Qwen3.5 have it in three of four layers.

Megatron-core's own (0.16.1 `ssm/gated_delta_net.py`) knows no packed samples and no context parallelism. This one is
plain torch: the rule within chunks of positions at once, then over the chunks, those of all samples beside each other.
Source: Yang et al., arXiv:2412.06464; what is computed is what transformers 5.24.0 models/qwen3_next computes.
"""

# R positions of a row, its samples one after the other, r of them on this rank; n samples; T positions, B rows,
# H hidden size; F inputs of a position; K key heads and V value heads here, S of these a key head; D and E widths of
# both; A channels of the convolution, W its positions; C chunks, L positions of one

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rllaunch.backends.megatron.chunks import CHUNK, apart, chunks_of
from rllaunch.backends.megatron.context import gather_row, packed_lengths, whole_row
from rllaunch.backends.megatron.local_layers import TorchNorm
from rllaunch.backends.megatron.shape import DeltaNet, ModelShape
from rllaunch.backends.megatron.wide import float32_parameter

# Of the norm of queries and keys, as transformers and the engines' kernels have it.
_UNIT_EPS = 1e-6


class GatedDeltaNet(nn.Module):
    """`self_attention` of a layer spec. Tensor-parallel ranks have some of the key heads each, and all that is theirs.

    Context-parallel ranks gather what goes into the convolution, and each computes the state over whole samples and
    keeps its own positions: a state has no part that could wait for another rank's.

    Args:
        delta: of the whole model.
    """

    def __init__(self, config: Any, delta: DeltaNet, **_: Any) -> None:
        super().__init__()
        ranks, dtype = int(config.tensor_model_parallel_size), config.params_dtype
        self.config = config
        self._delta, self._num_ranks, self._context_size = delta, ranks, int(config.context_parallel_size)
        self._K, self._V = delta.key_heads // ranks, delta.value_heads // ranks
        values = delta.value_heads * delta.value_dim
        convolved = 2 * delta.key_heads * delta.key_dim + values
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            convolved + values + 2 * delta.value_heads,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
        )
        self.out_proj = RowParallelLinear(
            values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
        )
        self.conv_weight = nn.Parameter(torch.zeros(convolved // ranks, delta.kernel, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.zeros(self._V, dtype=dtype))
        # Its exponential is a rate that a state is multiplied by at every position.
        self.A_log = float32_parameter(self._V)
        for split in (self.conv_weight, self.dt_bias, self.A_log):
            set_tensor_model_parallel_attributes(split, True, 0, 1)
        self.norm_weight = nn.Parameter(torch.ones(delta.value_dim, dtype=dtype))
        # Autograd would keep 22 float32 numbers for every element of a value head, of each position in each layer; a
        # layer that is computed again as a whole needs them for itself only. Of `block` those behind the first are not.
        self._recomputes = config.recompute_granularity != "full" or config.recompute_method == "block"

    def forward(
        self, hidden_states: Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        """[T, B, H] → [T, B, H], no bias; with sequence parallelism T is this rank's part of them.

        It needs no mask: a sample is padded at its end, and nothing flows back from there.

        Args:
            packed_seq_params: Megatron-core's, with the bounds of whole samples; best on the host.
        """
        mixed_TBF, _bias = self.in_proj(hidden_states)
        T, B = mixed_TBF.shape[:2]
        lens: tuple[int, ...] = (T * self._context_size,) * B
        if packed_seq_params is not None:
            lens = packed_lengths(packed_seq_params)
        mixed_rF = mixed_TBF.transpose(0, 1).flatten(0, 1)
        out_rO = self._of_samples(mixed_rF, lens)
        out_TBH, _bias = self.out_proj(out_rO.view(B, T, -1).transpose(0, 1).contiguous())
        return out_TBH, None

    def _of_samples(self, mixed_rF: Tensor, lens_n: tuple[int, ...]) -> Tensor:
        """[r, V·E]."""
        size = self._context_size
        mixed_RF = gather_row(mixed_rF, lens_n, size)
        if self._recomputes and torch.is_grad_enabled():
            # What is kept is the input.
            out_RO: Tensor = checkpoint(self._mix, mixed_RF, lens_n, use_reentrant=False, preserve_rng_state=False)
        else:
            out_RO = self._mix(mixed_RF, lens_n)
        if size == 1:
            return out_RO
        _, here_r = whole_row(lens_n, size, parallel_state.get_context_parallel_rank(), out_RO.device)
        return out_RO.index_select(0, here_r)

    def _mix(self, mixed_RF: Tensor, lens_n: tuple[int, ...]) -> Tensor:
        """[R, V·E] normed and gated, of whole samples."""
        D, E, K, V = self._delta.key_dim, self._delta.value_dim, self._K, self._V
        R, S = len(mixed_RF), V // K
        widths = [2 * D + S * E, S * E, S, S]
        qkv_RKx, gate_RKx, beta_RKS, rate_RKS = torch.split(mixed_RF.view(R, K, -1), widths, dim=-1)
        convolved_RA = F.silu(causal_convolution(qkv_RKx.flatten(1), self.conv_weight, lens_n))
        q_RKD, k_RKD, v_RKx = torch.split(convolved_RA.view(R, K, -1), [D, D, S * E], dim=-1)
        softened_RV = F.softplus(rate_RKS.reshape(R, V).float() + self.dt_bias.float())
        decay_RV = -self.A_log.float().exp() * softened_RV
        beta_RV = beta_RKS.reshape(R, V).float().sigmoid()
        out_RVE = gated_delta_rule(q_RKD, k_RKD, v_RKx.reshape(R, V, E), decay_RV, beta_RV, lens_n)
        return self._norm(out_RVE.to(mixed_RF.dtype), gate_RKx.reshape(R, V, E)).flatten(1)

    def _norm(self, out_RVE: Tensor, gate_RVE: Tensor) -> Tensor:
        weight_E = self.norm_weight
        if self._num_ranks > 1:
            # Whole on each of them, whose heads are its own: the gradient is the sum, with sequence parallelism or not.
            weight_E = copy_to_tensor_model_parallel_region(weight_E)
        normed_RVE = F.rms_norm(
            out_RVE.float(), out_RVE.shape[-1:], weight_E.float(), eps=self.config.layernorm_epsilon
        )
        return (normed_RVE * F.silu(gate_RVE.float())).to(out_RVE.dtype)


def causal_convolution(x_RA: Tensor, weight_AW: Tensor, lens_n: tuple[int, ...]) -> Tensor:
    """[R, A]: of each channel the weighted sum of the W positions that end at each, none of another sample's."""
    A, W = weight_AW.shape
    apart_X, together_R = apart(lens_n, W, x_RA.device)
    # Before every sample as many zeros as it would reach back.
    apart_AX = _with_zero(x_RA).index_select(0, apart_X).t()
    out_AX = F.conv1d(apart_AX[None], weight_AW[:, None], groups=A)[0]
    return out_AX.t().index_select(0, together_R)


def gated_delta_rule(
    q_RKD: Tensor, k_RKD: Tensor, v_RVE: Tensor, decay_RV: Tensor, beta_RV: Tensor, lens_n: tuple[int, ...]
) -> Tensor:
    """[R, V, E] in float32: what the states of V heads say to the queries, each sample's from a state of zeros.

    At every position a state is multiplied by exp(decay), then what it says to the key is replaced by the value, to
    the part beta. Queries and keys are brought to length one; V // K heads share each.

    Args:
        decay_RV: 0 or less.
        lens_n: of the samples, which the row is made of.
    """
    tables = chunks_of(lens_n, q_RKD.device)
    C, L, S = len(tables.of_chunks_CL), CHUNK, v_RVE.shape[1] // k_RKD.shape[1]

    def in_chunks(x: Tensor) -> Tensor:
        """[R, heads, …] → [C, heads, L, …] in float32, zeros where a chunk reaches past its sample."""
        taken = _with_zero(x).index_select(0, tables.of_chunks_CL.flatten())
        return taken.view(C, L, *x.shape[1:]).transpose(1, 2).float()

    q, k = (_of_length_one(in_chunks(x)).repeat_interleave(S, dim=1) for x in (q_RKD, k_RKD))
    v, beta, sums = in_chunks(v_RVE), in_chunks(beta_RV)[..., None], in_chunks(decay_RV).cumsum(-1)
    q = q * q.shape[-1] ** -0.5
    # What is left at a later position of what was written at an earlier one.
    is_later = torch.ones(L, L, dtype=torch.bool, device=q.device).tril()
    left_CVLL = (sums[..., :, None] - sums[..., None, :]).masked_fill(~is_later, -torch.inf).exp()
    grown, rest = sums.exp()[..., None], (sums[..., -1:] - sums).exp()[..., None]
    # Every position takes back what the earlier ones of its chunk wrote under its key: a triangular system.
    system_CVLL = (beta * k) @ k.transpose(-1, -2) * left_CVLL
    solved = torch.linalg.solve_triangular(
        system_CVLL, torch.cat([beta * v, beta * k * grown], dim=-1), upper=False, unitriangular=True
    )
    written, read = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    inside = (q @ k.transpose(-1, -2)) * left_CVLL
    asked, kept, shrunk = q * grown, (k * rest).transpose(-1, -2), grown[..., -1:, :]
    state = v.new_zeros(tables.steps[0][1], v.shape[1], k.shape[-1], v.shape[-1])
    said = []
    for begin, end in tables.steps:
        state = state[: end - begin]
        new = written[begin:end] - read[begin:end] @ state
        said.append(asked[begin:end] @ state + inside[begin:end] @ new)
        state = state * shrunk[begin:end] + kept[begin:end] @ new
    out_CLVE = torch.cat(said).transpose(1, 2)
    return out_CLVE.flatten(0, 1).index_select(0, tables.in_chunks_R)


def _with_zero(x: Tensor) -> Tensor:
    """With one more row, of zeros, which indices of nothing mean."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _of_length_one(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)


def put_delta_nets(block_spec: Any, shape: ModelShape, config: Any) -> None:
    """Put linear attention into those layers of this stage that have it, whatever its other layers are made of.

    Their projections and the norm before them are Megatron-core's local ones and torch's: those of Transformer Engine
    hold the norm inside.
    """
    first = get_transformer_layer_offset(config)
    for number, layer in enumerate(block_spec.layer_specs):
        if not shape.is_linear(first + number):
            continue
        own = copy(layer)  # layers of a kind share their spec
        own.submodules = copy(layer.submodules)
        own.submodules.input_layernorm = TorchNorm
        own.submodules.self_attention = ModuleSpec(module=GatedDeltaNet, params={"delta": shape.delta_net})
        block_spec.layer_specs[number] = own
