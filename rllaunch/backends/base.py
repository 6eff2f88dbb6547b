"""What the loop asks of a trainer and of a rollout engine.

A backend is named in the config (`trainer.backend`, `rollout.backend`) and found through the plugin
hooks as a `BackendSpec`; its module is imported only in the process that runs it. Arrays cross process
borders as numpy: Ray moves those without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from rllaunch.plan.handoff import HandoffOptions, Region
from rllaunch.resolve.schema import LaunchConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    FloatArray = npt.NDArray[np.float32]
    IntArray = npt.NDArray[np.int64]

# B samples, P prompt tokens (left-padded), L response tokens (right-padded)


@dataclass(frozen=True)
class BackendSpec:
    """A backend a plugin offers.

    Args:
        name: what `trainer.backend` or `rollout.backend` says.
        target: `module:Class`, imported only where it runs; empty for one that launches can name, to be
            checked and dry-run, before this version can run it.
        environment: `module:function`, which gives the variables that its processes must be started with under a
            config; called where the run is driven. Empty: none.
        own_process: of a rollout backend: each engine lives in a Ray actor of its own on the node of its first slot,
            and all are asked at the same time. Else they share the rollout manager's process and take turns.
        follower: of a rollout backend with `own_process`: `module:Class` of an `EngineFollower`, one on each further
            node of an engine that spans nodes. Empty: its engines do not.
        loads_any_layout: of a trainer backend: a run may resume on another number or layout of ranks.
    """

    name: str
    target: str
    environment: str = ""
    own_process: bool = False
    follower: str = ""
    loads_any_layout: bool = False

    def load(self) -> Callable[..., Any]:
        return _imported(self.target)

    def load_follower(self) -> Callable[..., Any]:
        return _imported(self.follower)

    def environment_of(self, config: LaunchConfig) -> Mapping[str, str]:
        found: Mapping[str, str] = _imported(self.environment)(config) if self.environment else {}
        return found


def _imported(path: str) -> Callable[..., Any]:
    module, _, attribute = path.partition(":")
    loaded: Callable[..., Any] = getattr(import_module(module), attribute)
    return loaded


@dataclass(frozen=True)
class Slot:
    """One GPU of the launch (on `cpu`: what stands for one): a trainer rank and an engine share it.

    Args:
        index: position in the whole launch, 0-based.
        node: 0-based node, which names the host pool.
        ledger_dir: directory of the shared pool ledgers, on the node's memory-backed disk if it has one.
    """

    index: int
    node: int
    device: str
    ledger_dir: str


@dataclass(frozen=True)
class LaunchContext:
    """What every process of a run is given, beside its slot.

    Args:
        vocabulary: characters of the character tokenizer, in id order; empty with a checkpoint's tokenizer.
        max_prompt_tokens: of the longest prompt, training and evaluation together: P everywhere.
        gpus: UUID of each slot's GPU, the same in every process whatever numbers it sees; empty on `cpu`.
    """

    config: LaunchConfig
    options: HandoffOptions
    vocabulary: str
    max_prompt_tokens: int
    num_slots: int
    gpus: tuple[str, ...] = ()

    def gpus_of(self, slot: Slot, count: int = 1) -> tuple[str, ...]:
        """Of `count` slots from this one on; of this process's own GPU where the launch does not say."""
        from rllaunch.backends.node_memory import gpu_of_process

        return self.gpus[slot.index : slot.index + count] or (gpu_of_process(),)


@dataclass(frozen=True)
class GenerateRequest:
    """Prompts to answer.

    Args:
        prompt_ids_BP: left-padded with `pad_id`.
        prompt_lens_B: real tokens of each prompt.
        uniform_BL: numbers in [0, 1) that decide each token, so that a sample does not depend on which
            engine answers it; None: greedy.
        version: weights the caller expects; another is an error, never an answer.
    """

    prompt_ids_BP: IntArray
    prompt_lens_B: IntArray
    version: int
    uniform_BL: FloatArray | None = None


