"""The embedded trainer's checkpoints: its regions as they are, and the model as transformers loads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rllaunch.backends.embedded.layout import Layout
from rllaunch.errors import RunError
from rllaunch.plan.handoff import Region

_STATE = "trainer.pt"


def save_state(directory: Path, content: Mapping[Region, Tensor], layout: Layout, num_steps: int) -> None:
    """
    Args:
        content: the bytes of each region without its padding.
        layout: of the parameters, which must be equal where the state is loaded.
    """
    state: dict[str, Any] = {
        **{region: _own_storage(flat.cpu()) for region, flat in content.items()},
        "num_steps": num_steps,
        "layout": layout.fingerprint(),
    }
    torch.save(state, directory / _STATE)


def load_state(directory: Path, content: Mapping[Region, Tensor], layout: Layout) -> int:
    """Fill the regions; optimizer steps the state has taken.

    Raises:
        RunError: the checkpoint is of another model.
    """
    state = torch.load(directory / _STATE, weights_only=True)
    if state["layout"] != layout.fingerprint():
        raise RunError(
            "the checkpoint is of another model",
            str(directory),
            "resume with the model, the vocabulary and the LoRA rank it was made with",
        )
    for region, flat in content.items():
        flat.copy_(state[region])
    num_steps: int = state["num_steps"]
    return num_steps


def export(model: Any, tokenizer: Any, directory: Path) -> None:
    """The actor as transformers loads it, adapters merged.

    Args:
        tokenizer: transformers', None where there is none.
    """
    from safetensors.torch import save_file

    from rllaunch.algo.lora import merged_state_dict

    directory.mkdir()
    tensors = {n: t.detach().cpu().clone().contiguous() for n, t in merged_state_dict(model).items()}
    if getattr(model.config, "tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    (directory / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2, default=str))
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)


def _own_storage(flat: Tensor) -> Tensor:
    """The tensor on a storage of its size: torch saves whole storages, padding and all."""
    return flat if flat.untyped_storage().nbytes() == flat.nbytes else flat.clone()
