"""The trainer's GPUs divide into its parallel groups."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import layout_of
from rllaunch.doctor.numbers import architecture_key, either, experts_key, gpus_key, plural
from rllaunch.resolve.origins import Resolved

TP = "trainer.tensor_model_parallel_size"
PP = "trainer.pipeline_model_parallel_size"
CP = "trainer.context_parallel_size"
EP = "trainer.expert_model_parallel_size"
ETP = "trainer.expert_tensor_parallel_size"


def is_megatron_like(resolved: Resolved) -> bool:
    """Whether the trainer is parallel within a model at all; the embedded one is not, which RL332 says."""
    return resolved.config.trainer.backend != "embedded"


def _check_dense(resolved: Resolved) -> Iterator[Finding]:
    layout = layout_of(resolved)
    if not is_megatron_like(resolved) or "RL312" not in layout.broken():
        return
    parallel = [field for field in ("pp", "tp", "cp") if getattr(layout, field) > 1]
    yield DENSE.error(
        resolved,
        f"{plural(layout.world, 'GPU')} cannot be divided into groups of TP × PP × CP = "
        f"{layout.tp} × {layout.pp} × {layout.cp} = {layout.dense_group}",
        [TP, PP, CP, "cluster.num_nodes", gpus_key(resolved)],
        layout.fix("RL312", *parallel, "nodes") or "choose sizes whose product divides the GPUs",
    )


def _check_expert(resolved: Resolved) -> Iterator[Finding]:
    layout = layout_of(resolved)
    if not is_megatron_like(resolved) or "RL313" not in layout.broken():
        return
    sizes = {"pp": layout.pp, "ep": layout.ep, "tp" if layout.etp is None else "etp": layout.expert_tp}
    follows = " (ETP follows TP)" if layout.etp is None and layout.tp > 1 else ""
    yield EXPERT.error(
        resolved,
        f"{plural(layout.world, 'GPU')} cannot be divided into expert groups of ETP × EP × PP = "
        f"{layout.expert_tp} × {layout.ep} × {layout.pp} = {layout.expert_group}{follows}",
        [TP if layout.etp is None else ETP, EP, PP, "cluster.num_nodes", gpus_key(resolved)],
        either(
            layout.fix("RL313", *(field for field, size in sizes.items() if size > 1), "nodes"),
            "--expert-tensor-parallel-size 1" if follows and layout.world % (layout.ep * layout.pp) == 0 else "",
        )
        or "choose sizes whose product divides the GPUs",
    )


def _check_experts(resolved: Resolved) -> Iterator[Finding]:
    layout = layout_of(resolved)
    name = experts_key(resolved.config)
    if name and is_megatron_like(resolved) and "RL319" in layout.broken():
        yield EXPERTS.error(
            resolved,
            f"{layout.experts} experts cannot be spread evenly over EP = {layout.ep} GPUs",
            [architecture_key(resolved.config, name), EP],
            layout.fix("RL319", "ep") or "choose an expert_model_parallel_size that divides the experts",
        )


DENSE = Rule(
    code="RL312",
    name="GPUs divide into TP × PP × CP",
    reason="Megatron asserts it only after Ray and the model are up (THUDM/slime#1818)",
    check=_check_dense,
    overridable=True,
)
EXPERT = Rule(
    code="RL313",
    name="GPUs divide into ETP × EP × PP",
    reason="Megatron asserts it after bring-up; its ETP follows TP unless set (THUDM/slime#1818)",
    check=_check_expert,
    overridable=True,
)
EXPERTS = Rule(
    code="RL319",
    name="experts divide over EP",
    reason="each GPU of an expert group holds whole experts, the same number each (Megatron-core, MoE layer)",
    check=_check_experts,
    overridable=True,
)
RULES = (DENSE, EXPERT, EXPERTS)
