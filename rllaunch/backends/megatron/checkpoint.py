"""Checkpoints: the state as any layout of ranks can read it, and the model as transformers loads it.

Each rank writes and reads its own rectangles of the whole tensors, in place, through torch.distributed.checkpoint.
Megatron-core's own `dist_checkpointing` does not do: 0.16.1 refuses `fully_sharded_model_space`, its
`fully_reshardable` gathers an optimizer's state on one of the ranks that share it, and neither reads the state of an
optimizer that is distributed into one that is not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from rllaunch.backends.base import LaunchContext
from rllaunch.backends.embedded.model import model_config
from rllaunch.backends.megatron.pieces import Piece
from rllaunch.backends.megatron.shape import ModelShape
from rllaunch.errors import RunError
from rllaunch.resolve.schema import LaunchConfig

_FACTS = "state.json"
_FILE_BYTES = 5 * 2**30
_STAGED_BYTES = 2**29


def facts_of(config: LaunchConfig, shape: ModelShape) -> dict[str, str]:
    """What must be equal where a state is loaded."""
    lora = config.algorithm
    on = f"rank {lora.lora_rank}, alpha {lora.lora_alpha:g}, on {', '.join(lora.lora_target_modules)}"
    return {
        "model": repr(shape),
        "precision": config.trainer.precision,
        "adapters": on if config.has_lora else "none",
        "critic": str(config.has_critic),
    }


def save_state(directory: Path, pieces: Iterable[Piece], facts: Mapping[str, str], num_steps: int) -> None:
    """
    Args:
        pieces: this rank's; of those that several ranks hold alike, one rank writes each.
        facts: of `facts_of`.
    """
    if dist.get_rank() == 0:
        (directory / _FACTS).write_text(json.dumps({**facts, "num_steps": num_steps}), encoding="utf-8")
    state_dict_saver.save({}, storage_writer=_Files(directory / "state"), planner=_Writing(pieces))


def load_state(directory: Path, pieces: Iterable[Piece], facts: Mapping[str, str]) -> int:
    """Fill the tensors of `pieces`; optimizer steps the state has taken.

    Raises:
        RunError: the checkpoint is of another model, or of another backend.
    """
    restart = f"or start anew from its model: --hf-checkpoint {directory}/hf"
    path = directory / _FACTS
    if not path.exists():
        raise RunError(
            "the checkpoint has no state of the megatron trainer", str(path), f"resume with what made it, {restart}"
        )
    saved = json.loads(path.read_text(encoding="utf-8"))
    if differing := [f"{n}: {saved.get(n)!r} there, {v!r} here" for n, v in facts.items() if saved.get(n) != v]:
        raise RunError(
            f"the checkpoint does not fit this launch: {'; '.join(differing)}",
            str(directory),
            f"resume with what it was made with, {restart}",
        )
    with torch.no_grad():
        state_dict_loader.load({}, checkpoint_id=directory / "state", planner=_Reading(pieces))
    return int(saved["num_steps"])


def _index(piece: Piece) -> MetadataIndex:
    return MetadataIndex(piece.key, piece.offset)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(piece.offset), piece.tensor.shape)


class _Writing(DefaultSavePlanner):
    """Of pieces. Before anything is written torch checks that they make up whole tensors and do not overlap."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(index, piece) for index, piece in self._pieces.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index].tensor


def _write_item(index: MetadataIndex, piece: Piece) -> WriteItem:
    properties = TensorProperties.create_from_tensor(piece.tensor)
    return WriteItem(
        index, WriteItemType.SHARD, tensor_data=TensorWriteData(_chunk(piece), properties, torch.Size(piece.size))
    )


class _Files(FileSystemWriter):
    """Several files a rank, of `_STAGED_BYTES` or one larger tensor.

    torch 2.13 keeps a host copy of all that is in a file until its end (`tensor_dict` in its filesystem.py). With one
    file a rank, 5.6 GB of state took 745 MB more on a CPU, now 80; of a state on a GPU it would be all.
    """

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        for number, items in enumerate(_batches(plan.items)):
            at = replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{number}_")
            results += super().write_data(replace(plan, items=items, storage_data=at), planner).wait()
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written


def _batches(items: Iterable[WriteItem]) -> Iterator[list[WriteItem]]:
    batch: list[WriteItem] = []
    nbytes = 0
    for item in items:
        data = item.tensor_data
        assert data is not None, "only tensors are written"
        size = data.chunk.sizes.numel() * data.properties.dtype.itemsize
        if batch and nbytes + size > _STAGED_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch


class _Reading(DefaultLoadPlanner):
    """Into pieces, each from those parts of what was written that overlap it."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = {_index(piece): piece for piece in pieces}

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([item for piece in self._pieces.values() for item in self._read_items(piece)])

    def _read_items(self, piece: Piece) -> list[ReadItem]:
        assert self.metadata is not None, "given before the plan is asked for"
        written = self.metadata.state_dict_metadata.get(piece.key)
        if not isinstance(written, TensorStorageMetadata) or written.size != torch.Size(piece.size):
            raise RunError(f"the checkpoint lacks {piece.key} of {list(piece.size)}", "", "it is damaged")
        items = create_read_items_for_chunk_list(piece.key, written, [_chunk(piece)])
        assert sum(math.prod(i.lengths) for i in items) == piece.tensor.numel(), f"all of {piece.key} was written"
        return items

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index].tensor


def export(named: Iterable[tuple[str, Tensor]], context: LaunchContext, tokenizer: Any, directory: Path) -> None:
    """Write the model as transformers saves one; rank 0 does, the others only take part in gathering.

    Args:
        tokenizer: transformers', None where there is none.
    """
    if dist.get_rank() != 0:
        for _ in named:
            raise AssertionError("only rank 0 gathers")
        return
    directory.mkdir()
    files = _write_files(named, directory)
    if len(files) == 1:
        next(iter(files)).rename(directory / "model.safetensors")
    else:
        index = {name: path.name for path, names in files.items() for name in names}
        text = json.dumps({"metadata": {}, "weight_map": index}, indent=2)
        (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    config = model_config(context).get_text_config(decoder=True)  # of a multi-modal model that is what was trained
    if not config.architectures:
        config.architectures = [_class_name(config)]
    facts = config.to_dict()
    facts.pop("quantization_config", None)  # of what training started from; these weights are whole
    (directory / "config.json").write_text(json.dumps(facts, indent=2, default=str), encoding="utf-8")
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _write_files(named: Iterable[tuple[str, Tensor]], directory: Path) -> dict[Path, list[str]]:
    """Files of at most `_FILE_BYTES` and the names in each: no more than one of them is in memory at a time."""
    from safetensors.torch import save_file

    files: dict[Path, list[str]] = {}
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        path = directory / f"model-{len(files) + 1:05d}.safetensors"
        save_file(waiting, path, metadata={"format": "pt"})
        files[path] = list(waiting)
        waiting.clear()

    for name, tensor in named:
        if waiting and sum(t.nbytes for t in waiting.values()) + tensor.nbytes > _FILE_BYTES:
            write()
        waiting[name] = tensor.detach().cpu().clone().contiguous()
    write()
    return files


def _class_name(config: Any) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    return name
