"""What the embedded backend leaves to the others."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import decided_int, either
from rllaunch.doctor.rules.groups import CP, EP, ETP, PP, TP
from rllaunch.resolve.origins import Resolved

TRAINER_SIZES = {
    TP: "--tensor-model-parallel-size 1",
    PP: "--pipeline-model-parallel-size 1",
    CP: "--context-parallel-size 1",
    EP: "--expert-model-parallel-size 1",
    ETP: "--expert-tensor-parallel-size 1",
}
ENGINE = "rollout.rollout_num_gpus_per_engine"
CPU_OPTIMIZER = "trainer.optimizer_cpu_offload"


def _check(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    unsupported: dict[str, str] = {}
    if is_trainer := config.trainer.backend == "embedded":
        sizes = {key: decided_int(resolved, key) or 1 for key in TRAINER_SIZES}
        unsupported |= {key: TRAINER_SIZES[key] for key, size in sizes.items() if size > 1}
        if config.trainer.optimizer_cpu_offload:
            unsupported[CPU_OPTIMIZER] = "--no-optimizer-cpu-offload"
    is_rollout = config.rollout.backend == "embedded"
    if is_rollout and config.rollout.rollout_num_gpus_per_engine > 1:
        unsupported[ENGINE] = "--rollout-num-gpus-per-engine 1"
    if not unsupported:
        return
    asked = [_asked(resolved, key) for key in unsupported]
    backends = ["rollout.backend"] if set(unsupported) == {ENGINE} else ["trainer.backend"]
    others = ["--trainer-backend megatron"] if is_trainer else []
    others += ["--rollout-backend sglang"] if is_rollout else []
    yield RULE.error(
        resolved,
        f"the embedded backend cannot do {', '.join(asked)}",
        [*unsupported, *backends],
        either(" ".join(unsupported.values()), " ".join(others)),
    )


def _asked(resolved: Resolved, key: str) -> str:
    name, value = key.partition(".")[2], resolved.value(key)
    return name if value is True else f"{name} = {value}"


RULE = Rule(
    code="RL332",
    name="the embedded backend is parallel over data only",
    reason="each of its ranks holds the whole model and its optimizer, and each of its engines is one GPU",
    check=_check,
)
RULES = (RULE,)
