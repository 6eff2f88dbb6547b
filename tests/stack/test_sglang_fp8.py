"""The real SGLang's parameters, of a checkpoint in bfloat16 and told of FP8, after an update in FP8.

make test-stack ARGS="-k sglang_fp8"
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("sglang")

from stack_rig import DEEPSEEK, MINIMAX_M2, QWEN3, QWEN3_MOE, YARN, make_context, sglang_parameters
from torch import Tensor

from rllaunch.backends.base import LaunchContext, Slot
from rllaunch.backends.block_fp8 import engine_scheme
from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.update import as_engine_wants, in_groups
from rllaunch.backends.megatron.weights import entries, unstack_experts
from rllaunch.backends.sglang.checkpoint import write_checkpoint
from rllaunch.backends.sglang.options import decided

pytestmark = pytest.mark.stack

WIDE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 192, "intermediate_size": 256, "moe_intermediate_size": 128}
ARCHITECTURES = {
    "qwen3": {**QWEN3, **WIDE, "head_dim": 128},
    "qwen3_moe": {**QWEN3_MOE, **WIDE, "head_dim": 128},
    "deepseek_v3": {
        **DEEPSEEK, **WIDE, "q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "head_dim": 64, "rope_parameters": YARN,
        # What the release has and transformers does not ask for.
        "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    },
    "minimax_m2": {**MINIMAX_M2, **WIDE, "head_dim": 128},
}  # fmt: skip


def context_of(name: str, checkpoint: Path | str = "", dtype: str = "fp8") -> LaunchContext:
    model = {"architecture": ARCHITECTURES[name], "dtype": "float32", "hf_checkpoint": str(checkpoint)}
    return make_context(ARCHITECTURES[name], model=model, rollout={"backend": "sglang", "dtype": dtype})


def update_of(context: LaunchContext) -> list[list[tuple[str, Tensor]]]:
    """In buckets of what may not be parted."""
    shape = read_shape(model_config(context).to_dict())
    tensors = dict(unstack_experts(((n, t.detach()) for n, t in build_model(context).state_dict().items()), shape))
    weights = [(s, tensors[s]) for entry in entries(shape) if entry.is_sent for s in entry.sources]
    sent = as_engine_wants(weights, context, shape, engine_scheme(context.config, None))
    return [list(group.tensors) for group in in_groups(sent)]


def bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(torch.uint8)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_engine_told_of_fp8_holds_after_an_update_what_one_with_such_a_checkpoint_loads(name: str, tmp_path: Path):
    for kind in ("bf16", "checkpoint", "buckets"):
        (tmp_path / kind).mkdir()
    write_checkpoint(context_of(name, dtype="bfloat16"), tmp_path / "bf16")
    write_checkpoint(context_of(name), tmp_path / "checkpoint")
    groups = update_of(context_of(name))
    for number, group in enumerate(groups):
        save_file({n: t.contiguous() for n, t in group}, tmp_path / "buckets" / f"{number:05d}.safetensors")
    context = context_of(name, tmp_path / "bf16")
    told = decided(context, Slot(0, 0, "cpu", ""), str(tmp_path / "bf16"), range(21000, 21064))
    arguments = {key: told[key] for key in ("dtype", "load_format", "json_model_override_args")}
    before, updated, loaded = sglang_parameters(tmp_path, arguments)
    assert updated.keys() == loaded.keys()
    sent = dict(pair for group in groups for pair in group)
    at = "model.layers.1.self_attn.o_proj.weight"
    assert bits(updated[at]).equal(bits(sent[at]))
    assert torch.equal(updated[f"{at}_scale_inv"], sent[f"{at}_scale_inv"])
    assert any(n.endswith("scale_inv") and "self_attn" not in n for n in updated)
    # SGLang passes over a norm or a bias that its model was not told of.
    assert {n for n in sent if n.endswith(("norm.weight", "bias"))} <= updated.keys()
    for tensor_name, tensor in updated.items():
        assert bits(tensor).equal(bits(loaded[tensor_name])), tensor_name
        is_left = bits(tensor).equal(bits(before[tensor_name]))
        # Of a KV cache that is not in FP8 nobody reads these.
        assert is_left == tensor_name.endswith((".k_scale", ".v_scale")), f"{tensor_name} is still a stand-in"
