"""The SGLang rollout engine: the launch's side of it. What talks to SGLang itself is in `host`, in another process."""

# B rows, P prompt tokens (left-padded), L response tokens

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from rllaunch.backends.base import Bucket, GenerateRequest, GenerateResult, LaunchContext, Slot
from rllaunch.backends.block_fp8 import BlockFp8, loads_nothing
from rllaunch.backends.embedded.model import checkpoint_directory, model_config
from rllaunch.backends.sglang.checkpoint import checkpoint_tensors, ids_of, of_layers
from rllaunch.backends.sglang.options import given, meeting_point
from rllaunch.backends.sglang.part import NodePart
from rllaunch.backends.sglang.state import EngineState
from rllaunch.backends.sglang.update import Names
from rllaunch.backends.text_names import text_name
from rllaunch.errors import RunError
from rllaunch.plan.handoff import Region

if TYPE_CHECKING:
    from rllaunch.backends.base import FloatArray, IntArray

GIB = 2**30


class SglangEngine(NodePart):
    """One SGLang engine, seen from its first node. See `rllaunch.backends.base.SpanningEngine` for the promises.

    Its samples are drawn by SGLang, from a seed of the row: it takes no ready-made random numbers. With
    `sglang.enable_deterministic_inference` the seeds decide the samples, without it SGLang does not look at them.

    On `cpu` SGLang has nothing that releases memory: the regions stay booked, and a release only guards the order of
    calls.
    """

    def __init__(self, context: LaunchContext, slot: Slot) -> None:
        super().__init__(context, slot)
        self.response_len = context.config.rollout.rollout_max_response_len
        self.state = EngineState(self.name, keeps_weights=context.options.has_mirror)
        self._lock = threading.RLock()  # one call at a time: a health check comes from another thread
        self._meeting_point = ""
        self._sizes: dict[Region, int] = {}
        self._loaded: Sequence[Mapping[str, str]] | None = None

    @property
    def version(self) -> int | None:
        return self.state.version

    @version.setter
    def version(self, version: int | None) -> None:
        self.state.version = version

    # -- life ----------------------------------------------------------------------------------------

    def meeting_point(self, host: str) -> str:
        self._meeting_point = meeting_point(host, self._find_ports())
        return self._meeting_point

    def start(self) -> None:
        context = self.context
        with self._lock, self.state.starting():
            path = self._model_path()
            is_empty = loads_nothing(context.config, self._quantisation)
            # Also of the hub's, which the trainer reads anyway: nothing else says what an update must bring.
            where = str(checkpoint_directory(path)) if is_empty else path
            is_fp8 = is_empty and context.config.rollout.dtype == "fp8"
            tensors = checkpoint_tensors(where, BlockFp8() if is_fp8 else None)
            if tensors and not given(context).get("speculative_algorithm"):
                tensors = of_layers(tensors, context.config.model.architecture)
            self._names = Names(self.name, tensors, model_config(context).model_type)
            self._must_be_whole = is_empty or not context.config.model.hf_checkpoint
            self._pad_id, self._eos_ids = ids_of(context)
            usage, ranks = self._start_process("start", path, self._meeting_point)
            assert self._process is not None, "just started"
            self._process.watch(ranks)
            self._sizes = self._sizes_of(usage, sum((tensors or {}).values()))
            self._loaded = self._checksums() if self._is_comparable else None
            self._open_books()
            if self._pools is not None:
                for region, nbytes in self._sizes.items():
                    self._pools[0].charge(self.name, region, nbytes)
        self._drop_weight_files()

    @property
    def _is_comparable(self) -> bool:
        """Whether the trainer's first update is to give exactly what the engine loads by itself.

        In FP8 only of a model without a checkpoint, for which both quantise the same numbers: what is quantised,
        read and quantised again is not the same to the bit.
        """
        config = self.context.config
        is_loaded = given(self.context).get("load_format", "auto") != "dummy"
        is_loaded &= not loads_nothing(config, self._quantisation)
        return is_loaded and (config.rollout.dtype != "fp8" or not config.model.hf_checkpoint)

    def _sizes_of(self, usage: Mapping[str, Any], checkpoint_bytes: int) -> dict[Region, int]:
        """SGLang's own figures, to a MiB; on `cpu` it takes the weights' from free memory, where others live."""
        weights = int(float(usage.get("weight", 0.0)) * GIB)
        graphs = usage.get("graph", 0.0)
        graph_gib = sum(graphs.values()) if isinstance(graphs, Mapping) else float(graphs)
        return {
            "weights": checkpoint_bytes if self.slot.device == "cpu" else weights,
            "kv_cache": int(float(usage.get("kvcache", 0.0)) * GIB),
            "cuda_graph": int(graph_gib * GIB),
        }

    def region_bytes(self) -> Mapping[Region, int]:
        return self._sizes

    def check_health(self) -> bool:
        return self.state.phase == "up" and super().check_health()

    def shutdown(self) -> None:
        if not self.state.end() and self._process is None:
            return
        self._end()
        if self._pools is not None:
            for region in self._sizes:
                self._pools[0].release(self.name, region)
            self._pools = None

    # -- handoff -------------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: Sequence[Region]) -> None:
        with self._lock, self.state.releasing(tags) as wanted:
            if wanted:
                self._call("release", wanted)
            if "weights" in wanted:
                self._require_mirror()

    def resume_memory_occupation(self, tags: Sequence[Region]) -> None:
        with self._lock, self.state.resuming(tags) as wanted:
            if wanted:
                self._call("resume", wanted)

    # -- weights -------------------------------------------------------------------------------------

    def begin_weight_update(self, version: int) -> None:
        with self._lock, self.state.beginning(version):
            self._names.begin()
            if version == 0 and self.context.config.handoff.check_weight_update_equal:
                self._call("overwrite")
            self._call("begin_weight_update")

    def load_bucket(self, bucket: Bucket) -> None:
        with self._lock, self.state.loading():
            self._call("load_bucket", self._of_own_gpus(bucket), self._names.take(bucket.tensors))

    def _of_own_gpus(self, bucket: Bucket) -> Bucket:
        """With the handles of this engine's slots only: one a rank."""
        if isinstance(bucket.handle, str):
            if self.num_nodes > 1:
                raise RunError(f"{self.name}: an update through a file does not reach its {self.num_nodes} nodes")
            return bucket
        first = self.slot.index
        return replace(bucket, handle=bucket.handle[first : first + len(self.engine_slots)])

    def end_weight_update(self, version: int) -> None:
        with self._lock, self.state.ending(version):
            self._names.end(version, is_whole=self._must_be_whole or self.state.has_lost_weights)
            self._call("end_weight_update")
            if version == 0 and self._loaded is not None:
                # The trainer starts from the same weights; a run that resumes begins with a later version.
                require_equal(self.name, self._loaded, self._checksums())
            self._loaded = None

    def _checksums(self) -> list[dict[str, str]]:
        return of_updates(self._call("checksums"))

    def weights_checksum(self) -> str:
        """Equal for engines of the same layout that hold the same weights. SGLang fuses tensors and cuts them between
        ranks, so it is not the checksum of the trainer's tensors."""
        with self._lock:
            self.state.need_weights("a checksum of the weights")
            return one_checksum(self._checksums())

    # -- sampling ------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> GenerateResult:
        """
        Raises:
            RunError: something is offloaded, an update is under way, or the weights are of another version.
        """
        with self._lock, self.state.generating(request.version):
            P = request.prompt_ids_BP.shape[1]
            prompts = [
                row[P - length :].tolist()
                for row, length in zip(request.prompt_ids_BP, request.prompt_lens_B, strict=True)
            ]
            answers = self._call("generate", prompts, self._sampling(len(prompts), request.uniform_BL))
        return to_arrays(answers, self.response_len, self._pad_id, self._eos_ids)

    def _sampling(self, num_rows: int, uniform_BL: FloatArray | None) -> list[dict[str, Any]]:
        common = {
            "max_new_tokens": self.response_len,
            "temperature": 0.0 if uniform_BL is None else self.context.config.rollout.rollout_temperature,
            # The whole distribution, whatever the checkpoint's generation_config says.
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "stop_token_ids": sorted(self._eos_ids),
        }
        if uniform_BL is None:
            return [common] * num_rows
        return [common | {"sampling_seed": int(first * 2**31)} for first in uniform_BL[:, 0]]


