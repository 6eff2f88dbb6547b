"""The attention heads divide over the tensor-parallel GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import heads_fit, kv_heads_fit, layout_of
from rllaunch.doctor.numbers import architecture_key, experts_key
from rllaunch.doctor.rules.groups import TP, is_megatron_like
from rllaunch.resolve.origins import Resolved


def _check(resolved: Resolved) -> Iterator[Finding]:
    if not is_megatron_like(resolved):
        return
    layout = layout_of(resolved)
    fix = "choose a tensor_model_parallel_size that divides the heads"
    if not heads_fit(layout.heads, layout.tp):
        yield RULE.error(
            resolved,
            f"{layout.heads} attention heads cannot be divided over TP = {layout.tp} GPUs",
            [architecture_key(resolved.config, "num_attention_heads"), TP],
            layout.fix("RL317", "tp") or fix,
        )
    # Heads are whole groups of KV heads: where both are wrong it is one size that is.
    elif not kv_heads_fit(layout.kv_heads, layout.tp):
        yield RULE.error(
            resolved,
            f"{layout.kv_heads} KV heads can be neither divided nor copied evenly over TP = {layout.tp} GPUs",
            [architecture_key(resolved.config, "num_key_value_heads"), TP],
            layout.fix("RL317", "tp") or fix,
        )
    elif not heads_fit(layout.key_heads, layout.tp):
        yield RULE.error(
            resolved,
            f"{layout.key_heads} key heads of linear attention cannot be divided over TP = {layout.tp} GPUs",
            [architecture_key(resolved.config, "linear_num_key_heads"), TP],
            layout.fix("RL317", "tp") or fix,
        )
    if resolved.config.trainer.sequence_parallel and layout.tp == 1:
        yield RULE.finding(
            "info",
            resolved,
            "sequence_parallel has no effect with TP = 1",
            ["trainer.sequence_parallel", TP],
            "--no-sequence-parallel",
        )


RULE = Rule(
    code="RL317",
    name="heads divide over TP",
    reason="a GPU holds whole heads; KV heads are split or copied, evenly (modelscope/ms-swift#8219)",
    check=_check,
    overridable=True,
)


def _check_sequence(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    trainer, facts = config.trainer, config.model.architecture
    if trainer.backend != "megatron" or trainer.sequence_parallel or trainer.tensor_model_parallel_size == 1:
        return
    if key := experts_key(config):
        what = "Megatron-core trains experts with TP > 1 only"
    elif facts.get("kv_lora_rank"):
        key, what = "kv_lora_rank", "gradients of latent attention are added over TP ranks only"
    else:
        return
    yield SEQUENCE.error(
        resolved,
        f"{what} where the ranks share sequences too",
        ["trainer.sequence_parallel", TP, f"model.architecture.{key}"],
        "--sequence-parallel",
    )


SEQUENCE = Rule(
    code="RL343",
    name="experts and latents with TP share sequences",
    reason="Megatron-core refuses in the first training step (megatron/core/transformer/moe/moe_layer.py, forward)",
    check=_check_sequence,
)
RULES = (RULE, SEQUENCE)
