"""Megatron-core's model against that of transformers, on the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import load_file
from stack_rig import ARCHITECTURES, hf_model, make_context, one_process

from rllaunch.backends.deepseek_v4_names import module_name, release_name
from rllaunch.backends.embedded.model import model_config
from rllaunch.backends.megatron.model import build_model
from rllaunch.backends.megatron.options import megatron_configs
from rllaunch.backends.megatron.placement import Placement
from rllaunch.backends.megatron.shape import ModelShape, read_shape
from rllaunch.backends.megatron.weights import as_saved, stack_experts, unstack_experts

pytestmark = pytest.mark.stack


def named_tensors(model: Any, shape: ModelShape) -> dict[str, torch.Tensor]:
    """As its checkpoint has them; buffers that are saved too."""
    return dict(unstack_experts(((n, t.detach()) for n, t in model.state_dict().items()), shape))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_those_of_transformers_packed_or_not_and_weights_come_back_exactly(
    name: str, tmp_path: Path
) -> None:
    context = make_context(ARCHITECTURES[name])
    theirs = hf_model(context)
    shape = read_shape(model_config(context).to_dict())
    tensors = named_tensors(theirs, shape)
    ids_BT = torch.randint(0, 52, (3, 40), generator=torch.Generator().manual_seed(1))
    with one_process():
        ours = build_model(megatron_configs(context.config, shape, on_cpu=True), shape)
        placement = Placement(ours, shape)
        placement.fill(tensors.__getitem__)
        lens = (40, 1, 17)
        packed_1R = torch.cat([row[:length] for row, length in zip(ids_BT, lens, strict=True)])[None]
        bounds = torch.tensor([0, 40, 41, 58], dtype=torch.int32)
        packing = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=40, max_seqlen_kv=40)
        with torch.no_grad():
            got = ours(ids_BT, None, None)[..., : shape.vocab_size]
            in_one_row = ours(packed_1R, None, None, packed_seq_params=packing)[0, :, : shape.vocab_size]
            want = theirs(input_ids=ids_BT, use_cache=False).logits
        parameters = dict(ours.named_parameters()) | dict(ours.named_buffers())
        back = dict(as_saved(placement.gather(parameters.__getitem__, "cpu"), shape))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    each = torch.cat([rows[:length] for rows, length in zip(want, lens, strict=True)])
    torch.testing.assert_close(in_one_row, each, rtol=2e-4, atol=2e-4)
    assert want.std() > 0.1

    theirs.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    if shape.compressed:  # saved under the names of the release, which transformers does not give back
        saved = {release_name(module_name(n)): t for n, t in saved.items()}
    assert back.keys() == saved.keys()
    assert all(torch.equal(back[n], saved[n]) for n in saved)
    if shape.experts:
        stacked = dict(
            stack_experts(((module_name(n), t) for n, t in back.items()) if shape.compressed else back.items(), shape)
        )
        module = theirs.state_dict()
        assert all(torch.equal(stacked[n], module[n]) for n in module if n != "lm_head.weight" or not shape.is_tied)


def test_routers_of_local_layers_are_torch_s_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a kernel of Transformer Engine")

    context = make_context(ARCHITECTURES["gpt_oss"])
    shape = read_shape(model_config(context).to_dict())
    monkeypatch.setattr(moe_utils, "te_general_gemm", refuse, raising=False)
    with one_process(), torch.no_grad():
        model = build_model(megatron_configs(context.config, shape, on_cpu=True), shape)
        assert model(torch.zeros(1, 4, dtype=torch.long), None, None).shape[:2] == (1, 4)


def test_linear_attention_is_computed_again_in_layers_that_are_not_as_a_whole() -> None:
    """Megatron-core computes with the method `block` only the first of a stage's layers again."""

    def kept_bytes(granularity: str, **options: Any) -> int:
        architecture = ARCHITECTURES["qwen3_5_text-every-fourth-layer"]
        context = make_context(architecture, trainer={"recompute_granularity": granularity}, megatron=options)
        shape = read_shape(model_config(context).to_dict())
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with one_process(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model = build_model(megatron_configs(context.config, shape, on_cpu=True), shape).train()
            model(torch.zeros(2, 40, dtype=torch.long), None, None)
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    nothing_else = kept_bytes("none")
    assert kept_bytes("full", recompute_method="block", recompute_num_layers=1) < nothing_else
    assert kept_bytes("full") < nothing_else
