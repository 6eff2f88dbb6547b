"""A launch as arguments of SGLang: what is decided, what may be said, and what the installed version does not know."""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
from rig import make_context

from rllaunch.backends.base import LaunchContext, Slot
from rllaunch.backends.block_fp8 import SCHEME
from rllaunch.backends.sglang import options
from rllaunch.backends.sglang.options import (
    PORTS_OF_ENGINE,
    decided,
    find_ports,
    given,
    known_names,
    preferred,
    server_arguments,
)
from rllaunch.errors import ConfigError, EnvironmentProblem
from rllaunch.plan.handoff import HandoffOptions

CPU, GPU = Slot(0, 0, "cpu", "/nowhere"), Slot(0, 0, "cuda", "/nowhere")
PORTS = range(21000, 21064)


class DeprecatedAction(argparse._StoreAction):
    """As SGLang has them: the value of the flag is not the value of its field."""


@dataclass
class ServerArgs:
    """Some options of the real one, and its names for flags."""

    model_path: str
    device: str | None = None
    dtype: str = "auto"
    load_format: str = "auto"
    json_model_override_args: str = "{}"
    quantization: str | None = None
    random_seed: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    ep_size: int = 1
    nnodes: int = 1
    node_rank: int = 0
    enable_dp_attention: bool = False
    mem_fraction_static: float | None = None
    context_length: int | None = None
    port: int = 30000
    nccl_port: int | None = None
    dist_init_addr: str | None = None
    skip_tokenizer_init: bool = False
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    log_level: str = "info"
    attention_backend: str | None = None
    fp8_gemm_runner_backend: str = "auto"
    max_total_tokens: int | None = None
    enable_tf32_matmul: bool = False
    cuda_graph_max_bs_decode: int | None = None
    enable_amd_monokernel: bool = False

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model-path", "--model", dest="model_path")
        parser.add_argument("--tensor-parallel-size", "--tp-size", dest="tp_size")
        parser.add_argument("--fp8-gemm-backend", dest="fp8_gemm_runner_backend")
        parser.add_argument("--enable-tf32-matmul", action=argparse.BooleanOptionalAction)
        parser.add_argument("--config")
        parser.add_argument("--monokernel-backend", action=DeprecatedAction, dest="enable_amd_monokernel")


def arguments_of(context: LaunchContext, slot: Slot = CPU, path: str = "/model") -> dict[str, Any]:
    return server_arguments(decided(context, slot, path, PORTS), preferred(context, slot), given(context), ServerArgs)


@pytest.mark.parametrize(
    ("handoff", "saver", "backup"),
    [
        (HandoffOptions(engine_weights="discard"), True, False),
        (HandoffOptions(engine_weights="mirror"), True, True),
        (HandoffOptions(engine_weights="mirror", level=frozenset({"kv_cache"})), True, False),
        (HandoffOptions(engine_weights="mirror", offload_rollout=False), False, False),
    ],
    ids=["discard", "mirror", "weights stay", "nothing is released"],
)
def test_memory_saver_and_backup_follow_the_handoff(handoff: HandoffOptions, saver: bool, backup: bool):
    arguments = arguments_of(make_context(options=handoff), GPU)
    assert (arguments["enable_memory_saver"], arguments["enable_weights_cpu_backup"]) == (saver, backup)
    # Without a GPU there is nothing to save, and SGLang would ask for the library.
    on_cpu = arguments_of(make_context(options=handoff), CPU)
    assert (on_cpu["enable_memory_saver"], on_cpu["enable_weights_cpu_backup"]) == (False, False)


