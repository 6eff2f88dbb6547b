"""A rehearsal's model is the launch's own architecture in small: transformers builds it, and no kind of layer is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rllaunch.errors import ConfigError
from rllaunch.plugins import load_plugins
from rllaunch.run.rehearsal import shrink

VOCAB_SIZE = 100

# The layers and facts that the released configs name beyond their class's defaults; sizes are the classes' own, which are
# those of the released models.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2": {"model_type": "qwen2", "num_hidden_layers": 24, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
    "llama": {
        "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8,
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "qwen3_moe": {"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128},
    "qwen3_moe with dense layers": {"model_type": "qwen3_moe", "num_hidden_layers": 8, "mlp_only_layers": [0, 5]},
    "deepseek_v3": {
        "model_type": "deepseek_v3", "head_dim": 192,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
    },
    "deepseek_v3 without a query latent": {
        "model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    },
    "deepseek_v32": {"model_type": "deepseek_v32"},
    "deepseek_v4 as the ratios say it": {
        "model_type": "deepseek_v4", "num_hidden_layers": 6, "compress_ratios": [0, 0, 4, 128, 4, 128], "num_hash_layers": 3,
        "quantization_config": {"quant_method": "fp8"},
    },
    "glm4_moe": {"model_type": "glm4_moe", "head_dim": 128, "use_qk_norm": True, "first_k_dense_replace": 3},
    "glm4_moe_lite": {"model_type": "glm4_moe_lite"},
    "glm_moe_dsa": {"model_type": "glm_moe_dsa"},
    "glm_moe_dsa with shared indexers": {"model_type": "glm_moe_dsa", "index_topk_freq": 4, "index_skip_topk_offset": 3},
    "gpt_oss": {"model_type": "gpt_oss"},
    "qwen3_next": {"model_type": "qwen3_next", "full_attention_interval": 4},
    "qwen3_5_text": {
        "model_type": "qwen3_5_text", "linear_num_value_heads": 48,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "mrope_interleaved": True, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
        },
    },
    "qwen3_5_moe_text": {"model_type": "qwen3_5_moe_text"},
    "qwen3_5 with its vision tower": {"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 64}},
    "minimax_m2": {"model_type": "minimax_m2"},
    "nemotron_h": {"model_type": "nemotron_h", "hybrid_override_pattern": "MEMEM*EMEMEM*EME", "n_routed_experts": 128},
    "inkling_text": {"model_type": "inkling_text"},
}  # fmt: skip
STORE = load_plugins().profiles()
PROFILES = [profile.name for profile in STORE.of_kind("model")]


def facts_of(name: str) -> dict[str, Any]:
    """The architecture of a shipped profile; TOML has no null, so 0 says that MLA has no query latent."""
    prefix = "model.architecture."
    values = STORE.get("model", name, "this test").values
    facts = {key.removeprefix(prefix): v.value for key, v in values.items() if key.startswith(prefix)}
    return facts | ({"q_lora_rank": None} if facts.get("q_lora_rank") == 0 else {})


ARCHITECTURES = MODELS | {p: facts_of(p) for p in PROFILES if p != "tiny"}


def config_of(facts: dict[str, Any]) -> Any:
    return AutoConfig.for_model(**facts).get_text_config(decoder=True)


def mixers_of(facts: dict[str, Any]) -> list[tuple[tuple[str, str], ...]]:
    """For each layer of the built model its modules, by name and class: what the layer is, as transformers made it."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**facts))
    layers = next(m for name, m in model.named_modules() if name.endswith("layers"))
    # Experts that are modules of their own are numbered; one stands for all.
    return [
        tuple((n, type(m).__name__) for n, m in layer.named_modules() if not any(p.isdigit() for p in n.split(".")))
        for layer in layers
    ]


@pytest.mark.parametrize("facts", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_a_shrunk_model_learns_on_this_machine_and_is_tiny(facts: dict[str, Any]):
    small = shrink(facts, VOCAB_SIZE)
    assert small["model_type"] in (facts["model_type"], f"{facts['model_type']}_text")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**small), dtype=torch.float32)
    assert model.config.vocab_size == VOCAB_SIZE
    assert 10_000 < sum(p.numel() for p in model.parameters()) < 200_000
    assert 2 <= len(mixers_of(small)) <= 4
    assert {getattr(model.config, n, None) or 0 for n in ("num_nextn_predict_layers", "num_mtp_layers")} == {0}
    ids = torch.randint(3, VOCAB_SIZE, (2, 24))
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]


@pytest.mark.parametrize("facts", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_kind_of_layer_is_kept(facts: dict[str, Any]):
    full = config_of(facts)
    small = config_of(shrink(facts, VOCAB_SIZE))
    for name in ("layer_types", "mlp_layer_types", "indexer_types"):
        assert set(getattr(full, name, None) or ()) == set(getattr(small, name, None) or ())
    # Beyond what the configs say: every module that some layer of the full model has, some layer of the small one has.
    assert set().union(*mixers_of(shrink(facts, VOCAB_SIZE))) == set().union(*mixers_of(whole(facts)))


def whole(facts: dict[str, Any]) -> dict[str, Any]:
    """The full model, of a text model's own type where the facts are those of several towers."""
    config = config_of(facts)
    return {**config.to_dict(), "model_type": config.model_type} if "text_config" in facts else facts


def test_deepseek_v4_keeps_its_three_attentions_and_both_routers_in_three_layers():
    small = shrink(facts_of("dsv4"), VOCAB_SIZE)
    assert small["layer_types"] == ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    assert small["mlp_layer_types"] == ["hash_moe", "hash_moe", "moe"]
    assert small["scoring_func"] == "sqrtsoftplus"  # what is no size is the launch's own
    assert small["rope_parameters"]["rope_type"] == "yarn"


def test_a_model_that_is_tiny_already_keeps_its_layers():
    tiny = {"model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    small = shrink(tiny, VOCAB_SIZE)
    assert {k: small[k] for k in tiny} == tiny


def test_the_facts_given_are_not_changed():
    facts = facts_of("dsv4")
    shrink(facts, VOCAB_SIZE)
    assert facts == facts_of("dsv4")


@pytest.mark.parametrize("facts", [{}, {"hidden_size": 64}, {"model_type": "no_such_model"}])
def test_facts_without_a_known_architecture_are_refused(facts: dict[str, Any]):
    with pytest.raises(ConfigError, match=r"model_type|transformers cannot make"):
        shrink(facts, VOCAB_SIZE)
