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
ROLLOUT_DTYPE = "rollout.dtype"
NODES, GPUS = "cluster.num_nodes", "cluster.num_gpus_per_node"

# What only Megatron and SGLang read. Set for an embedded run, it would do nothing and say nothing.
TRAINER_ONLY_ELSEWHERE = (
    "trainer.max_tokens_per_gpu",
    "trainer.recompute_granularity",
    "trainer.precision",
    "trainer.sequence_parallel",
    "trainer.decoder_first_pipeline_num_layers",
    "trainer.decoder_last_pipeline_num_layers",
    "handoff.train_memory_margin_bytes",
    "handoff.offload_train_process_groups",
)
USER_LAYERS = ("config", "env", "flag")


def _check(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    unsupported: dict[str, str] = {}
    if is_trainer := config.trainer.backend == "embedded":
        sizes = {key: decided_int(resolved, key) or 1 for key in TRAINER_SIZES}
        unsupported |= {key: TRAINER_SIZES[key] for key, size in sizes.items() if size > 1}
        if config.trainer.optimizer_cpu_offload:
            unsupported[CPU_OPTIMIZER] = "--no-optimizer-cpu-offload"
    is_rollout = config.rollout.backend == "embedded"
    if is_rollout and config.rollout.dtype not in ("float32", "bfloat16"):
        unsupported[ROLLOUT_DTYPE] = "--rollout-dtype bfloat16"
    if (is_trainer or is_rollout) and config.cluster.num_nodes > 1:
        unsupported[NODES] = "--num-nodes 1"
    if (is_trainer or is_rollout) and config.hardware.accelerator != "cpu" and config.world_size > 1:
        unsupported[GPUS] = "--num-gpus-per-node 1"
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


def _check_unread(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    keys: list[str] = []
    if config.trainer.backend == "embedded":
        keys += [*TRAINER_ONLY_ELSEWHERE, *(k for k in resolved.origins if k.startswith("megatron."))]
    if config.rollout.backend == "embedded":
        keys += [k for k in resolved.origins if k.startswith("sglang.")]
    if config.model.hf_checkpoint and "embedded" in (config.trainer.backend, config.rollout.backend):
        keys += [k for k in resolved.origins if k.startswith("model.architecture.")]
    unread = [key for key in keys if resolved.origin(key).layer in USER_LAYERS]
    if unread:
        yield UNREAD.error(
            resolved,
            f"the embedded backend does not read {', '.join(unread)}",
            unread,
            f"leave {'it' if len(unread) == 1 else 'them'} out, or --allow {UNREAD.code}",
        )


UNREAD = Rule(
    code="RL339",
    name="what the user sets has an effect",
    reason="a flag that does nothing is taken for one that does (THUDM/slime#2311)",
    check=_check_unread,
    overridable=True,
)
RULES = (RULE, UNREAD)