def of_updates(ranks: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The checksums of what updates bring: a vision tower is left, and is rubbish once an engine has discarded it."""
    return [{name: value for name, value in sums.items() if text_name(name) is not None} for sums in ranks]


def one_checksum(ranks: Sequence[Mapping[str, str]]) -> str:
    """One text for the checksums of all ranks' tensors; equal exactly when all are."""
    digest = blake2b(digest_size=16)
    for index, sums in enumerate(ranks):
        for name in sorted(sums):
            digest.update(f"{index}\0{name}\0{sums[name]}\n".encode())
    return digest.hexdigest()


def require_equal(owner: str, loaded: Sequence[Mapping[str, str]], updated: Sequence[Mapping[str, str]]) -> None:
    """
    Raises:
        RunError: an update brought other weights than the engine had loaded; with the tensors' names.
    """
    different = [
        name
        for before, after in zip(loaded, updated, strict=True)
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    if different:
        raise RunError(
            f"{owner}: {len(different)} tensors of the first update differ from what SGLang loaded by itself: "
            f"{', '.join(different[:3])}",
            "trainer and engine start from the same weights, so the first update should change nothing",
            "give both the same checkpoint; if they have it, the trainer sends a layer otherwise than SGLang reads it",
        )


def to_arrays(
    answers: Sequence[tuple[Sequence[int], Sequence[float]]], response_len: int, pad_id: int, eos_ids: frozenset[int]
) -> GenerateResult:
    """Answers cut after their first end token, or at L, and right-padded.

    Raises:
        RunError: an answer has no tokens, or not a log-prob for each.
    """
    B, L = len(answers), response_len
    ids_BL: IntArray = np.full((B, L), pad_id, dtype=np.int64)
    logprob_BL: FloatArray = np.zeros((B, L), dtype=np.float32)
    mask_BL: FloatArray = np.zeros((B, L), dtype=np.float32)
    for row, (ids, logprobs) in enumerate(answers):
        if not ids or len(ids) != len(logprobs):
            raise RunError(f"SGLang answered {len(ids)} tokens with {len(logprobs)} log-probs")
        end = next((i + 1 for i, token in enumerate(ids) if token in eos_ids), len(ids))
        end = min(end, L)
        ids_BL[row, :end] = ids[:end]
        logprob_BL[row, :end] = logprobs[:end]
        mask_BL[row, :end] = 1.0
    return GenerateResult(ids_BL, logprob_BL, mask_BL)
