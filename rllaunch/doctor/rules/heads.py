"""The attention heads divide over the tensor-parallel GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import heads_fit, kv_heads_fit, layout_of
from rllaunch.doctor.rules.groups import TP, is_megatron_like
from rllaunch.resolve.origins import Resolved


def _check(resolved: Resolved) -> Iterator[Finding]:
    if not is_megatron_like(resolved):
        return
    layout = layout_of(resolved)
    claims = (
        ("num_attention_heads", heads_fit(layout.heads, layout.tp), f"{layout.heads} attention heads cannot be"),
        ("num_key_value_heads", kv_heads_fit(layout.kv_heads, layout.tp), f"{layout.kv_heads} KV heads can be neither"),
    )
    for name, fits, what in claims:
        if not fits:
            how = " nor copied evenly" if name == "num_key_value_heads" else ""
            yield RULE.error(
                resolved,
                f"{what} divided{how} over TP = {layout.tp} GPUs",
                [f"model.architecture.{name}", TP],
                layout.fix("RL317", "tp") or "choose a tensor_model_parallel_size that divides the heads",
            )
            return  # KV heads are a part of the heads: one size is wrong, not two
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
RULES = (RULE,)
