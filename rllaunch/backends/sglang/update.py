"""A weight update on its way into SGLang: the names it knows, and the bytes its processes unpickle.

SGLang skips a tensor whose name it does not know, with a line in a log, so names are held against the checkpoint that
the engine loaded before anything is sent.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rllaunch.backends.base import Bucket, TensorSlice, joined_with
from rllaunch.backends.embedded.layout import dtype_of, nbytes_of
from rllaunch.backends.embedded.shared_file import SharedFile
from rllaunch.errors import RunError

# E experts, I intermediate size of one, H hidden size

_FUSED_EXPERTS = re.compile(r"(?P<prefix>.*\.experts)\.(?P<part>gate_up_proj|down_proj)$")
# Over this tensor of gpt-oss all ranks but the first write zeros where it lies, so that its biases are added once: not
# before the first has read it (sglang 0.5.23 models/gpt_oss.py). Over CUDA IPC each rank has a bucket of its own.
_ZEROED = ".experts.down_proj_bias"
# Families whose checkpoints, and SGLang, have experts in one tensor, as transformers has.
_FUSED_FAMILIES = ("gpt_oss",)


def as_checkpoint(tensors: Sequence[TensorSlice]) -> Iterator[TensorSlice]:
    """The slices under the names of a checkpoint.

    transformers 5 holds a layer's experts in one tensor, gate_up_proj [E, 2·I, H] and down_proj [E, H, I]; checkpoints
    have a gate_proj, an up_proj and a down_proj for each expert. They lie in the same bytes in this order.
    """
    for tensor in tensors:
        match = _FUSED_EXPERTS.match(tensor.name)
        if match is None or len(tensor.shape) != 3:
            yield tensor
            continue
        parts = ("gate_proj", "up_proj") if match["part"] == "gate_up_proj" else ("down_proj",)
        num_experts, rows, columns = tensor.shape
        shape = (rows // len(parts), columns)
        nbytes = math.prod(shape) * dtype_of(tensor).itemsize
        for expert in range(num_experts):
            for index, part in enumerate(parts):
                offset = tensor.offset + (expert * len(parts) + index) * nbytes
                yield TensorSlice(f"{match['prefix']}.{expert}.{part}.weight", tensor.dtype, shape, offset)


class Names:
    """Which tensors of the checkpoint an update has brought.

    Args:
        known: names of the checkpoint the engine loaded; None: they cannot be read, and nothing is checked.
        model_type: of the model's `config.json`.
    """

    def __init__(self, owner: str, known: Collection[str] | None, model_type: str = "") -> None:
        self._owner = owner
        self._is_fused = model_type in _FUSED_FAMILIES
        self._known = None if known is None else frozenset(known)
        self._missing: set[str] = set()

    def begin(self) -> None:
        self._missing = set(self._known or ())

    def take(self, tensors: Sequence[TensorSlice]) -> list[TensorSlice]:
        """The slices as the engine is to be given them.

        Raises:
            RunError: the engine loaded no tensor of that name, or would forget one.
        """
        self._check_joined(tensors)
        if self._known is None:
            return list(tensors) if self._is_fused else list(as_checkpoint(tensors))
        taken: list[TensorSlice] = []
        for tensor in tensors:
            taken += [tensor] if tensor.name in self._known else as_checkpoint([tensor])
        if unknown := [t.name for t in taken if t.name not in self._known]:
            raise RunError(
                f"{self._owner} has no such tensor: the update brings {unknown[0]}",
                f"{len(unknown)} of {len(taken)} names are not in the checkpoint the engine loaded",
                "trainer and engine must be given the same model",
            )
        self._missing -= {t.name for t in taken}
        return taken

    def _check_joined(self, tensors: Sequence[TensorSlice]) -> None:
        names = {t.name for t in tensors}
        if parted := [n for n in names if (other := joined_with(n)) is not None and other not in names]:
            raise RunError(
                f"{self._owner} would forget {min(parted)}: it is joined with {joined_with(min(parted))}, which is "
                "in another bucket",
                "handoff.update_weight_buffer_size",
                "make it larger: --update-weight-buffer-size",
            )

    def end(self, version: int, *, is_whole: bool) -> None:
        """
        Args:
            is_whole: whether the engine holds nothing that it could keep of a tensor which did not come.
        Raises:
            RunError: tensors are missing that the engine does not have.
        """
        if is_whole and self._missing:
            some = ", ".join(sorted(self._missing)[:3])
            raise RunError(
                f"{self._owner}: the update to version {version} lacks {len(self._missing)} tensors: {some}, …",
                "handoff.engine_weights" if self._known else "",
                "--engine-weights mirror keeps what no update brings",
            )


class Payloads:
    """Buckets as `update_weights_from_tensor(load_format="flattened_bucket")` takes them, one a rank of the engine.

    Runs in the engine's own process, whose children (its ranks) alone can open what is shared here.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._file: SharedFile | None = None
        self._shared = torch.empty(0, dtype=torch.uint8)
        self._copies: list[Tensor] = []

    def of(self, bucket: Bucket, tensors: Sequence[TensorSlice]) -> list[bytes]:
        from multiprocessing.reduction import ForkingPickler

        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata

        metadata = []
        for tensor in tensors:
            size = nbytes_of(tensor)
            shape = torch.Size(tensor.shape)
            end = tensor.offset + size
            metadata.append(FlattenedTensorMetadata(tensor.name, shape, dtype_of(tensor), tensor.offset, end, size))
        flats: list[Any]
        if isinstance(bucket.handle, str):
            # Once a rank: what a tensor in shared memory is pickled to can be opened once.
            flats = [self._in_shared_memory(bucket)] * self._num_ranks
            if any(tensor.name.endswith(_ZEROED) for tensor in tensors):
                flats[1:] = self._copies = [flat.clone().share_memory_() for flat in flats[1:]]
        else:
            flats = [relay(handle) for handle in bucket.handle]
        return [bytes(ForkingPickler.dumps({"flattened_tensor": flat, "metadata": metadata})) for flat in flats]

    def _in_shared_memory(self, bucket: Bucket) -> Tensor:
        assert isinstance(bucket.handle, str), "the handle is a path"
        if self._file is None or str(self._file.path) != bucket.handle or self._file.nbytes < bucket.nbytes:
            self._file = SharedFile(bucket.handle)
        if len(self._shared) < bucket.nbytes:
            fresh: Any = torch.empty(bucket.nbytes, dtype=torch.uint8)
            self._shared = fresh.share_memory_()
        flat = self._shared[: bucket.nbytes]
        flat.copy_(self._file.bytes[: bucket.nbytes])
        return flat


