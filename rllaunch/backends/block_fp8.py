"""Engines with linear layers in FP8 and a scale for each block: which tensors, and what no update can bring right.

Plain data, without torch: the doctor asks here what a run will do. The arithmetic is in `quantise`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllaunch.errors import ConfigError
from rllaunch.resolve.schema import LaunchConfig

# Rows and columns of a block: what DeepSeek-V3's release has, and SGLang's kernels are written for.
BLOCK = 128
SCALE = "weight_scale_inv"
# What `config.json` of such a checkpoint says, and an engine is told of a checkpoint that is none.
SCHEME: Mapping[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}

# GPUs by what comes before a dash in their profile's name. DeepGEMM's scales on the newer ones (sm100; sm120 in
# grouped products) are powers of two, packed: SGLang puts them in the place of the loaded ones, and float32 scales of
# an update would be read as such (0.5.17 and 0.5.23 layers/quantization/fp8_utils.py,
# `requant_block_scale_ue8m0_for_deepgemm`). Older than sm89 have no FP8: the weights are repacked for Marlin.
_NEWER = ("B200", "B300", "GB200", "GB300", "VR", "RTX-PRO-6000")
_OLDER = ("A100",)
OLDEST, FIRST_TOO_NEW = (8, 9), (10, 0)
"""CUDA compute capabilities: the first that does, and the first that does not any more."""

# Attention and feed-forward blocks of the families that are trained. Not routers (`mlp.gate`), norms and biases.
_LINEAR = re.compile(
    r"(?:^|\.)(?:(?:self_attn|mlp)(?:\.(?:experts\.\d+|shared_experts))?"
    r"\.(?:(?:q|k|v|o|q_a|q_b|kv_b|gate|up|down)_proj|kv_a_proj_with_mqa)"
    r"|block_sparse_moe\.experts\.\d+\.w[123])\.weight$"
)
# Names of the one type; the last is MiniMax-M2's release's.
_E4M3 = (None, "e4m3", "float8_e4m3fn")
# Their layers of linear attention have matrices whose blocks no update has been held against.
_LINEAR_ATTENTION = ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
_BF16 = "--rollout-dtype bfloat16 (of a checkpoint that is not quantised)"


@dataclass(frozen=True)
class BlockFp8:
    """Which tensors such an engine holds in FP8, by the names of a checkpoint.

    Args:
        skipped: modules that stay as they are; their names begin at any dot and end at one.
    """

    skipped: tuple[str, ...] = ()

    def holds(self, name: str) -> bool:
        if _LINEAR.search(name) is None:
            return False
        path = f".{name.removesuffix('.weight')}."
        return not any(f".{module.strip('.')}." in path for module in self.skipped)


def scale_name(weight: str) -> str:
    """Of `X.weight` the tensor with its scales."""
    return weight.removesuffix("weight") + SCALE


def is_mxfp4(quantisation: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is quantised as gpt-oss's release: experts in four bits, with a scale for 32 of them."""
    return quantisation.get("quant_method") == "mxfp4"


def scheme_of(quantisation: Mapping[str, Any]) -> BlockFp8:
    """How a checkpoint with this `quantization_config` is quantised.

    Raises:
        ConfigError: otherwise than in blocks of FP8 with scales in float32.
    """
    method, size = quantisation.get("quant_method"), quantisation.get("weight_block_size")
    unlike = [
        text
        for text, is_other in (
            (f"quant_method = {method!r}", method != "fp8"),
            (f"weight_block_size = {size!r}", list(size or ()) != [BLOCK, BLOCK]),
            (f"fmt = {quantisation.get('fmt')!r}", quantisation.get("fmt") not in _E4M3),
            ("scale_fmt = 'ue8m0'", quantisation.get("scale_fmt") == "ue8m0"),
            ("activation_scheme = 'static'", quantisation.get("activation_scheme") == "static"),
        )
        if is_other
    ]
    if unlike:
        raise ConfigError(
            f"a checkpoint with {unlike[0]}: no weight update brings an engine such weights",
            "quantization_config in the checkpoint's config.json",
            "give a checkpoint in bfloat16, or in FP8 with blocks of 128 × 128 and scales in float32",
        )
    names = [name for key in ("modules_to_not_convert", "ignored_layers") for name in quantisation.get(key) or ()]
    return BlockFp8(tuple(dict.fromkeys(str(name) for name in names)))


