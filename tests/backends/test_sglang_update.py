"""Names of an update against the checkpoint an engine loaded, experts told apart, and handles passed on unopened."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rig import LLAMA, QWEN3, QWEN3_MOE, make_context
from safetensors.torch import load_file
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from rllaunch.backends.base import TensorSlice
from rllaunch.backends.embedded.layout import lay_out
from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.sglang.checkpoint import checkpoint_tensors, ids_of, of_layers, write_checkpoint
from rllaunch.backends.sglang.update import Names, relay
from rllaunch.errors import RunError

ARCHITECTURES = {"qwen3": QWEN3, "llama": LLAMA, "qwen3_moe": QWEN3_MOE, "tied": {**QWEN3, "tie_word_embeddings": True}}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_update_of_all_parameters_is_the_whole_checkpoint_bit_for_bit(name: str, dtype: str, tmp_path: Path):
    context = make_context(architecture=ARCHITECTURES[name], rollout={"dtype": dtype})
    write_checkpoint(context, tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    # What the trainer sends: the parameters as transformers names them, in one flat bucket.
    parameters = list(build_model(context, dtype=getattr(torch, dtype)).named_parameters())
    layout = lay_out([("all", parameters)])
    content = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for (_, parameter), piece in zip(parameters, layout.slices, strict=True):
        raw = parameter.detach().contiguous().flatten().view(torch.uint8)
        content[piece.offset : piece.offset + len(raw)] = raw

    names = Names("engine-0", checkpoint_tensors(str(tmp_path)))
    names.begin()
    taken = names.take(layout.slices)
    names.end(1, is_whole=True)
    assert {t.name for t in taken} == set(written)
    for piece in taken:
        assert tuple(written[piece.name].shape) == piece.shape
        raw = written[piece.name].flatten().view(torch.uint8)
        assert torch.equal(content[piece.offset : piece.offset + len(raw)], raw), piece.name
    assert checkpoint_tensors(str(tmp_path)) == {n: t.numel() * t.itemsize for n, t in written.items()}


def test_a_written_checkpoint_is_the_trainers_first_model(tmp_path: Path):
    from transformers import AutoModelForCausalLM

    context = make_context()
    write_checkpoint(context, tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for (name, ours), (_, theirs) in zip(
        build_model(context).named_parameters(), loaded.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert ids_of(context) == (0, frozenset({2}))


@pytest.mark.parametrize(("share", "rotated"), [({}, 8), ({"partial_rotary_factor": 0.5}, 4), ({"rotary_dim": 2}, 2)])
def test_a_minimax_m2_written_for_an_engine_says_what_sglang_asks_for(
    share: dict[str, float], rotated: int, tmp_path: Path
):
    small = {"num_local_experts": 4, "num_experts_per_tok": 2}
    write_checkpoint(make_context(architecture={**LLAMA, "model_type": "minimax_m2", **small, **share}), tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    assert facts["rotary_dim"] == rotated
    assert facts["rope_parameters"].get("partial_rotary_factor", 1.0) == rotated / 8
    assert (facts["use_qk_norm"], facts["use_routing_bias"], facts["scoring_func"]) == (True, True, "sigmoid")


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_linear_attention_written_for_an_engine_says_what_sglang_asks_for(model_type: str, tmp_path: Path):
    architecture = {
        **LLAMA, "model_type": model_type, "num_hidden_layers": 3, "layer_types": None, "full_attention_interval": 3,
        "rope_theta": 5e6, "partial_rotary_factor": 0.5, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "moe_intermediate_size": 8, "num_experts": 4,
        "num_experts_per_tok": 2, "shared_expert_intermediate_size": 8,
    }  # fmt: skip
    context = make_context(architecture=architecture)
    write_checkpoint(context, tmp_path)
    facts = json.loads((tmp_path / "config.json").read_text())
    told = facts["full_attention_interval"], facts["rope_theta"], facts["partial_rotary_factor"]
    assert told == (3, 5e6, 0.5)
    assert facts["architectures"] == ["Qwen3NextForCausalLM" if model_type == "qwen3_next" else "Qwen3_5ForCausalLM"]
    # transformers reads it as it was; of a checkpoint that says it by itself nothing changes.
    again = model_config(make_context(model={"hf_checkpoint": str(tmp_path)})).to_dict()
    assert (again["full_attention_interval"], again["rope_theta"], again["layer_types"]) == (
        3,
        5e6,
        facts["layer_types"],
    )
    assert again["rope_parameters"] == facts["rope_parameters"]


def test_rates_of_linear_attention_are_float32_in_an_engine_of_bfloat16(tmp_path: Path):
    architecture = {**LLAMA, "model_type": "qwen3_5_text", "layer_types": ["linear_attention"] * 2}
    rollout = {"backend": "sglang", "dtype": "bfloat16"}
    for backend, dtype in (("megatron", torch.float32), ("embedded", torch.bfloat16)):
        write_checkpoint(
            make_context(architecture=architecture, rollout=rollout, trainer={"backend": backend}), tmp_path
        )
        tensors = load_file(tmp_path / "model.safetensors")
        assert {t.dtype for n, t in tensors.items() if n.endswith("A_log")} == {dtype}
        assert {t.dtype for n, t in tensors.items() if not n.endswith("A_log")} == {torch.bfloat16}


def slices(*names: str) -> list[TensorSlice]:
    return [TensorSlice(name, "float32", (2, 2), 64 * i) for i, name in enumerate(names)]


def test_a_name_the_engine_did_not_load_is_an_error_and_not_a_line_in_a_log():
    names = Names("engine-2", ["a", "b"])
    names.begin()
    with pytest.raises(RunError, match="engine-2 has no such tensor: the update brings c"):
        names.take(slices("a", "c"))


def test_an_update_that_lacks_tensors_is_refused_where_they_are_lost_otherwise():
    names = Names("engine-0", ["a", "b", "c"])
    names.begin()
    names.take(slices("b"))
    names.end(3, is_whole=False)
    with pytest.raises(RunError, match="the update to version 3 lacks 2 tensors: a, c"):
        names.end(3, is_whole=True)
    names.begin()
    names.take(slices("a", "b"))
    names.take(slices("c"))
    names.end(4, is_whole=True)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_bucket_that_parts_what_the_engine_joins_is_refused(is_known: bool):
    """SGLang would forget both, and sample from the old weights."""
    query, keys, other = (f"model.layers.3.self_attn.{n}.weight" for n in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"))
    names = Names("engine-0", [query, keys, other] if is_known else None)
    names.begin()
    assert len(names.take(slices(other, keys, query))) == 3
    with pytest.raises(RunError, match=f"engine-0 would forget {query}: it is joined with {keys}") as caught:
        names.take(slices(query, other))
    assert caught.value.fix == "make it larger: --update-weight-buffer-size"
    # A model whose queries have no latent has one of the two only.
    assert len(names.take(slices(keys))) == 1


def test_names_that_cannot_be_read_are_not_checked(tmp_path: Path):
    assert checkpoint_tensors(str(tmp_path)) is None
    names = Names("engine-0", None)
    names.begin()
    assert names.take(slices("anything")) == slices("anything")
    names.end(1, is_whole=True)


def test_experts_stay_in_one_tensor_where_a_checkpoint_has_them_so():
    """Under other names SGLang would pass over them, and sample from the old ones."""
    experts = [TensorSlice("model.layers.0.mlp.experts.down_proj", "bfloat16", (2, 4, 8), 0)]
    assert len(Names("engine-0", None, "qwen3_moe").take(experts)) == 2
    assert Names("engine-0", None, "gpt_oss").take(experts) == experts


# -- handles on a GPU ----------------------------------------------------------------------------------


class _Sent:
    """What torch makes of a CUDA tensor when it is pickled for another process."""

    arguments = (torch.Tensor, (64,), (1,), 0, torch.UntypedStorage, torch.uint8, 0, b"handle", 64, 0, b"ref", 0, b"event", False, False)  # fmt: skip

    def __reduce__(self) -> tuple[Any, Any]:
        return rebuild_cuda_tensor, self.arguments


def test_a_handle_is_passed_on_as_it_came_without_being_opened():
    sent = pickle.dumps(_Sent())
    relayed = relay(sent)
    assert relayed.__reduce__() == (rebuild_cuda_tensor, _Sent.arguments)
    assert relay(pickle.dumps(relayed)).__reduce__() == (rebuild_cuda_tensor, _Sent.arguments)


def test_a_handle_of_something_else_is_refused():
    with pytest.raises(RunError, match=r"names numpy.*, which no CUDA tensor does"):
        relay(pickle.dumps(np.zeros(3)))
    with pytest.raises(RunError, match="holds a tuple, not a CUDA tensor"):
        relay(pickle.dumps((torch.uint8,)))


class _Calls:
    def __reduce__(self) -> tuple[Any, Any]:
        return os.system, ("exit 1",)


def test_a_handle_calls_nothing():
    with pytest.raises(RunError, match=r"names (posix|nt).system, which no CUDA tensor does"):
        relay(pickle.dumps(_Calls()))


def test_layers_that_predict_further_tokens_are_no_part_of_an_update():
    names = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.layers.9.mlp.up_proj.weight")
    further = ("model.layers.10.eh_proj.weight", "model.layers.10.shared_head.head.weight")
    assert tuple(of_layers(dict.fromkeys((*names, *further), 1), {"num_hidden_layers": 10})) == names