def test_an_engine_gets_its_gpus_its_share_its_precision_and_its_length():
    context = make_context(
        rollout={"rollout_num_gpus_per_engine": 8, "dtype": "bfloat16", "rollout_max_context_len": 4096},
        sglang={"dp_size": 8, "ep_size": 4, "enable_dp_attention": True, "mem_fraction_static": 0.61},
    )
    got = arguments_of(context, GPU)
    expected = {
        "model_path": "/model", "device": "cuda", "tp_size": 8, "dp_size": 8, "ep_size": 4, "enable_dp_attention": True,
        "mem_fraction_static": 0.61, "dtype": "bfloat16", "context_length": 4096, "skip_tokenizer_init": True,
        "port": 21000, "nccl_port": 21001, "dist_init_addr": "127.0.0.1:21008",
    }  # fmt: skip
    assert {name: got[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("dtype", "checkpoint", "is_quantised", "is_told"),
    [
        ("float32", "", False, False),
        ("float32", "org/model", False, False),
        ("fp8", "", False, False),  # one is written, in FP8
        ("fp8", "org/model", True, False),
        ("fp8", "org/model", False, True),
    ],
)
def test_an_engine_is_told_of_fp8_where_its_checkpoint_does_not_say_so(
    dtype: str, checkpoint: str, is_quantised: bool, is_told: bool
):
    context = make_context(
        rollout={"dtype": dtype, "backend": "sglang"},
        model={"hf_checkpoint": checkpoint},
        trainer={"backend": "megatron"},
    )
    got = decided(context, CPU, "/model", PORTS, quantisation=SCHEME if is_quantised else None)
    assert got["dtype"] == ("bfloat16" if dtype == "fp8" else dtype)
    assert "quantization" not in got, "SGLang's own has no scales that an update could bring"
    assert got.get("load_format") == ("dummy" if is_told else None)
    told = json.loads(got.get("json_model_override_args", "{}"))
    assert told == ({"quantization_config": SCHEME} if is_told else {})


def test_a_user_changes_the_config_of_a_checkpoint_beside_the_launch():
    rope = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}

    def told(overrides: Any) -> Any:
        context = make_context(
            rollout={"dtype": "fp8", "backend": "sglang"},
            model={"hf_checkpoint": "org/model"},
            trainer={"backend": "megatron"},
            sglang={"json_model_override_args": overrides},
        )
        return json.loads(arguments_of(context)["json_model_override_args"])

    assert told(json.dumps(rope)) == told(rope) == rope | {"quantization_config": SCHEME}
    with pytest.raises(ConfigError, match="says another quantization_config than this launch"):
        told({"quantization_config": {}})
    with pytest.raises(ConfigError, match="is no JSON object"):
        told("[1]")
    with pytest.raises(ConfigError, match="is no JSON: "):
        told("{")


def test_an_engine_is_not_started_with_weights_that_an_update_would_spoil():
    context = make_context(rollout={"dtype": "fp4", "backend": "sglang"}, trainer={"backend": "megatron"})
    with pytest.raises(ConfigError, match="no weight update brings the engines weights in fp4"):
        decided(context, CPU, "/model", PORTS)


def test_engines_draw_different_numbers_and_a_run_draws_the_same_again():
    def seed(run: int, slot: int) -> int:
        return int(arguments_of(make_context(run={"seed": run}), Slot(slot, 0, "cpu", ""))["random_seed"])

    assert len({seed(run, slot) for run in (0, 1, 7) for slot in range(64)}) == 3 * 64
    assert 0 <= seed(2**63 - 1, 3) < 2**31
    assert seed(7, 1) == seed(7, 1)


def test_a_user_overrules_what_is_only_preferred():
    assert arguments_of(make_context())["attention_backend"] == "torch_native"
    assert arguments_of(make_context(sglang={"attention_backend": "intel_amx"}))["attention_backend"] == "intel_amx"
    # The pool on a machine without GPUs holds the whole request at once.
    assert arguments_of(make_context())["max_total_tokens"] >= 8 * (5 + 4)


def test_preferences_the_installed_version_lacks_are_left_out():
    assert "grammar_backend" in preferred(make_context(), CPU)
    assert "grammar_backend" not in arguments_of(make_context())


