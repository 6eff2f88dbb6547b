"""Engines in FP8: which tensors of a checkpoint, what an update sends for them, and launches that are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rig import LLAMA, QWEN3, QWEN3_MOE, make_context
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from rllaunch.backends.base import LaunchContext, joined_with
from rllaunch.backends.block_fp8 import SCHEME, BlockFp8, engine_scheme, refusal_of, scale_name, scheme_of
from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.update import BucketSender, as_engine_wants, bucket_bytes, in_groups
from rllaunch.backends.megatron.weights import entries, unstack_experts
from rllaunch.backends.quantise import dequantise
from rllaunch.backends.sglang.checkpoint import checkpoint_tensors, write_checkpoint
from rllaunch.backends.sglang.update import Names
from rllaunch.errors import ConfigError
from rllaunch.plan.architecture import read_architecture
from rllaunch.plan.sizes import is_in_fp8, sizes_of
from rllaunch.resolve.schema import LaunchConfig

# As in real models, nothing is larger than the embedding, of 512 rows.
# More than a block in most directions, and not a whole number of them in some.
WIDE = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 128, "max_position_embeddings": 64}
LATENT = {
    **QWEN3_MOE, **WIDE, "model_type": "deepseek_v3", "num_key_value_heads": 2, "head_dim": 16, "q_lora_rank": 128,
    "kv_lora_rank": 96, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 80, "first_k_dense_replace": 1,
    "moe_intermediate_size": 128, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, **WIDE},
    "qwen2": {**LLAMA, **WIDE, "model_type": "qwen2"},
    "qwen3": {**QWEN3, **WIDE, "tie_word_embeddings": True},
    "qwen3_moe": {**QWEN3_MOE, **WIDE, "moe_intermediate_size": 128, "num_experts": 4},
    "deepseek_v3": LATENT,
    "no query latent": {**LATENT, "q_lora_rank": 0},
    "glm4_moe_lite": {**LATENT, "model_type": "glm4_moe_lite"},
    "glm4_moe": {
        **LLAMA, **WIDE, "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1,
        "moe_intermediate_size": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
    },
    "minimax_m2": {
        **LLAMA, **WIDE, "model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2,
        "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
QUANTIZER: Any = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float"))


def context_of(architecture: dict[str, Any], **sections: dict[str, Any]) -> LaunchContext:
    sections["rollout"] = {"backend": "sglang", "dtype": "fp8", **sections.get("rollout", {})}
    sections["trainer"] = {"backend": "megatron", **sections.get("trainer", {})}
    return replace(make_context(architecture=architecture, **sections), vocabulary="")


def weights_of(context: LaunchContext) -> dict[str, Tensor]:
    """In the order of an update."""
    shape = read_shape(model_config(context).to_dict())
    tensors = dict(unstack_experts(build_model(context).state_dict().items(), shape))
    return {s: tensors[s] for entry in entries(shape) if entry.is_sent for s in entry.sources}


def theirs(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    made = Fp8Quantize(QUANTIZER).convert({"x.weight": padded})
    return made["x.weight"][:rows, :columns], made["x.weight_scale_inv"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_update_brings_every_linear_layer_as_transformers_would_quantise_it_and_all_else_in_bfloat16(name: str):
    context = context_of({"vocab_size": 512, **ARCHITECTURES[name]})
    shape, weights = read_shape(model_config(context).to_dict()), weights_of(context)
    fp8 = engine_scheme(context.config, None)
    sent = dict(as_engine_wants(weights.items(), context, shape, fp8))
    quantised = {n for n, t in sent.items() if t.dtype == torch.float8_e4m3fn}
    # Linear layers as transformers' module has them, experts and all; not its routers and its head.
    modules = build_model(context, device="meta").named_modules()
    linear = {f"{n}.weight" for n, m in modules if isinstance(m, torch.nn.Linear) and "lm_head" not in n}
    assert {n for n in quantised if ".experts." not in n} == linear
    assert {n for n in quantised if ".experts." in n} == {n for n in weights if ".experts." in n}
    assert sent.keys() == weights.keys() | set(map(scale_name, quantised))
    for tensor_name, weight in weights.items():
        got = sent[tensor_name]
        if tensor_name not in quantised:
            wanted = weight if tensor_name.endswith("correction_bias") else weight.to(torch.bfloat16)
            assert torch.equal(got, wanted)
            continue
        scale_inv = sent[scale_name(tensor_name)]
        wanted, wanted_scale = theirs(weight.to(torch.bfloat16))
        assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8)), tensor_name
        assert torch.equal(scale_inv, wanted_scale), tensor_name
        back = dequantise(got, scale_inv)
        assert (back - weight).norm() < 0.04 * weight.norm()


@pytest.mark.parametrize("limit", [1, 100_000, 10**7])
@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe", "minimax_m2"])
def test_buckets_are_what_an_engine_that_loaded_the_written_checkpoint_expects(name: str, limit: int, tmp_path: Path):
    context = context_of(
        {"vocab_size": 512, **ARCHITECTURES[name]},
        handoff={"update_weight_buffer_size": limit},
    )
    write_checkpoint(context, tmp_path)
    known = checkpoint_tensors(str(tmp_path))
    assert known is not None
    shape, fp8 = read_shape(model_config(context).to_dict()), engine_scheme(context.config, None)
    names, sink = Names("engine-0", known), Collected()
    names.begin()
    sink.names = names
    sender = BucketSender(tmp_path / "update.bin", limit)
    sent = as_engine_wants(weights_of(context).items(), context, shape, fp8)
    sender.send(sent, sink)
    sender.close()
    names.end(1, is_whole=True)
    assert {n: t.nbytes for n, t in sink.tensors.items()} == known
    from safetensors.torch import load_file

    written = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(sink.tensors[n].view(torch.uint8), t.view(torch.uint8)) for n, t in written.items())
    assert sink.largest <= bucket_bytes(context, shape, with_scales=True)
    joined = [n for n in written if joined_with(n)]
    assert len(joined) == (2 * 2 if name == "deepseek_v3" else 0)  # weights and scales, in two layers


class Collected:
    """An engine's names held against each bucket."""

    names: Names

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.largest = 0

    def begin_weight_update(self, version: int) -> None: ...

    def end_weight_update(self, version: int) -> None: ...

    def load_bucket(self, bucket: Any) -> None:
        self.names.take(bucket.tensors)
        content = torch.frombuffer(bytearray(Path(bucket.handle).read_bytes()), dtype=torch.uint8)
        self.largest = max(self.largest, bucket.nbytes)
        for piece in bucket.tensors:
            dtype: torch.dtype = getattr(torch, piece.dtype)
            nbytes = dtype.itemsize * torch.Size(piece.shape).numel()
            flat = content[piece.offset : piece.offset + nbytes].clone()
            self.tensors[piece.name] = flat.view(dtype).view(piece.shape)


