"""The real SGLang's parameters of models with linear attention, after an update in buckets as the megatron trainer sends it.

SGLang's kernels for linear attention want a GPU (or AMX ones that have no wheel): nothing is computed with them here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("sglang")

from stack_rig import QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, make_context, sglang_parameters

from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.update import as_engine_wants, in_groups
from rllaunch.backends.megatron.weights import entries, unstack_experts
from rllaunch.backends.sglang.checkpoint import write_checkpoint

pytestmark = pytest.mark.stack

ARCHITECTURES = {"qwen3_5_text": QWEN3_5, "qwen3_5_moe_text": QWEN3_5_MOE, "qwen3_next": QWEN3_NEXT}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_update_in_buckets_gives_an_engine_what_it_loads_from_a_checkpoint(name: str, tmp_path: Path) -> None:
    """Each tensor in a bucket of its own, unless it may not be parted from another."""
    context = make_context(ARCHITECTURES[name], rollout={"backend": "sglang", "dtype": "bfloat16"})
    for kind in ("bf16", "buckets"):
        (tmp_path / kind).mkdir()
    write_checkpoint(context, tmp_path / "bf16")
    shutil.copytree(tmp_path / "bf16", tmp_path / "checkpoint")
    shape = read_shape(model_config(context).to_dict())
    tensors = dict(unstack_experts(((n, t.detach()) for n, t in build_model(context).state_dict().items()), shape))
    weights = [(source, tensors[source]) for entry in entries(shape) for source in entry.sources]
    sent = {}
    for number, group in enumerate(in_groups(as_engine_wants(weights, context, shape))):
        sent |= dict(group.tensors)
        save_file({n: t.contiguous() for n, t in group.tensors}, tmp_path / "buckets" / f"{number:05d}.safetensors")
    written = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert sent.keys() == written.keys()
    assert all(torch.equal(sent[n], t) and sent[n].dtype == t.dtype for n, t in written.items())
    assert all(t.dtype == (torch.float32 if n.endswith("A_log") else torch.bfloat16) for n, t in sent.items())

    # By default SGLang keeps snapshots of states, which it cannot on a CPU.
    arguments: dict[str, Any] = {"dtype": "bfloat16", "disable_radix_cache": True}
    before, updated, loaded = sglang_parameters(tmp_path, arguments)
    rates = [n for n in updated if n.endswith("A_log")]
    assert rates
    assert all(updated[n].dtype == torch.float32 and torch.equal(updated[n], sent[n]) for n in rates)
    for tensor_name, tensor in updated.items():
        assert torch.equal(tensor, loaded[tensor_name]), tensor_name
        assert not torch.equal(tensor, before[tensor_name]), f"{tensor_name} is still a stand-in"
