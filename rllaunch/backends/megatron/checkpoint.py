"""Checkpoints: every rank's state as its memory holds it, and the model as transformers loads it.

The state is read back in place, bit for bit, by the same layout of ranks; what another layout or an engine needs is the
model under `hf/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from rllaunch.backends.base import LaunchContext
from rllaunch.backends.embedded.model import model_config
from rllaunch.errors import RunError

_FACTS = "layout.json"
_FILE_BYTES = 5 * 2**30


def save_state(directory: Path, tensors: Mapping[str, Tensor], layout: Mapping[str, Any], num_steps: int) -> None:
    """
    Args:
        tensors: this rank's.
        layout: what must be equal where it is loaded.
    """
    if dist.get_rank() == 0:
        (directory / _FACTS).write_text(json.dumps({"layout": layout, "num_steps": num_steps}), encoding="utf-8")
    state_dict_saver.save(_of_this_rank(tensors), checkpoint_id=directory / "state")


def load_state(directory: Path, tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> int:
    """Fill `tensors`; optimizer steps the state has taken.

    Raises:
        RunError: the checkpoint is of another model or another layout of ranks.
    """
    facts = json.loads((directory / _FACTS).read_text(encoding="utf-8"))
    was = facts["layout"]
    if differing := [f"{n}: {was.get(n)!r} there, {v!r} here" for n, v in layout.items() if was.get(n) != v]:
        raise RunError(
            f"the checkpoint does not fit this launch: {'; '.join(differing)}",
            str(directory),
            f"resume with the layout it was made with, or start anew from its model: --hf-checkpoint {directory}/hf",
        )
    state_dict_loader.load(_of_this_rank(tensors), checkpoint_id=directory / "state")
    return int(facts["num_steps"])


def _of_this_rank(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {f"rank-{dist.get_rank()}/{name}": tensor for name, tensor in tensors.items()}


def export(named: Iterable[tuple[str, Tensor]], context: LaunchContext, directory: Path) -> None:
    """Write the model as transformers saves one; rank 0 does, the others only take part in gathering."""
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
    config = model_config(context)
    if not config.architectures:
        config.architectures = [_class_name(config)]
    (directory / "config.json").write_text(json.dumps(config.to_dict(), indent=2, default=str), encoding="utf-8")


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
