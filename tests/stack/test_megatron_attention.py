"""Attention of context-parallel ranks, both in one process, where no kernel takes samples of any length."""

from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams

from rllaunch.backends.megatron import attention, sinks
from rllaunch.backends.megatron.attention import TorchAttention
from rllaunch.backends.megatron.context import positions_here, segments

pytestmark = pytest.mark.stack

LENS = [4, 20, 8]


class Calls(TorchFunctionMode):
    """What torch's attention is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, dict[str, Any]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.seen.append((args[0].shape[-3], args[1].shape[-3], kwargs))
        return func(*args, **(kwargs or {}))


def attended(inputs: list[torch.Tensor], ranks: int) -> torch.Tensor:
    module = TorchAttention(SimpleNamespace(attention_dropout=0.0, context_parallel_size=ranks, softmax_type="vanilla"))
    bounds = torch.tensor([0, *accumulate(LENS)], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(LENS), max_seqlen_kv=max(LENS))
    out: torch.Tensor = module(*inputs, packed_seq_params=packed)
    return out


@pytest.mark.parametrize(("heads", "value_width"), [((8, 2), 16), ((4, 4), 8)], ids=["shared keys", "latents"])
def test_ranks_give_what_one_gives_and_no_mask_stands_beside_shared_keys(
    heads: tuple[int, int], value_width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU torch has no kernel for both at once but the one that holds all scores."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, heads[0], 16), (32, heads[1], 16), (32, heads[1], value_width)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    want = attended(inputs, 1)
    here = [positions_here(LENS, 2, rank) for rank in range(2)]
    everything = torch.cat([t[torch.cat(here)] for t in inputs[1:]], dim=-1)
    monkeypatch.setattr(attention, "gather_from_sequence_parallel_region", lambda mine, group: everything)
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_group", lambda: None)
    got = torch.zeros_like(want)
    with Calls() as calls:
        for rank in range(2):
            monkeypatch.setattr(attention.parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
            got = got.index_copy(0, here[rank], attended([t[here[rank]] for t in inputs], 2))
    torch.testing.assert_close(got, want)
    weight = torch.linspace(-1, 1, got.numel()).view(got.shape)
    for mine, alone in zip(
        *(torch.autograd.grad((o * weight).sum(), inputs, retain_graph=True) for o in (got, want)), strict=True
    ):
        torch.testing.assert_close(mine, alone)
    masked = [(n, g, kwargs) for n, g, kwargs in calls.seen if kwargs["attn_mask"] is not None]
    assert len(masked) == 3 * len(LENS), "of the four chunks of a sample the first alone reads itself only"
    assert all(n == g and not kwargs["enable_gqa"] for n, g, kwargs in masked)


# -- sinks and windows ---------------------------------------------------------------------------------


def with_sinks(inputs: list[torch.Tensor], sink_N: torch.Tensor, window: int, ranks: int) -> torch.Tensor:
    config = SimpleNamespace(
        attention_dropout=0.0,
        context_parallel_size=ranks,
        softmax_type="learnable",
        num_attention_heads=len(sink_N),
        tensor_model_parallel_size=1,
        window_size=(window - 1, 0),
        window_attn_skip_freq=[0, int(window > 0)],
    )
    module = TorchAttention(config, layer_number=2)
    del module.softmax_offset
    module.softmax_offset = sink_N
    bounds = torch.tensor([0, *accumulate(LENS)], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(LENS), max_seqlen_kv=max(LENS))
    out: torch.Tensor = module(*inputs, packed_seq_params=packed)
    return out


def plainly(q_TND: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, sink_N: torch.Tensor, window: int) -> Any:
    """All scores of a sample at once, with a column for the sink that is dropped after the softmax."""
    parts = []
    for q, k, v in zip(*(torch.split(t, LENS) for t in (q_TND, k_TGD, v_TGD)), strict=True):
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = torch.einsum("tnd,knd->ntk", q, k) / q.shape[-1] ** 0.5
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))
        scores = scores.masked_fill((back < 0) | (back >= (window or len(q))), -torch.inf)
        column = sink_N[:, None, None].expand(-1, len(q), 1)
        shares = torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]
        parts.append(torch.einsum("ntk,knd->tnd", shares, v))
    return torch.cat(parts)


@pytest.mark.parametrize("window", [0, 1, 5, 16])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
def test_a_sink_takes_its_share_on_any_ranks_and_in_blocks(
    heads: tuple[int, int], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of one to four queries.
    monkeypatch.setattr(sinks, "_MOST_SCORES", 4 * heads[0] * max(LENS))
    generator = torch.Generator().manual_seed(0)
    shapes = [(32, heads[0], 16), (32, heads[1], 16), (32, heads[1], 16), (heads[0],)]
    inputs = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    want = plainly(*inputs, window)
    weight = torch.linspace(-1, 1, want.numel()).view(want.shape)
    wanted = torch.autograd.grad((want * weight).sum(), inputs)
    here = [positions_here(LENS, 2, rank) for rank in range(2)]
    everything = torch.cat([t[torch.cat(here)] for t in inputs[1:3]], dim=-1)
    monkeypatch.setattr(attention, "gather_from_sequence_parallel_region", lambda mine, group: everything)
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_group", lambda: None)
    outputs = [with_sinks(inputs[:3], inputs[3], window, 1).view(want.shape), torch.zeros_like(want)]
    for rank in range(2):
        monkeypatch.setattr(attention.parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        mine = with_sinks([t[here[rank]] for t in inputs[:3]], inputs[3], window, 2)
        outputs[1] = outputs[1].index_copy(0, here[rank], mine.view(-1, *want.shape[1:]))
    for out in outputs:
        torch.testing.assert_close(out, want)
        for got, expected in zip(
            torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True), wanted, strict=True
        ):
            torch.testing.assert_close(got, expected)


class FlashOnCpu:
    """torch's FlashAttention for a CPU in the place of that for a GPU, of one sample: the contract is the same, its
    backward pass is given the output and lse."""

    def __init__(self, found: Any, window: int, scale: float) -> None:
        assert window == 0
        self.scale = scale

    def forward(self, *qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (t.transpose(0, 1)[None].contiguous() for t in qkv)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=self.scale)
        return out[0].transpose(0, 1), lse[0]

    def backward(self, grad: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *of_heads, lse = tensors
        grad, q, k, v, out = (t.transpose(0, 1)[None].contiguous() for t in (grad, *of_heads))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse[None].contiguous(), 0.0, True, scale=self.scale
        )
        return tuple(t[0].transpose(0, 1) for t in grads)


def test_a_kernel_that_knows_no_sinks_gives_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "_Flash", FlashOnCpu)
    inputs = [torch.randn(shape).requires_grad_() for shape in [(40, 4, 16)] * 3 + [(4,)]]
    found = segments((40,), 1, 0, torch.device("cpu"))
    results = []
    for uses_kernel in (True, False):
        out = sinks.attend_with_sinks(*inputs, found, window=0, scale=None, uses_kernel=uses_kernel)
        results.append(
            [out, *torch.autograd.grad((out * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum(), inputs)]
        )
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 7])
def test_the_kernels_of_a_gpu_are_called_as_they_are_declared(window: int) -> None:
    """On the meta device, which has their shapes: the numbers need a GPU."""
    kernel = sinks._Flash(segments((24, 8), 1, 0, torch.device("cpu")), window, 0.25)
    q, k, v = (torch.empty(32, n, 64, dtype=torch.bfloat16, device="meta") for n in (8, 2, 2))
    kernel._bounds = tuple(t.to("meta") for t in kernel._bounds)
    out, lse = kernel.forward(q, k, v)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, (8, 32), torch.float32)
    assert [t.shape for t in kernel.backward(out, q, k, v, out, lse)] == [q.shape, k.shape, v.shape]
