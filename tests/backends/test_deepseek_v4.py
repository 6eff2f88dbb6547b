"""DeepSeek-V4: what its tensors are called where, and launches of it that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from rig import make_context

from rllaunch.backends.base import joined_with
from rllaunch.backends.deepseek_v4_names import module_name, release_name, stays_float32
from rllaunch.backends.embedded.model import build_model, model_config
from rllaunch.backends.megatron.served import refusal_of
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.weights import entries, unstack_experts
from rllaunch.errors import ConfigError

SMALL = {
    "model_type": "deepseek_v4", "vocab_size": 52, "hidden_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 8, "partial_rotary_factor": 0.5, "q_lora_rank": 12,
    "o_groups": 2, "o_lora_rank": 6, "index_n_heads": 2, "index_head_dim": 8, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "hc_mult": 2, "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
}  # fmt: skip


def context_of(**sections: Any) -> Any:
    return make_context(architecture=SMALL, **sections)


def tensors_of(context: Any) -> dict[str, Any]:
    shape = read_shape(model_config(context).to_dict())
    return dict(unstack_experts(build_model(context, device="meta").state_dict().items(), shape))


def test_every_tensor_has_a_name_in_the_release_and_back() -> None:
    names = list(tensors_of(context_of()))
    released = [release_name(name) for name in names]
    assert len(set(released)) == len(names)
    assert [module_name(name) for name in released] == names
    assert not any("proj" in name.replace("weights_proj", "") or "model" in name for name in released)
    assert module_name("layers.1.attn.wq_b.scale") == "model.layers.1.self_attn.q_b_proj.scale"
    assert module_name("layers.1.ffn.experts.3.w2.scale") == "model.layers.1.mlp.experts.3.down_proj.scale"
    assert module_name("mtp.0.enorm.weight") == "mtp.0.enorm.weight"


def test_what_transformers_saves_is_named_too(tmp_path: Any) -> None:
    from safetensors import safe_open

    context = context_of()
    build_model(context).save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        saved = {module_name(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    assert saved == set(tensors_of(context))


def test_tensors_that_sglang_joins_follow_each_other() -> None:
    shape = read_shape(model_config(context_of()).to_dict())
    names = [release_name(source) for entry in entries(shape) for source in entry.sources]
    joined = [name for name in names if joined_with(name)]
    assert len(joined) == 3 + 2 + 1  # of each layer, of a sparse layer two more, of a heavy one
    assert all(names[names.index(name) + 1] == joined_with(name) for name in joined)


def test_mixing_and_sinks_stay_float32_in_engines() -> None:
    wide = {name for name in tensors_of(context_of()) if stays_float32(name)}
    ends = ("_hc.fn", "_hc.base", "_hc.scale", "sinks", "position_bias", "hc_fn", "hc_base", "hc_scale")
    norms = {name for name in wide if name.endswith("compressor.kv_norm.weight") or ".indexer.kv_norm." in name}
    assert {name for name in wide if not name.endswith(ends)} == norms
    assert len(norms) == 3
    assert len(wide) == 3 * 7 + 3 + 3 + 3


MEGATRON: dict[str, Any] = {"backend": "megatron", "precision": "bf16"}


@pytest.mark.parametrize(
    ("sections", "says", "fix"),
    [
        ({"trainer": {"precision": "fp8"}}, "built in local layers only", "--train-precision bf16"),
        (
            {"megatron": {"transformer_impl": "transformer_engine", "fp8_format": "e4m3"}},
            "built in local layers only",
            "--set megatron.transformer_impl=local --set megatron.fp8_format=false",
        ),
        (
            {"trainer": {"tensor_model_parallel_size": 4, "sequence_parallel": True}},
            "2 groups of attention's output do not divide by 4",
            "choose a size that divides them",
        ),
        (
            {"trainer": {"tensor_model_parallel_size": 2, "sequence_parallel": False}},
            "only where the ranks share sequences",
            "use --sequence-parallel",
        ),
        ({"algorithm": {"lora_rank": 8}}, "compressed attention has others", "--lora-rank 0"),
        ({"megatron": {"moe_router_fusion": True}}, "moe_router_fusion = True", "leave it out"),
        (
            {
                "trainer": {"recompute_granularity": "selective"},
                "megatron": {"recompute_modules": ["moe", "core_attn"]},
            },
            "recompute_modules has moe",
            "--recompute-granularity full",
        ),
    ],
)
def test_what_its_layers_have_not_is_refused_before_the_start(sections: Any, says: str, fix: str) -> None:
    given = {**sections, "trainer": {**MEGATRON, **sections.get("trainer", {})}}
    refusal = refusal_of(context_of(**given).config)
    assert isinstance(refusal, ConfigError)
    assert says in refusal.what
    assert fix in refusal.fix


def test_what_its_layers_have_is_not_refused() -> None:
    given = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}
    assert refusal_of(context_of(trainer={**MEGATRON, **given, "recompute_granularity": "full"}).config) is None


@pytest.mark.parametrize("hardware", ["GB300", "H200"])
def test_a_shipped_launch_is_refused_for_what_its_cell_asks_and_for_its_engines(rllaunch: Any, hardware: str) -> None:
    launch = ("--no-probe", "--model", "dsv4", "--hardware", hardware)
    result = rllaunch("doctor", *launch)
    out, told = result.out, result.err
    assert "dsv4 cannot be trained so: compressed attention and residual streams are built in local layers only" in out
    assert "no update has been held against it yet" in out
    assert "the configuration is sound, but `rllaunch train` refuses it (RL512, RL513)" in told
    fix = (
        "--train-precision",
        "bf16",
        "--set",
        "megatron.transformer_impl=local",
        "--set",
        "megatron.fp8_format=false",
    )
    assert "RL512" not in rllaunch("doctor", *launch, *fix).out
