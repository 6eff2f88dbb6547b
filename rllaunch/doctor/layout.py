"""How a launch's GPUs are divided, as plain numbers: what holds for them, and the nearest that would.

The rules about sizes share it, so that a fix one of them proposes does not break another.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any

from rllaunch.doctor.numbers import (
    architecture_int,
    decided_int,
    either,
    experts_key,
    flag_with,
    nearest,
    samples_per_step,
)
from rllaunch.resolve.origins import Resolved

FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
    "ep": "--expert-model-parallel-size",
    "etp": "--expert-tensor-parallel-size",
    "nodes": "--num-nodes",
    "engine_gpus": "--rollout-num-gpus-per-engine",
}
# No further than this is a legal size looked for: it would help nobody, and a typo may be a large number.
MOST = 4096


@dataclass(frozen=True)
class Layout:
    """The sizes of a launch; a fact of the model that is unknown is None and breaks nothing.

    Args:
        etp: None while it follows TP.
        rollout_gpus: None while it follows the trainer's.
        batch: samples of one optimizer step; None if that is another rule's mistake.
    """

    nodes: int
    gpus_per_node: int
    tp: int
    pp: int
    cp: int
    ep: int
    etp: int | None
    has_experts: bool
    experts: int | None
    layers: int | None
    first: int | None
    last: int | None
    heads: int | None
    kv_heads: int | None
    key_heads: int | None
    rollout_gpus: int | None
    engine_gpus: int
    batch: int | None

    @property
    def world(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def dense_group(self) -> int:
        return self.tp * self.pp * self.cp

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def expert_group(self) -> int:
        return self.expert_tp * self.ep * self.pp

    @property
    def data_parallel(self) -> int | None:
        """Ranks that each train on other samples; None if the GPUs do not divide evenly."""
        ranks, rest = divmod(self.world, self.dense_group)
        return None if rest else ranks

    def broken(self) -> frozenset[str]:
        """Codes of the rules about sizes that these break."""
        rollout_gpus = self.rollout_gpus or self.world
        ranks = self.data_parallel
        claims = {
            "RL311": rollout_gpus == self.world,
            "RL312": ranks is not None,
            "RL313": not self.has_experts or self.world % self.expert_group == 0,
            "RL314": rollout_gpus % self.engine_gpus == 0,
            "RL315": is_whole(self.engine_gpus, self.gpus_per_node),
            "RL316": self._stages_fit(),
            "RL317": heads_fit(self.heads, self.tp)
            and kv_heads_fit(self.kv_heads, self.tp)
            and heads_fit(self.key_heads, self.tp),
            "RL319": self.experts is None or self.experts % self.ep == 0,
            "RL322": ranks is None or self.batch is None or self.batch % ranks == 0,
        }
        return frozenset(code for code, holds in claims.items() if not holds)

    def _stages_fit(self) -> bool:
        if self.pp == 1:
            return self.first is None and self.last is None
        return self.layers is None or stages_fit(self.layers, self.pp, self.first, self.last)

    def repairs(self, code: str, field: str) -> str:
        """`--flag N` with the nearest values of one size that mend `code` and break nothing else, if any."""
        now = getattr(self, field)
        most = lcm(self.dense_group, self.expert_group) if field == "nodes" else self.world
        before = self.broken()
        good = []
        for value in range(1, min(most, MOST) + 1):
            change: dict[str, Any] = {field: value}
            after = replace(self, **change).broken()
            if code not in after and after <= before:
                good.append(value)
        return flag_with(FLAGS[field], nearest(good, now))

    def fix(self, code: str, *fields: str) -> str:
        """The nearest values of each of these sizes, each alone, that mend `code`."""
        return either(*(self.repairs(code, field) for field in fields))


def layout_of(resolved: Resolved) -> Layout:
    config = resolved.config
    trainer = config.trainer
    experts = experts_key(config)
    etp = decided_int(resolved, "trainer.expert_tensor_parallel_size")
    return Layout(
        nodes=config.cluster.num_nodes,
        gpus_per_node=config.gpus_per_node,
        tp=trainer.tensor_model_parallel_size,
        pp=trainer.pipeline_model_parallel_size,
        cp=trainer.context_parallel_size,
        ep=trainer.expert_model_parallel_size,
        etp=etp,
        has_experts=experts is not None or trainer.expert_model_parallel_size > 1 or etp is not None,
        experts=architecture_int(config, experts) if experts else None,
        layers=architecture_int(config, "num_hidden_layers"),
        first=trainer.decoder_first_pipeline_num_layers,
        last=trainer.decoder_last_pipeline_num_layers,
        heads=architecture_int(config, "num_attention_heads"),
        kv_heads=architecture_int(config, "num_key_value_heads"),
        key_heads=architecture_int(config, "linear_num_key_heads"),
        rollout_gpus=decided_int(resolved, "rollout.rollout_num_gpus"),
        engine_gpus=config.rollout.rollout_num_gpus_per_engine,
        batch=samples_per_step(config),
    )


def is_whole(engine_gpus: int, per_node: int) -> bool:
    """Whether engines are whole nodes, or nodes whole engines."""
    return max(engine_gpus, per_node) % min(engine_gpus, per_node) == 0


def stages_fit(layers: int, stages: int, first: int | None, last: int | None) -> bool:
    """Whether the layers left after the first and the last stage divide over the other stages."""
    rest = layers - (first or 0) - (last or 0)
    others = stages - sum(given is not None for given in (first, last))
    if others <= 0:
        return others == 0 and rest == 0
    return rest > 0 and rest % others == 0


def heads_fit(heads: int | None, tp: int) -> bool:
    return heads is None or heads % tp == 0


def kv_heads_fit(kv_heads: int | None, tp: int) -> bool:
    return kv_heads is None or kv_heads % tp == 0 or tp % kv_heads == 0
