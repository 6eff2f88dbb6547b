"""There is a cluster, and it is large enough."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from threading import Thread

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import either, gpus_key, plural
from rllaunch.resolve.origins import Resolved, show_value

ADDRESS = "cluster.ray_address"
TIMEOUT_SECONDS = 0.4
HOST_AND_PORT = re.compile(r"(?:[a-z]+://)?(?P<host>\[[^\]]+\]|[^:/\s]+):(?P<port>\d{1,5})/?")
# Ray looks these up by itself: the cluster of this machine, or a new one.
LOOKED_UP = ("auto", "local")


def ray_address(resolved: Resolved) -> tuple[str, str]:
    """The cluster to join and a line saying who named it; empty for a local cluster of our own."""
    if resolved.config.cluster.ray_address:
        return resolved.config.cluster.ray_address, resolved.describe(ADDRESS)
    address = os.environ.get("RAY_ADDRESS", "")
    return address, f"RAY_ADDRESS = {show_value(address)}   this environment" if address else ""


def _check_size(resolved: Resolved) -> Iterator[Finding]:
    """For a local cluster only: what a remote one has, the placement asks when it gets there."""
    address, _ = ray_address(resolved)
    if address not in ("", "local"):
        return
    config = resolved.config
    nodes, per_node = config.cluster.num_nodes, config.gpus_per_node
    join = "--ray-address HOST:PORT of a running cluster"
    if config.hardware.accelerator == "cpu":
        if nodes > 1:
            yield SIZE.error(
                resolved,
                f"the launch needs {nodes} nodes, a local cluster is one",
                ["cluster.num_nodes"],
                either(f"--num-nodes 1 --num-gpus-per-node {nodes * per_node}", join),
            )
        return
    from rllaunch.doctor.gpus import read_node
    from rllaunch.resolve.detect import probe_machine

    if nodes == 1 and per_node <= len(read_node().gpus):
        return  # where CUDA_VISIBLE_DEVICES hides some of them, RL404 says so
    machine = probe_machine()
    present = len(machine.gpu_names)
    enough = f"--num-nodes 1 --num-gpus-per-node {min(present, per_node)}" if present else ""
    unseen = f" ({machine.gpu_error})" if machine.gpu_error else ""
    yield SIZE.error(
        resolved,
        f"the launch needs {plural(nodes, 'node')} × {plural(per_node, 'GPU')}, "
        f"a local cluster is this machine with {plural(present, 'GPU')}{unseen}\n" + _table(nodes, per_node, present),
        ["cluster.num_nodes", gpus_key(resolved)],
        either(join, enough),
    )


def _table(nodes: int, per_node: int, present: int) -> str:
    rows = [("node", "requested", "present"), ("0", str(per_node), str(present))]
    if nodes > 1:
        rows.append(("1" if nodes == 2 else f"1–{nodes - 1}", str(per_node), "none"))
    return "\n".join(f"{node:<6}{requested:>9}{has:>9}" for node, requested, has in rows)


def _check_reachable(resolved: Resolved) -> Iterator[Finding]:
    address, origin = ray_address(resolved)
    if not address or address in LOOKED_UP:
        return
    parts = HOST_AND_PORT.fullmatch(address)
    if parts is None or not 0 < int(parts["port"]) < 2**16:
        problem, fix = "is no HOST:PORT", "--ray-address HOST:6379, as `ray start --head` printed it"
    elif why := unreachable(parts["host"].strip("[]"), int(parts["port"])):
        problem = f"does not answer: {why}"
        fix = "start the cluster with `ray start --head`, or correct the address"
        fix += "" if resolved.config.cluster.ray_address else " in RAY_ADDRESS"
    else:
        return
    yield Finding(REACHABLE.code, "error", f"the Ray cluster at {address} {problem}", (origin,), fix)


def unreachable(host: str, port: int) -> str:
    """Why no connection to a port opens within `TIMEOUT_SECONDS`; empty if one does."""
    answer = [f"no answer within {TIMEOUT_SECONDS} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), TIMEOUT_SECONDS).close()
            answer.append("")
        except TimeoutError:
            pass
        except OSError as err:
            answer.append((err.strerror or str(err)).lower())

    # In a thread, because looking up a name has no time limit of its own.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(TIMEOUT_SECONDS + 0.05)
    return answer[-1]


SIZE = Rule(
    code="RL502",
    name="the local cluster is large enough",
    reason="GPUs that never come are waited for in silence (verl-project/verl#505, verl-project/verl#539)",
    check=_check_size,
    probes=True,
    overridable=True,
)
REACHABLE = Rule(
    code="RL503",
    name="the Ray cluster answers",
    reason="a job submitted to a cluster that is gone hangs and ends in a time-out (THUDM/slime#1374)",
    check=_check_reachable,
    probes=True,
    overridable=True,
)
RULES = (SIZE, REACHABLE)
