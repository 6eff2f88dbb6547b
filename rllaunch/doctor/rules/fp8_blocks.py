"""Engines in FP8 cut their weights between blocks, never through one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rllaunch.backends import block_fp8
from rllaunch.backends.block_fp8 import BLOCK
from rllaunch.backends.megatron.shape import refusal_of
from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import divisors, either, flag_with
from rllaunch.doctor.rules.engines import ENGINE
from rllaunch.errors import ConfigError
from rllaunch.plan.architecture import Architecture, Weight, read_architecture
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.schema import LaunchConfig

EP = "sglang.ep_size"


@dataclass(frozen=True)
class _Ranks:
    """GPUs that share a matrix of an engine: of attention, of dense blocks, of an expert."""

    attention: int
    dense: int
    expert: int


def _ranks(config: LaunchConfig, engine: int, ep: int) -> _Ranks:
    dense = (config.sglang.model_extra or {}).get("moe_dense_tp_size") or engine
    return _Ranks(max(1, engine // config.sglang.attention_dp), int(dense), max(1, engine // ep))


def _misfits(model: Architecture, ranks: _Ranks) -> Iterator[tuple[str, int, int]]:
    """(matrix, features, GPUs that share them) where a GPU's part ends inside a block.

    What SGLang makes one parameter of must end at a block even where it is whole, for the next part's scales begin
    there. Source: sglang 0.5.23 layers/quantization/fp8.py, `validate_block_quant_shapes`, `create_fp8_moe_weight_`.
    """
    for layer in dict.fromkeys(model.layers):
        for weight in layer.weights:
            for features, shared in _cuts(weight, model, ranks, {w.name for w in layer.weights}):
                if features % shared or features // shared % BLOCK:
                    yield weight.name.removesuffix(".weight"), features, shared


def _cuts(weight: Weight, model: Architecture, ranks: _Ranks, names: set[str]) -> Iterator[tuple[int, int]]:
    part, is_attention = weight.name.split(".")[-2], weight.name.startswith("self_attn.")
    if weight.is_expert:
        yield (weight.shape[0] // 2 if "gate_up" in weight.name else weight.shape[1]), ranks.expert
    elif part in ("gate_proj", "up_proj") and weight.name.startswith("mlp."):
        yield weight.shape[0], ranks.dense
    elif is_attention and "self_attn.k_proj.weight" in names and part in ("q_proj", "k_proj", "v_proj"):
        yield weight.shape[0], ranks.attention if part == "q_proj" else min(ranks.attention, model.num_kv_heads)
    elif is_attention and part == "q_a_proj":
        yield weight.shape[0], 1
    elif is_attention and ranks.attention > 1 and part in ("q_proj", "q_b_proj", "kv_b_proj", "o_proj"):
        yield weight.shape[1 if part == "o_proj" else 0], ranks.attention


def _check(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    model = _model(config.model.architecture)
    if config.rollout.backend != "sglang" or config.rollout.dtype != "fp8" or model is None:
        return
    engine, ep = config.rollout.rollout_num_gpus_per_engine, config.sglang.ep_size
    found = next(_misfits(model, _ranks(config, engine, ep)), None)
    # Engines that are refused anyway want no other layout. Asked last: it may read the checkpoint's config.json.
    if found is None or block_fp8.refusal_of(config) is not None:
        return
    name, features, shared = found
    part = f"{features / shared:g}" + (f" of {features}" if shared > 1 else "")
    yield RULE.error(
        resolved,
        f"FP8 weights come in blocks of {BLOCK} × {BLOCK}, and a GPU's part of {name} has {part} features",
        ["rollout.dtype", ENGINE, *([EP] if model.num_experts else [])],
        _fix(config, model, engine, ep),
    )


def _fix(config: LaunchConfig, model: Architecture, engine: int, ep: int) -> str:
    def fits(engine: int, ep: int) -> bool:
        return not any(_misfits(model, _ranks(config, engine, ep)))

    dp = config.sglang.dp_size
    spread = (
        [n for n in divisors(engine) if model.num_experts % n == 0 and fits(engine, n)] if model.num_experts else []
    )
    smaller = [n for n in divisors(engine) if n < engine and n % ep == 0 and n % dp == 0 and fits(n, ep)]
    return either(
        flag_with("--sglang-ep-size", spread[:1]) if spread else "",
        flag_with("--rollout-num-gpus-per-engine", smaller[-1:]) if smaller else "",
        "--rollout-dtype bfloat16",
    )


def _model(facts: Mapping[str, Any]) -> Architecture | None:
    """Of the families that are trained; of others it isn't said which matrices are cut how."""
    if "model_type" not in facts or refusal_of(facts) is not None:
        return None
    try:
        return read_architecture(facts)
    except ConfigError:
        return None  # the plan says what is wrong with it


RULE = Rule(
    code="RL345",
    name="engines in FP8 cut between blocks",
    reason="a block has one scale, so SGLang refuses to load such a layout (sglang 0.5.23 layers/quantization/fp8.py)",
    check=_check,
)
RULES = (RULE,)