@dataclass(frozen=True)
class GenerateResult:
    """Answers: tokens right-padded with `pad_id`; the end token, where reached, is in the mask."""

    response_ids_BL: IntArray
    logprob_BL: FloatArray
    mask_BL: FloatArray


@dataclass(frozen=True)
class TrainBatch:
    """All samples of one rollout; samples of one prompt are adjacent."""

    rollout_id: int
    prompt_ids_BP: IntArray
    prompt_lens_B: IntArray
    response_ids_BL: IntArray
    logprob_BL: FloatArray
    mask_BL: FloatArray
    reward_B: FloatArray


@dataclass(frozen=True)
class TensorSlice:
    """Where one tensor lies in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Bucket:
    """A flattened piece of a weight update, in shared memory or in the memory of every slot's GPU.

    A tensor is with the one it is joined with (`joined_with`).

    Args:
        handle: path of the shared-memory file; or for each slot, in order, a pickled CUDA IPC handle that one process
            on that slot's GPU may open once.
    """

    handle: str | tuple[bytes, ...]
    nbytes: int
    tensors: tuple[TensorSlice, ...]


def joined_with(name: str) -> str | None:
    """The tensor that must lie in the same bucket as this one; None: there is none.

    SGLang makes one parameter of both projections to the latents. What has come without the other when a call ends is
    forgotten, without a word (0.5.23 models/deepseek_common/deepseek_weight_loader.py, models/glm4_moe_lite.py); of
    DeepSeek-V4, which has more such pairs, it ends the engine (models/deepseek_v4.py).
    """
    for one, other in _JOINED.items():
        if one in name:
            return name.replace(one, other)
    return None


_JOINED = {".q_a_proj.": ".kv_a_proj_with_mqa.", ".attn.wq_a.": ".attn.wkv.", ".compressor.wkv.": ".compressor.wgate."}


@dataclass(frozen=True)
class MemoryReading:
    """Bytes in use on the fullest GPU and the fullest node, and the most since the last reading.

    Args:
        moved_bytes: copied between GPU and host by this process since its last reading.
        own_gpu_bytes: of `gpu_bytes` those that the processes of who reads hold; None where nothing tells.
        pinned_bytes: of `host_bytes` those that the trainers' host copies on the node take; None where nobody counts.
        pss_bytes: host RAM of the processes of who reads (a trainer rank, an engine with what is below it), pages that
            several share counted in parts; None unless `run.record_pss` asks, and the kernel tells.
        communicator_seconds: that destroying the trainer's communicators, or making them anew, took since the last
            reading; None where neither was done.
        communicator_bytes: of a GPU that they took by it, negative where they gave them back.
    """

    gpu_bytes: int
    host_bytes: int
    gpu_peak_bytes: int
    host_peak_bytes: int
    moved_bytes: int = 0
    own_gpu_bytes: int | None = None
    pinned_bytes: int | None = None
    pss_bytes: int | None = None
    communicator_seconds: float | None = None
    communicator_bytes: int | None = None


def fullest(readings: Sequence[MemoryReading]) -> MemoryReading:
    """Of readings made in several places the most of each figure."""
    return MemoryReading(
        max(r.gpu_bytes for r in readings),
        max(r.host_bytes for r in readings),
        max(r.gpu_peak_bytes for r in readings),
        max(r.host_peak_bytes for r in readings),
        max(r.moved_bytes for r in readings),
        max((r.own_gpu_bytes for r in readings if r.own_gpu_bytes is not None), default=None),
        max((r.pinned_bytes for r in readings if r.pinned_bytes is not None), default=None),
        max((r.pss_bytes for r in readings if r.pss_bytes is not None), default=None),
        max((r.communicator_seconds for r in readings if r.communicator_seconds is not None), default=None),
        max((r.communicator_bytes for r in readings if r.communicator_bytes is not None), key=abs, default=None),
    )


@dataclass(frozen=True)
class StepResult:
    """One step of the schedule as a worker ran it."""

    memory: MemoryReading
    seconds: float
    report: Mapping[str, Any] = field(default_factory=dict)


class WeightSink(Protocol):
    """Where a trainer sends an update: all engines it serves."""

    def begin_weight_update(self, version: int) -> None: ...

    def load_bucket(self, bucket: Bucket) -> None: ...

    def end_weight_update(self, version: int) -> None: ...


class RolloutEngine(WeightSink, Protocol):
    """One engine. Strict on purpose: releasing what is released is an error, as it is in the engines
    of the field (there it ends the process); the rollout manager keeps the state and is idempotent."""

    version: int | None

    def start(self) -> None:
        """Load the model; afterwards `weights`, `kv_cache` and `cuda_graph` are resident."""
        ...

    def release_memory_occupation(self, tags: Sequence[Region]) -> None: ...

    def resume_memory_occupation(self, tags: Sequence[Region]) -> None: ...

    def generate(self, request: GenerateRequest) -> GenerateResult: ...

    def check_health(self) -> bool: ...

    def weights_checksum(self) -> str: ...

    def region_bytes(self) -> Mapping[Region, int]:
        """Bytes of each region the engine owns when it is resident, from the model's shapes."""
        ...

    def memory(self) -> MemoryReading:
        """Of the GPUs and the node this engine is on, whoever holds the memory; starts a new peak."""
        ...

    def shutdown(self) -> None: ...


