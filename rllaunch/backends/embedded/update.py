"""The embedded trainer's weight update: buckets planned from shapes, filled in one shared file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rllaunch.backends.base import Bucket, LaunchContext, TensorSlice, WeightSink
from rllaunch.backends.embedded.layout import dtype_name, nbytes_of, view_of
from rllaunch.backends.embedded.model import build_model, engine_dtype
from rllaunch.backends.embedded.shared_file import SharedFile
from rllaunch.backends.embedded.trainer_memory import Reader

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class PlannedBucket:
    """Which tensors of the trainer's `params` a bucket takes, and where in it they lie."""

    sources: tuple[TensorSlice, ...]
    tensors: tuple[TensorSlice, ...]
    nbytes: int


def plan_buckets(context: LaunchContext, sent: Sequence[TensorSlice]) -> list[PlannedBucket]:
    """The update cut into buckets of at most `update_weight_buffer_size`; a larger tensor has one of its own."""
    limit = context.config.handoff.update_weight_buffer_size
    # The engine's own: LoRA adapters are float32 beside bf16 weights.
    engine = build_model(context, dtype=engine_dtype(context), device="meta")
    dtypes = {name: dtype_name(parameter.dtype) for name, parameter in engine.named_parameters()}
    buckets: list[PlannedBucket] = []
    sources: list[TensorSlice] = []
    targets: list[TensorSlice] = []
    end = 0
    for source in sent:
        name = source.name.removeprefix("actor.")
        target = TensorSlice(name, dtypes[name], source.shape, -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
        if sources and target.offset + nbytes_of(target) > limit:
            buckets.append(PlannedBucket(tuple(sources), tuple(targets), end))
            sources, targets, target = [], [], TensorSlice(name, target.dtype, source.shape, 0)
        sources.append(source)
        targets.append(target)
        end = target.offset + nbytes_of(target)
    return [*buckets, PlannedBucket(tuple(sources), tuple(targets), end)]


class PlannedSender:
    """Fills one file in shared memory with bucket after bucket.

    Args:
        nbytes: of the file, which is made at the first update.
    """

    def __init__(self, path: Path, buckets: Sequence[PlannedBucket], nbytes: int) -> None:
        self._path, self._buckets, self._nbytes = path, buckets, nbytes
        self._file: SharedFile | None = None

    def send(self, params: Reader, sink: WeightSink) -> int:
        """Bytes sent."""
        if self._file is None:
            self._file = SharedFile(self._path, self._nbytes)
        for bucket in self._buckets:
            for source, target in zip(bucket.sources, bucket.tensors, strict=True):
                view_of(self._file.bytes, target).copy_(params(source))
            sink.load_bucket(Bucket(str(self._file.path), bucket.nbytes, bucket.tensors))
        return sum(b.nbytes for b in self._buckets)
