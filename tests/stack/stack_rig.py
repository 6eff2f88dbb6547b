"""Tiny models of every family and a launch around them, with the megatron trainer."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rllaunch.backends.base import LaunchContext, RankInfo
from rllaunch.plan.handoff import HandoffOptions
from rllaunch.resolve.schema import LaunchConfig

LLAMA = {
    "model_type": "llama",
    "vocab_size": 52,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
QWEN3 = {**LLAMA, "model_type": "qwen3"}
QWEN3_MOE = {
    **QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}  # fmt: skip
DEEPSEEK = {
    **LLAMA, "model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "head_dim": 4, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
GLM4_MOE_LITE = {
    **DEEPSEEK, "model_type": "glm4_moe_lite", "qk_nope_head_dim": 6, "v_head_dim": 10, "rms_norm_eps": 1e-2,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
}  # fmt: skip
GLM4_MOE = {
    **LLAMA, "model_type": "glm4_moe", "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0,
}  # fmt: skip
MINIMAX_M2 = {
    **LLAMA, "model_type": "minimax_m2", "intermediate_size": 16, "num_local_experts": 8, "num_experts_per_tok": 2,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
GPT_OSS = {
    **LLAMA, "model_type": "gpt_oss", "intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 5, "swiglu_limit": 0.5, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 0.05,
        "truncate": False, "original_max_position_embeddings": 16,
    },
}  # fmt: skip
# Odd widths, so that none stands for another. With the usual eps, states that happen to be small make rounding large:
# transformers differs from itself in float64 as much as we do.
QWEN3_5 = {
    **LLAMA, "model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "partial_rotary_factor": 0.5,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "rms_norm_eps": 1e-2,
}  # fmt: skip
GATED_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
}  # fmt: skip
QWEN3_5_MOE = {**QWEN3_5, **GATED_EXPERTS, "model_type": "qwen3_5_moe_text"}
QWEN3_NEXT = {**QWEN3_5, **GATED_EXPERTS, "model_type": "qwen3_next", "norm_topk_prob": True}
DEEPSEEK_V4 = {
    "model_type": "deepseek_v4", "vocab_size": 52, "hidden_size": 32, "moe_intermediate_size": 16,
    "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8, "partial_rotary_factor": 0.5, "q_lora_rank": 12,
    "o_groups": 2, "o_lora_rank": 6, "sliding_window": 5, "index_n_heads": 12, "index_head_dim": 8, "index_topk": 3,
    "layer_types": [
        "heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention", "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "mlp_layer_types": ["hash_moe", "moe", "hash_moe", "moe"], "n_routed_experts": 4, "num_experts_per_tok": 2,
    "swiglu_limit": 0.5, "hc_mult": 2, "hc_sinkhorn_iters": 5, "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 0.5,
    },
}  # fmt: skip
DEEPSEEK_V4_SHORT = {
    **DEEPSEEK_V4, "sliding_window": 3, "index_topk": 1,
    "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 3},
}  # fmt: skip
"""With so little in a window and an entry that samples of a few tokens have all of it, and more than are chosen."""
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama-tied": {**LLAMA, "tie_word_embeddings": True},
    "llama3-rope": {**LLAMA, "rope_parameters": LLAMA3_ROPE},
    "qwen2": {**LLAMA, "model_type": "qwen2"},
    "qwen3": {**QWEN3, "rope_theta": 1e6},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe-raw-weights": {**QWEN3_MOE, "norm_topk_prob": False, "mlp_only_layers": [0]},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v3-yarn": {**DEEPSEEK, "rope_parameters": YARN},
    "deepseek_v3-no-query-latent": {**DEEPSEEK, "q_lora_rank": 0, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5},
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm4_moe_lite-listed-layers": {
        **GLM4_MOE_LITE, "mlp_layer_types": ["sparse", "dense"], "q_lora_rank": 0, "rope_parameters": YARN,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    },
    "glm4_moe": GLM4_MOE,
    "glm4_moe-without-norms-or-biases": {
        **GLM4_MOE, "attention_bias": False, "use_qk_norm": False, "partial_rotary_factor": 1.0,
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
    },
    "glm4_moe-llama3-rope": {
        **GLM4_MOE, "head_dim": 16, "partial_rotary_factor": 0.25, "use_qk_norm": False, "first_k_dense_replace": 0,
        "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 1e6},
    },
    "qwen3-yarn": {**QWEN3, "rope_parameters": {"rope_theta": 1e6, **YARN, "mscale": 0.7, "mscale_all_dim": 0.4}},
    "gpt_oss": GPT_OSS,
    "gpt_oss-other-windows": {
        **GPT_OSS, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 17, "head_dim": 16,
        "num_key_value_heads": 4, "num_experts_per_tok": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v4-other-layers": {
        **DEEPSEEK_V4, "num_hidden_layers": 3, "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}, "index_topk": 64,
        "mlp_layer_types": ["moe"] * 3, "hc_mult": 3, "hc_sinkhorn_iters": 1, "o_groups": 4, "swiglu_limit": 10.0,
        "rope_parameters": {}, "index_n_heads": 3, "sliding_window": 64, "rms_norm_eps": 1e-3,
    },
    "minimax_m2": MINIMAX_M2,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_text-tied": {
        **QWEN3_5, "tie_word_embeddings": True, "layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3, "rms_norm_eps": 1e-6,
    },
    "qwen3_5_text-every-fourth-layer": {**QWEN3_5, "num_hidden_layers": 5, "layer_types": None},
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_next-dense-layers": {**QWEN3_NEXT, "mlp_only_layers": [1], "norm_topk_prob": False},
    "minimax_m2-whole-heads": {**MINIMAX_M2, "head_dim": 16, "partial_rotary_factor": 1.0, "num_experts_per_tok": 4},
}  # fmt: skip


def make_context(architecture: dict[str, Any], *, num_slots: int = 1, **sections: dict[str, Any]) -> LaunchContext:
    """A tiny launch in float32; `sections` add to or replace what stands here (`trainer={"lr": 1.0}`)."""
    facts: dict[str, dict[str, Any]] = {
        "model": {"architecture": architecture, "dtype": "float32"},
        "trainer": {"backend": "megatron", "lr": 1e-2, "precision": "fp32", "init_method_std": 0.3, "num_steps_per_rollout": 2},
        "rollout": {
            "backend": "embedded", "dtype": "float32", "rollout_batch_size": 4, "n_samples_per_prompt": 2,
            "rollout_max_response_len": 4,
        },
        "run": {"num_rollout": 10, "seed": 7},
        # The other dispatcher, `alltoall`, works on streams of a GPU.
        "megatron": {"moe_token_dispatcher_type": "allgather"},
    }  # fmt: skip
    options = sections.pop("options", {})
    for name, values in sections.items():
        facts[name] = {**facts.get(name, {}), **values}
    return LaunchContext(LaunchConfig.model_validate(facts), replace(HandoffOptions(), **options), "", 5, num_slots)


def free_port() -> int:
    """Below the ports that the system hands out itself: between now and its use, sockets of gloo take of those."""
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.closing(socket.socket()) as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


Trained = tuple[list[dict[str, float]], dict[str, torch.Tensor]]
"""Figures of two rollouts, and what an update then sends."""


def assert_trained_alike(name: str, got: Trained, want: Trained, *, rel: float, abs_: float) -> None:
    (figures, sent), (want_figures, want_sent) = got, want
    for rollout in range(2):
        assert figures[rollout].keys() == want_figures[rollout].keys(), name
        for figure, value in want_figures[rollout].items():
            assert figures[rollout][figure] == pytest.approx(value, rel=rel, abs=abs_), f"{name}: {figure}"
    assert sent.keys() == want_sent.keys()
    for tensor_name, tensor in want_sent.items():
        torch.testing.assert_close(sent[tensor_name], tensor, rtol=rel, atol=abs_, msg=f"{name}: {tensor_name}")


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """Megatron's parallel groups in this process alone, on the CPU."""
    from megatron_cpu import use_cpu

    from rllaunch.backends.megatron.build import start_processes, stop_processes

    use_cpu()
    start_processes(make_context(LLAMA).config, RankInfo(0, 1, "", 0), "cpu")
    try:
        yield
    finally:
        stop_processes()


