"""The weights training starts from: a checkpoint's, or the random ones every backend draws from the same seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
from rllaunch.backends.text_names import of_each_expert, text_name
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
    places = _places(_files(directory), shape)
    if lacking := missing(shape, places):
        raise ConfigError(
            f"the checkpoint lacks {len(lacking)} tensors of the model: {', '.join(lacking[:3])}",
            str(directory),
            "choose the model profile that describes this checkpoint",
        )
    return _reader(places)


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


@dataclass(frozen=True)
class _Place:
    """Where a tensor is found.

    Args:
        name: in the file.
        part: of a stack of experts, which expert, and which of how many parts of its rows; None: all of it.
    """

    file: Path
    name: str
    part: tuple[int, int, int] | None = None

    def read(self, number: int | None = None) -> Tensor:
        """
        Args:
            number: of the only expert that is wanted of a stack that is in place as a whole.
        """
        from safetensors import safe_open

        with safe_open(self.file, framework="pt") as file:
            if self.part is None:
                whole: Tensor = file.get_tensor(self.name) if number is None else file.get_slice(self.name)[number]
                return whole
            stack, (expert, index, count) = file.get_slice(self.name), self.part
            rows = stack.get_shape()[1] // count
            part: Tensor = stack[expert, index * rows : (index + 1) * rows]
            return part


def _places(files: Mapping[str, Path], shape: ModelShape) -> dict[str, _Place]:
    """Name that the model has for a tensor → where it is: some releases have other names, or more than one model."""
    if shape.compressed:
        return {module_name(name): _Place(file, name) for name, file in files.items()}
    if shape.delta_net is None:
        return {name: _Place(file, name) for name, file in files.items()}
    named = ((plain, name, file) for name, file in files.items() if (plain := text_name(name)) is not None)
    return dict(_of_text_model(named, shape.experts.number if shape.experts else 0))


def _of_text_model(named: Iterable[tuple[str, str, Path]], num_experts: int) -> Iterable[tuple[str, _Place]]:
    for plain, name, file in named:
        yield plain, _Place(file, name)
        for single, *part in of_each_expert(plain, num_experts):
            yield single, _Place(file, name, (part[0], part[1], part[2]))


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


def _reader(places: Mapping[str, _Place]) -> Callable[[str], Tensor]:
    def read_mxfp4(name: str, number: int | None) -> Tensor:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        if scales not in places:
            raise ConfigError(f"the checkpoint lacks {scales}", str(places[blocks].file.parent), "it is damaged")
        try:
            return dequantise_mxfp4(places[blocks].read(number), places[scales].read(number)).t()
        except ValueError as err:
            raise ConfigError(f"{name}: {err}", str(places[blocks].file), "the checkpoint is damaged") from err

    def tensor_of(source: str) -> Tensor:
        name, number = stored(source)
        if name not in places:
            return read_mxfp4(name, number)
        tensor = places[name].read(number)
        scales = next((s for s in (scale_name(name), name.removesuffix("weight") + "scale") if s in places), None)
        if tensor.dtype == E4M3 and scales is not None:
            try:
                return dequantise(tensor, places[scales].read().float())
            except ValueError as err:
                raise ConfigError(f"{name}: {err}", str(places[scales].file), "the checkpoint is damaged") from err
        if name.endswith(TABLE):
            return tensor
        if not tensor.is_floating_point() or tensor.itemsize < 2:
            raise ConfigError(
                f"{name} is held as {tensor.dtype}",
                str(places[name].file),
                "training starts from a checkpoint in bfloat16, float32, or FP8 or MXFP4 with scales; cast it first",
            )
        return tensor

    return tensor_of
