"""Which of the model's parameters this rank holds, filling them from a checkpoint, and gathering them on rank 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rllaunch.backends.megatron.shape import ModelShape
from rllaunch.backends.megatron.weights import Entry, entries, from_megatron, shard, to_megatron, unshard
from rllaunch.errors import RunError

TensorOf = Callable[[str], Tensor]


@dataclass(frozen=True)
class Held:
    """A parameter of this rank: its name here, its shape, and which shard of how many it is."""

    name: str
    shape: tuple[int, ...]
    shard: int
    num_shards: int


@dataclass(frozen=True)
class _Source:
    """Where the shards of one entry come from, in the order of the shards.

    Args:
        ranks: of each shard the lowest global rank that holds it.
        holders: all of them.
    """

    ranks: tuple[int, ...]
    holders: tuple[frozenset[int], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class Placement:
    """The parameters of one model on the ranks that share it.

    Args:
        model: this rank's stage, without a wrapper around it.
        of: the entries of its parameters, where they are not those of the shape.
    """

    def __init__(self, model: Any, shape: ModelShape, of: Sequence[Entry] | None = None) -> None:
        self.shape = shape
        self.entries = list(of) if of is not None else entries(shape)
        self._tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.held: dict[int, Held] = {}
        layers = {layer.layer_number - 1: i for i, layer in enumerate(model.decoder.layers)}
        experts = _local_experts(shape)
        for index, entry in enumerate(self.entries):
            if entry.layer is not None and entry.layer not in layers:
                continue
            if entry.expert is not None and entry.expert not in experts:
                continue
            layer = layers[entry.layer] if entry.layer is not None else 0
            expert = experts[entry.expert] if entry.expert is not None else 0
            names = [name.format(layer=layer, expert=expert) for name in entry.names]
            name = next((n for n in names if n in self._tensors), None)
            if name is not None:
                local = self._tensors[name]
                place = _place(entry) if _is_split(entry, local, model.config) else (0, 1)
                self.held[index] = Held(name, tuple(local.shape), *place)
            elif entry.layer is not None:
                raise RunError(f"the model built by Megatron-core has no parameter {' or '.join(names)}")
        self._check_complete(model)
        self._sources: list[_Source] | None = None

    def _check_complete(self, model: Any) -> None:
        """Every parameter is one of ours: one left over would never reach an engine."""
        known = {held.name for held in self.held.values()}
        if extra := sorted(n for n, _ in model.named_parameters() if n not in known):
            raise RunError(f"the model built by Megatron-core has parameters that no checkpoint names: {extra[:3]}")

    def fill(self, tensor_of: TensorOf, *, adapters: bool = False) -> None:
        """Give every parameter of this rank the checkpoint's values, or every adapter its own.

        Args:
            tensor_of: the tensor of a name, on the host.
        """
        tp = parallel_state.get_tensor_model_parallel_world_size()
        with torch.no_grad():
            for index, held in self.held.items():
                entry, target = self.entries[index], self._tensors[held.name]
                if entry.is_adapter != adapters:
                    continue
                whole = to_megatron(entry, [tensor_of(s) for s in entry.sources], self.shape, tp)
                part = shard(entry, whole, held.shard, held.num_shards)
                if part.shape != target.shape:
                    raise RunError(
                        f"{' and '.join(entry.sources)} of the checkpoint fit {list(part.shape)}, "
                        f"the model has {list(target.shape)}",
                        fix="the checkpoint is of another model than the architecture says",
                    )
                target.copy_(part)

    def gather(self, local_of: TensorOf, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the checkpoint, one after the other, on rank 0; nothing on the others, which help.

        Every rank must exhaust it at the same moment.

        Args:
            local_of: this rank's tensor of a name of `held`: the parameter, or its host copy.
            device: where the tensors are gathered; that of the process group.
        """
        rank = dist.get_rank()
        for index, (entry, source) in enumerate(zip(self.entries, self._all_sources(), strict=True)):
            if not entry.is_sent:
                continue
            shards = []
            for sender in source.ranks:
                if rank == sender:
                    shard = local_of(self.held[index].name).detach().to(device)
                else:
                    shard = torch.empty(source.shape, dtype=source.dtype, device=device)
                if sender != 0:
                    # To all, though rank 0 alone keeps it: NCCL would open a communicator for each pair, and keep it.
                    shard = shard.contiguous()
                    dist.broadcast(shard, sender)
                if rank == 0:
                    shards.append(shard)
            if rank == 0:
                whole = unshard(entry, shards)
                yield from zip(entry.sources, from_megatron(entry, whole, self.shape), strict=True)

    def spread(self, local_of: TensorOf, device: torch.device | str) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors of the checkpoint, one after the other, on every rank.

        Every rank must exhaust it at the same moment. A tensor may still lie in pinned host memory where this rank
        holds it whole there; all others are on `device`, made on the current stream.

        Args:
            local_of: this rank's tensor of a name of `held`: the parameter, or its host copy.
        """
        rank, everyone = dist.get_rank(), frozenset(range(dist.get_world_size()))
        for index, (entry, source) in enumerate(zip(self.entries, self._all_sources(), strict=True)):
            if not entry.is_sent:
                continue
            shards = []
            for sender, holders in zip(source.ranks, source.holders, strict=True):
                if rank in holders:
                    mine = local_of(self.held[index].name).detach()
                if holders == everyone:
                    # Rows of q, k and v lie between each other: on the host they would be copied at its speed.
                    shards.append(mine.to(device, non_blocking=True) if entry.is_rearranged else mine)
                    continue
                if rank == sender:
                    shared = mine.to(device, non_blocking=True).contiguous()
                else:
                    shared = torch.empty(source.shape, dtype=source.dtype, device=device)
                dist.broadcast(shared, sender)
                shards.append(shared)
            whole = unshard(entry, shards)
            yield from zip(entry.sources, from_megatron(entry, whole, self.shape), strict=True)

    def _all_sources(self) -> list[_Source]:
        if self._sources is None:
            mine = {i: (held.shard, held.shape, self._tensors[held.name].dtype) for i, held in self.held.items()}
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            self._sources = [_source(e, i, everyone) for i, e in enumerate(self.entries)]
        return self._sources


def _source(entry: Entry, index: int, everyone: list[Mapping[int, Any]]) -> _Source:
    """Of every shard the lowest rank that holds it; data-parallel ranks hold the same."""
    by_shard: dict[int, list[int]] = {}
    shape: tuple[int, ...] = ()
    dtype = torch.float32
    for rank, held in enumerate(everyone):
        if index in held:
            number, shape, dtype = held[index]
            by_shard.setdefault(number, []).append(rank)
    if not entry.is_copy:
        assert sorted(by_shard) == list(range(len(by_shard))), f"some rank holds every shard of {entry.names[0]}"
        assert by_shard, f"some rank holds {entry.names[0]}"
    holders = [by_shard[number] for number in sorted(by_shard)]
    return _Source(tuple(ranks[0] for ranks in holders), tuple(map(frozenset, holders)), shape, dtype)


def _local_experts(shape: ModelShape) -> dict[int, int]:
    """Number of an expert in the whole model → its number here; each rank has a run of them."""
    if shape.experts is None:
        return {}
    size, rank = parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_model_parallel_rank()
    share = shape.experts.number // size
    return {rank * share + i: i for i in range(share)}


def _place(entry: Entry) -> tuple[int, int]:
    """This rank's number among those that share a parameter, and how many they are."""
    if entry.expert is not None:
        return parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_expert_tensor_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()


def _is_split(entry: Entry, local: Tensor, config: Any) -> bool:
    """Whether ranks share it; the projections to latents are whole on each rank in most kinds of layers."""
    if entry.split is None:
        return False
    if "_down_proj" in entry.names[0]:
        is_query = "linear_q_" in entry.names[0]
        width = config.q_lora_rank if is_query else config.kv_lora_rank + config.qk_pos_emb_head_dim
        return bool(local.shape[0] != width)
    return True
