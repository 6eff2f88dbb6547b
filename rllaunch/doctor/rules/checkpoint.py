"""A checkpoint in a directory is there, and is of the launch's model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import architecture_key
from rllaunch.plan.architecture import text_facts
from rllaunch.resolve.checkpoint import CHECKPOINT, has_weights, is_path, missing_shards, why_random
from rllaunch.resolve.origins import Resolved

# What decides the tensors of a model, of any family.
_SIZES = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "moe_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "num_experts", "n_routed_experts", "num_local_experts", "vocab_size",
)  # fmt: skip


def _check(resolved: Resolved) -> Iterator[Finding]:
    name = resolved.config.model.hf_checkpoint
    if not name or not is_path(name):
        return
    directory, fix = Path(name), "--hf-checkpoint with a directory of config.json and weights, or a name at the hub"
    if not directory.is_dir():
        yield RULE.error(resolved, f"there is no directory {name}", [CHECKPOINT], fix)
        return
    file = directory / "config.json"
    try:
        theirs = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        yield RULE.error(resolved, f"there is no {file} that can be read", [CHECKPOINT], fix)
        return
    except ValueError as err:
        yield RULE.error(resolved, f"{file} is not JSON: {err}", [CHECKPOINT], fix)
        return
    # transformers, which loads the embedded trainer's, knows another format too.
    loads_bin = resolved.config.trainer.backend == "embedded" and any(directory.glob("pytorch_model*.bin"))
    if not has_weights(directory) and not loads_bin:
        yield RULE.error(resolved, f"there are no weights (*.safetensors) in {name}", [CHECKPOINT], fix)
    elif missing := missing_shards(directory):
        some = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        what = f"{len(missing)} of the checkpoint's files are not in {name}: {some}"
        yield RULE.error(resolved, what, [CHECKPOINT], "download the rest of it")
    # The embedded backend takes the model from its checkpoint.
    if isinstance(theirs, dict) and "embedded" not in (
        resolved.value("trainer.backend"),
        resolved.value("rollout.backend"),
    ):
        yield from _unlike(resolved, theirs, file)


def _unlike(resolved: Resolved, theirs: Mapping[str, Any], file: Path) -> Iterator[Finding]:
    ours, theirs = text_facts(resolved.config.model.architecture), text_facts(theirs)
    unlike = [key for key in _SIZES if key in theirs and key in ours and theirs[key] != ours[key]]
    if unlike:
        key = unlike[0]
        yield RULE.error(
            resolved,
            f"the checkpoint is of another model: {key} is {theirs[key]!r} in {file}, {ours[key]!r} in this launch",
            [CHECKPOINT, architecture_key(resolved.config, key)],
            f"--model {file.parent} takes the model from the checkpoint, or another --hf-checkpoint",
        )


def _check_random(resolved: Resolved) -> Iterator[Finding]:
    """Of a model that is given as a directory: who names a profile without a checkpoint, or none, means it."""
    directory = Path(resolved.config.model.name)
    if directory.is_absolute() and not resolved.is_set(CHECKPOINT):
        yield RANDOM.finding(
            "warning",
            resolved,
            f"training would start from random weights: {why_random(resolved)}",
            ["model.name"],
            "--hf-checkpoint with the directory of the weights, or --hf-checkpoint= if random ones are meant",
        )


RULE = Rule(
    code="RL346",
    name="a checkpoint in a directory is there with its weights, and is the model's",
    reason="found by the first worker that loads it, it costs the start of Ray and of every engine",
    check=_check,
    probes=True,
)
RANDOM = Rule(
    code="RL347",
    name="training starts from a checkpoint's weights",
    reason="random weights train like any others, and nothing but the reward tells that the checkpoint was never read",
    check=_check_random,
    probes=True,
)
RULES = (RULE, RANDOM)
