"""A rank's state as rectangles of the whole model's tensors, so that any other layout of ranks finds its own in them.

The whole tensors are the parameters of `weights.entries`, unsplit and unpadded, and for each of them its float32 main
copy and Adam's moments, all of two dimensions (a vector is one column). Ranks split parameters by rows or by columns;
the distributed optimizer cuts what is left anywhere, in the middle of a row too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rllaunch.backends.megatron.build import Built
from rllaunch.backends.megatron.placement import Held, Placement
from rllaunch.backends.megatron.shape import ModelShape
from rllaunch.backends.megatron.weights import Entry
from rllaunch.errors import RunError

Pair = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A rectangle of a whole tensor, in this rank's own memory.

    Args:
        size: of the whole tensor.
        offset: where the rectangle lies in it.
        tensor: its values, a view.
    """

    key: str
    size: Pair
    offset: Pair
    tensor: Tensor


def state_pieces(built: Built, *, with_copies: bool) -> Iterator[Piece]:
    """Of the policy and of a critic, where there is one; `with_copies` as `pieces` takes it."""
    yield from pieces("policy", built.placement, built.ddp.module, built.optimizer, with_copies=with_copies)
    if (placement := built.critic_placement) is not None:
        yield from pieces("critic", placement, built.critic.module, built.optimizer, with_copies=with_copies)


def pieces(role: str, placement: Placement, model: Any, optimizer: Any, *, with_copies: bool) -> Iterator[Piece]:
    """Of all parameters, masters and moments of a model that this rank holds.

    Args:
        role: what the checkpoint calls the model.
        model: that `placement` is of.
        optimizer: Megatron-core's, with its moments.
        with_copies: parameters that repeat another's values too: they are filled, but not written twice.
    """
    shards = _shards(optimizer)
    parameters = dict(model.named_parameters()) | dict(model.named_buffers())
    for index, held in placement.held.items():
        entry = placement.entries[index]
        if entry.is_copy and not with_copies:
            continue
        parameter = parameters[held.name]
        key = f"{role} {' + '.join(entry.sources)}"
        yield from _cut(f"{key}: weight", parameter.data, 0, entry, held, placement.shape)
        if parameter in shards:
            shard = shards[parameter]
            for part, tensor in shard.state.items():
                yield from _cut(f"{key}: {part}", tensor, shard.start, entry, held, placement.shape)


@dataclass(frozen=True)
class _Shard:
    """What an optimizer keeps of a parameter, from its element `start` on."""

    start: int
    state: Mapping[str, Tensor]


def _shards(optimizer: Any) -> dict[Any, _Shard]:
    """Parameter → the optimizer's state of it on this rank; those of which other ranks keep all are not there."""
    found: dict[Any, _Shard] = {}
    for wrapper in getattr(optimizer, "chained_optimizers", [optimizer]):
        if wrapper.optimizer is None:
            continue
        groups = wrapper.optimizer.param_groups
        if hasattr(wrapper, "model_float16_groups"):  # the distributed optimizer
            # Its `model_param_group_index_map` is wrong where a group has parameters in float32 beside narrower ones.
            for group, wide, narrow in zip(
                groups, wrapper.model_fp32_groups, wrapper.model_float16_groups, strict=True
            ):
                for main, parameter in zip(group["params"], [*wide, *narrow], strict=True):
                    own = wrapper._get_model_param_range_map(parameter)["param"]
                    state = _state(wrapper.optimizer, main, parameter)
                    assert all(t.numel() == own.size for t in state.values()), "state is as large as its shard"
                    found[parameter] = _Shard(own.start, state)
            continue
        halves = (p for group in getattr(wrapper, "float16_groups", ()) for p in group)
        stepped = {id(p.main_param): p for p in halves}
        for main in (p for group in groups for p in group["params"]):
            parameter = stepped.get(id(main), main)
            found[parameter] = _Shard(0, _state(wrapper.optimizer, main, parameter))
    return found


def _state(torch_optimizer: Any, main: Tensor, parameter: Tensor) -> dict[str, Tensor]:
    """Master and moments of a parameter; a parameter that is its own master has none."""
    state = {n: t for n, t in torch_optimizer.state[main].items() if isinstance(t, Tensor) and t.dim()}
    if "exp_avg" not in state:
        raise RunError(
            "the optimizer has no moments before its first step, so that a checkpoint of them cannot be read",
            "[megatron] optimizer_offload_fraction",
            "leave it out: with trainer.optimizer_cpu_offload the whole optimizer is then on the host",
        )
    if "master_param" in state:  # of the precision-aware optimizer, or of one on the host
        state["main"] = state.pop("master_param")
    elif main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
        state["main"] = main.data
    return state


def _cut(key: str, tensor: Tensor, start: int, entry: Entry, held: Held, shape: ModelShape) -> Iterator[Piece]:
    """The rectangles that a run of a parameter's elements, from `start` on, makes up."""
    flat = tensor.view(-1)
    rows, columns = held.shape if len(held.shape) > 1 else (*held.shape, 1)
    by_rows, by_columns = (held.num_shards, 1) if entry.split == 0 else (1, held.num_shards)
    whole_rows = shape.vocab_size if entry.form == "vocab" else rows * by_rows
    size = whole_rows, columns * by_columns
    for first_row, last_row, to_row in _bands(entry, held, rows, whole_rows):
        begin = max(start, first_row * columns)
        end = min(start + flat.numel(), last_row * columns)
        for low, high in _rectangles(begin, end, columns):
            row, column = divmod(low, columns)
            width = min(columns, high - low)
            offset = to_row + row - first_row, column + (held.shard * columns if entry.split == 1 else 0)
            yield Piece(key, size, offset, flat[low - start : high - start].view(-1, width))


def _bands(entry: Entry, held: Held, rows: int, whole_rows: int) -> list[tuple[int, int, int]]:
    """Rows of a parameter that stand together in the whole one: first, last and the row they become there."""
    if entry.split != 0 or held.num_shards == 1:
        return [(0, min(rows, whole_rows), 0)]
    if entry.has_halves:
        half = rows // 2
        return [(0, half, held.shard * half), (half, rows, whole_rows // 2 + held.shard * half)]
    to_row = held.shard * rows
    return [(0, max(0, min(rows, whole_rows - to_row)), to_row)]


def _rectangles(begin: int, end: int, columns: int) -> list[Pair]:
    """A run of elements in parts that are rectangles: the rest of a row, whole rows, the beginning of a row."""
    first, last = -(-begin // columns) * columns, end // columns * columns
    if first > last:  # all in one row
        return [(begin, end)] if begin < end else []
    return [(low, high) for low, high in ((begin, first), (first, last), (last, end)) if low < high]
