"""Low-rank adapters beside Megatron-core's linear layers: those of `rllaunch.algo.lora`, parallel like their layers.

Each matrix of the checkpoint has an adapter of its own, as in the embedded trainer. Where Megatron-core holds several
in one parameter, their A stand below each other, and their B are laid out and split as the parameter's rows are.
"""

# T positions, B sequences, S matrices of a layer, R rank, I inputs and O outputs of a layer on this rank

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from torch import Tensor, nn

from rllaunch.algo.lora import drawn_again
from rllaunch.backends.base import LaunchContext
from rllaunch.backends.embedded.model import build_model
from rllaunch.backends.megatron.placement import Held, Placement, TensorOf
from rllaunch.backends.megatron.shape import ModelShape
from rllaunch.backends.megatron.weights import Entry, shard, to_megatron


def freeze_and_adapt(context: LaunchContext, model: Any, placement: Placement) -> tuple[Adapters, Placement]:
    """Freeze the model and put an adapter beside each layer of it that the launch names; before it is wrapped.

    Args:
        placement: of the model as it is.
    Returns:
        The adapters, and where they and all else lie. They start as the embedded trainer's do.
    Raises:
        ConfigError: a target names no linear layer of the model.
    """
    algorithm = context.config.algorithm
    module = build_model(context, device="meta")
    linear_of: Callable[[str], Any] = module.get_submodule
    drawn = dict(drawn_again(module, context.config.run.seed))
    model.requires_grad_(False)
    adapters = Adapters()
    new: list[Entry] = []
    for index, entry in enumerate(placement.entries):
        names = [source.removesuffix(".weight") for source in entry.sources]
        if not any(name in drawn for name in names):
            continue
        new += _entries(entry, names)
        if (held := placement.held.get(index)) is None:
            continue
        layer = model.get_submodule(held.name.removesuffix(".weight"))
        rows = [linear_of(name).out_features for name in names]
        from_O = _source_of_rows(entry, rows, held, placement.shape)
        adapter = _Adapter(held, len(names), from_O, algorithm.lora_alpha / algorithm.lora_rank, adapters)
        adapter.attach(layer, entry, algorithm.lora_rank, next(iter(drawn.values())).dtype)
        adapters.of_weight[held.name] = adapter
    if model.pre_process:
        # Else no gradient would flow through layers that are computed again, nor through a stage without adapters.
        model.embedding.register_forward_hook(lambda module, args, output: output.requires_grad_())
    placed = Placement(model, placement.shape, [*placement.entries, *new])
    placed.fill(_starting(drawn, linear_of, algorithm.lora_rank), adapters=True)
    return adapters, placed


def _entries(entry: Entry, names: Sequence[str]) -> list[Entry]:
    """A and B of a layer, placed like parameters. A matrix that is no target has both zero, and they stay zero."""
    layers = [name.removesuffix(".weight") for name in entry.names]

    def half(which: str) -> Entry:
        renamed = tuple(f"{layer}.{which}" for layer in layers), tuple(f"{name}.{which}" for name in names)
        return replace(entry, names=renamed[0], sources=renamed[1], is_adapter=True)

    a = replace(half("lora_a"), form="plain", split=1 if entry.split == 1 else None)
    return [a, replace(half("lora_b"), split=0 if entry.split == 0 else None)]


def _starting(drawn: Mapping[str, Tensor], linear_of: Callable[[str], Any], rank: int) -> TensorOf:
    def tensor_of(name: str) -> Tensor:
        layer, _, which = name.rpartition(".")
        linear = linear_of(layer)
        if which == "lora_b":
            return torch.zeros(linear.out_features, rank)
        return drawn[layer] if layer in drawn else torch.zeros(rank, linear.in_features)

    return tensor_of


def _source_of_rows(entry: Entry, rows: Sequence[int], held: Held, shape: ModelShape) -> Tensor:
    """[O]: which of the layer's matrices each of this rank's outputs belongs to."""
    tp = held.num_shards if entry.split == 0 else 1
    numbers = [torch.full((count, 1), number) for number, count in enumerate(rows)]
    return shard(entry, to_megatron(entry, numbers, shape, tp), held.shard if tp > 1 else 0, tp).flatten()


