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

from rllaunch.backends.megatron import attention
from rllaunch.backends.megatron.attention import TorchAttention
from rllaunch.backends.megatron.context import positions_here

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
