"""Joining a Ray cluster that somebody else runs: it is used, told what it lacks, and left as it was."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launching import finish, start

# Both sides alike: with a token file in the home directory Ray would ask for it.
CLUSTER_ENV = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Ray head node of two CPUs, in processes of its own; its address."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("cluster") / "log"
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port),
        "--num-cpus", "2", "--include-dashboard", "false", "--disable-usage-stats",
    ]  # fmt: skip
    with log.open("w") as stream:
        head = subprocess.Popen(command, stdout=stream, stderr=stream, env={**os.environ, **CLUSTER_ENV})
    deadline = time.monotonic() + 60
    found = None
    while time.monotonic() < deadline and "block forever" not in log.read_text():
        time.sleep(0.2)
    found = re.search(r"--address='([^']+)'", log.read_text())
    assert found, log.read_text()
    try:
        yield found.group(1)
    finally:
        below = psutil.Process(head.pid).children(recursive=True)
        head.terminate()
        _, alive = psutil.wait_procs([psutil.Process(head.pid), *below], timeout=15)
        for process in alive:
            process.kill()


def test_a_cluster_that_runs_is_joined_and_left_running(cluster: str, tmp_path: Path):
    # Not those of a session that an earlier test of this process has joined.
    port = cluster.rpartition(":")[2]
    ray_processes = [p for p in psutil.Process().children(recursive=True) if p.name() in ("raylet", "gcs_server")]
    mine = [p for p in ray_processes if any(port in word for word in p.cmdline())]
    assert len(mine) == 2
    run = finish(
        start(tmp_path / "run", "--num-rollout", "2", cwd=tmp_path, env={"RAY_ADDRESS": cluster, **CLUSTER_ENV}),
        tmp_path / "run",
    )
    assert run.code == 0, run.err
    assert f"joining the Ray cluster at {cluster}" in run.err
    assert len(run.metrics) == 2
    assert all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in mine), "what we did not start goes on"
    left = {p.name() for p in psutil.Process().children(recursive=True)} & {"ray::TrainerRank", "ray::ManagerActor"}
    assert not left


def test_a_cluster_with_too_few_slots_is_said_at_once_with_a_table(cluster: str, tmp_path: Path):
    words = ("--num-rollout", "2", "--num-gpus-per-node", "4", "--ray-address", cluster)
    run = finish(start(tmp_path / "run", *words, cwd=tmp_path, env=CLUSTER_ENV), tmp_path / "run")
    assert run.code == 5
    lines = run.err[run.err.index("error:") :].splitlines()
    assert lines[0] == "error: the launch needs 1 nodes with 4 slots free; 0 of the cluster's 1 have them"
    assert lines[1] == f"  node {cluster.partition(':')[0]}: CPU 2 free of 2"
    assert lines[2].startswith("hint: this is the cluster at ")


def test_an_address_where_nothing_listens_is_a_finding(tmp_path: Path):
    run = finish(start(tmp_path / "run", "--ray-address", "127.0.0.1:1", cwd=tmp_path), tmp_path / "run")
    assert run.code == 5
    assert "error[RL503]" in run.out
