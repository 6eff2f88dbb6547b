"""A launch as arguments of miles: only names its parser has, with values they take, and nothing dropped."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rllaunch_miles import reward, translate
from rllaunch_miles.options import KINDS, NotTaken, options, written

from rllaunch.resolve.resolve import known_keys
from rllaunch.testing import Project

DSV4 = ("--model", "dsv4", "--hardware", "GB300")
QWEN3 = ("--model", "qwen3-30b-a3b", "--hardware", "H100")


@pytest.fixture
def project(rllaunch_project: Project) -> Project:
    rllaunch_project.use("miles", "rllaunch_miles")
    return rllaunch_project


def exported(project: Project, *words: object) -> dict[str, Any]:
    answer: dict[str, Any] = project.json("export", "--to", "miles", *words)
    assert "arguments" in answer, answer
    return answer


def parser() -> argparse.ArgumentParser:
    """One that takes what miles takes."""
    made = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for option in options().values():
        more: dict[str, Any] = {"dest": option.sets, "default": None}
        match option.kind:
            case "switch" | "off":
                made.add_argument(option.flag, action=f"store_{str(option.kind == 'switch').lower()}", **more)
            case "boolean":
                made.add_argument(option.flag, action=argparse.BooleanOptionalAction, **more)
            case kind:
                made.add_argument(option.flag, nargs="+" if kind == "values" else None, **more)
    return made


def parsed(answer: dict[str, Any]) -> dict[str, Any]:
    """What miles' arguments would be; fails on a name it does not have or a value an option does not take."""
    known, unknown = parser().parse_known_args(answer["arguments"])
    assert unknown == []
    return {name: value for name, value in vars(known).items() if value is not None}


def left_out(answer: dict[str, Any]) -> dict[str, str]:
    return {item["key"]: item["reason"] for item in answer["left_out"]}


def cells() -> Iterator[tuple[str, str]]:
    from rllaunch.plugins import load_plugins

    for profile in load_plugins().profiles().of_kind("cell"):
        yield profile.model, profile.hardware


# -- the options -----------------------------------------------------------------------------------------


def test_the_list_is_of_miles_megatron_sglang_and_its_router():
    text = Path(translate.__file__).with_name("options.txt").read_text(encoding="utf-8")
    sources = [line for line in text.splitlines() if line.startswith("[")]
    assert len(sources) == 5
    assert sources[0].startswith("[radixark/miles@31f1ca961a94cb860cec3b2dea34ec332bfa8f76 ")
    assert len(options()) > 1500
    assert {o.kind for o in options().values()} == set(KINDS)
    for name in (
        "--rollout-batch-size",
        "--tensor-model-parallel-size",
        "--sglang-mem-fraction-static",
        "--router-policy",
    ):
        assert name in options()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("colocate", True, ("--colocate",)),
        ("colocate", False, ()),
        ("offload_train", False, ("--no-offload-train",)),
        ("offload-train", True, ("--offload-train",)),
        ("grpo_std_normalization", False, ("--disable-grpo-std-normalization",)),
        ("grpo_std_normalization", True, ()),
        ("disable-grpo-std-normalization", True, ("--disable-grpo-std-normalization",)),
        ("disable-grpo-std-normalization", False, ()),
        ("fp8", "e4m3", ("--fp8-format", "e4m3")),
        ("lr", 1e-6, ("--lr", "1e-06")),
        ("offload_rollout_level", ("kv_cache", "weight"), ("--offload-rollout-level", "kv_cache", "weight")),
        ("sglang-cuda-graph-bs", [1, 2], ("--sglang-cuda-graph-bs", "1", "2")),
        ("train-env-vars", {"A": "1"}, ("--train-env-vars", '{"A": "1"}')),
    ],
)  # fmt: skip
def test_a_value_is_written_as_the_option_takes_it(name: str, value: Any, words: tuple[str, ...]):
    assert written(name, value) == words


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("no_such_thing", 1, "train.py of miles has no option --no-such-thing"),
        ("colocate", "yes", "--colocate of miles is on or off, and takes no value"),
        ("offload_rollout_level", [], "--offload-rollout-level of miles takes at least one value"),
    ],
)
def test_what_miles_does_not_take_is_said(name: str, value: Any, says: str):
    with pytest.raises(NotTaken) as caught:
        written(name, value)
    assert str(caught.value) == says


# -- every key has a place -------------------------------------------------------------------------------


def test_every_key_of_a_launch_is_translated_or_has_nothing_to_say():
    places = [*translate.SAME, *translate.NOTHING_TO_SAY, *translate.TRANSLATED]
    assert len(places) == len(set(places))
    homes = {key: [p for p in places if key == p or (p.endswith(".") and key.startswith(p))] for key in known_keys()}
    assert {key: found for key, found in homes.items() if len(found) != 1} == {}
    assert [p for p in places if not p.endswith(".") and p not in homes] == []
    assert len(homes) > 100


def test_every_option_named_in_the_table_is_one_of_miles():
    assert [option for option in translate.SAME.values() if f"--{option}" not in options()] == []


