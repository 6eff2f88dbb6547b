"""The megatron trainer with weights in FP8: what it reads of a checkpoint, and what every rank makes for an engine."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from safetensors.torch import load_file, save_file
from stack_process import fp8_update_rank, run_ranks
from stack_rig import DEEPSEEK, MINIMAX_M2, QWEN3_MOE, free_port, make_context, one_process
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from rllaunch.backends.base import LaunchContext
from rllaunch.backends.block_fp8 import SCHEME
from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.megatron.build import build
from rllaunch.backends.megatron.checkpoint import export
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.start import starting_weights
from rllaunch.backends.megatron.weights import stack_experts, unstack_experts
from rllaunch.backends.quantise import dequantise
from rllaunch.backends.sglang.checkpoint import write_checkpoint
from rllaunch.errors import ConfigError

pytestmark = pytest.mark.stack

# Some matrices are no whole number of blocks.
WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 256, "moe_intermediate_size": 160}
ARCHITECTURES = {
    "qwen3_moe": {**QWEN3_MOE, **WIDE, "head_dim": 64},
    "deepseek_v3": {
        **DEEPSEEK, **WIDE, "q_lora_rank": 128, "kv_lora_rank": 136, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16,
        "v_head_dim": 64, "head_dim": 16,
    },
    "minimax_m2": {**MINIMAX_M2, **WIDE, "head_dim": 64},
}  # fmt: skip
IN_FP8 = {"backend": "sglang", "dtype": "fp8"}


def context_of(name: str, checkpoint: Path | str = "", **sections: dict[str, Any]) -> LaunchContext:
    facts: dict[str, Any] = {"architecture": ARCHITECTURES[name], "dtype": "float32", "hf_checkpoint": str(checkpoint)}
    return make_context(ARCHITECTURES[name], model=facts, rollout=IN_FP8, **sections)


def dequantised_by_transformers(directory: Path) -> dict[str, Tensor]:
    tensors = load_file(directory / "model.safetensors")
    quantizer: Any = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=[128, 128]))
    read: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float8_e4m3fn:
            read[name] = tensor
            continue
        rows, columns = tensor.shape  # transformers takes whole blocks only
        padded = torch.nn.functional.pad(tensor.float(), (0, -columns % 128, 0, -rows % 128)).to(tensor.dtype)
        scale_inv = tensors[name.replace(".weight", ".weight_scale_inv")]
        read[name] = Fp8Dequantize(quantizer)._dequantize_one(padded, scale_inv, torch.float32)[:rows, :columns]
    return {n: t for n, t in read.items() if not n.endswith("scale_inv")}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_training_starts_from_an_fp8_checkpoint_as_transformers_reads_it(name: str, tmp_path: Path):
    write_checkpoint(context_of(name), tmp_path)
    context = context_of(name, tmp_path)
    assert model_config(context).to_dict()["quantization_config"] == SCHEME
    read = dequantised_by_transformers(tmp_path)
    theirs = build_model(context_of(name))
    shape = read_shape(model_config(context).to_dict())
    theirs.load_state_dict(dict(stack_experts(((n, t.float()) for n, t in read.items()), shape)), strict=False)
    ids_BT = torch.randint(0, 52, (3, 40), generator=torch.Generator().manual_seed(1))
    with one_process():
        built = build(context, "cpu")
        with torch.no_grad():
            got = built.ddp(ids_BT, None, None)[..., :52]
            want = theirs(input_ids=ids_BT, use_cache=False).logits
            exact = build_model(context_of(name))(input_ids=ids_BT, use_cache=False).logits
        local = dict(built.ddp.module.named_parameters()) | dict(built.ddp.module.named_buffers())
        sent = dict(built.placement.gather(local.__getitem__, "cpu"))
        export(iter(sent.items()), context, None, tmp_path / "hf")
    assert sent.keys() == read.keys()
    assert all(torch.equal(sent[n], read[n].float()) for n in read)
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)
    assert (want - exact).abs().max() > 1e-2, "FP8 is not exact: what was read is what was written"
    # What is saved is whole again, and says so.
    assert "quantization_config" not in json.loads((tmp_path / "hf" / "config.json").read_text())


def test_a_weight_in_fp8_without_its_scales_is_refused(tmp_path: Path):
    write_checkpoint(context_of("qwen3_moe"), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.self_attn.o_proj.weight"
    scales = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, file)
    context = context_of("qwen3_moe", tmp_path)
    shape = read_shape(model_config(context).to_dict())
    with pytest.raises(ConfigError, match=rf"{name} is held as torch.float8_e4m3fn"):
        starting_weights(context, shape)(name)
    save_file({**tensors, f"{name}_scale_inv": scales[:, :1].contiguous()}, file)
    with pytest.raises(ConfigError, match=r"o_proj.weight: scales of \[2, 1\] for a weight of \[192, 256\]"):
        starting_weights(context, shape)(name)


def test_an_fp8_checkpoint_with_other_scales_is_refused_before_it_is_read(tmp_path: Path):
    write_checkpoint(context_of("qwen3_moe"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    context = context_of("qwen3_moe", tmp_path)
    with pytest.raises(ConfigError, match="weight_block_size = None"):
        starting_weights(context, read_shape(model_config(context).to_dict()))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_rank_makes_the_same_update_as_one_rank_alone(name: str, tmp_path: Path):
    parallel = {
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    }
    launch = {"architecture": ARCHITECTURES[name], "rollout": IN_FP8}
    (tmp_path / "many").mkdir()
    (tmp_path / "one").mkdir()
    run_ranks(2, fp8_update_rank, free_port(), str(tmp_path / "many"), {**launch, "trainer": parallel})
    run_ranks(1, fp8_update_rank, free_port(), str(tmp_path / "one"), launch)
    want: dict[str, Tensor] = torch.load(tmp_path / "one" / "rank-0.pt")["spread"]
    context = context_of(name)
    shape = read_shape(model_config(context).to_dict())
    weights = dict(unstack_experts(build_model(context).state_dict().items(), shape))
    for rank in (0, 1):
        made = torch.load(tmp_path / "many" / f"rank-{rank}.pt")
        for way in ("spread", "sent") if rank == 0 else ("spread",):
            assert list(made[way]) == list(want)
            for tensor_name, tensor in made[way].items():
                assert tensor.dtype == want[tensor_name].dtype
                assert torch.equal(tensor.view(torch.uint8), want[tensor_name].view(torch.uint8)), tensor_name
    scaled = [n for n in want if n.endswith("scale_inv")]
    assert scaled
    for scale in scaled:
        weight = scale.removesuffix("_scale_inv")
        back = dequantise(want[weight], want[scale])
        assert (back - weights[weight]).norm() < 0.04 * weights[weight].norm()