class SpanningEngine(RolloutEngine, Protocol):
    """An engine that may span nodes: this is its part on the first of them, and the only one that is asked.

    Built from its first slot; the others are those after it.
    """

    def meeting_point(self, host: str) -> str:
        """Where its followers find it, at this node's address `host`; asked before the start if it has followers."""
        ...

    def abandon(self) -> None:
        """End its processes at once, from another thread than the one a call is under way in; that call then fails."""
        ...


class EngineFollower(Protocol):
    """An engine's part on a further node. Built from the first of the engine's slots there."""

    def start(self, meeting_point: str) -> None:
        """Load this node's part of the model; returns when the engine's part on the first node has loaded too."""
        ...

    def check_release(self, tags: Sequence[Region]) -> None:
        """Raise if what the engine has just released is not as it must be on this node."""
        ...

    def memory(self) -> MemoryReading: ...

    def check_health(self) -> bool: ...

    def wait(self) -> str:
        """Return only when this part has ended, however; why."""
        ...

    def abandon(self) -> None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True)
class RankInfo:
    """A trainer rank's place in the group."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int


@dataclass(frozen=True)
class TrainMetrics:
    """Figures of one rollout's training, equal on every rank."""

    values: Mapping[str, float] = field(default_factory=dict)


class TrainerBackend(Protocol):
    """One trainer rank. Each call is made on every rank at the same moment."""

    def init(self, rank: RankInfo) -> None:
        """Build the model and the optimizer; afterwards `params`, `optimizer`, `grads` are resident."""
        ...

    def onload(self) -> None: ...

    def offload(self) -> None: ...

    def clear_memory(self) -> None:
        """Free what needs no backup (gradients, caches), so that the engine's weights may return."""
        ...

    def train(self, batch: TrainBatch) -> TrainMetrics: ...

    def update_weights(self, version: int, sink: WeightSink) -> int:
        """Send the weights, from the GPU or from the backup; bytes sent. Only rank 0 has a sink to talk to."""
        ...

    def save(self, directory: str) -> None:
        """Write this rank's state into `directory`, which exists; the caller makes the whole atomic."""
        ...

    def load(self, directory: str) -> None: ...

    def region_bytes(self) -> Mapping[Region, int]: ...

    def memory(self) -> MemoryReading: ...

    def shutdown(self) -> None: ...
