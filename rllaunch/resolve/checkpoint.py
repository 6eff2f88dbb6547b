"""What a launch's names of models and checkpoints stand for: a directory here or a name elsewhere, weights or none."""

from __future__ import annotations

import json
from pathlib import Path

from rllaunch.resolve.origins import Resolved

CHECKPOINT = "model.hf_checkpoint"


def is_path(name: str) -> bool:
    """Whether a model's name is a path: no profile is called so, and at the hub names have one slash at most."""
    is_written_so = name.startswith((".", "/", "~")) or name.endswith(".json") or name.count("/") > 1
    return is_written_so or Path(name).is_dir()


def has_weights(directory: Path) -> bool:
    return any(directory.glob("*.safetensors"))


def missing_shards(directory: Path) -> list[str]:
    """Files of weights that the checkpoint's index names and that are not there, as after a download that stopped."""
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
        named = sorted({str(file) for file in index["weight_map"].values()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # one file without an index; a broken one is told by who loads it
    return [file for file in named if not (directory / file).is_file()]


def why_random(resolved: Resolved) -> str:
    """Why training starts from random weights; empty where it starts from a checkpoint."""
    model = resolved.config.model
    if model.hf_checkpoint:
        return ""
    if resolved.is_set(CHECKPOINT):
        return resolved.describe(CHECKPOINT)
    # A model that comes from a directory has its path as name, and takes the weights it finds there.
    if Path(model.name).is_absolute():
        return f"no *.safetensors in {model.name}"
    return f"{model.name} has no checkpoint"
