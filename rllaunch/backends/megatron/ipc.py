"""A weight update over CUDA IPC: buckets on each rank's GPU, opened by the engine's rank on the same GPU."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rllaunch.backends.base import Bucket, TensorSlice, WeightSink
from rllaunch.backends.embedded.layout import dtype_name
from rllaunch.backends.megatron.update import aligned, in_groups

_NUM_BUFFERS = 2


class IpcSender:
    """Fills one buffer while the engines read the other. Every rank fills the same bucket; rank 0 speaks for all.

    The buffers live for the update only: what an engine opened must be closed before they can be given back, and an
    engine closes a bucket before it answers.

    Args:
        limit: bytes of a bucket; a group larger than that has a larger one of its own.
    """

    def __init__(self, device: str, limit: int) -> None:
        self._device, self._limit = device, limit
        self._buffers: list[Tensor] = []
        self._tensors: list[TensorSlice] = []
        self._nbytes = self._turn = self._sent = 0
        self._under_way: Future[None] | None = None

    def send(self, named: Iterable[tuple[str, Tensor]], sink: WeightSink | None) -> int:
        """Bytes sent.

        Args:
            named: the same names in the same order on every rank; tensors on this rank's GPU or in pinned memory.
            sink: of rank 0.
        """
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with ThreadPoolExecutor(1, "update") as calls, torch.cuda.stream(stream):
            try:
                # In a call of its own: what still named a buffer here would keep it past the end.
                return self._send_all(named, sink, calls)
            finally:
                self._give_back(stream)

    def _send_all(self, named: Iterable[tuple[str, Tensor]], sink: WeightSink | None, calls: ThreadPoolExecutor) -> int:
        for group in in_groups(named):
            begin = aligned(self._nbytes)
            if self._tensors and begin + group.nbytes > self._limit:
                self._flush(sink, calls)
                begin = 0
            buffer = self._buffer(begin + group.nbytes)
            for (name, tensor), at in zip(group.tensors, group.offsets, strict=True):
                offset = begin + at
                target = buffer[offset : offset + tensor.nbytes]
                target.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=True)
                self._tensors.append(TensorSlice(name, dtype_name(tensor.dtype), tuple(tensor.shape), offset))
            self._nbytes = begin + group.nbytes
        self._flush(sink, calls)
        self._wait()
        # An engine closes a bucket before it answers, and rank 0 alone has the answer: before it, nothing can be freed.
        _meet()
        return self._sent

    def _buffer(self, needed: int) -> Tensor:
        if self._turn == len(self._buffers):
            self._buffers.append(self._allocated(max(self._limit, needed)))
        elif len(self._buffers[self._turn]) < needed:
            # Only a group beyond the limit grows it, and such a one comes first in its bucket.
            self._buffers[self._turn] = self._allocated(needed)
        return self._buffers[self._turn]

    def _allocated(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _flush(self, sink: WeightSink | None, calls: ThreadPoolExecutor) -> None:
        if not self._tensors:
            return
        torch.cuda.current_stream(self._device).synchronize()
        # Once the ranks meet here, the engines have read the bucket before this one, and its buffer is free.
        self._wait()
        handles = _all_handles(handle_of(self._buffers[self._turn][: self._nbytes]))
        if sink is not None:
            bucket = Bucket(handles, self._nbytes, tuple(self._tensors))
            self._under_way = calls.submit(sink.load_bucket, bucket)
        self._sent += self._nbytes
        self._tensors, self._nbytes = [], 0
        self._turn = (self._turn + 1) % _NUM_BUFFERS

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way.result()
            self._under_way = None

    def _give_back(self, stream: Any) -> None:
        stream.synchronize()
        self._buffers.clear()
        self._tensors, self._nbytes, self._turn, self._sent = [], 0, 0, 0
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def handle_of(flat: Tensor) -> bytes:
    """A flat CUDA tensor for one process on the same GPU to open, once.

    The GPU is named by its UUID: the number it has here may be another's there. SGLang reads both
    (sglang 0.5.17 `utils/patch_torch.py`).
    """
    from torch.multiprocessing.reductions import reduce_tensor

    rebuild, arguments = reduce_tensor(flat)  # type: ignore[no-untyped-call]
    device = arguments[_DEVICE]
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return pickle.dumps(_Pickled(rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])))


# The place of the device among the arguments of torch's `rebuild_cuda_tensor`.
_DEVICE = 6


class _Pickled:
    def __init__(self, rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._rebuild, self._arguments = rebuild, arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._rebuild, self._arguments


def _meet() -> None:
    """All ranks are here, without a word to their GPUs."""
    if dist.get_world_size() > 1:
        dist.all_gather_object([None] * dist.get_world_size(), None)


def _all_handles(mine: bytes) -> tuple[bytes, ...]:
    """Every rank's, in their order: ranks are the launch's slots."""
    if dist.get_world_size() == 1:
        return (mine,)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return tuple(everyone)