def sglang_parameters(directory: Path, arguments: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], ...]:
    """SGLang's parameters in a process of its own: before an update, after it, and of `checkpoint` as it is loaded.

    Args:
        directory: with `bf16`, from which the engine starts, `buckets` and `checkpoint`.
        arguments: SGLang's.
    """
    here = Path(__file__).parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here / "stubs"), *filter(None, sys.path)])}
    command = [sys.executable, str(here / "sglang_fp8_process.py"), str(directory), json.dumps(arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    before, updated, loaded = torch.load(directory / "parameters.pt")
    return before, updated, loaded


def critic_of(trainer: Any) -> dict[str, torch.Tensor]:
    """A megatron trainer's critic under the names of its checkpoint, on rank 0; its value head as `lm_head.weight`.

    Without the biases and tables of routers, which are no parameters.

    Every rank must call it, awake.
    """
    from rllaunch.backends.megatron.placement import Placement

    if trainer.built.critic is None:
        return {}
    model = trainer.built.critic.module
    # As if untied: the head is the critic's own.
    placement = Placement(model, replace(trainer.built.shape, is_tied=False))
    local = dict(model.named_parameters()) | dict(model.named_buffers())
    found = {n: t.detach().clone() for n, t in placement.gather(local.__getitem__, "cpu")}
    if found:
        found["lm_head.weight"] = found["lm_head.weight"][:1]  # each tensor-parallel rank has a whole one
    buffers = ("e_score_correction_bias", "tid2eid")
    return {f"critic {n}": t for n, t in found.items() if not n.endswith(buffers)}


def hf_model(context: LaunchContext) -> Any:
    """The model of transformers with random values everywhere, norms and biases too."""
    from rllaunch.backends.embedded.model import build_model

    model = build_model(context)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("norm.weight", "bias", "sinks", "A_log", "base", "scale")):
                tensor.add_(torch.randn_like(tensor) * 0.2)
            if name.endswith("tid2eid"):
                experts = torch.rand(len(tensor), context.config.model.architecture["n_routed_experts"])
                tensor.copy_(experts.argsort(dim=1)[:, : tensor.shape[1]])
    return model
