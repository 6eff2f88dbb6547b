"""What the example brings, asked for through rllaunch; nothing has to be installed for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import rllaunch_example
from rllaunch_example.commands import example_tail
from rllaunch_example.csv_metrics import CsvMetrics
from rllaunch_example.rewards import same_digits

from rllaunch.doctor.engine import diagnose
from rllaunch.errors import UsageError
from rllaunch.plugins import Plugins, load_plugins
from rllaunch.resolve.detect import MachineFacts
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.resolve import Request, Setting, resolve


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Plugins:
    if "example" in load_plugins().infos:
        monkeypatch.setenv("RLLAUNCH_DISABLE_PLUGINS", "example")
    return load_plugins(extra=[("example", rllaunch_example)])


def launch(plugins: Plugins, **values: object) -> Resolved:
    keys = {"model.name": "tiny", "hardware.name": "cpu"} | {k.replace("__", "."): v for k, v in values.items()}
    flags = tuple(Setting(key, value, "test") for key, value in keys.items())
    return resolve(Request(flags=flags, environ={}), plugins)


def test_the_plugin_answers_every_hook_without_a_problem(plugins: Plugins, tmp_path: Path):
    resolved = launch(plugins, hardware__name="example-workstation")
    plugins.check()
    (observer,) = [o for info, o in plugins.observers(resolved.config, tmp_path) if info.name == "example"]
    assert isinstance(observer, CsvMetrics)
    assert plugins.problems == []
    assert plugins.profiles().problems == []
    assert len(plugins.infos["example"].hooks) == 10


def test_the_tiny_model_runs_on_the_workstation_without_megatron(plugins: Plugins):
    resolved = launch(plugins, hardware__name="example-workstation")
    for side in ("trainer", "rollout"):
        assert resolved.origin(f"{side}.backend").value == "example-embedded"
        assert resolved.origin(f"{side}.backend").source == "plugin example test"
        assert "example-embedded" in plugins.backends(side)
    assert launch(plugins, hardware__name="H100").origin("trainer.backend").value == "megatron"


def test_an_h100_with_half_the_lanes_reaches_its_host_half_as_fast(plugins: Plugins):
    (half, quarter) = (plugins.profiles().get("hardware", f"example-h100-x{lanes}", "") for lanes in (8, 4))
    key = "hardware.host_link_bytes_per_second"
    assert half.values[key].value == pytest.approx(31.5e9, rel=1e-3)
    assert quarter.values[key].value == half.values[key].value / 2
    assert half.values["hardware.gpus_per_node"].value == 8
    assert half.values["hardware.gpus_per_node"].place.startswith("extends H100 (rllaunch ")


@pytest.mark.parametrize(
    ("rollouts", "save_interval", "warns"), [(1001, 0, True), (1001, 100, False), (1000, 0, False)]
)
def test_a_long_run_without_checkpoints_is_warned_about(
    plugins: Plugins, rollouts: int, save_interval: int, warns: bool
):
    resolved = launch(plugins, run__num_rollout=rollouts, run__save_interval=save_interval)
    found = [f for f in diagnose(resolved, plugins.rules(), probe=False) if f.code == "RL901"]
    assert [f.level for f in found] == ["warning"] * warns


def test_the_task_has_a_hundred_different_prompts_and_a_reward(plugins: Plugins):
    config = launch(plugins, task__name="example-copy").config
    files = (config.task.prompt_data, config.task.eval_prompt_data)
    rows = [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 100
    assert all(same_digits(row["prompt"], row["label"], row["label"]) == 1.0 for row in rows)
    assert same_digits("47=", "41", "47") == 0.5
    assert same_digits("47=", "477", "47") == 0.0
    assert same_digits("47=", "", "47") == 0.0


def test_the_machine_is_known_only_where_the_environment_says_so(plugins: Plugins, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("EXAMPLE_HARDWARE", raising=False)
    assert plugins.detect_hardware(MachineFacts()) == "cpu"
    monkeypatch.setenv("EXAMPLE_HARDWARE", "1")
    assert plugins.detect_hardware(MachineFacts()) == "example-workstation-2x24"


def test_a_resumed_run_goes_on_in_the_csv_file(tmp_path: Path):
    file = tmp_path / "metrics.csv"
    first = CsvMetrics(file)
    for rollout in range(3):
        first.on_event({"step": "trainer.offload", "seconds": 0.5, "bytes_moved": 8})
        first.on_event({"step": "train", "seconds": 9.0, "bytes_moved": 0})
        first.on_metrics({"rollout_id": rollout, "reward_mean": 0.25, "seconds": {}})
    first.on_end({"status": "interrupted"})
    CsvMetrics(file).on_metrics({"rollout_id": 2, "reward_mean": 0.75, "loss": 1.5})
    assert file.read_text(encoding="utf-8").splitlines() == [
        "rollout_id,reward_mean,loss,entropy,grad_norm,handoff_seconds,handoff_bytes",
        "0,0.25,,,,0.5,8",
        "1,0.25,,,,0.5,8",
        "2,0.75,1.5,,,0.0,0",
    ]


def test_the_command_prints_the_last_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"rollout_id": n, "reward_mean": n / 8, "loss": None} for n in range(5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    example_tail(tmp_path)
    assert capsys.readouterr().out == "rollout 4  reward_mean 0.5\n"


@pytest.mark.parametrize("text", [None, ""])
def test_the_command_says_what_is_missing(text: str | None, tmp_path: Path):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match="no metrics"):
        example_tail(tmp_path)
