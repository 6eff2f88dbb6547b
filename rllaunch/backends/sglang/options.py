"""A launch as the keyword arguments of SGLang's engine, held against the `ServerArgs` that is installed."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any
from zlib import crc32

from rllaunch.backends.base import LaunchContext, Slot
from rllaunch.backends.block_fp8 import SCHEME, engine_scheme, loads_nothing
from rllaunch.errors import ConfigError, EnvironmentProblem, did_you_mean

# An engine needs two ports, and with DP attention a run of derived ones after its third. The range lies between
# Ray's workers (10002 to 19999) and the ports that Linux gives out by itself (from 32768).
PORTS = range(21000, 32000)
PORTS_OF_ENGINE = 64
# Slots that can have two blocks each.
MAX_SLOTS_APART = len(PORTS) // PORTS_OF_ENGINE // 2
_DIST_OFFSET = 8

# A section of the config → what it decides here; a user who says otherwise in [sglang] is told, not overruled.
_DECIDED_BY = {
    "model_path": "model.hf_checkpoint",
    "tp_size": "rollout.rollout_num_gpus_per_engine",
    "dtype": "rollout.dtype",
    "load_format": "rollout.dtype, which is not the checkpoint's",
    "json_model_override_args": "rollout.dtype, which is not the checkpoint's",
    "context_length": "rollout.rollout_max_context_len",
    "device": "hardware.accelerator",
    "random_seed": "run.seed",
    "enable_memory_saver": "handoff.offload_rollout",
    "enable_weights_cpu_backup": "handoff.engine_weights",
    "skip_tokenizer_init": "rllaunch, which sends and takes token ids",
    "nnodes": "rllaunch, which starts a part of an engine on each of its nodes",
    "node_rank": "rllaunch, which starts a part of an engine on each of its nodes",
    "port": "rllaunch, which keeps the engines' ports apart",
    "nccl_port": "rllaunch, which keeps the engines' ports apart",
    "dist_init_addr": "rllaunch, which keeps the engines' ports apart",
}

_OVERRIDES = "json_model_override_args"

# Options that SGLang renamed without a change of meaning: profiles say what their source said, of whatever age it was
# (sglang 0.5.23 `arg_groups/fields/exec_.py`; a CUDA graph without further words was always one of decoding).
_RENAMED = {
    "cuda_graph_bs": "cuda_graph_bs_decode",
    "cuda_graph_max_bs": "cuda_graph_max_bs_decode",
    "mamba_scheduler_strategy": "mamba_radix_cache_strategy",
    "nsa_decode_backend": "dsa_decode_backend",
    "nsa_prefill_backend": "dsa_prefill_backend",
}

# Keys of our own section with the value that means "as SGLang has it".
_UNSAID = {"dp_size": 1, "ep_size": 1, "enable_dp_attention": False}


@dataclass(frozen=True)
class Span:
    """The nodes of an engine, and which of its parts this is.

    Args:
        meeting_point: `host:port` of the first node, where the parts find each other; empty on a single node.
    """

    num_nodes: int = 1
    node_rank: int = 0
    meeting_point: str = ""


def decided(
    context: LaunchContext,
    slot: Slot,
    model_path: str,
    ports: range,
    span: Span = Span(),
    quantisation: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the launch decides; every name must exist in the installed SGLang.

    Args:
        slot: the first of the engine's.
        model_path: directory or hub name the engine loads.
        ports: this part's own, `PORTS_OF_ENGINE` of them.
        quantisation: what the launch's checkpoint says of it; None: nothing.
    Raises:
        ConfigError: engines whose weights an update would spoil.
    """
    config, options = context.config, context.options
    rollout = config.rollout
    arguments: dict[str, Any] = {
        "model_path": model_path,
        "tp_size": rollout.rollout_num_gpus_per_engine,
        "device": "cpu" if slot.device == "cpu" else "cuda",
        # Engines that drew the same numbers would give a prompt's samples twice.
        "random_seed": (config.run.seed * 1009 + slot.index) % 2**31,
        "enable_memory_saver": options.offload_rollout and slot.device != "cpu",
        # A shared mirror is copied by our guest in SGLang's processes.
        "enable_weights_cpu_backup": options.has_mirror and options.buffers != "shared" and slot.device != "cpu",
        "skip_tokenizer_init": True,
        "port": ports[0],
        "nccl_port": ports[1],
        "nnodes": span.num_nodes,
        "node_rank": span.node_rank,
        **_precision(context, quantisation),
    }
    if span.meeting_point or config.sglang.enable_dp_attention:
        arguments["dist_init_addr"] = span.meeting_point or meeting_point("127.0.0.1", ports)
    if rollout.rollout_max_context_len is not None:
        arguments["context_length"] = rollout.rollout_max_context_len
    return arguments


