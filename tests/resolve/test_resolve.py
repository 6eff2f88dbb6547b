"""From layers to a config, as a user of the command line sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TINY = ("--model", "tiny", "--hardware", "cpu")
DSV4 = ("--model", "dsv4", "--hardware", "GB300")


def origin(result: Any, key: str) -> tuple[Any, str, str]:
    last = result.json()["origins"][key][-1]
    return last["value"], last["layer"], last["source"]


def test_gb300_puts_the_peak_on_the_gpu_for_every_model(rllaunch: Any):
    models = [p["name"] for p in rllaunch("profiles", "list", "--kind", "model", "--json").json()]
    assert len(models) >= 3
    for model in models:
        result = rllaunch("resolve", "--model", model, "--hardware", "GB300", "--json")
        # A cell may know better: GLM-5.2's engines and trainer do not fit a GPU together.
        origins = result.json()["origins"]["handoff.colocate_memory_peak_device"]
        (by_hardware,) = [o for o in origins if o["layer"] == "hardware profile"]
        assert by_hardware["value"] == "gpu"
        assert by_hardware["source"].startswith("GB300 (rllaunch ")
        assert "hardware/GB300.toml:" in by_hardware["source"]
        assert origins[-1]["value"] == ("cpu" if model == "glm-5.2" else "gpu")


def test_layers_win_in_their_order_and_all_are_named(rllaunch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = tmp_path / "run.toml"
    config.write_text("[rollout]\n\nrollout_batch_size = 48\n")
    key = "rollout.rollout_batch_size"

    def layers(*words: str) -> list[tuple[Any, str]]:
        return [(o["value"], o["layer"]) for o in rllaunch("resolve", *DSV4, *words, "--json").json()["origins"][key]]

    assert layers() == [(32, "default"), (32, "cell")]
    assert layers("--config", str(config))[-1] == (48, "config")
    monkeypatch.setenv("RLLAUNCH_ROLLOUT__ROLLOUT_BATCH_SIZE", "64")
    assert layers("--config", str(config))[-1] == (64, "env")
    assert layers("--config", str(config), "--rollout-batch-size", "128") == [
        (32, "default"), (32, "cell"), (48, "config"), (64, "env"), (128, "flag"),
    ]  # fmt: skip


def test_explain_prints_every_layer_with_its_place(rllaunch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "run.toml").write_text("# mine\n[rollout]\nrollout_batch_size = 48\n")
    monkeypatch.setenv("RLLAUNCH_ROLLOUT__ROLLOUT_BATCH_SIZE", "64")
    result = rllaunch("explain", "rollout_batch_size", *TINY, "--config", "run.toml", "--rollout-batch-size", "128")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[:4] == [
        "rollout.rollout_batch_size = 128   flag: --rollout-batch-size 128",
        "  over 64   env: RLLAUNCH_ROLLOUT__ROLLOUT_BATCH_SIZE in the environment",
        "  over 48   config: run.toml:3",
        lines[3],
    ]
    assert lines[3].startswith("  over ")
    assert "model profile: tiny (rllaunch " in lines[3]
    assert lines[-2:] == ["  Prompts of one rollout.", "  flag: --rollout-batch-size INT"]


def test_explain_tells_what_the_plan_takes_for_auto(rllaunch: Any):
    launch = ("--model", "qwen3-0.6b", "--hardware", "H200")
    lines = rllaunch("explain", "engine_weights", *launch).out.splitlines()
    assert lines[:2] == [
        'handoff.engine_weights = "discard"   derived: handoff.engine_weights = auto: the fastest that fits',
        '  over "auto"   default: schema default',
    ]
    assert rllaunch("explain", "engine_weights", *launch, "--json").json()["value"] == "discard"
    apart = rllaunch("explain", "engine_weights", *launch, "--no-colocate").out
    assert apart.startswith('handoff.engine_weights = "auto"   default: schema default\n'), "it cannot be planned"


@pytest.mark.parametrize("words", [(), ("--hardware", "H200")], ids=["bare", "hardware"])
def test_explain_without_a_model_says_what_the_key_means(rllaunch: Any, words: tuple[str, ...]):
    result = rllaunch("explain", "offload-train-buffers", *words)
    assert result.code == 0
    assert result.out == (
        'handoff.offload_train_buffers = "auto"   default: schema default\n'
        "  How host copies are held: `retained` for the whole run, `fresh` at each offload, or in one arena `shared` by the "
        "trainer's backup and the engine's mirror.\n"
        "  flag: --offload-train-buffers retained|fresh|shared|auto\n"
    )
    assert result.err == "note: no model is named; with --model NAME it says who sets the key\n"
    assert rllaunch("explain", "sglang.some_option").code == 3, "nothing is known of what passes through"


def test_resolve_tells_what_the_plan_takes_for_auto_and_leaves_it_open(rllaunch: Any, tmp_path: Path):
    launch = ("--model", "qwen3-0.6b", "--hardware", "H200", "--engine-weights", "auto")
    out = rllaunch("resolve", *launch).out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    at = lines.index('engine_weights = "auto" # flag: --engine-weights auto')
    assert lines[at + 1 : at + 3] == [
        '# engine_weights = "discard" # derived: handoff.engine_weights = auto: the fastest that fits',
        '# update_weights_from = "host" # derived: handoff.update_weights_from = auto: the fastest that fits',
    ]
    (tmp_path / "run.toml").write_text(out)
    again = rllaunch("resolve", "--config", "run.toml", "--json").json()
    assert again["config"]["handoff"]["engine_weights"] == "auto"
    assert again["decided"]["handoff.engine_weights"] == {
        "value": "discard",
        "layer": "derived",
        "source": "handoff.engine_weights = auto: the fastest that fits",
    }


def test_a_later_config_file_and_the_last_flag_win(rllaunch: Any, tmp_path: Path):
    (tmp_path / "a.toml").write_text("[run]\nseed = 1\nnum_rollout = 7\n")
    (tmp_path / "b.toml").write_text("[run]\nseed = 2\n")
    result = rllaunch("resolve", *TINY, "--config", "a.toml", "--config", "b.toml", "--json")
    assert origin(result, "run.seed") == (2, "config", "b.toml:2")
    assert origin(result, "run.num_rollout") == (7, "config", "a.toml:3")
    result = rllaunch("resolve", *TINY, "--seed", "5", "--set", "run.seed=6", "--json")
    assert origin(result, "run.seed") == (6, "flag", "--set run.seed=6")


def test_gpus_per_node_follow_the_hardware_unless_set(rllaunch: Any):
    for hardware, gpus in (("GB200", 4), ("H200", 8), ("cpu", 1)):
        result = rllaunch("resolve", "--model", "qwen3-0.6b", "--hardware", hardware, "--json")
        value, layer, source = origin(result, "cluster.num_gpus_per_node")
        assert (value, layer) == (gpus, "derived")
        assert source.startswith("follows hardware.gpus_per_node (hardware profile: ")
    result = rllaunch("resolve", "--model", "qwen3-0.6b", "--hardware", "H200", "--num-gpus-per-node", "4", "--json")
    assert origin(result, "cluster.num_gpus_per_node") == (4, "flag", "--num-gpus-per-node 4")


def test_flags_take_lists_negations_and_pass_through(rllaunch: Any):
    result = rllaunch(
        "resolve", *DSV4, "--offload-rollout-level", "kv_cache", "weight", "--no-offload-train",
        "--megatron-moe-router-dtype", "fp32", "--megatron-overlap-grad-reduce", "--sglang-cuda-graph-max-bs=8", "--json",
    )  # fmt: skip
    config = result.json()["config"]
    assert config["handoff"]["offload_rollout_level"] == ["kv_cache", "weight"]
    assert config["handoff"]["offload_train"] is False
    assert config["megatron"]["moe_router_dtype"] == "fp32"
    assert config["megatron"]["overlap_grad_reduce"] is True
    assert config["sglang"]["cuda_graph_max_bs"] == 8
    assert origin(result, "handoff.offload_train") == (False, "flag", "--no-offload-train")


@pytest.mark.parametrize(
    ("words", "flag", "key", "value"),
    [
        (("--num-nodes", "4"), "--num-nodes", "cluster.num_nodes", 4),
        (("--colocate-memory-peak-device", "cpu"), "", "handoff.colocate_memory_peak_device", "cpu"),
        (("--offload-rollout-level", "kv_cache"), "", "handoff.offload_rollout_level", ["kv_cache"]),
        (("--offload-rollout-level", "kv_cache,weight"), "", "handoff.offload_rollout_level", ["kv_cache", "weight"]),
        (("--lora-rank", "16"), "", "algorithm.lora_rank", 16),
        (("--advantage-estimator", "ppo"), "", "algorithm.advantage_estimator", "ppo"),
        (("--tensor-model-parallel-size", "4"), "", "trainer.tensor_model_parallel_size", 4),
        (("--pipeline-model-parallel-size", "2"), "", "trainer.pipeline_model_parallel_size", 2),
        (("--context-parallel-size", "2"), "", "trainer.context_parallel_size", 2),
        (("--expert-model-parallel-size", "8"), "", "trainer.expert_model_parallel_size", 8),
        (("--expert-tensor-parallel-size", "1"), "", "trainer.expert_tensor_parallel_size", 1),
        (("--decoder-first-pipeline-num-layers", "4"), "", "trainer.decoder_first_pipeline_num_layers", 4),
        (("--decoder-last-pipeline-num-layers", "3"), "", "trainer.decoder_last_pipeline_num_layers", 3),
        (("--rollout-num-gpus-per-engine", "8"), "", "rollout.rollout_num_gpus_per_engine", 8),
        (("--sglang-mem-fraction-static", "0.6"), "", "sglang.mem_fraction_static", 0.6),
        (("--optimizer-cpu-offload",), "", "trainer.optimizer_cpu_offload", True),
        (("--no-optimizer-cpu-offload",), "", "trainer.optimizer_cpu_offload", False),
        (("--train-memory-margin-bytes", "1024"), "", "handoff.train_memory_margin_bytes", 1024),
        (("--num-rollout", "3"), "", "run.num_rollout", 3),
        (("--n-samples-per-prompt", "4"), "", "rollout.n_samples_per_prompt", 4),
        (("--data", "x.jsonl"), "", "task.prompt_data", "x.jsonl"),
    ],
)
def test_the_names_people_know_are_flags(rllaunch: Any, words: tuple[str, ...], flag: str, key: str, value: Any):
    result = rllaunch("resolve", *DSV4, *words, "--json")
    assert origin(result, key)[:2] == (value, "flag")


def test_the_explicit_command_resolves_to_the_same_config(rllaunch: Any):
    for launch in (
        DSV4,
        ("--model", "dsv4", "--hardware", "H200"),
        TINY,
        (*DSV4, "--lora-rank", "16", "--set", "env.A=b c"),
    ):
        first = rllaunch("resolve", *launch, "--json").json()
        assert first["command"][:2] == ["rllaunch", "train"]
        again = rllaunch("resolve", *first["command"][2:], "--json").json()
        assert again["config"] == first["config"]


def test_what_resolve_prints_is_toml_that_config_takes(rllaunch: Any, tmp_path: Path):
    for launch in (DSV4, (*TINY, "--entropy-coef", "0.1")):
        shown = rllaunch("resolve", *launch)
        assert "  # " in shown.out
        (tmp_path / "again.toml").write_text(shown.out)
        again = rllaunch("resolve", "--config", "again.toml", "--json").json()
        assert again["config"] == rllaunch("resolve", *launch, "--json").json()["config"]


def test_the_documented_json_is_there(rllaunch: Any):
    answer = rllaunch("resolve", *DSV4, "--json").json()
    assert set(answer) == {"config", "origins", "command", "decided"}
    for origins in answer["origins"].values():
        for one in origins:
            assert set(one) == {"value", "layer", "source"}


def test_what_resolves_is_frozen():
    from pydantic import ValidationError

    from rllaunch.resolve.schema import LaunchConfig

    config = LaunchConfig()
    with pytest.raises(ValidationError):
        config.run.seed = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        config.run = config.run  # type: ignore[misc]


def test_every_key_says_what_it_means():
    from rllaunch.resolve.resolve import known_keys
    from rllaunch.resolve.schema import descriptions

    keys = list(known_keys())
    assert len(keys) > 80
    assert set(descriptions()) == set(keys)
    assert all(text.endswith(".") for text in descriptions().values())


# -- mistakes ---------------------------------------------------------------------------------------

MISTAKES = [
    (("--model", "dsv5", "--hardware", "GB300"), 3,
     "error: unknown model profile 'dsv5'\n  --model dsv5\nhint: did you mean 'dsv4'? (a file of yours is found in ./profiles or with --profile-dir DIR)\n"),
    (("--model", "tiny", "--hardware", "GB30"), 3,
     "error: unknown hardware profile 'GB30'\n  --hardware GB30\nhint: did you mean 'GB300'? (a file of yours is found in ./profiles or with --profile-dir DIR)\n"),
    ((*TINY, "--rollout-batch-sise", "3"), 2,
     "error: unknown flag --rollout-batch-sise\nhint: did you mean '--rollout-batch-size'?\n"),
    ((*TINY, "--set", "rollout.rollout_batchsize=3"), 3,
     "error: unknown key 'rollout_batchsize' in [rollout]\n  --set rollout.rollout_batchsize=3\nhint: did you mean 'rollout_batch_size'?\n"),
    ((*TINY, "--set", "trainer.rollout_batch_size=3"), 3,
     "error: unknown key 'rollout_batch_size' in [trainer]\n  --set trainer.rollout_batch_size=3\nhint: did you mean 'rollout.rollout_batch_size'?\n"),
    ((*TINY, "--set", "rolout.rollout_batch_size=3"), 3,
     "error: unknown section [rolout]\n  --set rolout.rollout_batch_size=3\nhint: did you mean 'rollout'?\n"),
    ((*TINY, "--set", "seed=3"), 2,
     "error: --set 'seed=3' is not section.key=value\n  --set seed=3\nhint: write --set run.seed=3\n"),
    ((*TINY, "--seed", "many"), 3,
     "error: run.seed cannot be 'many': input should be a valid integer, unable to parse string as an integer\n"
     "  --seed many\nhint: run.seed: Seed of initialisation, prompt order and sampling.\n"),
    ((*TINY, "--colocate-memory-peak-device", "gpus"), 3,
     "error: handoff.colocate_memory_peak_device cannot be 'gpus': input should be 'cpu', 'gpu' or 'auto'\n"
     "  --colocate-memory-peak-device gpus\nhint: did you mean 'gpu'?\n"),
    ((*TINY, "--seed"), 2,
     "error: --seed needs a value\n  --seed\nhint: Seed of initialisation, prompt order and sampling.\n"),
    ((*TINY, "--config", "none.toml"), 3,
     "error: config file does not exist: none.toml\nhint: give an existing TOML file to --config\n"),
    (("--hardware", "cpu"), 3,
     "error: no model is named\nhint: --model NAME; `rllaunch profiles list --kind model` shows what there is\n"),
    (("--model", "./nowhere", "--hardware", "cpu"), 3,
     "error: model configuration does not exist: nowhere\nhint: give a directory with a config.json, or a model profile's name\n"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "code", "text"), MISTAKES, ids=[" ".join(m[0][-2:]) for m in MISTAKES])
def test_a_mistake_gets_one_error_with_its_origin_and_the_nearest_name(
    rllaunch: Any, words: tuple[str, ...], code: int, text: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RLLAUNCH_DISABLE_PLUGINS", "example")
    result = rllaunch("resolve", *words)
    assert (result.err, result.code, result.out) == (text, code, "")


def test_malformed_toml_names_file_and_line(rllaunch: Any, tmp_path: Path):
    (tmp_path / "bad.toml").write_text("[run]\nseed = 1\nnum_rollout = = 2\n")
    result = rllaunch("resolve", *TINY, "--config", "bad.toml")
    assert result.code == 3
    assert result.err == (
        "error: malformed TOML: Invalid value\n  bad.toml:3\nhint: correct that line; TOML: https://toml.io\n"
    )


def test_a_wrong_value_in_a_file_names_its_line(rllaunch: Any, tmp_path: Path):
    (tmp_path / "run.toml").write_text("[trainer]\n# half\nlr = -1\n")
    result = rllaunch("resolve", *TINY, "--config", "run.toml")
    assert result.code == 3
    assert result.err == (
        "error: trainer.lr cannot be -1: input should be greater than 0\n  run.toml:3\n"
        "hint: trainer.lr: Learning rate after warm-up.\n"
    )


def test_several_wrong_values_are_told_together(rllaunch: Any):
    result = rllaunch("resolve", *TINY, "--seed", "x", "--lr", "0")
    assert result.code == 3
    assert result.err.splitlines()[:3] == [
        "error: 2 values cannot be used",
        "  trainer.lr = '0'   --lr 0: input should be greater than 0",
        "  run.seed = 'x'   --seed x: input should be a valid integer, unable to parse string as an integer",
    ]


def test_a_misspelt_variable_is_an_error(rllaunch: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLLAUNCH_ROLLOUT__ROLLOUT_BATCHSIZE", "3")
    result = rllaunch("resolve", *TINY)
    assert result.code == 3
    assert result.err == (
        "error: unknown key 'rollout_batchsize' in [rollout]\n"
        "  RLLAUNCH_ROLLOUT__ROLLOUT_BATCHSIZE in the environment\nhint: did you mean 'rollout_batch_size'?\n"
    )


def test_a_key_outside_its_section_is_sent_home(rllaunch: Any, tmp_path: Path):
    (tmp_path / "run.toml").write_text("seed = 1\n")
    result = rllaunch("resolve", *TINY, "--config", "run.toml")
    assert result.err == "error: 'seed' stands outside a section\n  run.toml:1\nhint: write it under [run]\n"


def test_explain_knows_bare_keys_and_refuses_unknown_ones(rllaunch: Any):
    assert rllaunch("explain", "offload-train", *TINY).out.startswith("handoff.offload_train = true")
    result = rllaunch("explain", "offlod_train", *TINY)
    assert result.code == 3
    assert "did you mean" in result.err


# -- models from a checkpoint -----------------------------------------------------------------------


def test_a_checkpoint_in_fp8_says_how_engines_hold_it(rllaunch: Any, tmp_path: Path):
    facts = '{"model_type": "qwen3",\n "quantization_config": {"quant_method": "fp8"}}'
    (tmp_path / "config.json").write_text(facts, encoding="utf-8")
    result = rllaunch("resolve", "--model", str(tmp_path), "--hardware", "H200", "--task", "arithmetic", "--json")
    assert origin(result, "rollout.dtype")[0] == "fp8"
    assert origin(result, "rollout.dtype")[2].endswith("config.json:2")


def test_a_directory_with_a_config_json_is_a_model(rllaunch: Any, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(
        json.dumps({"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2}, indent=1)
    )
    result = rllaunch("resolve", "--model", "./mine", "--hardware", "cpu", "--json")
    assert result.code == 0
    config = result.json()["config"]
    assert config["model"]["name"] == str(tmp_path / "mine"), "found again from anywhere"
    assert config["model"]["architecture"]["hidden_size"] == 32
    assert origin(result, "model.architecture.hidden_size")[2].endswith("config.json:3")


def test_own_prompts_and_reward_replace_the_profiles_task(rllaunch: Any):
    config = rllaunch("resolve", *TINY, "--data", "p.jsonl", "--reward", "mine:score", "--json").json()["config"]
    assert config["task"] == {"name": "", "prompt_data": "p.jsonl", "eval_prompt_data": "", "reward": "mine:score"}
    config = rllaunch("resolve", *TINY, "--data", "p.jsonl", "--json").json()["config"]
    assert config["task"]["eval_prompt_data"] == "", "held-out prompts of another task say nothing about one's own"
    assert config["task"]["reward"] == "rllaunch_profiles.rewards:digits_in_place"


def test_every_unknown_key_is_told_at_once(rllaunch: Any, tmp_path: Path):
    (tmp_path / "a.toml").write_text("[trainer]\nlearning_rate = 1\n[handof]\ncolocate = true\n")
    result = rllaunch("resolve", "--model", "tiny", "--hardware", "cpu", "--config", "a.toml")
    assert (result.code, result.err.splitlines()[0]) == (3, "error: 2 keys cannot be set")
    assert "  unknown key 'learning_rate' in [trainer]   a.toml:2   " in result.err
    assert "  unknown section [handof]   a.toml:4   did you mean 'handoff'?\n" in result.err


def test_explain_shows_what_an_extended_profile_says_below_its_variant(rllaunch: Any, tmp_path: Path):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "ours.toml").write_text(
        '[profile]\nkind = "hardware"\nname = "ours"\nextends = "H200"\nsource = "a label"\n'
        '[facts]\nhost_memory_bytes = "1000 GiB"\n'
    )
    launch = ("--model", "qwen3-0.6b", "--hardware", "ours")
    lines = rllaunch("explain", "host_memory_bytes", *launch).out.splitlines()
    assert (
        lines[0]
        == f"hardware.host_memory_bytes = {1000 * 2**30}   hardware profile: ours (./profiles) profiles/ours.toml:7"
    )
    assert lines[1].startswith("  over 2000000000000   hardware profile: H200 (rllaunch ")
    assert lines[2].startswith("  over 2000000000000   hardware profile: H100 (rllaunch ")
    assert lines[3] == "  over unset   default: schema default"
    inherited = rllaunch("explain", "accelerator", *launch).out.splitlines()
    assert inherited[0].startswith('hardware.accelerator = "cuda"   hardware profile: ours (./profiles) extends ')
    assert [line for line in inherited if line.startswith("  over ")] == ['  over "cpu"   default: schema default']
