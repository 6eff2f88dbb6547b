"""Placing a launch on a Ray cluster: fail at once, with a table, instead of waiting for GPUs that do not come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from rllaunch.errors import EnvironmentProblem
from rllaunch.resolve.schema import LaunchConfig

WAIT_SECONDS = 60.0


def bundle_of(config: LaunchConfig) -> dict[str, float]:
    """Resources of one slot: a GPU with a CPU for its processes, or a CPU that stands for one."""
    return {"CPU": 1.0} if config.hardware.accelerator == "cpu" else {"GPU": 1.0, "CPU": 1.0}


def place(config: LaunchConfig) -> tuple[PlacementGroup, list[int]]:
    """A placement group with one bundle a slot, and the bundle index of each slot, node by node.

    Raises:
        EnvironmentProblem: the cluster has not enough nodes with enough free slots; with a table.
    """
    nodes, per_node = config.cluster.num_nodes, config.gpus_per_node
    bundle = bundle_of(config)
    require(config, bundle)
    group = placement_group([bundle] * (nodes * per_node), strategy="PACK")
    if not group.wait(WAIT_SECONDS):
        remove_placement_group(group)
        raise EnvironmentProblem(
            f"the cluster did not give {nodes * per_node} slots within {WAIT_SECONDS:.0f} s",
            resources_table(bundle),
            "another job holds them, or a node left; `ray status` shows who",
        )
    node_of = ray.util.placement_group_table(group)["bundles_to_node_id"]
    bundles = sorted(node_of, key=lambda b: (node_of[b], b))
    uneven = {n: c for n, c in Counter(node_of.values()).items() if c != per_node}
    if uneven:
        remove_placement_group(group)
        raise EnvironmentProblem(
            f"the cluster packed the slots unevenly: {sorted(uneven.values())} instead of {per_node} a node",
            resources_table(bundle),
            "free whole nodes, or set --num-gpus-per-node to what each has free",
        )
    return group, bundles


def require(config: LaunchConfig, bundle: dict[str, float]) -> None:
    """Raises EnvironmentProblem if too few nodes have the free resources that the launch needs of each."""
    nodes, per_node = config.cluster.num_nodes, config.gpus_per_node
    free = _free_by_node()
    enough = [n for n in free if all(n["free"].get(r, 0.0) >= amount * per_node for r, amount in bundle.items())]
    if len(enough) < nodes:
        raise EnvironmentProblem(
            f"the launch needs {nodes} nodes with {per_node} slots free; "
            f"{len(enough)} of the cluster's {len(free)} have them",
            resources_table(bundle),
            f"this is the cluster at {ray.get_runtime_context().gcs_address}: add nodes to it, join another with "
            "--ray-address, or lower --num-nodes or --num-gpus-per-node",
        )


def resources_table(bundle: dict[str, float]) -> list[str]:
    """One line a node: registered and free resources of the kinds a slot needs."""
    lines = []
    for node in _free_by_node():
        amounts = ", ".join(f"{r} {node['free'].get(r, 0):g} free of {node['all'].get(r, 0):g}" for r in bundle)
        lines.append(f"node {node['address']}: {amounts}")
    return lines


def _free_by_node() -> list[dict[str, Any]]:
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    alive: Sequence[dict[str, Any]] = [n for n in ray.nodes() if n["Alive"]]
    return [
        {"address": n["NodeManagerAddress"], "all": n["Resources"], "free": free.get(n["NodeID"], {})} for n in alive
    ]
