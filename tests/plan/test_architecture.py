"""Every tensor of every architecture, against what transformers builds from the same facts on the meta device."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from architecture_facts import MODELS
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rllaunch.errors import ConfigError
from rllaunch.plan.architecture import KNOWN_MODEL_TYPES, Architecture, Layer, Weight, read_architecture

# Small models in which every width is another number, so that no two of them can be mistaken for each other.
BASE = {
    "vocab_size": 64, "hidden_size": 36, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10, "num_key_value_heads": 4,
    "q_lora_rank": 14, "head_dim": 4,
}  # fmt: skip
EXPERTS = {
    "moe_intermediate_size": 20, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1,
}  # fmt: skip
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 5, "linear_value_head_dim": 7,
}  # fmt: skip
QWEN_EXPERTS = {"num_experts": 6, "moe_intermediate_size": 20, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 22}
INDEXER = {"index_n_heads": 3, "index_head_dim": 9}
V4 = {
    **BASE, **EXPERTS, "num_hidden_layers": 5, "num_key_value_heads": 1, "head_dim": 16, "q_lora_rank": 14,
    "o_groups": 2, "o_lora_rank": 9, "hc_mult": 3, **INDEXER, "sliding_window": 11, "partial_rotary_factor": 0.25,
}  # fmt: skip
del V4["intermediate_size"]
NEMOTRON = {
    **BASE, **EXPERTS, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 22, "mamba_num_heads": 6, "mamba_head_dim": 5,
    "ssm_state_size": 7, "n_groups": 2,
}  # fmt: skip
del NEMOTRON["num_hidden_layers"]
INKLING = {
    **BASE, "num_hidden_layers": 7, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 7,
    "d_rel": 3, "rel_extent": 10, "sliding_window_size": 9, "moe_intermediate_size": 20, "n_routed_experts": 6,
    "n_shared_experts": 2, "num_experts_per_tok": 2,
}  # fmt: skip

SMALL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **BASE},
    "llama biased, tied": {
        "model_type": "llama", **BASE, "attention_bias": True, "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama without head_dim and KV heads": {
        "model_type": "llama", **BASE, "hidden_size": 40, "head_dim": None, "num_key_value_heads": None,
    },
    "qwen2": {"model_type": "qwen2", **BASE},
    "qwen2 with a window": {"model_type": "qwen2", **BASE, "use_sliding_window": True, "max_window_layers": 3},
    "qwen3": {"model_type": "qwen3", **BASE, "tie_word_embeddings": True},
    "qwen3 biased": {"model_type": "qwen3", **BASE, "attention_bias": True},
    "qwen3_moe": {"model_type": "qwen3_moe", **BASE, **QWEN_EXPERTS},
    "qwen3_moe with dense layers": {
        "model_type": "qwen3_moe", **BASE, **QWEN_EXPERTS, "mlp_only_layers": [1], "decoder_sparse_step": 2,
    },
    "glm4_moe": {"model_type": "glm4_moe", **BASE, **EXPERTS, "first_k_dense_replace": 1},
    "glm4_moe normed, biased": {
        "model_type": "glm4_moe", **BASE, **EXPERTS, "first_k_dense_replace": 2, "use_qk_norm": True,
        "attention_bias": True,
    },
    "gpt_oss": {"model_type": "gpt_oss", **BASE, "num_local_experts": 6, "num_experts_per_tok": 2},
    "gpt_oss unbiased": {
        "model_type": "gpt_oss", **BASE, "num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": False,
    },
    "minimax_m2": {"model_type": "minimax_m2", **BASE, "num_local_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **BASE, **LATENT, **EXPERTS, "first_k_dense_replace": 1},
    "deepseek_v3 biased, without query latent": {
        "model_type": "deepseek_v3", **BASE, **LATENT, **EXPERTS, "first_k_dense_replace": 0, "q_lora_rank": None,
        "attention_bias": True,
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32", **BASE, **LATENT, **EXPERTS, **INDEXER, "first_k_dense_replace": 2,
        "attention_bias": True,
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **BASE, **LATENT, **EXPERTS},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa", **BASE, **LATENT, **EXPERTS, **INDEXER, "first_k_dense_replace": 2},
    "glm_moe_dsa listed": {
        "model_type": "glm_moe_dsa", **BASE, **LATENT, **EXPERTS, **INDEXER,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "indexer_types": ["full", "full", "shared", "shared"],
    },
    "glm_moe_dsa by pattern": {
        "model_type": "glm_moe_dsa", **BASE, **LATENT, **EXPERTS, **INDEXER, "first_k_dense_replace": 2,
        "index_topk_pattern": "FSSF",
    },
    "glm_moe_dsa every third": {
        "model_type": "glm_moe_dsa", **BASE, **LATENT, **EXPERTS, **INDEXER, "first_k_dense_replace": 2,
        "index_topk_freq": 3, "index_skip_topk_offset": 1, "num_hidden_layers": 7,
    },
    "deepseek_v4": {"model_type": "deepseek_v4", **V4, "compress_ratios": [0, 4, 128, 4, 128, 4], "num_hash_layers": 2},
    "deepseek_v4 listed": {
        "model_type": "deepseek_v4", **V4, "num_hidden_layers": 2,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 32},
        "tie_word_embeddings": True,
    },
    "qwen3_next": {"model_type": "qwen3_next", **BASE, **DELTA_NET, **QWEN_EXPERTS, **SHARED},
    "qwen3_next with dense layers": {
        "model_type": "qwen3_next", **BASE, **DELTA_NET, **QWEN_EXPERTS, **SHARED, "mlp_only_layers": [0, 3],
        "full_attention_interval": 2, "attention_bias": True,
    },
    "qwen3_5_text": {"model_type": "qwen3_5_text", **BASE, **DELTA_NET, "tie_word_embeddings": True},
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text", **BASE, **DELTA_NET, **QWEN_EXPERTS, **SHARED},
    "nemotron_h": {"model_type": "nemotron_h", **NEMOTRON},
    "nemotron_h biased, with a latent": {
        "model_type": "nemotron_h", **NEMOTRON, "moe_latent_size": 11, "use_bias": True, "mlp_bias": True,
        "use_conv_bias": False, "tie_word_embeddings": True,
    },
    "inkling_text": {"model_type": "inkling_text", **INKLING},
    "inkling_text with dense layers": {
        "model_type": "inkling_text", **INKLING, "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 5,
        "local_layer_ids": [0, 4],
    },
    "inkling_text under the checkpoint's names": {
        "model_type": "inkling_text", **INKLING, "dense_mlp_idx": 1, "dense_intermediate_size": 50,
    },
}  # fmt: skip
# Names that transformers has no class of its own for, or only one that wraps a tower around the language model.
WRAPPERS = {"kimi_k2", "kimi_k25", "qwen3_5", "qwen3_5_moe", "inkling_mm_model"}


@cache
def built_small(name: str) -> PreTrainedModel:
    return build(SMALL[name])


def build(facts: dict[str, Any], device: str = "meta") -> PreTrainedModel:
    facts = dict(facts)
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


def expanded(architecture: Architecture) -> Counter[tuple[str, tuple[int, ...]]]:
    """Whole names and shapes, experts stacked as transformers stacks them."""
    parts = [(f"model.layers.{i}.", layer.weights) for i, layer in enumerate(architecture.layers)]
    parts += [("", architecture.embedding), ("", architecture.head)]
    return Counter((prefix + weight.name, stacked(weight)) for prefix, weights in parts for weight in weights)


def stacked(weight: Weight) -> tuple[int, ...]:
    return (weight.copies, *weight.shape) if weight.copies > 1 else weight.shape


def total(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def read_small(name: str) -> Architecture:
    return read_architecture(SMALL[name])


def layers_by_kind(architecture: Architecture) -> dict[str, Layer]:
    return {layer.kind: layer for layer in architecture.layers}


def test_every_model_type_is_built_small_and_most_are_counted_whole():
    assert {facts["model_type"] for facts in SMALL.values()} == set(KNOWN_MODEL_TYPES) - WRAPPERS
    assert {model.facts["model_type"] for model in MODELS.values()} == set(KNOWN_MODEL_TYPES) - WRAPPERS
    assert len(MODELS) == 35


@pytest.mark.parametrize("name", MODELS)
def test_a_released_model_has_the_parameters_counted_for_it(name: str):
    assert read_architecture(MODELS[name].facts).num_parameters == MODELS[name].parameters


@pytest.mark.parametrize("name", MODELS)
def test_a_released_model_has_the_parameters_transformers_builds(name: str):
    assert read_architecture(MODELS[name].facts).num_parameters == total(build(MODELS[name].facts))


@pytest.mark.parametrize("name", SMALL)
def test_every_tensor_has_the_name_and_shape_transformers_gives_it(name: str):
    built = built_small(name)
    assert expanded(read_small(name)) == Counter((n, tuple(p.shape)) for n, p in built.named_parameters())
    assert read_small(name).num_parameters == total(built)


@pytest.mark.parametrize("name", SMALL)
def test_tensors_are_cut_as_transformers_plans_to_cut_them(name: str):
    """Where its plan for tensor parallelism says nothing of a tensor, it leaves it whole for reasons of its own."""
    model, architecture = built_small(name), read_small(name)
    plan = {"lm_head": "colwise", **(model.config.base_model_tp_plan or {})}
    meaning = {"colwise": "column", "packed_colwise": "column", "rowwise": "row", "embedding_rowwise": "vocab"}
    compared = 0
    for key, how in plan.items():
        if how not in meaning:
            continue
        weights = architecture.embedding + architecture.head
        if key.startswith("layers.*."):
            weights = tuple({weight for layer in architecture.layers for weight in layer.weights})
        for weight in weights:
            module = weight.name.removeprefix("model.")
            bare = key.removeprefix("layers.*.")
            if module not in (bare, f"{bare}.weight"):
                continue
            assert weight.split == ("vocab" if bare == "lm_head" else meaning[how]), weight.name
            compared += 1
    # gpt-oss plans only embedding and head, everything else it spreads by experts.
    assert compared >= (2 if architecture.model_type == "gpt_oss" else 3 - architecture.tied)


@pytest.mark.parametrize("name", SMALL)
def test_what_every_token_needs_whole_is_not_cut(name: str):
    for layer in read_small(name).layers:
        for weight in layer.weights:
            whole = ("layernorm.weight", "mlp.gate.weight", "router.weight", "q_a_proj.weight", "with_mqa.weight")
            if weight.name.endswith(whole) or "indexer" in weight.name or "_hc." in weight.name:
                assert weight.split == "none", weight.name
            if weight.split in ("column", "row") and not weight.is_expert:
                assert "norm" not in weight.name or weight.name == "mixer.norm.weight"


def test_deepseek_v4_is_cut_by_heads_and_groups_and_keeps_its_one_kv_head_whole():
    layer = layers_by_kind(read_small("deepseek_v4"))["compressed_sparse_attention+moe"]
    cut = {weight.name: weight.split for weight in layer.weights if weight.split != "none" and not weight.is_expert}
    assert cut == {
        "self_attn.sinks": "column", "self_attn.q_b_proj.weight": "column", "self_attn.o_a_proj.weight": "column",
        "self_attn.o_b_proj.weight": "row", "mlp.shared_experts.gate_proj.weight": "column",
        "mlp.shared_experts.up_proj.weight": "column", "mlp.shared_experts.down_proj.weight": "row",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "module"), [("qwen3_next", "linear_attn"), ("qwen3_5_text", "linear_attn"), ("nemotron_h", "mixer")])  # fmt: skip
def test_a_linear_layer_is_cut_by_its_heads(name: str, module: str):
    weights = {w.name: w.split for w in read_small(name).layers[0].weights if w.name.startswith(f"{module}.")}
    assert weights.pop(f"{module}.out_proj.weight") == "row"
    assert weights.pop(f"{module}.norm.weight") == ("column" if module == "mixer" else "none")
    assert set(weights.values()) == {"column"}


def test_a_bias_is_cut_with_the_outputs_it_belongs_to():
    cut = {w.name: w.split for w in read_small("gpt_oss").layers[0].weights if w.name.endswith(("bias", "sinks"))}
    assert cut == {
        "self_attn.sinks": "column", "self_attn.q_proj.bias": "column", "self_attn.k_proj.bias": "column",
        "self_attn.v_proj.bias": "column", "self_attn.o_proj.bias": "none", "mlp.router.bias": "none",
        "mlp.experts.gate_up_proj_bias": "column", "mlp.experts.down_proj_bias": "none",
    }  # fmt: skip


def test_experts_are_the_routed_ones_and_know_their_number():
    layer = read_small("deepseek_v3").layers[-1]
    assert {w.name: (w.copies, w.shape, w.split) for w in layer.weights if w.is_expert} == {
        "mlp.experts.gate_up_proj": (6, (40, 36), "column"),
        "mlp.experts.down_proj": (6, (36, 20), "row"),
    }
    shared = {w.name: w.is_expert for w in layer.weights if "shared" in w.name}
    assert shared == dict.fromkeys((f"mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")), False)


def test_layers_of_a_kind_are_one_object():
    layers = read_architecture(MODELS["deepseek-v4-flash"].facts).layers
    assert len(layers) == 43
    assert Counter(layer.kind for layer in layers) == {
        "sliding_attention+hash_moe": 2, "compressed_sparse_attention+hash_moe": 1,
        "heavily_compressed_attention+moe": 20, "compressed_sparse_attention+moe": 20,
    }  # fmt: skip
    assert len({id(layer) for layer in layers}) == 4


def test_a_wrapped_language_model_is_the_language_model():
    text = SMALL["qwen3_5_text"]
    outer = {"model_type": "qwen3_5", "tie_word_embeddings": False, "vision_config": {"depth": 3}}
    assert read_architecture({**outer, "text_config": text}) == read_small("qwen3_5_text")
    untied = {**text, "tie_word_embeddings": None}
    assert not read_architecture({**outer, "text_config": untied}).tied
    assert read_architecture({**outer, "text_config": untied, "tie_word_embeddings": True}).tied
    kimi = {"model_type": "kimi_k25", "text_config": {**SMALL["deepseek_v3"], "model_type": "kimi_k2"}}
    assert read_architecture(kimi).layers == read_small("deepseek_v3").layers


def test_zero_and_null_both_mean_no_query_latent():
    facts = SMALL["deepseek_v3 biased, without query latent"]
    assert read_architecture({**facts, "q_lora_rank": 0}) == read_architecture(facts)


# In billions, as published with each model.
@pytest.mark.parametrize(
    ("name", "billions"),
    [("deepseek-v3", 37), ("qwen3-235b-a22b", 22), ("qwen3-30b-a3b", 3.3), ("kimi-k2", 32), ("inkling", 41), ("glm-5", 40)],
)  # fmt: skip
def test_active_parameters_are_about_those_published(name: str, billions: float):
    assert read_architecture(MODELS[name].facts).num_active_parameters == pytest.approx(billions * 1e9, rel=0.05)


def test_active_parameters_of_a_dense_model_are_all():
    dense = read_architecture(MODELS["llama3.1-8b"].facts)
    assert dense.num_active_parameters == dense.num_parameters


def test_active_parameters_count_two_of_six_experts():
    architecture = read_small("qwen3_moe")
    experts = 4 * 6 * 3 * 36 * 20
    assert architecture.num_active_parameters == architecture.num_parameters - experts + experts // 3


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss", "glm4_moe", "minimax_m2", "qwen3_next", "nemotron_h", "inkling_text"])  # fmt: skip
def test_a_token_takes_the_kv_cache_transformers_fills_for_it(name: str):
    tokens = 6  # fewer than any window
    filled = build(SMALL[name], "cpu")(torch.ones(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    for layer, cached in zip(read_small(name).layers, filled.layers, strict=False):
        keys = getattr(cached, "keys", None)
        elements = 0 if keys is None else keys.numel() + cached.values.numel()
        assert elements == tokens * layer.kv_elements_per_token, layer.kind
        if layer.kv_elements_per_token:
            assert keys.shape[1] == layer.kv_heads


def test_a_latent_is_cached_once_and_cannot_be_spread():
    layer = read_architecture(MODELS["deepseek-v3"].facts).layers[0]
    assert (layer.kv_elements_per_token, layer.kv_heads) == (512 + 64, 1)
    indexed = read_architecture(MODELS["glm-5.2"].facts).layers
    assert Counter(layer.kv_elements_per_token for layer in indexed) == {512 + 64 + 128: 21, 512 + 64: 57}


def test_compressed_attention_takes_the_entries_transformers_keeps():
    facts, tokens = {**SMALL["deepseek_v4"], "sliding_window": 12}, 256
    filled = build(facts, "cpu")(torch.ones(1, tokens, dtype=torch.long), use_cache=True).past_key_values
    for layer, cached in zip(read_architecture(facts).layers, filled.layers, strict=True):
        entries = sum(e.numel() for e in getattr(cached, "compressed_kv", {}).values())
        # Rounded up to whole elements a token: 25 elements by 4 tokens, 16 by 128.
        assert -(-entries // tokens) == layer.kv_elements_per_token, layer.kind
        overlap = [s for o in ("overlap_kv", "overlap_gate") for s in getattr(cached, o, {}).values()]
        kept = sum(state.numel() for state in overlap)
        rate = getattr(cached, "compress_rate", 0)
        open_block = 2 * rate * {0: 0, 4: 2 * (16 + 9), 128: 16}[rate]
        assert layer.state_elements == 12 * 16 + kept + open_block, layer.kind


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "nemotron_h"])
def test_a_linear_layer_keeps_the_state_transformers_keeps(name: str):
    filled = build(SMALL[name], "cpu")(torch.ones(1, 9, dtype=torch.long), use_cache=True).past_key_values
    layer, cached = read_small(name).layers[0], filled.layers[0]
    recurrent, conv = state_of(cached.recurrent_states), state_of(cached.conv_states)
    # transformers keeps as many inputs as the kernel is long, engines those before the current token.
    inputs_before = conv.numel() // conv.shape[-1] * 3
    assert layer.state_elements == recurrent.numel() + inputs_before


def test_short_convolutions_keep_the_inputs_transformers_keeps():
    filled = build(SMALL["inkling_text"], "cpu")(torch.ones(1, 9, dtype=torch.long), use_cache=True).past_key_values
    for layer, cached in zip(read_small("inkling_text").layers, filled.layers, strict=True):
        states = cached.conv_states.values() if isinstance(cached.conv_states, dict) else cached.conv_states
        assert len(states) == 4
        assert layer.state_elements == sum(s.numel() // s.shape[-1] * 3 for s in states)


def state_of(states: Any) -> torch.Tensor:
    """Of the one state that a layer has, however the cache wraps it."""
    while not isinstance(states, torch.Tensor):
        (states,) = states.values() if isinstance(states, dict) else states
    return states


def test_an_mtp_layer_is_a_decoder_layer_behind_a_projection_of_two_hidden_states():
    architecture = read_architecture(MODELS["deepseek-v3"].facts)
    (mtp,) = architecture.mtp
    # The checkpoint's MTP module is 11.5 B parameters of its own: README_WEIGHTS.md of deepseek-ai/DeepSeek-V3.
    assert mtp.num_parameters == architecture.layers[-1].num_parameters + 2 * 7168**2 + 3 * 7168
    assert mtp.num_parameters == pytest.approx(11.5e9, rel=0.01)
    assert mtp.kind == "mtp+latent_attention+moe"


def test_mtp_layers_are_counted_from_the_fact_or_the_class_default():
    def number(name: str, **facts: Any) -> int:
        return len(read_architecture({**SMALL[name], **facts}).mtp)

    assert number("deepseek_v3") == AutoConfig.for_model("deepseek_v3").num_nextn_predict_layers == 1
    assert number("deepseek_v3", num_nextn_predict_layers=0) == 0
    assert number("qwen3_5_text") == 0
    assert number("qwen3_5_text", mtp_num_hidden_layers=2) == 2
    assert number("inkling_text", num_mtp_layers=3) == 3
    listed = read_architecture({**SMALL["inkling_text"], "num_mtp_layers": 3, "mtp_local_layer_ids": [1]}).mtp
    config = AutoConfig.for_model("inkling_text", num_mtp_layers=3, mtp_local_layer_ids=[1])
    named = {"hybrid": "mtp+full_attention+dense", "hybrid_sliding": "mtp+sliding_attention+dense"}
    assert [layer.kind for layer in listed] == [named[kind] for kind in config.mtp_layer_types]
    (joined,) = read_architecture({**SMALL["nemotron_h"], "num_nextn_predict_layers": 1}).mtp
    assert joined.kind == "mtp+full_attention+moe"


def test_the_largest_model_is_read_in_five_milliseconds():
    facts = MODELS["deepseek-v4-pro"].facts
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        assert read_architecture(facts).num_parameters == 1572997179491
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.005


def test_counting_imports_no_torch_and_no_transformers():
    code = "import sys, rllaunch.plan.architecture; print({'torch', 'transformers', 'numpy'} & {*sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "set()\n"


TAKE_IT = "hint: take it from the model's config.json into [facts.architecture] of its profile"


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({}, f"error: the architecture lacks the fact 'model_type'\n  new.toml:7\n{TAKE_IT}"),
        (
            {"model_type": "qwen3moe"},
            "error: unknown model_type 'qwen3moe'\n  new.toml:7\nhint: did you mean 'qwen3_moe'?",
        ),
        (
            {"model_type": "mixtral"},
            "error: unknown model_type 'mixtral'\n  new.toml:7\nhint: known: " + ", ".join(sorted(KNOWN_MODEL_TYPES)),
        ),
        (
            {**SMALL["qwen3_moe"], "moe_intermediate_size": None},
            f"error: the architecture of model_type 'qwen3_moe' lacks the fact 'moe_intermediate_size'\n  new.toml:7\n{TAKE_IT}",
        ),
        (
            {k: v for k, v in SMALL["deepseek_v3"].items() if k != "q_lora_rank"},
            f"error: the architecture of model_type 'deepseek_v3' lacks the fact 'q_lora_rank'\n  new.toml:7\n{TAKE_IT}; 0 for null",
        ),
        (
            {**SMALL["qwen3"], "hidden_size": "1024"},
            f"error: hidden_size = '1024' is not a whole number of at least 1\n  new.toml:7\n{TAKE_IT}",
        ),
        (
            {**SMALL["qwen3"], "tie_word_embeddings": 1},
            f"error: tie_word_embeddings = 1 is neither true nor false\n  new.toml:7\n{TAKE_IT}",
        ),
        (
            {**SMALL["gpt_oss"], "layer_types": ["full_attention"] * 3},
            f"error: layer_types has 3 entries for 4 layers\n  new.toml:7\n{TAKE_IT}",
        ),
        (
            {**SMALL["gpt_oss"], "layer_types": ["full_attention"] * 3 + ["mamba"]},
            "error: layer_types holds 'mamba'\n  new.toml:7\nhint: known: full_attention, sliding_attention",
        ),
        (
            {**SMALL["deepseek_v4"], "compress_ratios": None},
            f"error: the architecture of model_type 'deepseek_v4' lacks the fact 'compress_ratios'\n  new.toml:7\n{TAKE_IT}",
        ),
        (
            {**SMALL["deepseek_v4"], "compress_ratios": [0, 4, 8, 4, 128]},
            "error: compress_ratios holds 8\n  new.toml:7\nhint: known: 0, 4, 128",
        ),
        (
            {**SMALL["deepseek_v4"], "compress_rates": {"heavily_compressed_attention": 0}},
            "error: compress_rates = {'compressed_sparse_attention': 4, 'heavily_compressed_attention': 0} are not whole"
            f" numbers of at least 1\n  new.toml:7\n{TAKE_IT}",
        ),
        (
            {**SMALL["nemotron_h"], "layers_block_type": None},
            f"error: the architecture of model_type 'nemotron_h' lacks the fact 'layers_block_type'\n  new.toml:7\n{TAKE_IT}",
        ),
        (
            {**SMALL["glm_moe_dsa by pattern"], "index_topk_pattern": "FSX"},
            f"error: index_topk_pattern = 'FSX' is not an F or S for each of 4 layers\n  new.toml:7\n{TAKE_IT}",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_named(facts: dict[str, Any], text: str):
    with pytest.raises(ConfigError) as caught:
        read_architecture(facts, "new.toml:7")
    assert str(caught.value) == text
