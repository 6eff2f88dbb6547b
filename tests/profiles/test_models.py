"""Every shipped model, as it resolves: transformers builds it, with the parameters its checkpoint has."""

from __future__ import annotations

from typing import Any

import pytest

from rllaunch.resolve.schema import LaunchConfig

# Parameters of the causal LM: without MTP layers, vision and audio towers, the router's correction biases and id-to-expert
# tables. From the sizes in the launchers of radixark/miles@31f1ca9 and THUDM/slime@624b824 (gpt-oss-120b: the defaults of
# transformers; Llama 1B, 70B, 405B: pytorch/torchtune@bd2a0fc), by a closed form and by transformers 5.23.0, which agree.
PARAMETERS = {
    "deepseek-v3": 671_026_404_352,
    "deepseek-v3.2": 671_877_929_216,
    "deepseek-v4-pro": 1_572_997_179_491,
    "dsv4": 284_332_230_231,
    "glm-4.5": 352_797_814_784,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.7-flash": 29_943_390_976,
    "glm-5": 743_911_199_232,
    "glm-5.2": 743_377_000_704,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "inkling": 975_340_270_146,
    "joyai-llm-flash": 48_942_532_608,
    "kimi-k2": 1_026_408_209_408,
    "llama3.1-405b": 405_853_388_800,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "minimax-m2.5": 228_689_748_992,
    "moonlight-16b-a3b": 15_960_108_544,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-next-80b-a3b": 79_674_391_296,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.8-27b": 26_895_998_464,
    # Its vocabulary comes with the task: here ten digits, a colon and three special tokens.
    "tiny": 75_904,
}

# Billions, as published: vllm-project/recipes@8959cf6 models/, radixark/miles@31f1ca9 docs/models/ and THUDM/slime@624b824
# scripts/models/minimax-m2.sh. Rounded there, and some include an MTP layer.
PUBLISHED = {
    "deepseek-v3": 671,
    "deepseek-v3.2": 671,
    "deepseek-v4-pro": 1600,
    "glm-4.5": 358,
    "glm-5": 744,
    "glm-5.2": 744,
    "gpt-oss-20b": 21,
    "inkling": 975,
    "kimi-k2": 1000,
    "llama3.2-1b": 1.23,
    "llama3.2-3b": 3.21,
    "minimax-m2.5": 229,
    "qwen3-235b-a22b": 235,
    "qwen3-30b-a3b": 30.5,
    "qwen3.8-27b": 27,
}

# Those the megatron trainer builds.
TRAINED = {
    "deepseek-v3", "deepseek-v4-pro", "dsv4", "glm-4.5", "glm-4.5-air", "glm-4.7-flash", "gpt-oss-120b", "gpt-oss-20b", "joyai-llm-flash", "kimi-k2",
    "llama3.1-405b", "llama3.1-70b", "llama3.1-8b", "llama3.2-1b", "llama3.2-3b", "minimax-m2.5", "moonlight-16b-a3b", "qwen2.5-0.5b", "qwen3-0.6b",
    "qwen3-1.7b", "qwen3-14b", "qwen3-235b-a22b", "qwen3-30b-a3b", "qwen3-32b", "qwen3-4b", "qwen3-8b", "qwen3-next-80b-a3b",
    "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.8-27b", "tiny",
}  # fmt: skip

# Read by the models of transformers, or stated here, though not every config class declares them.
UNDECLARED = {"head_dim", "num_experts", "num_hidden_layers", "num_nextn_predict_layers", "tie_word_embeddings"}
ROPE = {"rope_theta", "partial_rotary_factor", "rope_parameters"}
"""Rewritten by transformers into its own `rope_parameters`."""


def resolved(rllaunch: Any, name: str) -> LaunchConfig:
    hardware = "cpu" if name == "tiny" else "H200"
    result = rllaunch("resolve", "--model", name, "--hardware", hardware, "--hf-checkpoint", "", "--json")
    assert result.code == 0, result.err
    return LaunchConfig(**result.json()["config"])


def hf_config(config: LaunchConfig) -> Any:
    """As the embedded backend makes it where there is no checkpoint."""
    from rllaunch.backends.base import LaunchContext
    from rllaunch.backends.embedded.model import model_config
    from rllaunch.plan.handoff import HandoffOptions

    vocabulary = "0123456789:" if config.model.vocabulary else ""
    return model_config(LaunchContext(config, HandoffOptions(), vocabulary, 8, 1))