# -- launches --------------------------------------------------------------------------------------------


def test_all_shipped_cells_are_exported_without_an_unknown_name(project: Project):
    pairs = sorted(cells())
    assert len(pairs) == 22
    for model, hardware in pairs:
        answer = exported(project, "--model", model, "--hardware", hardware)
        arguments = parsed(answer)
        assert arguments["hf_checkpoint"], model
        assert answer["substitutions"], f"{model} has a file in scripts/models"
        assert [reason for reason in left_out(answer).values() if "no option" in reason] == [], (model, hardware)
        config = project.json("resolve", "--model", model, "--hardware", hardware)["config"]
        given = {**config["megatron"], **{f"sglang_{k}": v for k, v in config["sglang"].items()}}
        for name, value in given.items():
            if value is not False:
                option = next(o for o in options().values() if name in (o.sets, o.flag[2:].replace("-", "_")))
                assert arguments[option.sets] is not None, (model, hardware, name)
        assert config["env"].items() <= answer["environment"].items()


def test_the_layout_of_a_cell_is_the_layout_in_miles(project: Project):
    answer = exported(project, *DSV4)
    arguments = parsed(answer)
    for name, value in {
        "actor_num_nodes": "8",
        "actor_num_gpus_per_node": "4",
        "num_gpus_per_node": "4",
        "tensor_model_parallel_size": "2",
        "pipeline_model_parallel_size": "8",
        "decoder_first_pipeline_num_layers": "4",
        "context_parallel_size": "2",
        "expert_model_parallel_size": "4",
        "rollout_num_gpus_per_engine": "8",
        "colocate": True,
        "offload_train": True,
        "offload_rollout": True,
        "offload_rollout_level": ["kv_cache", "weight"],
        "colocate_memory_peak_device": "gpu",
        "micro_batch_size": "1",
        "optimizer_cpu_offload": True,
        "fp8": "e4m3",
        "sglang_ep_size": "8",
        "rollout_max_response_len": "4096",
        "train_memory_margin_bytes": "3221225472",
    }.items():
        assert arguments[name] == value, name
    assert answer["program"] == ["python3", "train.py"]
    assert answer["substitutions"] == ["$(python3 miles/utils/external_utils/model_args_utils.py deepseek-v4-flash)"]
    assert answer["environment"]["SGLANG_HEALTH_CHECK_TIMEOUT"] == "120"
    assert any("miles#2781" in note for note in answer["notes"])


def test_nothing_is_said_of_the_peak_where_it_is_miles_own(project: Project):
    answer = exported(project, *QWEN3)
    assert "--colocate-memory-peak-device" not in answer["arguments"]
    assert not any("2781" in note for note in answer["notes"])


def test_a_team_on_miles_has_a_script_and_reads_what_it_lacks(project: Project):
    result = project.run("export", "--to", "miles", *QWEN3)
    assert result.code == 0
    words = result.out.replace("\\\n", " ").split()
    start = words.index("train.py")
    assert words[start - 1 : start + 4] == [
        "python3", "train.py", "$(python3", "miles/utils/external_utils/model_args_utils.py", "qwen3-30B-A3B)",
    ]  # fmt: skip
    assert words[words.index("--max-tokens-per-gpu") + 1] == "32768"
    assert 'left out: handoff.trainer_offload_backend = "arena"   schema default\n' in result.err
    assert "  miles moves the trainer's memory with torch_memory_saver\n" in result.err
    assert result.err.splitlines()[-1].startswith("qwen3-30b-a3b on 1 × 8 H100 for miles: ")


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        (("--set", "megatron.no_such_thing=1"), "megatron.no_such_thing", "train.py of miles has no option --no-such-thing"),
        (("--sglang-no-such-thing", "1"), "sglang.no_such_thing", "train.py of miles has no option --sglang-no-such-thing"),
        (("--engine-weights", "mirror"), "handoff.engine_weights", translate.DISCARDS),
        (("--offload-train-buffers", "retained"), "handoff.offload_train_buffers", translate.FRESH),
        (("--save-total-limit", "5"), "run.save_total_limit", translate.KEEPS_ALL),
        (("--train-precision", "fp32"), "trainer.precision", "miles trains in bf16, or with --fp16"),
        (("--lora-rank", "8", "--lora-alpha", "1.5"), "algorithm.lora_alpha", "miles takes whole numbers"),
        (("--hf-checkpoint", ""), "model.hf_checkpoint", translate.NO_CHECKPOINT),
        (
            ("--set", "model.architecture.num_hidden_layers=8"),
            "model.architecture.num_hidden_layers",
            "miles has the model's shape from its scripts/models/qwen3-30B-A3B.py: change it there",
        ),
    ],
)  # fmt: skip
def test_what_miles_cannot_express_is_listed_with_the_reason(
    project: Project, words: tuple[str, ...], key: str, says: str
):
    before = left_out(exported(project, *QWEN3, "--offload-train-buffers", "fresh"))
    assert key not in before or key == "run.save_total_limit"
    answer = exported(project, *QWEN3, *words)
    assert left_out(answer)[key] == says
    parsed(answer)