class Adapters:
    """All adapters of this rank's stage."""

    def __init__(self) -> None:
        self.of_weight: dict[str, _Adapter] = {}
        self.are_on = True

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The model is the frozen one inside the block: the reference of a KL term."""
        self.are_on = False
        try:
            yield
        finally:
            self.are_on = True

    def merged(self, local_of: TensorOf, device: torch.device | str) -> TensorOf:
        """This rank's tensors with every adapter added into its layer's weight.

        Args:
            local_of: this rank's tensor of a name, on the device or the host.
            device: where the sums are made.
        """

        def tensor_of(name: str) -> Tensor:
            plain = local_of(name)
            if name not in self.of_weight:
                return plain
            at = name.removesuffix(".weight")
            a, b = (local_of(f"{at}.{part}").detach().to(device) for part in ("lora_a", "lora_b"))
            return self.of_weight[name].merged(plain.detach().to(device), a, b)

        return tensor_of


@dataclass
class _Adapter:
    """
    Args:
        from_O: which of the layer's S matrices each output belongs to.
    """

    held: Held
    num_sources: int
    from_O: Tensor
    scale: float
    adapters: Adapters
    into: Callable[[Tensor], Tensor] = lambda low: low
    """Takes the narrow activations to where the layer's outputs are."""

    def attach(self, layer: Any, entry: Entry, rank: int, dtype: torch.dtype) -> None:
        weight_OI = layer.weight
        self.from_O = self.from_O.to(weight_OI.device)
        a = torch.empty(self.num_sources * rank, weight_OI.shape[1], dtype=dtype, device=weight_OI.device)
        b = torch.empty(weight_OI.shape[0], rank, dtype=dtype, device=weight_OI.device)
        layer.lora_a, layer.lora_b = nn.Parameter(a), nn.Parameter(b)
        is_sequence_parallel = layer.config.sequence_parallel
        split = entry.split if self.held.num_shards > 1 else None
        for parameter, dimension, is_split in ((layer.lora_a, 1, split == 1), (layer.lora_b, 0, split == 0)):
            if is_split:
                tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dimension, 1)
            else:
                # Each rank's gradient is that of its part of the sequence: Megatron-core adds those it finds so marked.
                parameter.sequence_parallel = is_sequence_parallel
        if split is not None:
            self.into = _across_ranks(is_rows=split == 1, is_sequence_parallel=is_sequence_parallel)
        layer.register_forward_hook(self._add)

    def _add(self, layer: Any, args: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        if not self.adapters.are_on:
            return None
        plain_TBO, bias = output
        low = self.into(_narrow(args[0], layer.lora_a))
        wide_TBO = F.linear(low, self._spread(layer.lora_b))
        return plain_TBO + (self.scale * wide_TBO).to(plain_TBO.dtype), bias

    def _spread(self, b_OR: Tensor) -> Tensor:
        """[O, S·R]: each output reads the narrow activations of its own matrix only."""
        if self.num_sources == 1:
            return b_OR
        belongs_OS1 = F.one_hot(self.from_O.to(b_OR.device), self.num_sources).to(b_OR.dtype)[..., None]
        return (belongs_OS1 * b_OR[:, None]).flatten(1)

    def merged(self, weight_OI: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """The weight that computes the same without an adapter, in its own dtype; from this rank's parts alone."""
        whole_OI = torch.addmm(weight_OI.to(b.dtype), self._spread(b), a, alpha=self.scale)
        return whole_OI.to(weight_OI.dtype)


def _across_ranks(*, is_rows: bool, is_sequence_parallel: bool) -> Callable[[Tensor], Tensor]:
    """What a layer that ranks share does with its wide activations, here with the narrow ones.

    Of a layer split by columns every rank needs all of them, and their gradient is the sum of the ranks'; one split by
    rows has a part of the sum on each rank.
    """
    crossing: Callable[[Tensor], Tensor]
    if is_rows and is_sequence_parallel:
        crossing = tensor_parallel.reduce_scatter_to_sequence_parallel_region
    elif is_rows:
        crossing = tensor_parallel.reduce_from_tensor_model_parallel_region
    elif is_sequence_parallel:
        crossing = tensor_parallel.gather_from_sequence_parallel_region
    else:
        crossing = tensor_parallel.copy_to_tensor_model_parallel_region
    return crossing


def _narrow(x_TBI: Tensor, a_RI: Tensor) -> Tensor:
    low: Tensor = _Narrow.apply(x_TBI, a_RI)  # type: ignore[no-untyped-call]
    return low


class _Narrow(torch.autograd.Function):
    """x A^T in the adapter's dtype. Kept for the backward pass is x as the layer itself keeps it, not a wider copy."""

    @staticmethod
    def forward(ctx: Any, x_TBI: Tensor, a_RI: Tensor) -> Tensor:
        ctx.save_for_backward(x_TBI, a_RI)
        return F.linear(x_TBI.to(a_RI.dtype), a_RI)

    @staticmethod
    def backward(ctx: Any, grad_TBR: Tensor) -> tuple[Tensor, Tensor]:
        x_TBI, a_RI = ctx.saved_tensors
        grad_a = grad_TBR.flatten(0, -2).t() @ x_TBI.flatten(0, -2).to(a_RI.dtype)
        return (grad_TBR @ a_RI).to(x_TBI.dtype), grad_a
