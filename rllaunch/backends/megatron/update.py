"""A weight update: the trainer's parameters under the checkpoint's names, in buckets of shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from rllaunch.backends import deepseek_v4_names
from rllaunch.backends.base import Bucket, LaunchContext, TensorSlice, WeightSink, joined_with
from rllaunch.backends.block_fp8 import FIRST_TOO_NEW, OLDEST, BlockFp8, scale_name, unfit
from rllaunch.backends.embedded.layout import dtype_name
from rllaunch.backends.embedded.model import model_config, stays_float32
from rllaunch.backends.embedded.shared_file import SharedFile
from rllaunch.backends.megatron.shape import ModelShape
from rllaunch.backends.megatron.weights import as_saved, entries, stack_experts
from rllaunch.backends.quantise import quantise
from rllaunch.plan.architecture import read_architecture

ALIGNMENT_BYTES = 64


def as_engine_wants(
    named: Iterable[tuple[str, Tensor]],
    context: LaunchContext,
    shape: ModelShape,
    fp8: BlockFp8 | None = None,
    device: torch.device | str | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors in the engine's dtype; of the embedded engine under the names of its module.

    SGLang quantises what it loads, never what an update brings: for an engine in FP8 it is done here, of the weights
    rounded to bfloat16, as a checkpoint would be. Biases of routers and rates of linear attention stay in float32.

    Args:
        fp8: which tensors the engine holds in FP8, if it does: of each comes its scales' too.
        device: where they are quantised; where they are if None.
    """
    dtype = torch.float32 if context.config.rollout.dtype == "float32" else torch.bfloat16
    is_embedded = context.config.rollout.backend == "embedded"
    stays = deepseek_v4_names.stays_float32 if shape.compressed else stays_float32
    cast = _cast(named, dtype, stays, has_buffers=not is_embedded)
    cast = stack_experts(cast, shape) if is_embedded and shape.experts else as_saved(cast, shape)
    yield from _in_block_fp8(cast, fp8, device) if fp8 is not None else cast


def _cast(
    named: Iterable[tuple[str, Tensor]], dtype: torch.dtype, stays: Callable[[str], bool], *, has_buffers: bool
) -> Iterator[tuple[str, Tensor]]:
    """
    Args:
        stays: which names an engine of its own process holds in float32 whatever its other weights are.
        has_buffers: whether what never changes is sent; the embedded engine has it from the start, and all else in
            one type.
    """
    for name, tensor in named:
        is_buffer = name.endswith(("e_score_correction_bias", "tid2eid"))
        is_wide = is_buffer or (has_buffers and stays(name))
        if has_buffers or not is_buffer:
            yield name, tensor if is_wide else tensor.to(dtype)


def _in_block_fp8(
    named: Iterable[tuple[str, Tensor]], fp8: BlockFp8, device: torch.device | str | None
) -> Iterator[tuple[str, Tensor]]:
    """Each weight with its scales after it; of two that are joined both weights, then the scales of both."""
    waiting = iter(named)
    for name, tensor in waiting:
        together = [(name, tensor)]
        if joined_with(name) is not None:
            together.append(next(waiting))
        if not fp8.holds(name):
            yield from together
            continue
        moved = [(n, t if device is None else t.to(device, non_blocking=True)) for n, t in together]
        made = [(n, *quantise(t)) for n, t in moved]
        yield from ((n, weight) for n, weight, _ in made)
        yield from ((scale_name(n), scale_inv) for n, _, scale_inv in made)


def require_fp8_fits(fp8: BlockFp8 | None) -> None:
    """
    Raises:
        ConfigError: this process's GPU, which an engine shares, is one on which SGLang would misread FP8 weights.
    """
    capability = torch.cuda.get_device_capability()
    if fp8 is not None and not OLDEST <= capability < FIRST_TOO_NEW:
        raise unfit(torch.cuda.get_device_name(), is_newer=capability >= FIRST_TOO_NEW)


def bucket_bytes(context: LaunchContext, shape: ModelShape, *, with_scales: bool = False) -> int:
    """Bytes of the largest bucket an update may need: what was asked for, a larger tensor, or the model.

    Args:
        with_scales: weights come in FP8. The embedding does not, so the largest tensor stays what it is.
    """
    itemsize = 4 if context.config.rollout.dtype == "float32" else 2
    largest = shape.vocab_size * shape.hidden_size
    if shape.experts and (shape.experts.is_stacked or context.config.rollout.backend == "embedded"):
        largest = max(largest, shape.experts.number * 2 * shape.experts.width * shape.hidden_size)
    asked = max(context.config.handoff.update_weight_buffer_size, largest * itemsize)
    facts = model_config(context).to_dict()
    names = sum(len(entry.sources) for entry in entries(shape)) * (2 if with_scales else 1)
    whole = read_architecture(facts, "model.architecture").num_parameters * itemsize + names * ALIGNMENT_BYTES
    return min(asked, whole)


@dataclass(frozen=True)
class Group:
    """Tensors that may not be parted.

    Args:
        offsets: of each, in bytes, where the first lies at the bucket's beginning.
        nbytes: of all, with what lies between them.
    """

    tensors: tuple[tuple[str, Tensor], ...]
    offsets: tuple[int, ...]
    nbytes: int


def in_groups(named: Iterable[tuple[str, Tensor]]) -> Iterator[Group]:
    """An update's tensors, those together that an engine must be given together: they come one after the other."""
    waiting = iter(named)
    while (first := next(waiting, None)) is not None:
        group = [first]
        if (other := joined_with(first[0])) is not None and (following := next(waiting, None)) is not None:
            if following[0] == other:
                group.append(following)
            else:  # a name that a family without the other has too
                waiting = chain([following], waiting)
        offsets, end = [], 0
        for _, one in group:
            offsets.append(aligned(end))
            end = offsets[-1] + one.nbytes
        yield Group(tuple(group), tuple(offsets), end)


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass
class _Filling:
    tensors: list[TensorSlice] = field(default_factory=list)
    nbytes: int = 0


class BucketSender:
    """Fills one file in shared memory again and again; a group larger than a bucket has one of its own.

    Args:
        limit: bytes of a bucket.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        self._file: SharedFile | None = None

    def send(self, named: Iterable[tuple[str, Tensor]], sink: WeightSink) -> int:
        """Bytes sent."""
        sent = 0
        filling = _Filling()
        for group in in_groups(named):
            begin = aligned(filling.nbytes)
            if filling.tensors and begin + group.nbytes > self._limit:
                sent += self._flush(filling, sink)
                filling, begin = _Filling(), 0
            file = self._file_of(begin + group.nbytes)
            for (name, tensor), offset in zip(group.tensors, group.offsets, strict=True):
                target = file.bytes[begin + offset : begin + offset + tensor.nbytes]
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor)
                filling.tensors.append(TensorSlice(name, dtype_name(tensor.dtype), tuple(tensor.shape), begin + offset))
            filling.nbytes = begin + group.nbytes
        return sent + self._flush(filling, sink)

    def _file_of(self, nbytes: int) -> SharedFile:
        needed = max(self._limit, nbytes)
        if self._file is None or self._file.nbytes < needed:
            # Only a group beyond the limit grows it, and such a one comes first in its bucket.
            self._file = SharedFile(self._path, needed)
        return self._file

    def _flush(self, filling: _Filling, sink: WeightSink) -> int:
        if filling.tensors:
            sink.load_bucket(Bucket(str(self._path), filling.nbytes, tuple(filling.tensors)))
        return filling.nbytes

    def close(self) -> None:
        if self._file is not None:
            self._file.remove()
            self._file = None