def test_handing_over_as_miles_does_leaves_nothing_of_it_out(project: Project):
    words = ("--offload-train-buffers", "fresh", "--trainer-offload-backend", "torch_memory_saver", "--seed", "3")
    words += ("--offload-train-process-groups",)
    answer = exported(project, *QWEN3, *words, "--engine-weights", "discard")
    assert set(left_out(answer)) == {"run.save_total_limit"}
    assert parsed(answer)["seed"] == parsed(answer)["rollout_seed"] == "3"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"use_rollout_logprobs": True, "calculate_per_token_loss": True, "use_dynamic_batch_size": True}),
        (("--set", "megatron.use_tis=true"), {"use_tis": True, "use_rollout_logprobs": None}),
        (("--loss-aggregation", "sequence"), {"calculate_per_token_loss": None}),
        (("--micro-batch-size", "2"), {"micro_batch_size": "2", "max_tokens_per_gpu": "32768"}),
        (("--no-normalize-advantages",), {"grpo_std_normalization": False}),
        (("--kl-loss-coef", "0.1"), {"use_kl_loss": True, "kl_loss_coef": "0.1", "kl_loss_type": "k3"}),
        (("--save-interval", "0", "--num-rollout", "7"), {"save_interval": "7"}),
        (("--run-dir", "there"), {"save": "there/checkpoints"}),
        (("--set", "megatron.save=here"), {"save": "here"}),
        (("--eval-interval", "4"), {"eval_interval": "4", "skip_eval_before_train": True, "eval_temperature": "0.0"}),
        (
            ("--advantage-estimator", "ppo", "--lr", "1e-5"),
            {"normalize_advantages": True, "critic_lr": "1e-05", "value_clip": "0.2"},
        ),
        (
            ("--lora-rank", "8", "--lora-target-modules", "q_proj", "v_proj", "--engine-weights", "mirror"),
            {"lora_rank": "8", "lora_alpha": "32", "target_modules": "q_proj,v_proj", "lora_base_cpu_backup": True},
        ),
        (("--rollout-dtype", "bfloat16"), {"sglang_dtype": "bfloat16"}),
        (("--megatron-attention-dropout", "0.1"), {"attention_dropout": "0.1"}),
    ],
)  # fmt: skip
def test_settings_mean_the_same_there(project: Project, words: tuple[str, ...], expected: dict[str, Any]):
    arguments = parsed(exported(project, *QWEN3, *words))
    assert {name: arguments.get(name) for name in expected} == expected


def test_a_cluster_of_rays_own_is_joined(project: Project):
    assert exported(project, *QWEN3, "--ray-address", "head:6379")["environment"]["RAY_ADDRESS"] == "head:6379"


def test_a_launch_for_another_backend_is_refused_with_its_origin(project: Project):
    result = project.run("export", "--to", "miles", "--model", "tiny", "--hardware", "cpu")
    assert (result.code, result.out) == (3, "")
    what, where, fix = result.err.splitlines()
    assert what == "error: miles has no trainer backend 'embedded'"
    assert where.startswith('  trainer.backend = "embedded"   hardware profile: cpu (rllaunch ')
    assert fix == "hint: --trainer-backend megatron"


def test_a_model_without_a_file_in_miles_says_so(project: Project):
    project.write("mine/config.json", json.dumps({"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "vocab_size": 256}))  # fmt: skip
    answer = exported(project, "--model", "mine", "--hardware", "H100")
    assert answer["substitutions"] == []
    assert "miles has no file in scripts/models for this model" in left_out(answer)["model.architecture"]
    assert any(note.startswith("add --prompt-data") for note in answer["notes"])


# -- the reward ------------------------------------------------------------------------------------------


def test_the_reward_is_called_as_rllaunch_calls_it(project: Project, monkeypatch: pytest.MonkeyPatch):
    answer = exported(project, *QWEN3, "--task", "reverse")
    assert parsed(answer)["custom_rm_path"] == "rllaunch_miles.reward.score"
    monkeypatch.setenv(reward.VARIABLE, answer["environment"][reward.VARIABLE])
    samples = [SimpleNamespace(prompt="123=", response=text, label="321") for text in ("321", "111")]
    one = asyncio.run(reward.score(None, samples[0]))
    both = asyncio.run(reward.score(None, samples))
    assert one == 1.0
    assert both == [1.0, both[1]]
    assert both[1] < 1.0


def test_a_reward_of_miles_own_stays(project: Project):
    answer = exported(project, *QWEN3, "--megatron-custom-rm-path", "mine.rm")
    assert parsed(answer)["custom_rm_path"] == "mine.rm"


def test_a_reward_that_is_not_named_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(reward.VARIABLE, raising=False)
    with pytest.raises(ValueError, match=r"RLLAUNCH_MILES_REWARD = '' is not module:function"):
        asyncio.run(reward.score(None, SimpleNamespace(prompt="", response="", label="")))