def on_meta(config: Any) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def count_parameters(config: Any) -> int:
    return sum(parameter.numel() for parameter in on_meta(config).parameters())


def test_every_shipped_model_is_in_the_table(rllaunch: Any):
    listed = rllaunch("profiles", "list", "--kind", "model", "--json").json()
    assert sorted(p["name"] for p in listed if p["plugin"].startswith("rllaunch ")) == sorted(PARAMETERS)
    assert len(PARAMETERS) == 36


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_resolves_and_has_the_parameters_of_its_checkpoint(rllaunch: Any, name: str):
    assert count_parameters(hf_config(resolved(rllaunch, name))) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_transformers_keeps_every_fact_under_its_name(rllaunch: Any, name: str):
    """A misspelt key would be stored beside the others and change nothing: the class must have it by itself."""
    from transformers import AutoConfig

    config = resolved(rllaunch, name)
    default, made = AutoConfig.for_model(config.model.architecture["model_type"]), hf_config(config)
    for key, value in config.model.architecture.items():
        assert key in UNDECLARED | ROPE or hasattr(default, key), key
        if key not in ROPE and key != "vocab_size":
            assert getattr(made, key) == (None if key == "q_lora_rank" and value == 0 else value), key


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_megatron_trainer_has_every_tensor_of_a_model_or_refuses_it(rllaunch: Any, name: str):
    from rllaunch.backends.megatron.shape import read_shape, refusal_of
    from rllaunch.backends.megatron.weights import entries, unstack_experts

    config = resolved(rllaunch, name)
    assert (refusal_of(config.model.architecture) is None) == (name in TRAINED)
    if name in TRAINED:
        shape = read_shape(hf_config(config).to_dict())
        names = {source for entry in entries(shape) for source in entry.sources}
        module = {n for n, _ in unstack_experts(on_meta(hf_config(config)).state_dict().items(), shape)}
        assert names == module - ({"lm_head.weight"} if shape.is_tied else set())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_is_about_as_large_as_published(name: str):
    assert PARAMETERS[name] / 1e9 == pytest.approx(PUBLISHED[name], rel=0.03)


def test_deepseek_v4_pro_follows_the_compression_ratios_of_its_launcher(rllaunch: Any):
    """radixark/miles@31f1ca9 scripts/models/deepseek-v4-pro.py; the 62nd is the MTP layer's."""
    attention = {4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    architecture = resolved(rllaunch, "deepseek-v4-pro").model.architecture
    assert architecture["layer_types"] == [attention[ratio] for ratio in [128, 128, *[4, 128] * 29, 4]]
    assert architecture["mlp_layer_types"] == ["hash_moe"] * 3 + ["moe"] * 58


def test_glm_5_2_computes_its_index_in_the_layers_of_its_launcher(rllaunch: Any):
    """Layers 1, 2, 3, 7, 11, …, 75, counted from 1: THUDM/slime@624b824 scripts/models/glm5.2-744B-A40B.sh."""
    types = resolved(rllaunch, "glm-5.2").model.architecture["indexer_types"]
    assert [n for n, kind in enumerate(types, 1) if kind == "full"] == [1, 2, *range(3, 76, 4)]
    assert len(types) == 78


def test_qwen3_8_27b_has_the_architecture_of_qwen3_5_27b_and_a_checkpoint_of_its_own(rllaunch: Any):
    old, new = (
        rllaunch("resolve", "--model", f"Qwen/Qwen{generation}-27B", "--hardware", "H200", "--json").json()["config"]
        for generation in ("3.5", "3.8")
    )
    assert old["model"]["architecture"] == new["model"]["architecture"]
    assert (old["model"]["hf_checkpoint"], new["model"]["hf_checkpoint"]) == ("Qwen/Qwen3.5-27B", "Qwen/Qwen3.8-27B")


@pytest.mark.parametrize("name", ["dsv4", "deepseek-v4-pro"])
def test_engines_of_deepseek_v4_keep_a_mirror_and_load_fp8(rllaunch: Any, name: str):
    config = resolved(rllaunch, name)
    assert (config.handoff.engine_weights, config.rollout.dtype) == ("mirror", "fp8")
