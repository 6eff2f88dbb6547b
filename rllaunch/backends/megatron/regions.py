"""The trainer's memory as regions: the storages Megatron-core allocated, freed and given back in place.

Megatron-core spreads its state over buffers of its own, with parameters, shards and gradients as views of them. Freeing
resizes a storage to nothing, so that every view stays the object it is and is whole again when the storage is back.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rllaunch.backends.base import TensorSlice
from rllaunch.backends.embedded.layout import dtype_name, view_of
from rllaunch.backends.embedded.pinned import allocate_pinned, release_pinned
from rllaunch.backends.embedded.pool import Pool
from rllaunch.errors import RunError
from rllaunch.plan.handoff import Region

_ALIGNMENT_BYTES = 64
_CHUNK_BYTES = 64 * 2**20


class StorageRegion:
    """Storages that come and go together, charged to `pool` as `owner`'s `region` while they are there.

    In between, nothing may touch the tensors: torch reads a freed storage without a check and the process ends by
    signal 11.

    Args:
        tensors: whatever lies in them; a storage that several share counts once. They must be resident.
    """

    def __init__(self, pool: Pool, owner: str, region: Region, tensors: Iterable[Tensor]) -> None:
        self._pool, self.owner, self.region = pool, owner, region
        storages = {t.untyped_storage().data_ptr(): t for t in tensors if t.untyped_storage().nbytes()}
        self._flat = [_whole_storage(t) for t in storages.values()]
        self._sizes = [flat.untyped_storage().nbytes() for flat in self._flat]
        self._offset: dict[int, int] = {}
        end = 0
        for pointer, size in zip(storages, self._sizes, strict=True):
            self._offset[pointer] = end
            end += -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self.nbytes = end
        self.is_resident = True
        pool.charge(owner, region, self.nbytes)

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._offset

    def pieces(self) -> list[tuple[int, Tensor]]:
        """Offset in the region and bytes of each storage.

        Raises:
            RunError: they are offloaded.
        """
        if not self.is_resident:
            raise RunError(
                f"{self.owner}: {self.region} is used while it is offloaded", "", "bring it back first (onload)"
            )
        return list(zip(self._offset.values(), self._flat, strict=True))

    def locate(self, name: str, tensor: Tensor) -> TensorSlice:
        """Where a tensor lies in the region, so that it can be read from a host copy."""
        assert tensor.is_contiguous(), f"{name} lies in one piece"
        base = self._offset[tensor.untyped_storage().data_ptr()]
        offset = base + int(tensor.storage_offset()) * tensor.itemsize
        return TensorSlice(name, dtype_name(tensor.dtype), tuple(tensor.shape), offset)

    def at(self, piece: TensorSlice) -> Tensor:
        """The counterpart of `locate`; while the memory is somebody else's to bring back only an address."""
        offsets = list(self._offset.values())
        index = bisect_right(offsets, piece.offset) - 1
        return view_of(self._flat[index], replace(piece, offset=piece.offset - offsets[index]))

    def end_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes of the region up to the last of these, which must be resident."""
        offsets = list(self._offset.values())
        # By where they are now: whoever takes the memory over may have moved it since.
        pointers = (flat.untyped_storage().data_ptr() for flat in self._flat)
        ends = dict(zip(pointers, [*offsets[1:], self.nbytes], strict=True))
        return max(ends[t.untyped_storage().data_ptr()] for t in tensors if t.untyped_storage().nbytes())

    def allocate(self) -> None:
        """
        Raises:
            FitError: the pool is too small.
            RunError: it is allocated already, or the machine has no memory left.
        """
        self.enter()
        try:
            for flat, size in zip(self._flat, self._sizes, strict=True):
                flat.untyped_storage().resize_(size)
        except RuntimeError as err:  # torch.OutOfMemoryError is one
            self._drop()
            self.leave()
            raise RunError(f"{self.owner}: the machine refuses {self.nbytes:,} bytes of {self.region}: {err}") from err

    def free(self) -> None:
        """
        Raises:
            RunError: it is free already.
        """
        self.leave()
        self._drop()

    def enter(self) -> None:
        """In the books only: somebody else brings the memory back, with all addresses as they were."""
        if self.is_resident:
            raise RunError(f"{self.owner}: {self.region} is allocated twice")
        self._pool.charge(self.owner, self.region, self.nbytes)
        self.is_resident = True

    def leave(self) -> None:
        """The counterpart of `enter`."""
        if not self.is_resident:
            raise RunError(f"{self.owner}: {self.region} is released twice")
        self.is_resident = False
        self._pool.release(self.owner, self.region)

    def _drop(self) -> None:
        for flat in self._flat:
            flat.untyped_storage().resize_(0)


def _whole_storage(tensor: Tensor) -> Tensor:
    """All bytes behind a tensor."""
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage())


class Reference:
    """The policy's parameters as they are now, kept on the host: they trade places with the trained ones for a pass.

    So the device never holds both, and nothing but a chunk is allocated for the exchange.

    Args:
        params: must be resident, here and at every exchange.
        nbytes: of the policy's, with which the region begins; a critic's after them have no reference.
    """

    def __init__(self, host_pool: Pool, params: StorageRegion, nbytes: int, *, is_pinned: bool) -> None:
        self._pool, self._params = host_pool, params
        host_pool.charge(params.owner, "reference", nbytes)
        self._is_pinned = is_pinned
        self._host = allocate_pinned(nbytes) if is_pinned else torch.empty(nbytes, dtype=torch.uint8)
        for offset, piece in self._pieces():
            self._host[offset : offset + piece.numel()].copy_(piece)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The device holds the reference inside the block, and after it what it held before, bit for bit."""
        self._trade()
        try:
            yield
        finally:
            self._trade()

    def _pieces(self) -> list[tuple[int, Tensor]]:
        return [(offset, piece) for offset, piece in self._params.pieces() if offset < len(self._host)]

    def _trade(self) -> None:
        for offset, piece in self._pieces():
            host = self._host[offset : offset + piece.numel()]
            for mine, theirs in zip(*(torch.split(t, _CHUNK_BYTES) for t in (piece, host)), strict=True):
                kept = mine.clone()
                mine.copy_(theirs)
                theirs.copy_(kept)

    def shutdown(self) -> None:
        if self._is_pinned:
            release_pinned(self._host)
        self._pool.release(self._params.owner, "reference")