def test_an_unknown_option_is_an_error_with_the_nearest_name():
    with pytest.raises(ConfigError, match="SGLang has no option 'mem_fraction_statik'") as caught:
        arguments_of(make_context(sglang={"mem_fraction_statik": 0.5}))
    assert caught.value.fix == "did you mean 'mem_fraction_static'?"
    assert "sglang.mem_fraction_statik = 0.5" in caught.value.where


def test_the_name_of_a_flag_will_do():
    got = arguments_of(make_context(sglang={"fp8_gemm_backend": "deep_gemm"}))
    assert got["fp8_gemm_runner_backend"] == "deep_gemm"
    assert "fp8_gemm_backend" not in got


def test_flags_that_name_no_field_and_negations_are_no_options():
    names = known_names(ServerArgs)
    assert names["model"] == "model_path"
    assert names["tensor_parallel_size"] == "tp_size"
    assert not {"config", "no_enable_tf32_matmul", "help", "monokernel_backend"} & set(names)


def test_an_older_name_is_taken_where_the_installed_version_has_the_newer():
    got = arguments_of(make_context(sglang={"cuda_graph_max_bs": 8}))
    assert got["cuda_graph_max_bs_decode"] == 8
    assert "cuda_graph_max_bs" not in got
    with pytest.raises(ConfigError, match="no option 'nsa_decode_backend'"):  # this one has neither
        arguments_of(make_context(sglang={"nsa_decode_backend": "flashmla_sparse"}))


def test_one_option_under_two_names_is_an_error():
    section = {"fp8_gemm_backend": "deep_gemm", "fp8_gemm_runner_backend": "triton"}
    with pytest.raises(ConfigError, match=r"sglang\.fp8_gemm.* and sglang\.fp8_gemm.* are the same option"):
        arguments_of(make_context(sglang=section))


def test_what_another_key_decides_may_be_repeated_but_not_contradicted():
    assert arguments_of(make_context(sglang={"tp_size": 1}))["tp_size"] == 1
    with pytest.raises(ConfigError, match=r"sglang\.tp_size = 2 contradicts 1") as caught:
        arguments_of(make_context(sglang={"tp_size": 2}))
    assert caught.value.where == ("tp_size is decided by rollout.rollout_num_gpus_per_engine",)


def test_an_installed_version_without_a_needed_argument_is_an_error():
    @dataclass
    class Old:
        model_path: str

    context = make_context()
    with pytest.raises(ConfigError, match="has no option 'tp_size', which this launch needs"):
        server_arguments(decided(context, CPU, "/m", PORTS), {}, {}, Old)


# -- ports ---------------------------------------------------------------------------------------------


def test_engines_that_start_together_never_look_at_the_same_ports():
    looked_at = [{p for block in islice(options._blocks(i, 8), 3) for p in block} for i in range(8)]
    assert all(len(ports) == 3 * PORTS_OF_ENGINE for ports in looked_at)
    assert len(set().union(*looked_at)) == sum(map(len, looked_at))


@contextlib.contextmanager
def listening(port: int) -> Iterator[None]:
    with contextlib.closing(socket.socket()) as taken:
        taken.bind(("", port))
        taken.listen()
        yield


def test_a_block_with_one_taken_port_is_passed_over():
    first = find_ports(1, 4)
    with listening(first[40]):
        second = find_ports(1, 4)
    assert len(first) == len(second) == PORTS_OF_ENGINE
    assert second.start > first[-1]


def test_two_launches_on_a_machine_begin_to_look_at_different_ports():
    begun = {find_ports(0, 8, f"/dev/shm/rllaunch-{launch}").start for launch in range(8)}
    assert len(begun) > 4
    assert find_ports(0, 8, "a").start == find_ports(0, 8, "a").start


def test_no_free_block_is_told(monkeypatch: pytest.MonkeyPatch):
    free = find_ports(0, 1)
    monkeypatch.setattr(options, "PORTS", free)
    with listening(free[5]), pytest.raises(EnvironmentProblem, match="no 64 ports in a row are free for engine 0"):
        find_ports(0, 1)