def refusal_of(config: LaunchConfig) -> ConfigError | None:
    """Why `engine_scheme` will refuse a launch, as far as can be told without the hub: what it would then load from
    there is not known."""
    checkpoint = config.model.hf_checkpoint
    quantisation = config.model.architecture.get("quantization_config")
    file = Path(checkpoint) / "config.json"
    is_local = bool(checkpoint) and file.is_file()
    try:
        if is_local:
            quantisation = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
        engine_scheme(config, quantisation, is_known=is_local or not checkpoint or quantisation is not None)
    except (ValueError, AttributeError, OSError):
        return None  # no JSON, or none of an object: who loads it will say so
    except ConfigError as err:
        return err
    return None


def engine_scheme(
    config: LaunchConfig, quantisation: Mapping[str, Any] | None, *, is_known: bool = True
) -> BlockFp8 | None:
    """How the engines hold what an update brings; None where nothing is quantised.

    Args:
        quantisation: the checkpoint's `quantization_config`; None where it has none.
        is_known: whether the checkpoint has been looked at; nothing is said of what depends on it else.
    Raises:
        ConfigError: engines whose weights an update would spoil.
    """
    if config.rollout.backend != "sglang":
        return None
    require_updates(config.model.architecture.get("model_type"))
    _check_options(config)
    dtype = config.rollout.dtype
    if dtype == "bfloat16" and loads_nothing(config, quantisation):
        _check_empty(config)
        return None
    if dtype in ("float32", "bfloat16"):
        if quantisation is not None and config.model.hf_checkpoint:
            raise ConfigError(
                f"the checkpoint is quantised ({quantisation.get('quant_method')}), and so would engines hold it",
                [f"rollout.dtype = {dtype}", f"model.hf_checkpoint = {config.model.hf_checkpoint}"],
                "--rollout-dtype fp8, or a checkpoint in bfloat16"
                if _may_be_fp8(config, quantisation)
                else "a checkpoint in bfloat16",
            )
        return None
    if dtype != "fp8":
        raise ConfigError(
            f"no weight update brings the engines weights in {dtype}",
            f"rollout.dtype = {dtype}",
            "--rollout-dtype fp8 or bfloat16" if _may_be_fp8(config, quantisation) else _BF16,
        )
    _check_fp8(config)
    if is_known and quantisation is None and config.model.hf_checkpoint:
        _check_empty(config)
    return scheme_of(quantisation) if quantisation is not None else BlockFp8()


def _may_be_fp8(config: LaunchConfig, quantisation: Mapping[str, Any] | None) -> bool:
    try:
        _check_fp8(config)
        scheme_of(quantisation or SCHEME)
    except ConfigError:
        return False
    return True


def loads_nothing(config: LaunchConfig, quantisation: Mapping[str, Any] | None) -> bool:
    """Whether engines start with weights that mean nothing, to be filled by the first update: in FP8 of a checkpoint
    that is not, and in bfloat16 of one in MXFP4, which the megatron trainer reads. A model without a checkpoint has one
    written for it, in the engines' type."""
    if not config.model.hf_checkpoint:
        return False
    if quantisation is None:
        return config.rollout.dtype == "fp8"
    return is_mxfp4(quantisation) and config.rollout.dtype == "bfloat16" and config.trainer.backend == "megatron"


def _check_options(config: LaunchConfig) -> None:
    """Not of what SGLang quantises as it loads: an update's tensors are copied into those parameters as they come
    (sglang 0.5.23 `model_executor/model_runner_components/weight_updater.py`)."""
    options = config.sglang.model_extra or {}
    for name in ("quantization", "torchao_config"):
        if options.get(name) and not (name == "quantization" and options[name] == config.rollout.dtype == "fp8"):
            raise ConfigError(
                f"sglang.{name} = {options[name]!r} quantises what an engine loads, not what an update brings it",
                f"sglang.{name}",
                "leave it out; `--rollout-dtype fp8` quantises both",
            )


