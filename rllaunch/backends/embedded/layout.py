"""How named tensors lie in one flat region: offsets from shapes alone, and parameters moved into a buffer."""

# Names are the model's own (`model.layers.0.mlp.up_proj.weight`), with a role before them in the trainer.

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rllaunch.backends.base import TensorSlice
from rllaunch.backends.embedded.pool import FlatBuffer

# Every run of one dtype starts on a cache line, which also aligns it for any dtype.
_ALIGNMENT_BYTES = 64
# What kernels of grouped products ask of a matrix on a GPU.
_MATRIX_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Segment:
    """Tensors of one group and dtype, back to back: one flat tensor of `numel` elements at `offset` bytes."""

    group: str
    dtype: torch.dtype
    offset: int
    numel: int

    def view(self, buffer: FlatBuffer) -> Tensor:
        return buffer.view(self.dtype, self.offset, (self.numel,))


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies in a region of `nbytes`; the same on every process that was given the same config."""

    slices: tuple[TensorSlice, ...]
    segments: tuple[Segment, ...]
    nbytes: int

    def views(self, buffer: FlatBuffer) -> dict[str, Tensor]:
        """name → the tensor inside `buffer`, which must be allocated."""
        return {s.name: buffer.view(dtype_of(s), s.offset, s.shape) for s in self.slices}

    def fingerprint(self) -> str:
        """Equal for equal layouts: what a checkpoint of the flat bytes is checked against."""
        return hashlib.blake2b(repr(self.slices).encode(), digest_size=16).hexdigest()


def lay_out(groups: Iterable[tuple[str, Iterable[tuple[str, Tensor]]]]) -> Layout:
    """Offsets for (group, named tensors) in the order given; tensors on the meta device will do.

    Within a group the dtypes are kept apart, so that each (group, dtype) is one flat segment that an
    optimizer can take as one parameter. In it tensors of an odd size come last: those before them, all that a kernel
    wants aligned, then lie on 16 bytes without a gap.
    """
    slices: list[TensorSlice] = []
    segments: list[Segment] = []
    end = 0
    for group, named_tensors in groups:
        by_dtype: dict[torch.dtype, list[tuple[str, Tensor]]] = {}
        for name, tensor in named_tensors:
            by_dtype.setdefault(tensor.dtype, []).append((name, tensor))
        for dtype, members in by_dtype.items():
            start = end = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            for name, tensor in sorted(members, key=lambda member: member[1].nbytes % _MATRIX_ALIGNMENT_BYTES != 0):
                slices.append(TensorSlice(name, dtype_name(dtype), tuple(tensor.shape), end))
                end += tensor.numel() * dtype.itemsize
            segments.append(Segment(group, dtype, start, (end - start) // dtype.itemsize))
    return Layout(tuple(slices), tuple(segments), end)


def move_parameters(parameters: Mapping[str, nn.Parameter], layout: Layout, buffer: FlatBuffer) -> None:
    """Copy each parameter's values to its place in `buffer` and make the parameter a view of it."""
    views = layout.views(buffer)
    with torch.no_grad():
        for name, parameter in parameters.items():
            view = views[name]
            view.copy_(parameter.data)
            parameter.data = view


def checksum(named_tensors: Iterable[tuple[str, Tensor]]) -> str:
    """One text for names and bytes of all tensors, whatever their order; equal exactly when all are."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in sorted(named_tensors, key=lambda item: item[0]):
        digest.update(name.encode())
        # A copy, because torch never again resizes a storage that numpy has seen.
        flat = tensor.detach().to("cpu", copy=True).contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(tensor_slice: TensorSlice) -> torch.dtype:
    dtype = getattr(torch, tensor_slice.dtype)
    assert isinstance(dtype, torch.dtype), "a TensorSlice names a torch dtype"
    return dtype


def nbytes_of(tensor_slice: TensorSlice) -> int:
    nbytes = dtype_of(tensor_slice).itemsize
    for size in tensor_slice.shape:
        nbytes *= size
    return nbytes


def view_of(flat_bytes: Tensor, tensor_slice: TensorSlice) -> Tensor:
    """The tensor that lies at its place in flat bytes."""
    own = flat_bytes[tensor_slice.offset : tensor_slice.offset + nbytes_of(tensor_slice)]
    return own.view(dtype_of(tensor_slice)).view(tensor_slice.shape)
