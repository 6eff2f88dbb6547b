"""The real SGLang's parameters of a gpt-oss whose checkpoint is in MXFP4, after an update: those of one in bfloat16.

make test-stack ARGS="-k sglang_gpt_oss"
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("sglang")

from stack_rig import GPT_OSS, hf_model, make_context, sglang_parameters
from torch import Tensor

from rllaunch.backends.base import Bucket, Slot, TensorSlice
from rllaunch.backends.embedded.layout import dtype_name
from rllaunch.backends.embedded.model import model_config
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.update import as_engine_wants
from rllaunch.backends.megatron.weights import entries, unstack_experts
from rllaunch.backends.sglang.options import decided
from rllaunch.backends.sglang.update import Names, Payloads

pytestmark = pytest.mark.stack

ARCHITECTURE = {**GPT_OSS, "vocab_size": 64, "intermediate_size": 64, "hidden_size": 64, "head_dim": 16}


def test_an_update_brings_every_parameter_and_lays_experts_as_a_checkpoint_does(tmp_path: Path):
    for kind in ("bf16", "checkpoint", "buckets"):
        (tmp_path / kind).mkdir()
    context = make_context(ARCHITECTURE, rollout={"backend": "sglang", "dtype": "bfloat16"})
    model, shape = hf_model(context).to(torch.bfloat16), read_shape(model_config(context).to_dict())
    model.config.dtype = torch.bfloat16
    for kind in ("bf16", "checkpoint"):
        model.save_pretrained(tmp_path / kind)
    tensors = dict(unstack_experts(((n, t.detach()) for n, t in model.state_dict().items()), shape))
    weights = [(s, tensors[s]) for entry in entries(shape) if entry.is_sent for s in entry.sources]
    sent: dict[str, Tensor] = dict(as_engine_wants(weights, context, shape))
    slices = [TensorSlice(n, dtype_name(t.dtype), tuple(t.shape), 0) for n, t in sent.items()]
    # Of a checkpoint of the hub no names are known.
    assert [s.name for s in Names("engine-0", None, "gpt_oss").take(slices)] == list(sent)
    for number, (name, tensor) in enumerate(sent.items()):  # a bucket for each: none needs another beside it
        save_file({name: tensor.contiguous()}, tmp_path / "buckets" / f"{number:05d}.safetensors")
    facts = json.loads((tmp_path / "bf16" / "config.json").read_text())
    mxfp4 = {"quant_method": "mxfp4"}
    (tmp_path / "bf16" / "config.json").write_text(json.dumps({**facts, "quantization_config": mxfp4}))
    released = make_context(
        ARCHITECTURE,
        model={"architecture": ARCHITECTURE, "hf_checkpoint": str(tmp_path / "bf16")},
        rollout={"backend": "sglang", "dtype": "bfloat16"},
    )
    told = decided(released, Slot(0, 0, "cpu", ""), str(tmp_path / "bf16"), range(21000, 21064), quantisation=mxfp4)
    # Others do not take sinks; nothing is computed here.
    arguments = {"attention_backend": "intel_amx"}
    arguments |= {key: told[key] for key in ("dtype", "load_format", "json_model_override_args")}
    before, updated, loaded = sglang_parameters(tmp_path, arguments)
    assert updated.keys() == loaded.keys()
    for name, tensor in updated.items():
        assert torch.equal(tensor, loaded[name]), name
        assert not torch.equal(tensor, before[name]), f"{name} is still a stand-in"
    experts = "model.layers.1.mlp.experts"
    assert torch.equal(updated[f"{experts}.w13_weight"], sent[f"{experts}.gate_up_proj"].transpose(1, 2))
    assert torch.equal(updated[f"{experts}.w2_weight_bias"], sent[f"{experts}.down_proj_bias"].float())
    assert torch.equal(updated["model.layers.1.self_attn.sinks"], sent["model.layers.1.self_attn.sinks"])


def test_a_rank_that_writes_into_its_bucket_does_not_write_into_anothers(tmp_path: Path):
    file = tmp_path / "bucket.bin"
    file.write_bytes(b"\1" * 64)
    tensors = (TensorSlice("model.layers.0.mlp.experts.down_proj_bias", "float32", (4, 4), 0),)
    payloads = Payloads(2)
    first, second = (pickle.loads(p)["flattened_tensor"] for p in payloads.of(Bucket(str(file), 64, tensors), tensors))
    second.zero_()
    assert first.tolist() == [1] * 64
