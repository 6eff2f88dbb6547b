"""The directory an engine loads: the launch's checkpoint, or one written for a model that has none."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from rllaunch.backends.base import LaunchContext
from rllaunch.backends.block_fp8 import BLOCK, SCHEME, BlockFp8, engine_scheme, scale_name
from rllaunch.backends.embedded.model import build_model, model_config, quantisation_of, special_ids, stays_float32
from rllaunch.backends.quantise import quantise
from rllaunch.backends.text_names import FURTHER, is_inner, of_each_expert, text_name
from rllaunch.plan.architecture import text_facts


def write_checkpoint(context: LaunchContext, directory: Path) -> None:
    """`config.json` and safetensors of a model without a checkpoint: the trainer's first weights, in the engine's type.

    Named as transformers names a checkpoint, which for experts is not how it names its parameters.
    """
    quantisation = quantisation_of(context)
    fp8 = engine_scheme(context.config, quantisation)
    dtype = torch.float32 if context.config.rollout.dtype == "float32" else torch.bfloat16
    # The embedded trainer sends every tensor in the engine's type, as it would be rounded here.
    has_wide = context.config.trainer.backend != "embedded"
    model: Any = build_model(context, dtype=torch.float32 if has_wide else dtype, with_lora=False)
    for name, parameter in model.named_parameters():
        if not (has_wide and stays_float32(name)):
            parameter.data = parameter.data.to(dtype)
    model.config.dtype = dtype
    model.save_pretrained(directory, max_shard_size=_FILE_BYTES)
    facts = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    facts.pop("quantization_config", None)
    if fp8 is not None:
        facts["quantization_config"] = quantisation or SCHEME
        _quantise_files(directory, fp8)
    (directory / "config.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")


def _quantise_files(directory: Path, fp8: BlockFp8) -> None:
    """In place, a file at a time."""
    from safetensors.torch import load_file, save_file

    index = directory / "model.safetensors.index.json"
    saved = json.loads(index.read_text(encoding="utf-8")) if index.exists() else {"weight_map": {}}
    for file in sorted(directory.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [n for n in tensors if fp8.holds(n)]:
            tensors[name], tensors[scale_name(name)] = quantise(tensors[name])
        save_file(tensors, file, metadata={"format": "pt"})
        saved["weight_map"] |= dict.fromkeys(tensors, file.name)
    if index.exists():
        index.write_text(json.dumps(saved, indent=2), encoding="utf-8")


def checkpoint_tensors(directory: str, fp8: BlockFp8 | None = None) -> dict[str, int] | None:
    """Name → bytes of every tensor in a directory of safetensors; None where there are none (a hub name, `.bin` files).

    Reads the headers only. Weights in MXFP4 count as the bfloat16 ones that they are read as. Of a multi-modal
    checkpoint those of the language model, under the names that updates have, and nothing of its vision tower, which
    no update brings and no run computes with.

    Args:
        fp8: the tensors as if these were in FP8, with those of their scales.
    """
    from safetensors import safe_open

    files = sorted(Path(directory).glob("*.safetensors"))
    sizes: dict[str, int] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for found in opened.keys():  # noqa: SIM118 (it is no mapping)
                piece = opened.get_slice(found)
                bits = _BITS.get(piece.get_dtype(), 8)
                shape = piece.get_shape()
                if (name := text_name(found)) is None:
                    continue
                if name.endswith(_MXFP4):
                    if name.endswith(_MXFP4[0]):  # bytes of two values each
                        sizes[name.removesuffix("_blocks")] = 4 * math.prod(shape)
                    continue
                singles = list(of_each_expert(name, shape[0])) if is_inner(found) else []
                if singles:
                    nbytes = math.prod(shape) * bits // 8 // shape[0]
                    sizes |= {single: nbytes // count for single, _, _, count in singles}
                    continue
                sizes[name] = math.prod(shape) * bits // 8
                if fp8 is not None and fp8.holds(name):
                    sizes[name] = math.prod(shape)
                    sizes[scale_name(name)] = 4 * math.prod(-(-size // BLOCK) for size in shape)
    return sizes or None


def of_layers(tensors: Mapping[str, int], architecture: Mapping[str, Any]) -> dict[str, int]:
    """Without those of layers behind the model's own, which predict further tokens: an engine that speculates loads
    them, others do not, and no update brings them.

    Args:
        architecture: the model's facts, perhaps of a multi-modal one; without a number of layers all that are
            numbered are its own.
    """
    num_layers = text_facts(architecture).get("num_hidden_layers") or math.inf
    found = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in tensors if not name.startswith(FURTHER)}
    return {n: tensors[n] for n, match in found.items() if match is None or int(match[1]) < num_layers}


# Endings of the two tensors that make up one in MXFP4.
_MXFP4 = ("_proj_blocks", "_proj_scales")
# Of a file that is written: no more of it is in memory at a time.
_FILE_BYTES = 2**31
# safetensors' names of types wider or narrower than a byte; every other type is a byte.
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}


def ids_of(context: LaunchContext) -> tuple[int, frozenset[int]]:
    """The id that pads and the ids that end a response, without building the model."""
    from transformers import GenerationConfig

    generation = None
    if checkpoint := context.config.model.hf_checkpoint:
        try:
            generation = GenerationConfig.from_pretrained(checkpoint)
        except OSError:
            generation = None  # many checkpoints have none; the model's config says it then
    return special_ids(cast("Any", SimpleNamespace(generation_config=generation, config=model_config(context))))
