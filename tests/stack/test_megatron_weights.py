"""Layouts of a parameter over ranks."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("megatron.core")

from stack_rig import ARCHITECTURES, make_context

from rllaunch.backends.deepseek_v4_names import module_name
from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.megatron.shape import ModelShape, read_shape
from rllaunch.backends.megatron.weights import (
    as_saved,
    entries,
    from_megatron,
    missing,
    shard,
    stack_experts,
    to_megatron,
    unshard,
    unstack_experts,
)

pytestmark = pytest.mark.stack


def shape_of(name: str) -> ModelShape:
    return read_shape(model_config(make_context(ARCHITECTURES[name])).to_dict())


@pytest.mark.parametrize("tp", [1, 2, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sharded_and_put_together_again_it_is_the_checkpoint(name: str, tp: int) -> None:
    shape = shape_of(name)
    module = build_model(make_context(ARCHITECTURES[name]))
    tensors = dict(unstack_experts(module.state_dict().items(), shape))
    saved = dict(as_saved(tensors.items(), shape))
    if shape.compressed:  # read under the module's names, whichever of three a checkpoint has
        saved = {module_name(name): tensor for name, tensor in saved.items()}
    assert missing(shape, saved) == []
    seen = set()
    for entry in entries(shape):
        whole = to_megatron(entry, [tensors[s] for s in entry.sources], shape, tp)
        if entry.split is not None and whole.shape[entry.split] % (2 * tp):
            continue
        shards = [shard(entry, whole, rank, tp) for rank in range(1 if entry.split is None else tp)]
        for source, back in zip(entry.sources, from_megatron(entry, unshard(entry, shards), shape), strict=True):
            assert torch.equal(back, tensors[source])
            seen.add(source)
    assert seen == set(tensors) - ({"lm_head.weight"} if shape.is_tied else set()) or tp == 8


def test_queries_keys_and_values_lie_interleaved_by_group() -> None:
    shape = shape_of("llama")  # 4 heads of 8, 2 groups
    entry = next(e for e in entries(shape) if e.form == "qkv")
    q, k, v = (torch.arange(n * 8).view(n * 8, 1) + start for n, start in ((4, 0), (2, 100), (2, 200)))
    rows = to_megatron(entry, [q, k, v], shape, 1).flatten().tolist()
    assert rows == [*range(16), *range(100, 108), *range(200, 208), *range(16, 32), *range(108, 116), *range(208, 216)]


def test_gate_and_up_lie_together_on_each_rank() -> None:
    entry = next(e for e in entries(shape_of("llama")) if e.form == "gated")
    whole = torch.tensor([[0], [1], [2], [3], [10], [11], [12], [13]])
    assert shard(entry, whole, 1, 2).flatten().tolist() == [2, 3, 12, 13]


def test_a_vocabulary_is_padded_to_what_ranks_can_share() -> None:
    shape = shape_of("llama")
    head = entries(shape)[-1]
    whole = to_megatron(head, [torch.ones(52, 3)], shape, 8)
    assert whole.shape == (1024, 3)  # Megatron's 128 rows a rank
    assert whole[52:].sum() == 0
    assert from_megatron(head, whole, shape)[0].shape == (52, 3)


def test_stacked_experts_are_those_of_the_module() -> None:
    module = build_model(make_context(ARCHITECTURES["qwen3_moe"]))
    shape = shape_of("qwen3_moe")
    single = dict(unstack_experts(module.state_dict().items(), shape))
    assert single["model.layers.1.mlp.experts.3.up_proj.weight"].shape == (16, 32)
    again = dict(stack_experts(single.items(), shape))
    assert again.keys() == module.state_dict().keys()
    assert all(torch.equal(again[n], t) for n, t in module.state_dict().items())
