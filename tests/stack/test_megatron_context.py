"""Context-parallel ranks share every sample, and train as one rank: with other ranks beside them, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from rig import QWEN3, make_context, sent_by
from stack_process import run_ranks, same_on_every_rank, train_rank
from stack_rig import (
    DEEPSEEK,
    DEEPSEEK_V4_SHORT,
    GPT_OSS,
    QWEN3_5,
    QWEN3_NEXT,
    YARN,
    assert_trained_alike,
    critic_of,
    free_port,
)
from test_megatron_trainer import (
    BY_TOKENS,
    DISPATCHER,
    MOE,
    PADDED,
    SP,
    STEADY,
    TIED,
    TWO_GROUPS,
    started,
    with_padding_sampled,
)

from rllaunch.backends.megatron.trainer import MegatronTrainer

pytestmark = pytest.mark.stack
__all__ = ["started"]  # a fixture

CP: dict[str, Any] = {"context_parallel_size": 2}
LATENTS = {**DEEPSEEK, "rope_parameters": YARN}
# The mean of a sample's own tokens, of which each rank has some, and a term of every token's whole distribution.
BY_SAMPLE = {"kl_loss_coef": 0.1, "loss_aggregation": "sequence", "entropy_coef": 0.05}
Layout = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
"""Preset, architecture, and what stands in [trainer] and [algorithm]."""

LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "packed": ("kl", TWO_GROUPS, CP, BY_SAMPLE),
        "padded": ("kl", TWO_GROUPS, CP, BY_SAMPLE),
        "by tokens": ("kl", QWEN3, {**CP, **BY_TOKENS}, {}),
        "by tokens, padded": ("kl", QWEN3, {**CP, **BY_TOKENS}, {}),
        "latents": ("kl", LATENTS, CP, {}),
        "latents, padded": ("kl", LATENTS, CP, {}),
        "sinks and windows": ("kl", GPT_OSS, CP, BY_SAMPLE),
        "sinks and windows, padded": ("kl", GPT_OSS, {**CP, "recompute_granularity": "selective"}, {}),
        "entries": ("kl", DEEPSEEK_V4_SHORT, {**CP, "recompute_granularity": "full"}, BY_SAMPLE),
        "entries, padded": ("kl", DEEPSEEK_V4_SHORT, {**CP, "recompute_granularity": "selective"}, {}),
        "experts": ("kl", MOE, {**CP, "expert_model_parallel_size": 2}, {}),
        "linear attention": ("kl", QWEN3_5, CP, BY_SAMPLE),
        "linear attention, padded": ("grpo", QWEN3_5, {**CP, "recompute_granularity": "selective"}, {}),
        "recomputed": ("grpo", QWEN3, {**CP, "recompute_granularity": "full"}, {}),
        "recomputed attention": ("grpo", LATENTS, {**CP, "recompute_granularity": "selective"}, {}),
        "critic": ("ppo", QWEN3, CP, {}),
        "adapters": ("lora", LATENTS, CP, {"lora_rank": 2, "lora_alpha": 4.0, "kl_loss_coef": 0.1}),
    },
    4: {
        "by four": ("kl", TWO_GROUPS, {"context_parallel_size": 4}, BY_SAMPLE),
        "with data": ("kl", QWEN3, CP, BY_SAMPLE),
        "with tensors": ("kl", TIED, {**CP, "tensor_model_parallel_size": 2}, {}),
        "with sequences, latents": ("kl", LATENTS, {**CP, **SP}, {}),
        "with sequences and experts": ("kl", MOE, {**CP, **SP, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, {}),
        "with sequences and experts, sinks and windows": ("kl", GPT_OSS, {**CP, **SP, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, {}),
        "with sequences, linear attention": ("kl", QWEN3_NEXT, {**CP, **SP}, {}),
        "with stages": ("ppo", TIED, {**CP, "pipeline_model_parallel_size": 2}, {}),
        "with stages, padded": ("kl", TIED, {**CP, "pipeline_model_parallel_size": 2}, {}),
    },
}  # fmt: skip


def sections_of(name: str, layout: Layout, trainer: dict[str, Any]) -> dict[str, Any]:
    preset, architecture, _, algorithm = layout
    return {
        "preset": preset,
        "architecture": architecture,
        "algorithm": algorithm,
        "rollout": {"rollout_max_response_len": 12},
        "trainer": {"backend": "megatron", **STEADY, **trainer},
        "megatron": DISPATCHER | (PADDED if "padded" in name else {}),
        "handoff": {"update_weight_buffer_size": 4096},
    }


@pytest.mark.parametrize("world", LAYOUTS)
def test_ranks_that_share_samples_train_as_one(world: int, started: Any, tmp_path: Path) -> None:
    """Each layout in the same processes, which is what takes the time."""
    layouts = LAYOUTS[world]
    launches = {name: sections_of(name, layout, layout[2]) for name, layout in layouts.items()}
    run_ranks(world, train_rank, [free_port() for _ in launches], str(tmp_path), launches)
    assert same_on_every_rank(tmp_path, world) == set(layouts)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(world)]
    for name, layout in layouts.items():
        (figures, sent, _), *others = (rank[name] for rank in ranks)
        assert all(other[0] == figures for other in others), f"{name}: every rank reports the same"
        trainer = started(MegatronTrainer, make_context(**sections_of("alone", layout, {})))
        want = [dict(trainer.train(with_padding_sampled(trainer.context, i)).values) for i in range(2)]
        weights = sent_by(trainer) | critic_of(trainer)
        assert_trained_alike(name, (figures, sent), (want, weights), rel=2e-3, abs_=2e-4)
