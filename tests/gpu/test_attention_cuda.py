"""Attention within packed samples on a GPU: one kernel for all of them gives what one call a sample gives.

python -m pytest -m gpu tests/gpu/test_attention_cuda.py -s        (megatron-core and torch 2.11 or later; -s shows the speeds)
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Query heads, key heads, width of a head, width of a value, softmax scale.
HEADS = {
    "as many keys": (8, 8, 64, 64, None),
    "shared keys": (16, 2, 128, 128, None),
    "latents": (8, 8, 192, 128, 0.1147),
}


@pytest.fixture(autouse=True)
def _varlen_is_there() -> None:
    from rllaunch.backends.megatron import attention

    if attention._VARLEN is None:
        pytest.skip("this torch has no attention over samples of any length that takes a scale")


def attention_of(scale: float | None, *, ranks: int = 1) -> Any:
    from rllaunch.backends.megatron.attention import TorchAttention

    return TorchAttention(SimpleNamespace(attention_dropout=0.0, context_parallel_size=ranks), softmax_scale=scale)


def packing(lens: list[int]) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = torch.tensor([0, *lens]).cumsum(0).int()
    return PackedSeqParams("thd", bounds, bounds, max_seqlen_q=max(lens), max_seqlen_kv=max(lens))


def drawn(heads: tuple[Any, ...], tokens: int, seed: int = 0) -> list[Any]:
    N, G, D, E, _ = heads
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = [(tokens, N, D), (tokens, G, D), (tokens, G, E)]
    return [torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16).requires_grad_() for s in shapes]


def with_gradients(out: Any, inputs: list[Any]) -> list[Any]:
    weight = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float32).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out.float() * weight).sum(), inputs)]


@pytest.mark.parametrize("name", HEADS)
def test_one_kernel_gives_what_one_call_a_sample_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rllaunch.backends.megatron import attention

    lens, heads = [1, 700, 64, 3, 1025], HEADS[name]
    module, results = attention_of(heads[4]), []
    for has_kernel in (True, False):
        if not has_kernel:
            monkeypatch.setattr(attention, "_VARLEN", None)
        inputs = drawn(heads, sum(lens))
        results.append(with_gradients(module(*inputs, packed_seq_params=packing(lens)), inputs))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", HEADS)
def test_two_ranks_that_share_samples_give_what_one_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ranks in this process, each with all keys and values."""
    from rllaunch.backends.megatron import attention
    from rllaunch.backends.megatron.context import positions_here

    lens, heads = [4, 700, 64, 1024], HEADS[name]
    inputs = drawn(heads, sum(lens))
    want = with_gradients(attention_of(heads[4])(*inputs, packed_seq_params=packing(lens)), inputs)
    here = [positions_here(lens, 2, rank).cuda() for rank in range(2)]
    everything = torch.cat([t[torch.cat(here)] for t in inputs[1:]], dim=-1)
    monkeypatch.setattr(attention, "gather_from_sequence_parallel_region", lambda mine, group: everything)
    monkeypatch.setattr(attention.parallel_state, "get_context_parallel_group", lambda: None)
    out = torch.empty_like(want[0])
    for rank in range(2):
        monkeypatch.setattr(attention.parallel_state, "get_context_parallel_rank", lambda rank=rank: rank)
        mine = (t[here[rank]] for t in inputs)
        out = out.index_copy(0, here[rank], attention_of(heads[4], ranks=2)(*mine, packed_seq_params=packing(lens)))
    for got, expected in zip(with_gradients(out, inputs), want, strict=True):
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_each_sample_lies_is_moved_without_a_wait(ranks: int) -> None:
    from rllaunch.backends.megatron.context import segments

    torch.cuda.set_sync_debug_mode("error")
    try:
        found = segments((4, 700, 64, 1024), ranks, ranks - 1, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.bounds[0].tolist()[-1] == 1792 // ranks


@pytest.mark.parametrize("name", ["as many keys", "shared keys"])
def test_without_the_kernel_ranks_that_share_samples_hold_no_scores(name: str) -> None:
    """In float32 no kernel takes several samples; of torch's others only those without a matrix of scores are let in."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    N, G, D, E, _ = HEADS[name]
    q, k, v = (torch.randn(1, heads, 64, width, device="cuda") for heads, width in ((N, D), (G, D), (G, E)))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        attention_of(None)._attend(q[:, :, :16], k, v)


def test_a_packed_row_is_faster_than_padded_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from rllaunch.backends.megatron import attention

    heads = HEADS["shared keys"]
    lens = [4096, *[96 + 37 * i for i in range(31)]]
    module = attention_of(None)

    def seconds(inputs: list[Any], packed: Any) -> float:
        for turn in range(6):
            if turn == 1:
                torch.cuda.synchronize()
                begun = time.perf_counter()
            module(*inputs, packed_seq_params=packed).sum().backward()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / 5

    row = drawn(heads, sum(lens))
    one_kernel = seconds(row, packing(lens))
    padded = [
        t.detach().view(max(lens), len(lens), *t.shape[1:]).requires_grad_()
        for t in drawn(heads, max(lens) * len(lens))
    ]
    as_rows = seconds(padded, None)
    monkeypatch.setattr(attention, "_VARLEN", None)
    by_sample = seconds(row, packing(lens))
    print(
        f"{len(lens)} samples, {sum(lens)} tokens, {max(lens) * len(lens)} padded: one kernel {1e3 * one_kernel:.2f} ms, "
        f"one call a sample {1e3 * by_sample:.2f} ms, padded rows {1e3 * as_rows:.2f} ms"
    )
    assert one_kernel < as_rows
