"""DeepSeek-V4's layers as the megatron trainer builds them, against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.packed_seq_params import PackedSeqParams
from safetensors.torch import save_file
from stack_rig import DEEPSEEK_V4, DEEPSEEK_V4_SHORT, hf_model, make_context, one_process
from test_megatron_model import named_tensors

from rllaunch.backends.deepseek_v4_names import release_name
from rllaunch.backends.embedded.model import model_config
from rllaunch.backends.megatron import compressed_attention, entries
from rllaunch.backends.megatron.model import build_model
from rllaunch.backends.megatron.options import megatron_configs
from rllaunch.backends.megatron.placement import Placement
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.start import starting_weights
from rllaunch.backends.megatron.weights import from_megatron, unstack_experts
from rllaunch.backends.quantise import E4M3
from rllaunch.errors import ConfigError

pytestmark = pytest.mark.stack


@pytest.mark.parametrize("granularity", ["none", "selective", "full"])
@pytest.mark.parametrize("facts", [DEEPSEEK_V4, DEEPSEEK_V4_SHORT], ids=["long", "short"])
def test_gradients_are_those_of_transformers_however_few_scores_are_held(
    facts: dict[str, Any], granularity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entries, "_MOST_SCORES", 600 if granularity == "none" else 2**26)
    monkeypatch.setattr(entries, "_MOST_QUERIES", 7 if granularity == "none" else 256)
    monkeypatch.setattr(compressed_attention, "_MOST_SCORES", 500 if granularity == "none" else 2**26)
    context = make_context(facts, trainer={"recompute_granularity": granularity})
    theirs = hf_model(context)
    shape = read_shape(model_config(context).to_dict())
    lens, ids_BT = (40, 1, 17), torch.randint(0, 52, (3, 40), generator=torch.Generator().manual_seed(1))
    weight_RV = torch.randn(sum(lens), 52, generator=torch.Generator().manual_seed(2))
    with one_process():
        ours = build_model(megatron_configs(context.config, shape, on_cpu=True), shape).train()
        placement = Placement(ours, shape)
        placement.fill(named_tensors(theirs, shape).__getitem__)
        bounds = torch.tensor([0, 40, 41, 58], dtype=torch.int32)
        packed_1R = torch.cat([row[:length] for row, length in zip(ids_BT, lens, strict=True)])[None]
        packing = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=40, max_seqlen_kv=40)
        logits_RV = ours(packed_1R, None, None, packed_seq_params=packing)[0, :, :52]
        (logits_RV * weight_RV).sum().backward()
        got, parameters = {}, dict(ours.named_parameters())
        for index, held in placement.held.items():
            entry, parameter = placement.entries[index], parameters.get(held.name)
            if parameter is not None and parameter.requires_grad:
                got |= zip(entry.sources, from_megatron(entry, parameter.grad, shape), strict=True)
    each = [theirs(input_ids=row[None, :n], use_cache=False).logits[0] for row, n in zip(ids_BT, lens, strict=True)]
    (torch.cat(each) * weight_RV).sum().backward()
    grads = ((n, p.grad) for n, p in theirs.named_parameters() if p.grad is not None)
    want = dict(unstack_experts(grads, shape))
    assert got.keys() == want.keys(), "an indexer has no gradient"
    for name, grad in want.items():
        torch.testing.assert_close(got[name], grad, rtol=1e-3, atol=1e-3 * float(grad.abs().max()), msg=name)


def test_what_a_query_sees_of_another_sample_is_nothing() -> None:
    """The same sample alone, and between two others."""
    context = make_context(DEEPSEEK_V4_SHORT)
    shape = read_shape(model_config(context).to_dict())
    with one_process(), torch.no_grad():
        ours = build_model(megatron_configs(context.config, shape, on_cpu=True), shape)
        Placement(ours, shape).fill(named_tensors(hf_model(context), shape).__getitem__)
        ids_R = torch.randint(0, 52, (30,), generator=torch.Generator().manual_seed(1))
        alone = ours(ids_R[None, 9:22], None, None)[0]
        bounds = torch.tensor([0, 9, 22, 30], dtype=torch.int32)
        packing = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=13, max_seqlen_kv=13)
        between = ours(ids_R[None], None, None, packed_seq_params=packing)[0, 9:22]
    torch.testing.assert_close(between, alone, rtol=1e-5, atol=1e-5)


def test_what_stays_float32_is_float32_among_bfloat16() -> None:
    from rllaunch.backends.megatron.build import _model

    context = make_context(DEEPSEEK_V4, trainer={"precision": "bf16"})
    shape = read_shape(model_config(context).to_dict())
    tensors = named_tensors(hf_model(context), shape)
    with one_process():
        configs = megatron_configs(context.config, shape, on_cpu=True)
        model, placement = _model(configs, shape, tensors.__getitem__, "cpu")
        kept = {n for n, p in model.named_parameters() if p.dtype == torch.float32}
        names = {n.rpartition(".")[0].rpartition(".")[2] + n[n.rindex(".") :] for n in kept}
        logits = model(torch.randint(0, 52, (1, 20)), None, None)
    strict = {
        "attn_hc",
        "ffn_hc",
        "final_layernorm",
        "input_layernorm",
        "pre_mlp_layernorm",
        "q_norm",
        "kv_norm",
        "norm",
    }
    assert {n.partition(".")[0] for n in names} == strict | {"self_attention", "compressor"}
    assert {n for n in names if n.startswith(("self", "comp"))} == {"self_attention.sinks", "compressor.position_bias"}
    assert logits.dtype == torch.bfloat16
    assert torch.isfinite(logits).all()
    assert len(placement.held) == len(placement.entries)


WIDE = {**DEEPSEEK_V4, "hidden_size": 160, "moe_intermediate_size": 144}


@pytest.mark.parametrize("scales", ["float32", "powers of two"])
def test_a_release_in_fp8_is_read(scales: str, tmp_path: Path) -> None:
    """Names, blocks and both types of scales as the releases have them."""
    context = make_context(WIDE)
    shape = read_shape(model_config(context).to_dict())
    named, want = {}, {}
    for name, tensor in named_tensors(hf_model(context), shape).items():
        released = release_name(name)
        want[name] = tensor
        if (".experts." in name and scales == "float32") or name.endswith("q_b_proj.weight"):
            rows, columns = (-(-n // 128) for n in tensor.shape)
            scale = torch.exp2(torch.randint(-3, 4, (rows, columns)).float())
            whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
            named[released] = (tensor / whole).to(E4M3)
            end = "weight_scale_inv" if ".experts." in name else "scale"
            stored = scale if scales == "float32" else scale.to(torch.float8_e8m0fnu)
            named[released.removesuffix("weight") + end] = stored
            want[name] = named[released].float() * whole
        else:
            named[released] = tensor
    save_file(named, tmp_path / "model.safetensors")
    config = model_config(context)
    config.quantization_config = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3", "scale_fmt": "ue8m0",
    }  # fmt: skip
    config.save_pretrained(tmp_path)
    tensor_of = starting_weights(make_context(WIDE, model={"hf_checkpoint": str(tmp_path)}), shape)
    assert all(torch.equal(tensor_of(name), tensor) for name, tensor in want.items())


def test_a_release_with_experts_in_four_bits_is_refused(tmp_path: Path) -> None:
    context = make_context(DEEPSEEK_V4)
    config = model_config(context)
    config.quantization_config = {
        "quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "expert_dtype": "fp4",
    }  # fmt: skip
    config.save_pretrained(tmp_path)
    shape = read_shape(config.to_dict())
    with pytest.raises(ConfigError, match="experts in fp4 is not read") as caught:
        starting_weights(make_context(DEEPSEEK_V4, model={"hf_checkpoint": str(tmp_path)}), shape)
    assert "give one in bfloat16" in caught.value.fix
