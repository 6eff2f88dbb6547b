"""Colocated trainer and engines share the same GPUs, so that their counts cannot differ."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import decided_int, either, gpus_key, plural, undo
from rllaunch.resolve.origins import Resolved


def _check_colocate(resolved: Resolved) -> Iterator[Finding]:
    key = "handoff.colocate"
    if not resolved.config.handoff.colocate:
        yield COLOCATE.error(
            resolved,
            "trainer and engines on separate GPUs are not supported yet",
            [key],
            undo(resolved, key, True, "--colocate"),
        )


def _check_per_node(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if not config.handoff.colocate:
        return
    per_node, on_board = config.gpus_per_node, config.hardware.gpus_per_node
    actor_gpus, actor_nodes = config.cluster.actor_num_gpus_per_node, config.cluster.actor_num_nodes
    gpus = gpus_key(resolved)
    differ = actor_gpus is not None and actor_gpus != per_node
    # On `cpu` a slot is a process, and a node has as many as it is asked for.
    if config.hardware.accelerator != "cpu" and per_node > on_board:
        trainer = ["cluster.actor_num_gpus_per_node"] if differ else []
        node = f"a {config.hardware.name} node" if config.hardware.name != "auto" else "a node"
        nodes = config.cluster.num_nodes * per_node // on_board
        spread = "" if differ or nodes * on_board != config.world_size else f" --num-nodes {nodes}"
        yield PER_NODE.error(
            resolved,
            f"{plural(per_node, 'GPU')} per node are asked for, {node} has {on_board}",
            [gpus, *trainer, "hardware.gpus_per_node"],
            f"--num-gpus-per-node {on_board}{spread}",
        )
    elif differ:
        yield PER_NODE.error(
            resolved,
            f"colocated engines use the trainer's GPUs, but take {per_node} a node, the trainer {actor_gpus}",
            [gpus, "cluster.actor_num_gpus_per_node"],
            either(f"--num-gpus-per-node {actor_gpus}", f"--actor-num-gpus-per-node {per_node}"),
        )
    if actor_nodes is not None and actor_nodes != config.cluster.num_nodes:
        nodes = config.cluster.num_nodes
        yield PER_NODE.error(
            resolved,
            f"colocated engines use the trainer's nodes, but take {nodes}, the trainer {actor_nodes}",
            ["cluster.num_nodes", "cluster.actor_num_nodes"],
            either(f"--num-nodes {actor_nodes}", f"--actor-num-nodes {nodes}"),
        )


def _check_total(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    rollout_gpus = decided_int(resolved, "rollout.rollout_num_gpus")
    if not config.handoff.colocate or rollout_gpus in (None, config.world_size):
        return
    critic = "; a critic shares them and adds none" if config.has_critic else ""
    estimator = ["algorithm.advantage_estimator"] if config.has_critic else []
    yield TOTAL.error(
        resolved,
        f"colocated engines use the trainer's {plural(config.world_size, 'GPU')}, "
        f"but rollout_num_gpus is {rollout_gpus}{critic}",
        ["rollout.rollout_num_gpus", "cluster.num_nodes", gpus_key(resolved), *estimator],
        f"--rollout-num-gpus {config.world_size}",
    )


COLOCATE = Rule(
    code="RL305",
    name="trainer and engines are colocated",
    reason="both run on the same GPUs here; a disaggregated run needs another placement and transport",
    check=_check_colocate,
)
PER_NODE = Rule(
    code="RL310",
    name="engines and trainer have the same GPUs per node, and no more than there are",
    reason="engines placed by a wrong count get another node's address (THUDM/slime#2012, vllm-project/vime#135)",
    check=_check_per_node,
)
TOTAL = Rule(
    code="RL311",
    name="engines have as many GPUs as the trainer",
    reason="GPUs that no placement group holds are an index error while engines start (vllm-project/vime#41)",
    check=_check_total,
)
RULES = (COLOCATE, PER_NODE, TOTAL)