def meeting_point(host: str, ports: range) -> str:
    """Where the ranks of an engine find each other; SGLang takes the ports after it too."""
    return f"[{host}]:{ports[_DIST_OFFSET]}" if ":" in host else f"{host}:{ports[_DIST_OFFSET]}"


def _precision(context: LaunchContext, quantisation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Type of the weights; a checkpoint that is quantised says how by itself.

    Of one that is not nothing is loaded. SGLang's own `quantization = fp8` has one scale for a matrix or a row, which
    no update brings; told of blocks it makes parameters as for a checkpoint that has them, and these are filled by the
    first update. So are those of engines in bfloat16 of a checkpoint in MXFP4, which are told of no quantisation. What
    is in the overrides takes the place of what `config.json` has (sglang 0.5.17 and 0.5.23
    `utils/hf_transformers/config.py`, `get_config`).
    """
    engine_scheme(context.config, quantisation)
    name = context.config.rollout.dtype
    if not loads_nothing(context.config, quantisation):
        return {"dtype": "bfloat16" if name == "fp8" else name}
    overrides = json.dumps({"quantization_config": SCHEME if name == "fp8" else None})
    return {"dtype": "bfloat16", "load_format": "dummy", "json_model_override_args": overrides}


def preferred(context: LaunchContext, slot: Slot) -> dict[str, Any]:
    """What suits this use of SGLang unless [sglang] says otherwise; a name the installed one lacks is left out."""
    # The driver waits for the engine, so nothing but what went wrong is worth a line.
    common: dict[str, Any] = {"log_level": "warning", "grammar_backend": "none"}
    if slot.device != "cpu":
        # `auto` reserves 1 GiB of the GPU for images, also where the model takes none (sglang 0.5.17).
        return common | {"mm_feature_transport": "cpu"}
    # The native kernels of torch: the others want AMX. The pool is sized to the request, because on a machine
    # without GPUs SGLang takes its share of all host memory.
    num_engines = max(1, context.num_slots // context.config.rollout.rollout_num_gpus_per_engine)
    rows = math.ceil(context.config.num_samples / num_engines)
    total_len = context.max_prompt_tokens + context.config.rollout.rollout_max_response_len
    return common | {
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "max_running_requests": rows,
        "max_total_tokens": rows * total_len + 1024,
    }


def given(context: LaunchContext) -> dict[str, Any]:
    """The section [sglang], without what only repeats SGLang's default."""
    values = context.config.sglang.model_dump()
    return {name: value for name, value in values.items() if name not in _UNSAID or value != _UNSAID[name]}


def known_names(server_args: type[Any]) -> dict[str, str]:
    """Every name an option has → the field of `ServerArgs`: the field's own, its flags without dashes, older names."""
    own = getattr(server_args, "__struct_fields__", None)  # msgspec; older releases have a dataclass
    names = {name: name for name in (own if own is not None else [f.name for f in fields(server_args)])}
    parser = argparse.ArgumentParser(add_help=False)
    if hasattr(server_args, "add_cli_args"):
        server_args.add_cli_args(parser)
    for action in parser._actions:
        flags = [flag[2:].replace("-", "_") for flag in action.option_strings if flag.startswith("--")]
        # A deprecated flag may take another value than its field; `--no-X` says the opposite of it.
        if action.dest in names and not type(action).__name__.startswith("Deprecated"):
            names = {flag: action.dest for flag in flags if not flag.startswith("no_")} | names
    return {old: new for old, new in _RENAMED.items() if new in names} | names


def server_arguments(
    decided: Mapping[str, Any], preferred: Mapping[str, Any], given: Mapping[str, Any], server_args: type[Any]
) -> dict[str, Any]:
    """Keyword arguments for the installed SGLang.

    Raises:
        ConfigError: [sglang] has an option the installed SGLang does not know, names one twice, or contradicts what
            another key decides; or the installed SGLang lacks an argument this launch needs.
    """
    names = known_names(server_args)
    if missing := [name for name in decided if name not in names]:
        raise ConfigError(
            f"the installed SGLang has no option {missing[0]!r}, which this launch needs",
            _version_line(),
            "install the SGLang that rllaunch[sglang] asks for",
        )
    arguments = {name: value for name, value in preferred.items() if name in names} | dict(decided)
    said: dict[str, str] = {}
    for key, value in given.items():
        if key not in names:
            raise ConfigError(
                f"SGLang has no option {key!r}",
                [f"sglang.{key} = {value!r}", _version_line()],
                did_you_mean(key, names),
            )
        name = names[key]
        if name in said:
            raise ConfigError(
                f"sglang.{said[name]} and sglang.{key} are the same option",
                [f"sglang.{said[name]} = {given[said[name]]!r}", f"sglang.{key} = {value!r}"],
                "keep one",
            )
        said[name] = key
        if name == _OVERRIDES and name in decided:
            arguments[name] = _merged(key, value, decided[name])
            continue
        if name in decided and decided[name] != value:
            raise ConfigError(
                f"sglang.{key} = {value!r} contradicts {decided[name]!r}, which this launch decides",
                f"{name} is decided by {_DECIDED_BY.get(name, 'rllaunch')}",
                f"leave sglang.{key} out",
            )
        arguments[name] = value
    return arguments


def _merged(key: str, given: Any, decided: str) -> str:
    """What a user changes of the checkpoint's config.json beside what the launch does.

    Raises:
        ConfigError: it is no object, or decides what the launch decides.
    """
    where = f"sglang.{key} = {given!r}"
    try:
        values = json.loads(given) if isinstance(given, str) else given
    except ValueError as err:
        raise ConfigError(f"sglang.{key} is no JSON: {err}", where, "correct it") from err
    if not isinstance(values, dict):
        raise ConfigError(f"sglang.{key} is no JSON object", where, 'write it as {"name": value}')
    ours = json.loads(decided)
    if both := sorted(name for name in ours if name in values and values[name] != ours[name]):
        by = f"{both[0]} is decided by {_DECIDED_BY[_OVERRIDES]}"
        raise ConfigError(f"sglang.{key} says another {both[0]} than this launch", [where, by], f"leave {both[0]} out")
    return json.dumps(values | ours)


def _version_line() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"sglang {version('sglang')}"
    except PackageNotFoundError:
        return "sglang"


def find_ports(index: int, num_engines: int, launch: str = "") -> range:
    """Ports that are free now and that no other engine of the launch on this node looks at.

    Engine `index` looks at every `num_engines`-th block, so that engines which start at the same moment never
    choose the same one. SGLang binds its ports much later, so another launch begins to look somewhere else.

    Args:
        launch: what names it.
    Raises:
        EnvironmentProblem: no block is free.
    """
    blocks = list(_blocks(index, num_engines))
    first = crc32(launch.encode()) % len(blocks) if launch and blocks else 0
    for block in blocks[first:] + blocks[:first]:
        if all(map(_is_free, block)):
            return block
    raise EnvironmentProblem(
        f"no {PORTS_OF_ENGINE} ports in a row are free for engine {index}",
        f"looked at {PORTS.start} to {PORTS.stop - 1}",
        "end what listens there",
    )


def _blocks(index: int, num_engines: int) -> Iterator[range]:
    starts = PORTS[::PORTS_OF_ENGINE][index::num_engines]
    return (range(start, start + PORTS_OF_ENGINE) for start in starts if start + PORTS_OF_ENGINE <= PORTS.stop)


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
