"""Whole runs under Ray: SGLang engines in actors of their own beside the embedded trainer, on the CPU."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

pytest.importorskip("sglang")

from launching import finish, start

pytestmark = [pytest.mark.stack, pytest.mark.slow]

STUBS = str(Path(__file__).with_name("stubs"))


def test_two_engines_in_actors_serve_a_run_and_leave_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "run"
    env = {"PYTHONPATH": os.pathsep.join(filter(None, [STUBS, os.environ.get("PYTHONPATH", "")]))}
    words = ("--rollout-backend", "sglang", "--num-gpus-per-node", "2", "--num-rollout", "2")
    run = finish(start(path, *words, cwd=tmp_path, env=env), path, timeout=600)
    assert run.code == 0, run.err + "".join(log.read_text() for log in path.glob("engine-*.log"))
    assert [row["rollout_id"] for row in run.metrics] == [0, 1]
    # The log-probs of the samples, as SGLang and as the trainer have them, before and after an update.
    assert all(row["logprob_diff"] < 1e-4 for row in run.metrics)
    assert {log.name for log in path.glob("engine-*.log")} == {"engine-0.log", "engine-1.log"}
    left = [p for p in psutil.process_iter() if str(path) in _environment_of(p)]
    assert not left


def _environment_of(process: psutil.Process) -> str:
    try:
        return str(process.environ()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except psutil.Error:
        return ""