def _check_fp8(config: LaunchConfig) -> None:
    where, hardware = "rollout.dtype = fp8", config.hardware
    require_quantised(config.model.architecture.get("model_type"))
    if config.trainer.backend == "embedded":
        raise ConfigError(
            "the embedded trainer does not quantise what it sends",
            [where, "trainer.backend = embedded"],
            f"--trainer-backend megatron, or {_BF16}",
        )
    if hardware.accelerator == "rocm":
        raise ConfigError(
            "on these GPUs SGLang rewrites FP8 weights after it has loaded them; an update's would be misread",
            [where, f"hardware.name = {hardware.name}"],
            _BF16,
        )
    if hardware.accelerator == "cuda" and hardware.name.startswith((*_NEWER, *_OLDER)):
        raise unfit(hardware.name, is_newer=hardware.name.startswith(_NEWER))


def require_quantised(model_type: str | None) -> None:
    """
    Raises:
        ConfigError: no update brings engines in FP8 all matrices of such a model.
    """
    where = ["rollout.dtype = fp8", f"model.architecture.model_type = {model_type}"]
    if model_type == "gpt_oss":
        raise ConfigError("experts of gpt-oss lie in one tensor, which nothing here quantises in blocks", where, _BF16)
    if model_type in _LINEAR_ATTENTION:
        raise ConfigError("no weight update brings engines linear attention in FP8", where, _BF16)


def require_updates(model_type: str | None) -> None:
    """
    Raises:
        ConfigError: nobody has held an update of such a model against SGLang's.
    """
    if model_type == "deepseek_v4":
        raise ConfigError(
            "SGLang's DeepSeek-V4 rewrites weights that it has loaded, for kernels that need a GPU: no update has been "
            "held against it yet",
            ["rollout.backend = sglang", f"model.architecture.model_type = {model_type}"],
            "`rllaunch train --rehearse` runs it in small; `rllaunch plan` and --dry-run take it as it is",
        )


def _check_empty(config: LaunchConfig) -> None:
    """Of engines that load nothing: all that they compute with must come with an update. SGLang's stand-ins for
    weights fill the scales of a quantised KV cache too (0.5.23 `model_loader/weight_utils.py`, `layers/quantization/
    kv_cache.py`), and the layers it speculates with."""
    options, dtype = config.sglang.model_extra or {}, config.rollout.dtype
    where, whole = f"rollout.dtype = {dtype}", "FP8" if dtype == "fp8" else "bfloat16"
    nothing = "an engine in FP8 loads nothing of a bfloat16 checkpoint"
    if dtype != "fp8":
        nothing = "an engine in bfloat16 loads nothing of an MXFP4 checkpoint"
    if options.get("speculative_algorithm"):
        raise ConfigError(
            f"{nothing}, and no update brings layers to speculate with",
            [where, "sglang.speculative_algorithm"],
            f"leave it out, or give the model's {whole} checkpoint",
        )
    if str(options.get("kv_cache_dtype", "auto")).startswith("fp8"):
        raise ConfigError(
            f"{nothing}, and no update brings scales of a KV cache",
            [where, f"sglang.kv_cache_dtype = {options['kv_cache_dtype']}"],
            f"leave it out, or give the model's {whole} checkpoint",
        )


def unfit(gpu: str, *, is_newer: bool) -> ConfigError:
    """The error for a GPU on which an update's FP8 weights would be misread."""
    why = "for DeepGEMM's packed scales" if is_newer else "for Marlin, as the GPU has no FP8"
    return ConfigError(
        f"on {gpu} SGLang rewrites FP8 weights after it has loaded them, {why}; an update's would be misread",
        "rollout.dtype = fp8",
        _BF16,
    )
