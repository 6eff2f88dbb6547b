"""The run directory: whatever is in it is whole."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import pytest

from rllaunch.errors import ConfigError, EnvironmentProblem
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.record import RunDirectory, refuse_changes, saved_layer


def started(tmp_path: Path) -> RunDirectory:
    record = RunDirectory(tmp_path / "run")
    record.create(LaunchConfig(), {"command": []})
    record.open(0)
    return record


def test_the_config_in_the_run_directory_is_the_whole_config(tmp_path: Path):
    record = started(tmp_path)
    assert LaunchConfig.model_validate(json.loads(record.config_file.read_text())) == LaunchConfig()


def test_a_checkpoint_that_fails_half_way_leaves_no_trace(tmp_path: Path):
    record = started(tmp_path)
    with record.new_checkpoint(4, {}, keep=2) as directory:
        (directory / "state").write_text("whole")
    with suppress(KeyboardInterrupt), record.new_checkpoint(9, {}, keep=2) as directory:
        (directory / "state").write_text("ha")
        raise KeyboardInterrupt
    assert [number for number, _ in record.list_checkpoints()] == [4]
    assert sorted(p.name for p in record.checkpoints.iterdir()) == ["rollout_000004"]


def test_old_checkpoints_go_only_after_a_newer_one_is_whole(tmp_path: Path):
    record = started(tmp_path)
    for number in (1, 2, 3):
        with record.new_checkpoint(number, {}, keep=2) as directory:
            (directory / "state").write_text(str(number))
            assert len(record.list_checkpoints()) == min(number - 1, 2)
    assert [number for number, _ in record.list_checkpoints()] == [2, 3]


def test_resuming_cuts_metrics_back_to_the_checkpoint_and_drops_half_a_line(tmp_path: Path):
    record = started(tmp_path)
    for rollout_id in range(5):
        record.event({"rollout_id": None if rollout_id == 0 else rollout_id, "step": "train"})
        record.metrics({"rollout_id": rollout_id, "loss": 0.5})
    record.close({})
    with (record.path / "metrics.jsonl").open("a") as stream:
        stream.write('{"rollout_id": 5, "lo')
    record.open(3)
    record.metrics({"rollout_id": 3, "loss": 0.25})
    record.close({})
    rows = [json.loads(line) for line in (record.path / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout_id"] for row in rows] == [0, 1, 2, 3]
    events = [json.loads(line) for line in (record.path / "events.jsonl").read_text().splitlines()]
    assert [row["rollout_id"] for row in events] == [1, 2], "start-up happens again"


def test_what_decides_the_results_cannot_change_on_resume(tmp_path: Path):
    record = started(tmp_path)
    longer = LaunchConfig.model_validate(
        {"run": {"num_rollout": 500}, "handoff": {"colocate_memory_peak_device": "gpu"}}
    )
    refuse_changes(record.path, longer)
    with pytest.raises(ConfigError) as caught:
        refuse_changes(record.path, LaunchConfig.model_validate({"run": {"seed": 1}, "trainer": {"lr": 0.1}}))
    assert caught.value.where[:2] == ("trainer.lr was 1e-06, is 0.1", "run.seed was 0, is 1")


def test_a_trainer_whose_checkpoints_fit_any_layout_may_resume_on_another(tmp_path: Path):
    def config(gpus: int, **trainer: object) -> LaunchConfig:
        return LaunchConfig.model_validate({"cluster": {"num_gpus_per_node": gpus}, "trainer": trainer})

    record = RunDirectory(tmp_path / "run")
    record.create(config(2, tensor_model_parallel_size=2), {})
    assert refuse_changes(record.path, config(4, context_parallel_size=2), any_layout=True) == [
        "cluster.num_gpus_per_node was 2, is 4",
        "trainer.tensor_model_parallel_size was 2, is 1",
        "trainer.context_parallel_size was 1, is 2",
    ]
    with pytest.raises(ConfigError) as caught:
        refuse_changes(record.path, config(4, lr=0.1), any_layout=True)
    assert caught.value.where[0] == "trainer.lr was 1e-06, is 0.1"
    with pytest.raises(ConfigError, match="keeps what decides"):
        refuse_changes(record.path, config(4))


@pytest.mark.parametrize(
    ("section", "options", "is_layout"),
    [
        ("sglang", {"mem_fraction_static": 0.5}, True),
        ("sglang", {"cuda_graph_max_bs": 8}, True),
        ("sglang", {"kv_cache_dtype": "fp8_e4m3"}, False),
        ("sglang", {"json_model_override_args": {"rope_theta": 1}}, False),
        ("env", {"NCCL_IB_HCA": "mlx5_0"}, True),
        ("env", {"NVTE_FLASH_ATTN": "0"}, False),
        ("megatron", {"attention_dropout": 0.1}, False),
    ],
)
def test_of_options_that_pass_through_only_those_of_the_layout_may_change(
    section: str, options: dict[str, object], is_layout: bool, tmp_path: Path
):
    plain, other = LaunchConfig(), LaunchConfig.model_validate({section: options})
    for number, (before, after) in enumerate([(plain, other), (other, plain)]):
        record = RunDirectory(tmp_path / str(number))
        record.create(before, {})
        if is_layout:
            assert len(refuse_changes(record.path, after, any_layout=True)) == 1
        else:
            with pytest.raises(ConfigError, match="keeps what decides"):
                refuse_changes(record.path, after, any_layout=True)


def test_a_resumed_run_keeps_how_it_began_and_what_changed_since(tmp_path: Path):
    record = RunDirectory(tmp_path / "run")
    record.create(LaunchConfig(), {"command": ["first"]})
    record.resume(LaunchConfig.model_validate({"trainer": {"tensor_model_parallel_size": 2}}), {"command": ["second"]})
    record.resume(LaunchConfig(), {"command": ["third"]})
    kept = json.loads((record.path / "launch.json").read_text())
    assert (kept["first_command"], kept["command"]) == (["first"], ["third"])
    assert [entry["changed"] for entry in kept["resumed"]] == [
        ["trainer.tensor_model_parallel_size was 1, is 2"],
        ["trainer.tensor_model_parallel_size was 2, is 1"],
    ]


def test_what_followed_from_the_layout_follows_again(tmp_path: Path):
    record = RunDirectory(tmp_path / "run")
    config = LaunchConfig.model_validate({"cluster": {"num_gpus_per_node": 2, "actor_num_nodes": 1}})
    origins = {
        "cluster.num_gpus_per_node": [{"value": 2, "layer": "flag", "source": "--num-gpus-per-node 2"}],
        "cluster.actor_num_nodes": [{"value": 1, "layer": "derived", "source": "follows num_nodes"}],
    }
    record.create(config, {"origins": origins})
    keys = {setting.key for setting in saved_layer(record.path).settings}
    assert "cluster.num_gpus_per_node" in keys
    assert "cluster.actor_num_nodes" not in keys
    assert any(key.startswith("hardware.") for key in keys)
    elsewhere = {setting.key for setting in saved_layer(record.path, "B200").settings}
    assert keys - elsewhere == {key for key in keys if key.startswith("hardware.")}


def test_resuming_nothing_says_so(tmp_path: Path):
    with pytest.raises(ConfigError, match="no run to resume"):
        saved_layer(tmp_path)


def test_an_observer_that_fails_is_reported_once_and_left_out(tmp_path: Path):
    said: list[str] = []

    class Broken:
        def on_metrics(self, metrics: object) -> None:
            raise ValueError("no network")

    class Counting:
        seen = 0

        def on_metrics(self, metrics: object) -> None:
            self.seen += 1

    counting = Counting()
    record = RunDirectory(
        tmp_path / "run", observers=[("bad 1.0", Broken()), ("good 1.0", counting)], complain=said.append
    )
    record.create(LaunchConfig(), {})
    record.open(0)
    record.metrics({"rollout_id": 0})
    record.metrics({"rollout_id": 1})
    record.close({})
    assert said == ["warning: observer of plugin bad 1.0 failed and is left out: ValueError: no network"]
    assert counting.seen == 2


def test_a_run_directory_that_cannot_be_made_is_an_environment_problem(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentProblem, match="cannot be written"):
        RunDirectory(tmp_path / "file" / "run").create(LaunchConfig(), {})
