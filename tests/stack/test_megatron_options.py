"""What a launch means to the installed Megatron-core."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from stack_rig import ARCHITECTURES, GPT_OSS, LLAMA, LLAMA3_ROPE, QWEN3_MOE, YARN, make_context

from rllaunch.backends.embedded.model import model_config
from rllaunch.backends.megatron import options
from rllaunch.backends.megatron.option_names import ALIASES, FOREIGN, OWN
from rllaunch.backends.megatron.options import MegatronConfigs, known_options, megatron_configs
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.errors import ConfigError

pytestmark = pytest.mark.stack

CELLS = Path(__file__).parents[2] / "profiles" / "rllaunch_profiles" / "cells"


def configs(architecture: dict[str, Any] = LLAMA, **sections: dict[str, Any]) -> MegatronConfigs:
    context = make_context(architecture, **sections)
    return megatron_configs(context.config, read_shape(model_config(context).to_dict()), on_cpu=True)


def test_an_option_reaches_each_dataclass_that_has_it() -> None:
    made = configs(megatron={"use_distributed_optimizer": False, "window_size": None, "attention_backend": "unfused"})
    assert (made.ddp.use_distributed_optimizer, made.optimizer.use_distributed_optimizer) == (False, False)
    assert made.transformer.attention_backend.name == "unfused"


def test_sections_and_architecture_decide_the_rest() -> None:
    trainer = {"lr": 3e-4, "clip_grad": 0.5, "adam_beta2": 0.98, "recompute_granularity": "full"}
    made = configs(QWEN3_MOE, trainer=trainer)
    assert (made.optimizer.lr, made.optimizer.clip_grad, made.optimizer.adam_beta2) == (3e-4, 0.5, 0.98)
    config = made.transformer
    assert (config.num_moe_experts, config.moe_router_topk, config.num_query_groups, config.kv_channels) == (4, 2, 2, 8)
    assert (config.recompute_granularity, config.recompute_method) == ("full", "uniform")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("moe_router_dtyp", "fp32", "did you mean 'moe_router_dtype'?"),
        ("hidden_size", 64, "hidden_size = 64 is decided elsewhere: it follows as 32"),
        ("moe_aux_loss_coeff", 0.01, "moe_aux_loss_coeff = 0.01 is not served"),
        ("attention_backend", "flsh", "did you mean 'flash'?"),
        ("transformer_impl", "transformer_engine", "Transformer Engine is not installed"),
        ("cp_comm_type", "p2p", "local layers gather keys and values"),
        ("hybrid_context_parallel", True, "every sample is shared by all context-parallel ranks"),
        ("recompute_granularity", "some", "Megatron-core refuses its TransformerConfig"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(
    option: str, value: Any, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "has_transformer_engine", lambda: False)
    with pytest.raises(ConfigError) as caught:
        configs(QWEN3_MOE, megatron={option: value})
    assert says in str(caught.value)
    assert option in str(caught.value)


@pytest.mark.parametrize("cell", sorted(CELLS.glob("*.toml")), ids=lambda p: p.stem)
def test_every_option_of_a_shipped_cell_is_known_or_told(cell: Path) -> None:
    given = tomllib.loads(cell.read_text())["choices"]["megatron"]
    kept, notes = options._given(given)
    assert set(kept) <= known_options()
    assert len(kept) + len(notes) == len(set(given) - OWN)
    assert {note.split()[1] for note in notes} == set(given) & set(FOREIGN)


def test_latent_attention_is_not_shared_by_ranks_without_sequence_parallelism() -> None:
    trainer = {"tensor_model_parallel_size": 2}
    with pytest.raises(ConfigError, match="latent attention"):
        configs(ARCHITECTURES["deepseek_v3"], trainer=trainer)
    configs(ARCHITECTURES["deepseek_v3"], trainer={**trainer, "sequence_parallel": True})


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"megatron": {"attention_dropout": 0.1}}, "attention_dropout = 0.1: attention with sinks drops nothing"),
        ({"megatron": {"moe_grouped_gemm": True}}, "moe_grouped_gemm = True: no grouped product adds biases"),
        ({"megatron": {"window_size": [64, 0]}}, "window_size = .64, 0. is decided elsewhere"),
        ({"megatron": {"transformer_impl": "transformer_engine"}}, "local layers only, not in those of Transformer"),
        ({"trainer": {"precision": "fp8"}}, "local layers only, not in those of Transformer Engine"),
        ({"trainer": {"expert_tensor_parallel_size": 2}}, "of an expert's bias"),
    ],
)
def test_what_attention_with_sinks_and_biases_of_experts_do_not_take_is_refused(
    sections: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "has_transformer_engine", lambda: True)
    with pytest.raises(ConfigError, match=says):
        configs(GPT_OSS, **sections)
    assert configs(GPT_OSS).transformer.transformer_impl == "local"


def test_ranks_have_whole_heads_of_linear_attention() -> None:
    architecture = {**ARCHITECTURES["qwen3_5_text"], "num_key_value_heads": 4}
    with pytest.raises(ConfigError, match="2 key heads of linear attention do not divide by 4") as caught:
        configs(architecture, trainer={"tensor_model_parallel_size": 4})
    assert "model.architecture.linear_num_key_heads" in str(caught.value)
    assert "trainer.tensor_model_parallel_size = 4" in str(caught.value)
    configs(architecture, trainer={"tensor_model_parallel_size": 2})


def test_gated_shared_experts_do_not_overlap_with_the_dispatch_of_others() -> None:
    overlap = {"moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"}
    with pytest.raises(ConfigError, match="moe_shared_expert_overlap = True is decided elsewhere"):
        configs(ARCHITECTURES["qwen3_next"], megatron=overlap)


def test_a_name_of_miles_is_told_and_has_no_effect() -> None:
    made = configs(megatron={"use_tis": True})
    assert made.notes == (
        "[megatron] use_tis = True has no effect: the ratio is already to the log-probabilities of the engine that sampled",
    )


def test_a_format_of_sequences_is_one_of_two() -> None:
    for known in ("thd", "bshd"):
        assert configs(megatron={"qkv_format": known}).notes == ()
    with pytest.raises(ConfigError, match="qkv_format = 'sbhd' is not known") as caught:
        configs(megatron={"qkv_format": "sbhd"})
    assert caught.value.fix == "did you mean 'bshd'?"


def test_foreign_names_and_reasons_speak_of_what_megatron_has() -> None:
    assert not set(FOREIGN) & known_options()
    assert {name for name, _ in ALIASES.values()} <= known_options()


HALF_ROTATED = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
LLAMA3_LONGER = {"rope_parameters": {**LLAMA3_ROPE, "original_max_position_embeddings": 4096}}
GROUPS_BY_THREE = {"num_experts_per_tok": 6, "n_group": 4, "topk_group": 2}


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("llama", {"model_type": "gpt2"}, "does not build models of type 'gpt2'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 1.5}}, "attention_factor = 1.5"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", HALF_ROTATED, "partial_rotary_factor = 0.5"),
        ("llama", LLAMA3_LONGER, "original_max_position_embeddings = 4096"),
        ("deepseek_v3", {"num_experts_per_tok": 1, "n_group": 1}, "the weight is the score itself"),
        ("deepseek_v3", {"rope_parameters": LLAMA3_ROPE}, "rope_type = 'llama3'"),
        ("glm4_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("glm4_moe", {"norm_topk_prob": False}, "always normalised"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "the weight is the score itself"),
        ("glm4_moe", GROUPS_BY_THREE, "only 3 groups"),
        ("glm4_moe", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
        ("glm4_moe", LLAMA3_LONGER, "original_max_position_embeddings = 4096"),
        ("glm4_moe_lite", {"attention_bias": True}, "attention_bias"),
        ("glm4_moe_lite", {"rope_interleave": False}, "rope_interleave"),
        ("glm4_moe_lite", {"norm_topk_prob": False}, "always normalised"),
        ("glm4_moe_lite", GROUPS_BY_THREE, "only 3 groups"),
        ("glm4_moe_lite", HALF_ROTATED, "partial_rotary_factor = 0.5"),
        ("glm4_moe_lite", {"rope_parameters": LLAMA3_ROPE}, "rope_type = 'llama3'"),
        ("gpt_oss", {"attention_bias": False}, "biases in all layers"),
        ("gpt_oss", {"num_experts_per_tok": 1}, "no normalised weight of one expert"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, r"swiglu_alpha = 1.0.*only 1\.702"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window = None"),
        ("qwen3_5_text", {"attention_bias": True}, "attention_bias"),
        ("qwen3_5_text", {"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate = False"),
        ("qwen3_5_text", {"linear_num_value_heads": 3}, "linear_num_value_heads = 3"),
        ("qwen3_5_text", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
        ("qwen3_5_moe_text", {"num_experts_per_tok": 1}, "no normalised weight of one expert"),
        ("minimax_m2", {"num_experts_per_tok": 1}, "no normalised weight of one expert"),
        ("minimax_m2", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("minimax_m2", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type = 'yarn'"),
    ],
)
def test_what_megatron_would_compute_otherwise_is_refused(family: str, changes: dict[str, Any], says: str) -> None:
    context = make_context(ARCHITECTURES[family])
    with pytest.raises(ConfigError, match=says):
        read_shape({**model_config(context).to_dict(), **changes})
