"""Runs that end early: what is told, what is kept, what goes on, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from launching import finish, start

TASK = '{"prompt": "12=", "label": "21"}\n{"prompt": "34=", "label": "43"}\n'


def own_reward(tmp_path: Path, body: str) -> tuple[str, ...]:
    (tmp_path / "p.jsonl").write_text(TASK)
    (tmp_path / "mine.py").write_text(f"def score(prompt, response, label):\n    {body}\n")
    return ("--data", "p.jsonl", "--reward", "mine:score", "--num-rollout", "2")


def test_a_reward_that_raises_stops_the_run_and_shows_the_prompt(tmp_path: Path):
    words = own_reward(tmp_path, "return {'12=': 1.0}[prompt]")
    run = finish(start(tmp_path / "run", *words, cwd=tmp_path), tmp_path / "run")
    assert run.code == 1
    text = run.err[run.err.index("error:") :]
    lines = text.splitlines()
    assert lines[0] == "error: the reward function raised KeyError: '34='"
    assert lines[1] == "  prompt: '34='"
    assert lines[2].startswith("  response: ")
    assert lines[3:5] == ["  label: '43'", "  reward: mine:score"]
    assert lines[5].endswith("mine.py:2 in score")
    assert lines[6] == "hint: correct the function; --resume goes on from the last checkpoint, if there is one"
    assert "Traceback" not in run.err
    assert f"the run is in {run.path}\n" in run.err, "nothing was saved that a resumed run would go on from"
    assert json.loads((run.path / "config.json").read_text())["task"]["reward"] == "mine:score"


def test_a_reward_of_nan_stops_the_run_and_shows_the_prompt(tmp_path: Path):
    run = finish(start(tmp_path / "run", *own_reward(tmp_path, "return float('nan')"), cwd=tmp_path), tmp_path / "run")
    assert run.code == 1
    lines = run.err[run.err.index("error:") :].splitlines()
    assert lines[0] == "error: the reward function returned nan, not a finite number"
    assert lines[1].startswith("  prompt: '")
    assert lines[-1] == "hint: correct the function; --resume goes on from the last checkpoint, if there is one"


def test_a_pool_that_is_too_small_stops_with_who_holds_what(tmp_path: Path):
    run = finish(start(tmp_path / "run", "--set", "pools.host_capacity_bytes=1000000", cwd=tmp_path), tmp_path / "run")
    assert run.code == 4
    assert "Traceback" not in run.err
    assert "host" in run.err[run.err.index("error:") :]


def processes_below(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def wait_for_rollouts(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        file = path / "metrics.jsonl"
        if file.exists() and len(file.read_text().splitlines()) >= count:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("the run did not get there")


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM")], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_stopped_run_leaves_no_process_and_resumes_bit_for_bit(
    train: Callable[..., Any], tmp_path: Path, number: signal.Signals, name: str
):
    words = ("--num-rollout", "12", "--eval-interval", "4", "--save-interval", "3")
    whole = train(*words)
    path = tmp_path / "run"
    process = start(path, *words, cwd=tmp_path)
    wait_for_rollouts(path, 5, process)
    below = processes_below(process.pid)
    assert len(below) >= 4, "raylet, gcs and workers"
    started = time.monotonic()
    process.send_signal(number)
    stopped = finish(process, path, timeout=60)
    assert time.monotonic() - started < 25  # two or three on an idle machine
    assert stopped.code == 130
    assert f"interrupted ({name}); go on with: rllaunch train --resume --run-dir {path}" in stopped.err
    _, alive = psutil.wait_procs(below, timeout=5)
    assert not alive
    assert not list(Path("/dev/shm").glob(f"rllaunch-{os.getuid()}-{process.pid}-*"))
    command = [sys.executable, "-m", "rllaunch", "train", "--resume", "--run-dir", str(path)]
    resumed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming from rollout_0000" in resumed.stderr
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in rows] == whole.without_seconds()


def test_a_run_stopped_while_ray_starts_leaves_no_process(tmp_path: Path):
    path, mark = tmp_path / "run", str(tmp_path)
    process = start(path, "--num-rollout", "3", cwd=tmp_path, env={"TEST_MARK": mark})
    deadline = time.monotonic() + 60
    # Ray's agents are children of its raylet, and stay for a minute when that has ended.
    while not any("agent" in command_of(one) for one in processes_below(process.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    stopped = finish(process, path, timeout=60)
    assert stopped.code == 130
    assert "interrupted (SIGINT); go on with: rllaunch train --resume" in stopped.err
    # By their environment: who has lost its parent is no child of ours any more.
    assert [command_of(one) for one in psutil.process_iter() if marked(one, mark)] == []


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_run_killed_before_its_first_checkpoint_starts_again_from_its_beginning(
    train: Callable[..., Any], tmp_path: Path
):
    words = ("--num-rollout", "4", "--eval-interval", "2", "--save-interval", "2")
    whole = train(*words)
    path = tmp_path / "run"
    process = start(path, *words, cwd=tmp_path)
    wait_for_rollouts(path, 1, process)
    below = processes_below(process.pid)
    process.kill()
    process.communicate()
    # Nobody could clean up after SIGKILL: end what that driver started, by id.
    for one in below:
        with_suppressed(one.kill)
    psutil.wait_procs(below, timeout=5)
    command = [sys.executable, "-m", "rllaunch", "train", "--resume", "--run-dir", str(path)]
    resumed = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert resumed.returncode == 0, resumed.stderr
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [{k: v for k, v in row.items() if k != "seconds"} for row in rows] == whole.without_seconds()


def with_suppressed(call: Callable[[], Any]) -> None:
    with contextlib.suppress(psutil.Error):
        call()


def test_what_decides_the_results_cannot_change_on_resume(train: Callable[..., Any]):
    run = train("--num-rollout", "4", "--eval-interval", "2", "--save-interval", "2")
    command = [sys.executable, "-m", "rllaunch", "train", "--resume", "--run-dir", str(run.path), "--lr", "0.1"]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 3
    assert refused.stderr == (
        "error: a resumed run keeps what decides its results\n"
        f"  trainer.lr was 0.002, is 0.1\n  the run's own: {run.path / 'config.json'}\n"
        "hint: leave these flags out, or start a new run\n"
    )


def test_a_run_directory_in_use_is_refused(train: Callable[..., Any]):
    run = train("--num-rollout", "4", "--eval-interval", "2", "--save-interval", "2")
    command = [
        sys.executable,
        "-m",
        "rllaunch",
        "train",
        "--model",
        "tiny",
        "--hardware",
        "cpu",
        "--run-dir",
        str(run.path),
    ]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 5
    assert "error[RL504]" in refused.stdout


def test_a_checkpoint_of_the_hub_that_cannot_be_had_is_no_random_weights(tmp_path: Path):
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty")}

    def run(*words: str) -> list[str]:
        path = tmp_path / "run"
        ended = finish(start(path, "--hf-checkpoint", "org/none", *words, cwd=tmp_path, env=offline), path)
        assert ended.code == 3, ended.err
        assert "random weights" not in ended.err
        return ended.err[ended.err.index("error:") :].splitlines()

    what, where, fix = run()
    assert what.startswith("error: cannot load a model's config.json from org/none: ")
    assert where == "  model.hf_checkpoint = org/none"
    assert fix.startswith("hint: a directory of config.json, weights and tokenizer, or a name at the hub ")
    shutil.rmtree(tmp_path / "run")
    assert run("--set", "model.vocabulary=")[0].startswith("error: cannot load a tokenizer from org/none: ")


def test_no_room_on_disk_is_said_before_the_start(tmp_path: Path):
    run = finish(
        start(tmp_path / "run", "--set", "run.disk_reserve_bytes=1000000000000000", cwd=tmp_path), tmp_path / "run"
    )
    assert run.code == 5
    assert "error[RL505]" in run.out
    assert "starting Ray" not in run.err
