"""The example as a user has it: installed by pip, beside rllaunch, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "plugins" / "rllaunch-example"
LABEL = "example 0.1.0"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is installed."""
    target = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--no-index", "--target", str(target), str(EXAMPLE)], check=True, capture_output=True)
    return target


@pytest.fixture
def run(site: Path, tmp_path: Path) -> Any:
    """`rllaunch …` with the example in front of the path."""

    def call(*words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
        env = {**os.environ, "PYTHONPATH": path, **environ}
        env.pop("RLLAUNCH_DISABLE_PLUGINS", None)
        done = subprocess.run(
            [sys.executable, "-m", "rllaunch", *words], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == code, done.stderr
        return done

    return call


def test_it_is_listed_with_all_it_brings(run: Any, site: Path):
    listed = json.loads(run("plugins", "--json").stdout)
    assert listed["findings"] == []
    (row,) = [r for r in listed["plugins"] if r["name"] == "example"]
    assert row["version"] == "0.1.0"
    assert row["error"] == ""
    assert row["rules"] == ["RL901"]
    assert len(row["hooks"]) == 10
    assert sorted(row["profiles"]) == [
        "hardware example-H100-x4",
        "hardware example-H100-x8",
        "hardware example-workstation-2x24",
        "task example-copy",
    ]


def test_a_profile_of_a_file_and_one_from_python_are_shown_with_their_sources(run: Any):
    file = json.loads(run("profiles", "show", "example-workstation", "--json").stdout)
    assert (file["plugin"], file["place"]) == (LABEL, "hardware/example-workstation-2x24.toml")
    assert file["values"]["hardware.host_link_bytes_per_second"] == {
        "value": 25e9,
        "place": "hardware/example-workstation-2x24.toml:17",
        "source": "example: made up, 80% of the link's 31.5e9",
    }
    built = run("profiles", "show", "example-h100-x8").stdout
    assert f"rllaunch_example/computed.py ({LABEL}), extends H100" in built
    assert "theory, not measured" in built


def test_its_rule_its_layer_and_its_detection_have_a_say_in_a_launch(run: Any):
    words = ("doctor", "--model", "tiny", "--no-probe", "--json", "--num-rollout", "2000", "--save-interval", "0")
    found = json.loads(run(*words, EXAMPLE_HARDWARE="1").stdout)
    assert found["ok"]
    assert [f["code"] for f in found["findings"]] == ["RL901"]
    key = json.loads(run("explain", "trainer.backend", "--model", "tiny", "--json", EXAMPLE_HARDWARE="1").stdout)
    assert key["origins"][-1] == {"value": "example-embedded", "layer": "cell", "source": f"plugin {LABEL}"}


def test_its_command_is_in_the_help_and_runs(run: Any, tmp_path: Path):
    assert "example-tail  Print the last metrics of a run as one line." in run("--help").stdout
    (tmp_path / "metrics.jsonl").write_text('{"rollout_id": 3, "reward_mean": 0.5}\n', encoding="utf-8")
    assert run("example-tail", ".").stdout == "rollout 3  reward_mean 0.5\n"
    assert run("example-tail", "nowhere", code=2).stderr.startswith("error: no metrics: No such file or directory")


@pytest.mark.slow
def test_its_task_is_trained_on_its_backends_and_its_observer_sees_every_rollout(run: Any, tmp_path: Path):
    backends = ("--trainer-backend", "example-embedded", "--rollout-backend", "example-embedded")
    length = ("--num-rollout", "2", "--run-dir", "run")
    run("train", "--model", "tiny", "--hardware", "cpu", "--task", "example-copy", *backends, *length)
    header, *rows = (tmp_path / "run" / "example_metrics.csv").read_text(encoding="utf-8").splitlines()
    assert header.startswith("rollout_id,reward_mean,")
    assert [row.partition(",")[0] for row in rows] == ["0", "1"]
    assert run("example-tail", "run").stdout.startswith("rollout 1  reward_mean ")


def test_its_own_tests_pass():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE)],
        cwd=EXAMPLE,
        env={k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RLLAUNCH_"))},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