def regions_of(
    models: Sequence[Any], optimizer: Any, pool: Pool, owner: str, device: torch.device | str
) -> dict[Region, StorageRegion]:
    """Parameters, what the optimizer keeps beside them on `device`, and gradients.

    Args:
        models: the policy's before a critic's, which is their order in every region; the reference is of its first
            part.
    """
    params = StorageRegion(pool, owner, "params", (t for m in models for t in parameter_tensors(m)))
    own = [t for t in optimizer_tensors(optimizer, device) if t not in params]
    return {
        "params": params,
        "optimizer": StorageRegion(pool, owner, "optimizer", own),
        "grads": StorageRegion(pool, owner, "grads", (t for m in models for t in gradient_tensors(m))),
    }


def parameter_tensors(model: Any) -> Iterator[Tensor]:
    for parameter in model.parameters():
        yield parameter.data


def gradient_tensors(ddp: Any) -> Iterator[Tensor]:
    """The buffers that gradients are accumulated in."""
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        yield buffer.grad_data


def optimizer_tensors(optimizer: Any, device: torch.device | str) -> Iterator[Tensor]:
    """Main parameters and moments that lie on `device`; counters and what the host keeps are left out."""
    for torch_optimizer in torch_optimizers(optimizer):
        for group in torch_optimizer.param_groups:
            for parameter in group["params"]:
                state = torch_optimizer.state[parameter].values()
                for tensor in (parameter.data, *(t for t in state if isinstance(t, Tensor) and t.dim())):
                    if tensor.device.type == torch.device(device).type:
                        yield tensor


def torch_optimizers(optimizer: Any) -> list[Any]:
    """Megatron-core wraps one for dense parameters and one for experts."""
    wrapped = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one.optimizer for one in wrapped if one.optimizer is not None]
