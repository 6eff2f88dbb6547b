"""Checkpoints in MXFP4, as gpt-oss is released in: read by the trainer, of which an engine in bfloat16 loads nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rig import make_context
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from rllaunch.backends.base import LaunchContext, Slot
from rllaunch.backends.embedded.model import build_model, model_config, quantisation_of
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.start import starting_weights
from rllaunch.backends.megatron.weights import entries, stored
from rllaunch.backends.quantise import dequantise_mxfp4
from rllaunch.backends.sglang.checkpoint import checkpoint_tensors
from rllaunch.backends.sglang.options import decided
from rllaunch.errors import ConfigError

GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss", "vocab_size": 52, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
    "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = ("gate_up_proj", "down_proj")


def random_mxfp4(*shape: int) -> tuple[Tensor, Tensor]:
    """Blocks and scales of a weight of this shape, input features last."""
    groups = (*shape[:-1], shape[-1] // 32)
    blocks = torch.randint(0, 256, (*groups, 16), dtype=torch.uint8)
    return blocks, torch.randint(100, 140, groups, dtype=torch.uint8)


def context_of(checkpoint: Path | str, **sections: Any) -> LaunchContext:
    model = {"architecture": GPT_OSS, "dtype": "float32", "hf_checkpoint": str(checkpoint)}
    rollout = {"backend": "sglang", "dtype": "bfloat16"}
    return make_context(architecture=GPT_OSS, model=model, rollout=rollout, trainer={"backend": "megatron"}, **sections)


@pytest.fixture
def release(tmp_path: Path) -> Path:
    """A checkpoint as gpt-oss's release."""
    model: Any = build_model(context_of(""))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    torch.manual_seed(2)
    for name in [n for n in tensors if n.endswith(EXPERTS)]:
        number, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = random_mxfp4(number, outputs, inputs)
    save_file(tensors, file, metadata={"format": "pt"})
    facts = json.loads((tmp_path / "config.json").read_text())
    quantisation = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**facts, "quantization_config": quantisation}))
    return tmp_path


def test_every_value_is_that_of_transformers():
    blocks = torch.arange(256, dtype=torch.uint8).repeat(3).view(1, 4, 12, 16)
    scales = torch.tensor([0, 1, 90, 127, 128, 200, 250, 254], dtype=torch.uint8).repeat(6).view(1, 4, 12)
    got, want = dequantise_mxfp4(blocks[0], scales[0]), convert_moe_packed_tensors(blocks, scales)[0].t()
    assert got.dtype == want.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert got.unique().numel() > 80


def test_training_starts_from_the_experts_that_transformers_reads(release: Path):
    context = context_of(release)
    shape = read_shape(model_config(context).to_dict())
    tensor_of, tensors = starting_weights(context, shape), load_file(release / "model.safetensors")
    for source in (s for entry in entries(shape) for s in entry.sources):
        name, number = stored(source)
        if name.endswith(EXPERTS):
            whole = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        else:
            whole = tensors[name]
        assert torch.equal(tensor_of(source), whole if number is None else whole[number]), source


def test_blocks_without_their_scales_are_an_error(release: Path):
    context, name = context_of(release), "model.layers.1.mlp.experts.down_proj"
    tensors = load_file(release / "model.safetensors")
    del tensors[f"{name}_scales"]
    save_file(tensors, release / "model.safetensors")
    tensor_of = starting_weights(context, read_shape(model_config(context).to_dict()))
    with pytest.raises(ConfigError, match=f"lacks {name}_scales"):
        tensor_of("model.layers.1.mlp.experts.2.down_proj")


def test_an_engine_in_bfloat16_loads_nothing_and_knows_what_an_update_must_bring(release: Path):
    context = context_of(release)
    quantisation = quantisation_of(context)
    told = decided(context, Slot(0, 0, "cpu", ""), str(release), range(21000, 21064), quantisation=quantisation)
    assert (told["dtype"], told["load_format"]) == ("bfloat16", "dummy")
    assert json.loads(told["json_model_override_args"]) == {"quantization_config": None}
    model: Any = build_model(context_of(""), dtype=torch.bfloat16)
    want = {n: t.nbytes for n, t in model.state_dict().items() if n.endswith(EXPERTS)}
    sizes = checkpoint_tensors(str(release)) or {}
    assert sizes.keys() == model.state_dict().keys()
    assert {n: sizes[n] for n in want} == want
