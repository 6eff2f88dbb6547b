"""The architecture of each shipped model, counted by transformers on the meta device."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Any

import pytest

COMPRESS_RATIOS = [0, 0, *[4, 128] * 20, 4]
ATTENTION = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def architecture_of(name: str) -> dict[str, Any]:
    text = (files("rllaunch_profiles") / "models" / f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["facts"]["architecture"]


def hf_config(architecture: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    options = dict(architecture)
    return AutoConfig.for_model(options.pop("model_type"), **options)


def count_parameters(architecture: dict[str, Any]) -> int:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(hf_config(architecture))
    return sum(parameter.numel() for parameter in model.parameters())


def test_tiny_has_about_76_thousand_parameters_with_a_vocabulary_of_14():
    assert count_parameters(architecture_of("tiny") | {"vocab_size": 14}) == 75_904


def test_qwen3_has_the_parameters_of_its_checkpoint():
    assert count_parameters(architecture_of("qwen3-0.6b")) == 596_049_920


def test_deepseek_v4_flash_has_its_284_billion_parameters():
    assert count_parameters(architecture_of("dsv4")) == 284_332_230_231


def test_deepseek_v4_flash_follows_the_compression_ratios_of_its_launcher():
    architecture = architecture_of("dsv4")
    assert architecture["layer_types"] == [ATTENTION[ratio] for ratio in COMPRESS_RATIOS]
    assert architecture["mlp_layer_types"] == ["hash_moe"] * 3 + ["moe"] * 40


@pytest.mark.parametrize("name", ["tiny", "qwen3-0.6b", "dsv4"])
def test_transformers_knows_every_name_and_keeps_every_value(name):
    """A misspelt key would be stored beside the others and change nothing: each must be there anyway."""
    architecture = architecture_of(name)
    known = set(hf_config({"model_type": architecture["model_type"]}).to_dict()) | {"rope_theta"}
    assert set(architecture) <= known
    config = hf_config(architecture)
    for key, value in architecture.items():
        if not key.startswith("rope_"):
            assert getattr(config, key) == value, key


def test_rope_is_that_of_the_sources():
    assert hf_config(architecture_of("qwen3-0.6b")).rope_parameters["rope_theta"] == 1_000_000
    rope = hf_config(architecture_of("dsv4")).rope_parameters
    assert (rope["main"]["rope_theta"], rope["compress"]["rope_theta"]) == (10_000, 160_000)
    assert (rope["compress"]["rope_type"], rope["compress"]["factor"]) == ("yarn", 16)
