"""Bytes of each region on the embedded backend, from shapes alone: what its flat buffers will be, without torch.

One float32 or bf16 copy of everything on every slot: the embedded backend is data parallel and cuts nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rllaunch.plan.architecture import Architecture, Weight
from rllaunch.plan.handoff import Region
from rllaunch.plan.sizes import LaunchSizes, is_adaptable
from rllaunch.resolve.schema import LaunchConfig

# Ids of a character tokenizer that stand for no character: padding, begin, end.
NUM_SPECIAL = 3
# Every run of one type in a buffer, and every tensor of an update's bucket, begins on a cache line.
_ALIGNMENT = 64
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Prompts:
    """What the sizes need of a task's prompts: the characters that occur, and the tokens of the longest."""

    characters: str
    longest: int


def read_prompts(config: LaunchConfig) -> Prompts:
    """Of the prompt files as far as they can be read; what is wrong with them the task's own check says."""
    seen: set[str] = set()
    longest = 0
    for name in (config.task.prompt_data, config.task.eval_prompt_data):
        if not name or not Path(name).is_file():
            continue
        for line in Path(name).read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                seen |= {c for key in ("prompt", "label") for c in str(row.get(key, ""))}
                longest = max(longest, len(str(row.get("prompt", ""))))
    given = config.model.vocabulary
    return Prompts("".join(sorted(seen)) if given == "auto" else given, 1 + longest)


def embedded_sizes(config: LaunchConfig, architecture: Architecture, prompts: Prompts) -> LaunchSizes:
    """The regions of one slot. Prompts count a token a character; a checkpoint's tokenizer makes fewer of them."""
    element, served = _BYTES[config.model.dtype], _BYTES.get(config.rollout.dtype, 4)
    weights = _weights(architecture)
    count = sum(w.numel for w in weights)
    # A value model is the backbone with one output row in place of the head.
    head = sum(w.numel for w in architecture.head if w.split == "vocab")
    critic = count - head + architecture.hidden_size
    trained = [count, *([critic] if config.has_critic else [])]
    frozen = [count] if config.algorithm.kl_loss_coef > 0 else []
    pieces = _adapters(config, architecture)
    adapters = sum(pieces)
    if config.has_lora:
        frozen, trained = [count, *frozen], [adapters, *trained[1:]]
    parts = 2 + (element < 4)
    slots = config.world_size
    rows = math.ceil(config.num_samples / slots)
    answer = config.rollout.rollout_max_response_len
    width = prompts.longest + answer
    per_token = sum(layer.kv_elements_per_token for layer in architecture.layers)
    sent = [n * 4 for n in pieces] if config.sends_adapters else [w.numel * served for w in weights]
    gpu: dict[Region, int] = {
        "weights": _runs([count * served, *([adapters * 4] if config.sends_adapters else [])]),
        "kv_cache": rows * width * per_token * served,
        "cuda_graph": _runs([rows * (answer + width) * 8, 3 * rows * answer * 4]),
        "params": _runs([n * element for n in (*trained, *frozen)]),
        "optimizer": _runs([n * 4 for n in trained for _ in range(parts)]),
        "grads": _runs([n * 4 for n in trained]),
        "activations": _runs(
            [config.num_samples * 2 * width * 8, (5 if config.has_critic else 3) * config.num_samples * answer * 4]
        ),
        "update_bucket": _largest_bucket(sent, config.handoff.update_weight_buffer_size),
    }
    given = config.pools.region_bytes
    gpu = {region: max(size, given.get(region, 0)) for region, size in gpu.items()}
    per_node = config.gpus_per_node
    node: dict[Region, int] = {r: gpu[r] * per_node for r in ("params", "optimizer", "weights")}
    pools = config.pools
    host = {"static": pools.host_static_bytes, "trainer": pools.host_trainer_bytes}
    return LaunchSizes(
        parameters=count,
        stages=(),
        gpus=(gpu,),
        node=node,
        static_gpu={"static": pools.device_static_bytes} if pools.device_static_bytes else {},
        static_host={name: size for name, size in host.items() if size},
        save_staging=pools.host_save_bytes,
        host_optimizer=0,
        gpus_per_node=per_node,
        tokens_in_kv=rows * width,
        update_bytes=sum(sent),
    )


def _weights(architecture: Architecture) -> list[Weight]:
    layers = (weight for layer in architecture.layers for weight in layer.weights)
    return [*architecture.embedding, *layers, *architecture.head]


def _adapters(config: LaunchConfig, architecture: Architecture) -> list[int]:
    """Elements of each adapter's two narrow matrices, on every linear layer; fused experts are no linear layers."""
    rank = config.algorithm.lora_rank
    weights = (w for layer in architecture.layers for w in layer.weights if is_adaptable(w))
    return [rank * size for w in weights for size in (w.shape[1], w.shape[0])]


def _runs(sizes: Iterable[int]) -> int:
    """Bytes of runs one after the other, each beginning aligned."""
    end = 0
    for size in sizes:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT + size
    return end


def _largest_bucket(sizes: Iterable[int], limit: int) -> int:
    """Of an update cut into buckets of at most `limit` bytes; a larger tensor has one of its own."""
    largest = end = 0
    for size in sizes:
        offset = -(-end // _ALIGNMENT) * _ALIGNMENT
        if end and offset + size > limit:
            largest, offset = max(largest, end), 0
        end = offset + size
    return max(largest, end)