def test_weights_that_are_joined_come_together_and_then_their_scales():
    context = context_of({"vocab_size": 512, **LATENT})
    shape = read_shape(model_config(context).to_dict())
    sent = as_engine_wants(weights_of(context).items(), context, shape, BlockFp8())
    pairs = [[n for n, _ in g.tensors] for g in in_groups(sent) if len(g.tensors) > 1]
    at = "model.layers.{}.self_attn.{}.{}"
    assert pairs == [
        [at.format(layer, part, kind) for part in ("q_a_proj", "kv_a_proj_with_mqa")]
        for layer in (0, 1)
        for kind in ("weight", "weight_scale_inv")
    ]


def test_a_checkpoint_written_for_an_engine_is_read_by_transformers(tmp_path: Path):
    pytest.importorskip("accelerate")  # transformers reads FP8 with it only
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    # Experts apart: transformers 5.24.0 wants a kernel for them.
    context = context_of({"vocab_size": 512, **ARCHITECTURES["qwen3"], "hidden_size": 256})
    write_checkpoint(context, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == SCHEME
    how = FineGrainedFP8Config(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=how)
    for (name, ours), (_, read) in zip(build_model(context).named_parameters(), loaded.named_parameters(), strict=True):
        assert (ours - read).norm() < 0.04 * ours.norm(), name


def test_a_scheme_for_another_type_is_not_written_into_a_checkpoint(tmp_path: Path):
    architecture = {"vocab_size": 512, **ARCHITECTURES["qwen3"], "quantization_config": dict(SCHEME)}
    write_checkpoint(context_of(architecture, rollout={"dtype": "bfloat16"}), tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


# -- the plan ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_plan_counts_what_an_update_sends(name: str):
    context = context_of({"vocab_size": 512, **ARCHITECTURES[name]})
    facts = model_config(context).to_dict()
    shape = read_shape(facts)
    sent = dict(as_engine_wants(weights_of(context).items(), context, shape, BlockFp8()))
    model = read_architecture(facts)
    for layer, weights in enumerate(layer.weights for layer in model.layers):
        planned = sum(weight.numel for weight in weights if is_in_fp8(weight))
        at = f"model.layers.{layer}."
        assert planned == sum(t.numel() for n, t in sent.items() if n.startswith(at) and t.itemsize == 1)
    buffers = sum(t.nbytes for n, t in sent.items() if n.endswith("correction_bias"))
    scales = sum(t.nbytes for n, t in sent.items() if n.endswith("scale_inv"))
    total = sum(t.nbytes for t in sent.values()) - buffers
    # The plan has a scale for a block's worth of elements; here many blocks are not full.
    assert 0 <= total - sizes_of(context.config, model).update_bytes <= scales


# -- what is said of a checkpoint -------------------------------------------------------------------


def test_modules_that_a_checkpoint_leaves_alone_come_as_they_are():
    fp8 = scheme_of(
        {**SCHEME, "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn", "mlp.gate", "kv_b_proj"]}
    )
    at = "model.layers.{}.{}.weight"
    assert not fp8.holds(at.format(0, "self_attn.o_proj"))
    assert fp8.holds(at.format(1, "self_attn.o_proj"))
    assert fp8.holds(at.format(0, "mlp.gate_proj"))  # its name only begins like the router's
    assert not fp8.holds(at.format(1, "self_attn.kv_b_proj"))
    assert not fp8.holds("lm_head.weight")


def test_the_release_of_minimax_m2_is_read():
    skipped = ["gate", "e_score_correction_bias", "lm_head"]
    fp8 = scheme_of({**SCHEME, "fmt": "float8_e4m3fn", "modules_to_not_convert": skipped})
    at = "model.layers.1.{}"
    for name in ("self_attn.q_proj", *(f"block_sparse_moe.experts.12.w{number}" for number in (1, 2, 3))):
        assert fp8.holds(f"{at.format(name)}.weight")
    for name in ("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias", "self_attn.q_norm.weight"):
        assert not fp8.holds(at.format(name))


def test_layers_beyond_the_first_ten_are_not_those_of_the_first():
    fp8 = scheme_of({**SCHEME, "ignored_layers": ["model.layers.1"]})
    assert not fp8.holds("model.layers.1.mlp.up_proj.weight")
    assert fp8.holds("model.layers.10.mlp.up_proj.weight")


FP8 = {"rollout": {"dtype": "fp8"}}
BF16_CHECKPOINT = {**FP8, "model": {"hf_checkpoint": "org/model"}}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str]] = {
    "fp4": ({"rollout": {"dtype": "fp4"}}, None, "no weight update brings the engines weights in fp4"),
    "int4": ({"rollout": {"dtype": "int4"}}, None, "no weight update brings the engines weights in int4"),
    "a scale for a tensor": (FP8, {"quant_method": "fp8"}, "weight_block_size = None"),
    "channels": (FP8, {"quant_method": "compressed-tensors"}, "quant_method = 'compressed-tensors'"),
    "another type of eight bits": (FP8, {**SCHEME, "fmt": "e5m2"}, "fmt = 'e5m2'"),
    "packed scales": (FP8, {**SCHEME, "scale_fmt": "ue8m0"}, "scale_fmt = 'ue8m0'"),
    "smaller blocks": (FP8, {**SCHEME, "weight_block_size": [32, 32]}, r"weight_block_size = \[32, 32\]"),
    "bfloat16 engines of an FP8 checkpoint": (
        {"rollout": {"dtype": "bfloat16"}, "model": {"hf_checkpoint": "org/model"}},
        dict(SCHEME),
        "the checkpoint is quantised",
    ),
    "an embedded trainer of a checkpoint in MXFP4": (
        {"rollout": {"dtype": "bfloat16"}, "model": {"hf_checkpoint": "org/model"}, "trainer": {"backend": "embedded"}},
        {"quant_method": "mxfp4"},
        r"the checkpoint is quantised \(mxfp4\)",
    ),
    "float32 of a checkpoint in MXFP4": (
        {"rollout": {"dtype": "float32"}, "model": {"hf_checkpoint": "org/model"}}, {"quant_method": "mxfp4"},
        r"the checkpoint is quantised \(mxfp4\)",
    ),
    "FP8 of a checkpoint in MXFP4": (BF16_CHECKPOINT, {"quant_method": "mxfp4"}, "quant_method = 'mxfp4'"),
    "experts in one tensor": (
        {**FP8, "model": {"architecture": {"model_type": "gpt_oss"}}}, None, "experts of gpt-oss lie in one tensor",
    ),
    "scales of a KV cache beside MXFP4": (
        {
            "rollout": {"dtype": "bfloat16"}, "model": {"hf_checkpoint": "org/model"},
            "sglang": {"kv_cache_dtype": "fp8_e4m3"},
        },
        {"quant_method": "mxfp4"},
        "loads nothing of an MXFP4 checkpoint, and no update brings scales of a KV cache",
    ),
    "SGLang's own": ({"sglang": {"quantization": "fp8"}}, None, "quantises what an engine loads, not what an update"),
    "torchao": ({"sglang": {"torchao_config": "fp8wo"}}, None, "quantises what an engine loads, not what an update"),
    "Blackwell": ({**FP8, "hardware": {"accelerator": "cuda", "name": "GB300"}}, None, "on GB300 SGLang rewrites FP8"),
    "Ampere": ({**FP8, "hardware": {"accelerator": "cuda", "name": "A100-40GB"}}, None, "for Marlin"),
    "Instinct": ({**FP8, "hardware": {"accelerator": "rocm", "name": "MI300X"}}, None, "on these GPUs"),
    "linear attention": (
        {**FP8, "model": {"architecture": {"model_type": "qwen3_next"}}}, None, "linear attention in FP8",
    ),
    "an embedded trainer": ({**FP8, "trainer": {"backend": "embedded"}}, None, "the embedded trainer does not"),
    "a draft that no update brings": (
        {**BF16_CHECKPOINT, "sglang": {"speculative_algorithm": "EAGLE"}}, None, "layers to speculate with",
    ),
    "scales of a KV cache that no update brings": (
        {**BF16_CHECKPOINT, "sglang": {"kv_cache_dtype": "fp8_e4m3"}}, None, "scales of a KV cache",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_engines_that_an_update_would_spoil_are_refused(name: str):
    facts, quantisation, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message) as caught:
        engine_scheme(LaunchConfig.model_validate({"trainer": {"backend": "megatron"}} | facts), quantisation)
    assert caught.value.fix
    assert caught.value.where


def test_what_the_hub_has_is_not_guessed_before_the_start(tmp_path: Path):
    facts: dict[str, Any] = {**FP8, "sglang": {"kv_cache_dtype": "fp8_e4m3"}, "model": {"hf_checkpoint": "org/model"}}
    assert refusal_of(LaunchConfig.model_validate(facts)) is None
    facts["model"] = {"hf_checkpoint": str(tmp_path)}
    (tmp_path / "config.json").write_text("{}")
    assert "scales of a KV cache" in str(refusal_of(LaunchConfig.model_validate(facts)))
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": dict(SCHEME)}))
    assert refusal_of(LaunchConfig.model_validate(facts)) is None
    (tmp_path / "config.json").write_text("not JSON")
    assert refusal_of(LaunchConfig.model_validate(facts)) is None


def test_the_doctor_says_it_before_the_start_and_a_plan_is_still_to_be_had(rllaunch: Any):
    words = ("doctor", "--model", "qwen3-0.6b", "--hardware", "B200", "--rollout-dtype", "fp8", "--json")
    for probe, level in (((), "error"), (("--no-probe",), "warning")):
        found = [f for f in rllaunch(*words, *probe).json()["findings"] if f["code"] == "RL513"]
        assert [f["level"] for f in found] == [level]
        assert found[0]["message"].startswith("on B200 SGLang rewrites FP8 weights after it has loaded them")
        assert any("rollout.dtype" in line and "--rollout-dtype" in line for line in found[0]["origins"])
    on_hopper = rllaunch(*[word.replace("B200", "H200") for word in words], "--no-probe").json()["findings"]
    assert not [f for f in on_hopper if f["code"] in ("RL345", "RL513")]


def test_a_remedy_is_none_that_would_be_refused_too(rllaunch: Any, tmp_path: Path):
    facts = {"model_type": "qwen3", "num_hidden_layers": 2, "hidden_size": 256, "vocab_size": 512}
    (tmp_path / "weights.safetensors").touch()

    def remedy(hardware: str, method: str, *words: str) -> tuple[list[str], str]:
        quantisation = SCHEME if method == "fp8" else {"quant_method": method}
        (tmp_path / "config.json").write_text(json.dumps({**facts, "quantization_config": quantisation}), "utf-8")
        answer = rllaunch("doctor", "--no-probe", "--model", str(tmp_path), "--hardware", hardware, *words, "--json")
        found = {f["code"]: f["fix"] for f in answer.json()["findings"]}
        return sorted(found.keys() & {"RL345", "RL513"}), found["RL513"]

    bf16 = ("--rollout-dtype", "bfloat16")
    assert remedy("H200", "fp8", *bf16) == (["RL513"], "--rollout-dtype fp8, or a checkpoint in bfloat16")
    assert remedy("B200", "fp8", *bf16) == remedy("H200", "awq", *bf16) == (["RL513"], "a checkpoint in bfloat16")
    assert remedy("B200", "fp8", "--rollout-dtype", "fp4")[1].startswith("--rollout-dtype bfloat16 (")
    # What the checkpoint says of itself is taken, and no layout is advised for engines that are refused anyway.
    assert remedy("B200", "fp8")[0] == ["RL513"]


def test_a_launch_that_train_refuses_is_not_called_sound_without_saying_so(rllaunch: Any):
    words = ("--model", "dsv4", "--hardware", "GB300")
    refused = "the configuration is sound, but `rllaunch train` refuses it (RL512, RL513)"
    assert refused in rllaunch("doctor", "--no-probe", *words).err
    assert rllaunch("train", "--dry-run", *words).err.endswith(f"dry run: nothing was started, {refused}\n")


def test_the_doctor_says_who_gave_an_engine_what_no_update_brings(rllaunch: Any):
    words = (
        "doctor",
        "--model",
        "qwen3-0.6b",
        "--hardware",
        "H200",
        "--sglang-quantization",
        "fp8",
        "--no-probe",
        "--json",
    )
    (found,) = [f for f in rllaunch(*words).json()["findings"] if f["code"] == "RL513"]
    assert found["origins"] == ['sglang.quantization = "fp8"   flag: --sglang-quantization fp8']