class _Relayed:
    """A CUDA tensor of another process that stays unopened here, and is pickled to what it was unpickled from."""

    def __init__(self, rebuild: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._rebuild = rebuild
        self._arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._rebuild, self._arguments


class _HandleReader(pickle.Unpickler):
    """Reads nothing but what a CUDA tensor of torch is pickled to; whatever else a pickle may call is not called."""

    def find_class(self, module: str, name: str) -> Any:
        is_of_torch = module.partition(".")[0] == "torch"
        found: Any = super().find_class(module, name) if is_of_torch else None
        if is_of_torch and name == "rebuild_cuda_tensor":
            return lambda *arguments: _Relayed(found, arguments)
        if not isinstance(found, type | torch.dtype):
            raise RunError(f"a bucket's handle names {module}.{name}, which no CUDA tensor does")
        return found


def relay(handle: bytes) -> _Relayed:
    """A flat uint8 CUDA tensor, pickled by `ForkingPickler` in the trainer, for a process of the engine to open.

    Opening it here would cost this process a CUDA context on the engine's GPU.
    """
    tensor = _HandleReader(io.BytesIO(handle)).load()
    if not isinstance(tensor, _Relayed):
        raise RunError(f"a bucket's handle holds a {type(tensor).__name__}, not a CUDA tensor")
    return tensor
