"""The rollout GPUs divide into engines, and an engine into what runs inside it."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import layout_of
from rllaunch.doctor.numbers import decided_int, divisors, either, flag_with, gpus_key, nearest, plural
from rllaunch.resolve.origins import Resolved

ENGINE = "rollout.rollout_num_gpus_per_engine"


def _check_count(resolved: Resolved) -> Iterator[Finding]:
    layout = layout_of(resolved)
    if "RL314" not in layout.broken():
        return
    total, engine = layout.rollout_gpus or layout.world, layout.engine_gpus
    if engine > total:
        what = f"an engine of {engine} GPUs is more than the {plural(total, 'rollout GPU')} there are"
    else:
        what = f"{total} rollout GPUs cannot be divided into engines of {engine}"
    decided = decided_int(resolved, "rollout.rollout_num_gpus")
    total_keys = ["rollout.rollout_num_gpus"] if decided else ["cluster.num_nodes", gpus_key(resolved)]
    yield COUNT.error(
        resolved,
        what,
        [ENGINE, *total_keys],
        layout.fix("RL314", "engine_gpus", "nodes") or "choose an engine size that divides the rollout GPUs",
    )


def _check_whole_nodes(resolved: Resolved) -> Iterator[Finding]:
    layout = layout_of(resolved)
    # Sizes that do not even divide the total are RL314's; one mistake, one finding.
    if "RL315" not in layout.broken() or "RL314" in layout.broken():
        return
    engine, per_node = layout.engine_gpus, layout.gpus_per_node
    yield WHOLE_NODES.error(
        resolved,
        f"an engine of {engine} GPUs is not a whole number of nodes with {per_node}"
        if engine > per_node
        else f"engines of {engine} GPUs leave part of a node with {per_node} over",
        [ENGINE, gpus_key(resolved)],
        layout.fix("RL315", "engine_gpus") or "choose an engine size that divides a node, or whole nodes",
    )


def _check_inside(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if config.rollout.backend != "sglang":
        return
    engine, sglang = config.rollout.rollout_num_gpus_per_engine, config.sglang
    if sglang.dp_size > 1 and not sglang.enable_dp_attention:
        yield INSIDE.error(
            resolved,
            f"an engine with dp_size = {sglang.dp_size} needs DP attention",
            ["sglang.dp_size", "sglang.enable_dp_attention"],
            either("--sglang-enable-dp-attention", "--sglang-dp-size 1"),
        )
    for key, size in (("dp_size", sglang.dp_size), ("ep_size", sglang.ep_size)):
        if engine % size:
            flag = f"--sglang-{key.replace('_', '-')}"
            yield INSIDE.error(
                resolved,
                f"an engine of {plural(engine, 'GPU')} cannot be divided by {key} = {size}",
                [f"sglang.{key}", ENGINE],
                flag_with(flag, nearest(divisors(engine), size)),
            )


def _check_release(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if config.rollout.backend == "sglang" and config.hardware.accelerator == "cpu" and config.handoff.offload_rollout:
        yield RELEASE.finding(
            "warning",
            resolved,
            "sglang engines release nothing on a CPU: their regions stay in use through the whole handoff",
            ["rollout.backend", "hardware.accelerator", "handoff.offload_rollout"],
            "--no-offload-rollout",
        )


COUNT = Rule(
    code="RL314",
    name="rollout GPUs divide into engines",
    reason="engines are counted by rounding down, and what is left over idles (THUDM/slime#1934)",
    check=_check_count,
)
WHOLE_NODES = Rule(
    code="RL315",
    name="engines of several nodes are whole nodes",
    reason="an engine is placed on consecutive GPUs; one that straddles a node finds its ranks elsewhere "
    "(THUDM/slime#1931, THUDM/slime#1934)",
    check=_check_whole_nodes,
)
INSIDE = Rule(
    code="RL318",
    name="DP and EP of an engine divide it",
    reason="SGLang splits an engine's GPUs by both, and is data parallel with DP attention only",
    check=_check_inside,
)
RELEASE = Rule(
    code="RL341",
    name="what an engine is to release it can release",
    reason="torch_memory_saver needs a GPU; without one SGLang takes a release, answers, and keeps the memory",
    check=_check_release,
)
RULES = (COUNT, WHOLE_NODES, INSIDE, RELEASE)
