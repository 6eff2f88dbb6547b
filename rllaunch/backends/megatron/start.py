"""The weights training starts from: a checkpoint's, or the random ones every backend draws from the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rllaunch.backends.base import LaunchContext
from rllaunch.backends.block_fp8 import BLOCK, is_mxfp4, scale_name, scheme_of
from rllaunch.backends.deepseek_v4_names import TABLE, module_name
from rllaunch.backends.embedded import model as embedded
from rllaunch.backends.megatron.shape import ModelShape
from rllaunch.backends.megatron.weights import missing, stored, unstack_experts
from rllaunch.backends.quantise import E4M3, dequantise, dequantise_mxfp4
from rllaunch.errors import ConfigError


def starting_weights(context: LaunchContext, shape: ModelShape) -> Callable[[str], Tensor]:
    """Name of a checkpoint's tensor → the tensor, on the host; read when it is asked for.

    A weight in FP8 with scales for its blocks comes in float32, one in MXFP4 in bfloat16, which has all its values.

    Raises:
        ConfigError: the checkpoint lacks tensors of the model, or holds them in a type that cannot be trained.
    """
    checkpoint = context.config.model.hf_checkpoint
    if not checkpoint:
        module = embedded.build_model(context, dtype=torch.float32, with_lora=False)
        return dict(unstack_experts(((n, t.detach()) for n, t in module.state_dict().items()), shape)).__getitem__
    quantisation = embedded.quantisation_of(context)
    if quantisation is not None and shape.compressed:
        _require_fp8(quantisation)
    elif quantisation is not None and not (is_mxfp4(quantisation) and shape.experts and shape.experts.is_stacked):
        scheme_of(quantisation)  # others have scales that are read otherwise
    directory = embedded.checkpoint_directory(checkpoint)
    files = _files(directory)
    called = {name: name for name in files}
    if shape.compressed:
        called = {module_name(name): name for name in files}
        files = {module_name(name): path for name, path in files.items()}
    if lacking := missing(shape, files):
        raise ConfigError(
            f"the checkpoint lacks {len(lacking)} tensors of the model: {', '.join(lacking[:3])}",
            str(directory),
            "choose the model profile that describes this checkpoint",
        )
    return _reader(files, called)


def _require_fp8(quantisation: Mapping[str, Any]) -> None:
    """Of DeepSeek-V4's releases those are read that have no experts in four bits; scales are float32 or powers of two.

    Raises:
        ConfigError: it is quantised otherwise.
    """
    method, size = quantisation.get("quant_method"), list(quantisation.get("weight_block_size") or ())
    experts = quantisation.get("expert_dtype") or "fp8"
    if method != "fp8" or size != [BLOCK, BLOCK] or not str(experts).startswith("fp8"):
        raise ConfigError(
            f"a checkpoint of DeepSeek-V4 with quant_method = {method!r}, weight_block_size = {size} and experts in "
            f"{experts} is not read",
            "quantization_config in the checkpoint's config.json",
            f"give one in bfloat16, or all of it in FP8 with blocks of {BLOCK} × {BLOCK}",
        )


def _files(directory: Path) -> dict[str, Path]:
    """Name of a tensor → the file it is in."""
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in names.items()}
    found: dict[str, Path] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found


def _reader(files: dict[str, Path], called: dict[str, str]) -> Callable[[str], Tensor]:
    """
    Args:
        files: by the names that the model has for the tensors.
        called: what the files call each.
    """
    from safetensors import safe_open

    def read(name: str, number: int | None = None) -> Tensor:
        with safe_open(files[name], framework="pt") as file:
            whole = called[name]
            tensor: Tensor = file.get_tensor(whole) if number is None else file.get_slice(whole)[number]
            return tensor

    def read_mxfp4(name: str, number: int | None) -> Tensor:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if scales not in files:
            raise ConfigError(f"the checkpoint lacks {scales}", str(files[blocks].parent), "it is damaged")
        try:
            return dequantise_mxfp4(read(blocks, number), read(scales, number)).t()
        except ValueError as err:
            raise ConfigError(f"{name}: {err}", str(files[blocks]), "the checkpoint is damaged") from err

    def tensor_of(source: str) -> Tensor:
        name, number = stored(source)
        if name not in files:
            return read_mxfp4(name, number)
        tensor = read(name, number)
        scales = next((s for s in (scale_name(name), name.removesuffix("weight") + "scale") if s in files), None)
        if tensor.dtype == E4M3 and scales is not None:
            try:
                return dequantise(tensor, read(scales).float())
            except ValueError as err:
                raise ConfigError(f"{name}: {err}", str(files[scales]), "the checkpoint is damaged") from err
        if name.endswith(TABLE):
            return tensor
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ConfigError(
                f"{name} is held as {tensor.dtype}",
                str(files[name]),
                "training starts from a checkpoint in bfloat16, float32, or FP8 or MXFP4 with scales; cast it first",
            )
        return tensor

    return tensor_of
