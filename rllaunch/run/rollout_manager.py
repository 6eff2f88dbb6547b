"""The rollout manager: owns the engines, keeps what is released, samples and scores.

Its fine-grained handoff calls carry the field's names (`offload`, `onload`, `offload_kv`, …) and are all
idempotent. The engines are strict (a second release ends an SGLang process), so the state is kept here,
per region: `cuda_graph` goes and comes with the KV cache's turn, the KV cache only if `kv_cache` is in
`offload_rollout_level`, the weights only if `weight` is, for offload and onload alike.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rllaunch.backends.base import (
    Bucket,
    GenerateRequest,
    GenerateResult,
    LaunchContext,
    MemoryReading,
    RolloutEngine,
    Slot,
    TrainBatch,
    fullest,
)
from rllaunch.errors import RESUME, RunError
from rllaunch.plan.handoff import ENGINE_REGIONS, Region
from rllaunch.run.data import Prompt, Reward, load_reward, score
from rllaunch.run.engines import ActorEngine, answers, call

if TYPE_CHECKING:
    from rllaunch.backends.base import FloatArray, IntArray

# B samples, P prompt tokens, L response tokens, N prompts


class Tokenizer(Protocol):
    """What the manager asks of a tokenizer; the embedded backend has one for characters."""

    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class HasHealth(Protocol):
    def check_health(self) -> bool: ...


class HealthMonitor:
    """Checks the engines every so often, but never while they are released.

    Pausing also discards the verdict of a check in flight: an engine that was asked just before its
    memory went is not dead (radixark/miles#692).
    """

    def __init__(self, engines: Sequence[HasHealth], interval_seconds: float) -> None:
        self._engines = engines
        self._interval = interval_seconds
        self._paused = threading.Event()
        self._stop = threading.Event()
        self._epoch = 0
        self.failed: str | None = None
        self._thread = threading.Thread(target=self._run, name="health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def paused(self) -> bool:
        return self._paused.is_set()

    def pause(self) -> None:
        self._epoch += 1
        self._paused.set()

    def resume(self) -> None:
        self._epoch += 1
        self._paused.clear()

    def stop(self) -> None:
        self._stop.set()

    def check_once(self) -> None:
        """One round over the engines, unless paused; a verdict counts only if nothing changed meanwhile."""
        if self.paused:
            return
        epoch = self._epoch
        for index, engine in enumerate(self._engines):
            try:
                healthy, why = engine.check_health(), "it reports itself unhealthy"
            except Exception as err:
                healthy, why = False, f"{type(err).__name__}: {err}"
            if not healthy and epoch == self._epoch and not self.paused:
                self.failed = f"engine {index} failed its health check: {why}"

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self.check_once()


@dataclass(frozen=True)
class RolloutStats:
    """What a rollout or an evaluation was like."""

    reward_mean: float
    exact_match: float | None
    tokens: int
    response_len_mean: float

    def to_json(self) -> dict[str, Any]:
        return {
            "reward_mean": self.reward_mean,
            "exact_match": self.exact_match,
            "tokens": self.tokens,
            "response_len_mean": self.response_len_mean,
        }


class RolloutManager:
    """Owns the engines of a launch; one call at a time, which goes to all engines before the first is waited for.

    The rows of a request are split over the engines by their number, so that every run splits them alike.

    Args:
        engines: not yet started. Those in actors work at the same time, those in this process in turn.
        prompts: training prompts; every rollout takes the next `rollout_batch_size` of a shuffled epoch.
        reward: `module:function`, imported in this process.
    """

    def __init__(
        self,
        context: LaunchContext,
        engines: Sequence[RolloutEngine | ActorEngine],
        tokenizer: Tokenizer,
        prompts: Sequence[Prompt],
        eval_prompts: Sequence[Prompt],
        reward: str,
    ) -> None:
        self.context = context
        self.engines = list(engines)
        self.tokenizer = tokenizer
        self.prompts = list(prompts)
        self.eval_prompts = list(eval_prompts)
        self.reward_name = reward
        self._reward: Reward = load_reward(reward, "task.reward")
        self.released: set[Region] = set()
        self.health = HealthMonitor(self.engines, context.config.rollout.health_check_interval)

    def start(self) -> Mapping[Region, int]:
        """Load the engines; afterwards all their memory is resident. Bytes of one engine's regions."""
        self._ask("start")
        self.health.start()
        return self.engines[0].region_bytes()

    def _ask(self, name: str, *arguments: Any) -> list[Any]:
        return answers([call(engine, name, *arguments) for engine in self.engines])

    # -- handoff -----------------------------------------------------------------------------------

    def _releasable(self, regions: Iterable[Region]) -> list[Region]:
        """Of `regions`, those this launch ever releases, in a fixed order."""
        options, wanted = self.context.options, set(regions)
        if unknown := wanted - set(ENGINE_REGIONS):
            raise RunError(
                f"an engine has no region {sorted(unknown)[0]!r}", "", f"regions: {', '.join(ENGINE_REGIONS)}"
            )
        allowed: set[Region] = set()
        if options.offload_rollout:
            allowed = {"cuda_graph"}
            allowed |= {"kv_cache"} if options.releases_kv else set()
            allowed |= {"weights"} if options.releases_weights else set()
        return [r for r in ("cuda_graph", "kv_cache", "weights") if r in wanted & allowed]

    def offload(self, tags: Iterable[Region] = ENGINE_REGIONS) -> None:
        """Release these regions of every engine; what is released already, or never is, stays as it is."""
        going = [r for r in self._releasable(tags) if r not in self.released]
        if not going:
            return
        self.health.pause()
        self._ask("release_memory_occupation", going)
        self.released |= set(going)

    def onload(self, tags: Iterable[Region] = ENGINE_REGIONS) -> None:
        """Bring these regions back; what was never released is left alone."""
        coming = [r for r in reversed(self._releasable(tags)) if r in self.released]
        if coming:
            self._ask("resume_memory_occupation", coming)
        self.released -= set(coming)
        # One flag for the whole engine would call it awake after the first of two calls
        # (ai-dynamo/dynamo#13823): it serves only when nothing is released any more.
        if not self.released:
            self.health.resume()

    def offload_kv(self) -> None:
        self.offload(("kv_cache", "cuda_graph"))

    def onload_kv(self) -> None:
        self.onload(("kv_cache", "cuda_graph"))

    def offload_weights(self) -> None:
        self.offload(("weights",))

    def onload_weights(self) -> None:
        self.onload(("weights",))

    # -- weights -----------------------------------------------------------------------------------

    def begin_weight_update(self, version: int) -> None:
        if "weights" in self.released:
            raise RunError(
                "a weight update arrived while the engines' weights are offloaded", "", "onload_weights first"
            )
        self._ask("begin_weight_update", version)

    def load_bucket(self, bucket: Bucket) -> None:
        self._ask("load_bucket", bucket)

    def end_weight_update(self, version: int) -> None:
        self._ask("end_weight_update", version)

    def checksums(self) -> list[str]:
        return self._ask("weights_checksum")

    # -- sampling ----------------------------------------------------------------------------------

    def generate(self, rollout_id: int, version: int) -> tuple[TrainBatch, RolloutStats]:
        """Sample and score one rollout with weights of `version`.

        What is sampled depends on the seed, the rollout's number and the weights only: not on how many
        engines share the work, nor on what ran before.

        Raises:
            RunError: an engine holds another version, is not resident, or failed its health check;
                or the reward function failed.
        """
        self._ready()
        config = self.context.config
        group = config.rollout.n_samples_per_prompt
        prompts = self._prompts_of(rollout_id)
        rng = np.random.Generator(np.random.Philox(key=[config.run.seed, rollout_id]))
        uniform_BL = rng.random((len(prompts) * group, config.rollout.rollout_max_response_len), dtype=np.float32)
        repeated = [p for p in prompts for _ in range(group)]
        ids_BP, lens_B = self._encode(repeated)
        parts = self._answers_of(ids_BP, lens_B, version, uniform_BL)
        response_BL = np.concatenate([p.response_ids_BL for p in parts])
        logprob_BL = np.concatenate([p.logprob_BL for p in parts])
        mask_BL = np.concatenate([p.mask_BL for p in parts])
        reward_B, stats = self._score(repeated, response_BL, mask_BL)
        return TrainBatch(rollout_id, ids_BP, lens_B, response_BL, logprob_BL, mask_BL, reward_B), stats

    def evaluate(self, version: int) -> RolloutStats:
        """Greedy answers to the held-out prompts, scored."""
        self._ready()
        ids_BP, lens_B = self._encode(self.eval_prompts)
        parts = self._answers_of(ids_BP, lens_B, version)
        response_BL = np.concatenate([p.response_ids_BL for p in parts])
        mask_BL = np.concatenate([p.mask_BL for p in parts])
        return self._score(self.eval_prompts, response_BL, mask_BL)[1]

    def _answers_of(
        self, ids_BP: IntArray, lens_B: IntArray, version: int, uniform_BL: FloatArray | None = None
    ) -> list[GenerateResult]:
        """Of each engine for its share of the rows, in their order; an engine without a share is not asked."""
        calls = []
        for engine, rows in zip(self.engines, np.array_split(np.arange(len(lens_B)), len(self.engines)), strict=True):
            if len(rows):
                uniform = None if uniform_BL is None else uniform_BL[rows]
                calls.append(call(engine, "generate", GenerateRequest(ids_BP[rows], lens_B[rows], version, uniform)))
        return answers(calls)

    def _ready(self) -> None:
        if self.released:
            raise RunError(f"generate while {', '.join(sorted(self.released))} is offloaded", "", "onload first")
        if self.health.failed:
            raise RunError(self.health.failed, "", f"see the engine's log; {RESUME}")

    def _prompts_of(self, rollout_id: int) -> list[Prompt]:
        """The next prompts of an endless sequence of shuffled epochs; depends on nothing but its number."""
        count, total = self.context.config.rollout.rollout_batch_size, len(self.prompts)
        chosen: list[Prompt] = []
        position = rollout_id * count
        while len(chosen) < count:
            epoch, offset = divmod(position, total)
            order = np.random.Generator(
                np.random.Philox(key=[self.context.config.run.seed, (1 << 32) + epoch])
            ).permutation(total)
            taken = order[offset : offset + count - len(chosen)]
            chosen += [self.prompts[i] for i in taken]
            position += len(taken)
        return chosen

    def _encode(self, prompts: Sequence[Prompt]) -> tuple[IntArray, IntArray]:
        width = self.context.max_prompt_tokens
        ids_BP = np.full((len(prompts), width), self.tokenizer.pad_id, dtype=np.int64)
        lens_B = np.zeros(len(prompts), dtype=np.int64)
        for row, prompt in enumerate(prompts):
            ids = self.tokenizer.encode(prompt.text)
            ids_BP[row, width - len(ids) :] = ids
            lens_B[row] = len(ids)
        return ids_BP, lens_B

    def _score(self, prompts: Sequence[Prompt], response_BL: Any, mask_BL: Any) -> tuple[Any, RolloutStats]:
        lens_B = mask_BL.sum(axis=1).astype(np.int64)
        rewards, exact = [], []
        for prompt, ids, length in zip(prompts, response_BL.tolist(), lens_B.tolist(), strict=True):
            response = self.tokenizer.decode(ids[:length])
            rewards.append(score(self._reward, self.reward_name, prompt, response))
            if prompt.label:
                exact.append(response == prompt.label)
        reward_B = np.asarray(rewards, dtype=np.float32)
        stats = RolloutStats(
            reward_mean=float(np.mean(rewards)),
            exact_match=float(np.mean(exact)) if exact else None,
            tokens=int(lens_B.sum()),
            response_len_mean=float(lens_B.mean()),
        )
        return reward_B, stats

    def memory(self) -> MemoryReading:
        """The fullest GPU and node of all engines; every one is read, so that each begins a new peak."""
        return fullest(self._ask("memory"))

    def shutdown(self) -> None:
        self.health.stop()
        self._ask("shutdown")


def make_manager(
    context: LaunchContext,
    slots: Sequence[Slot],
    target: str,
    prompts: Sequence[Prompt],
    eval_prompts: Sequence[Prompt],
    reward: str,
    in_actors: Sequence[ActorEngine] = (),
) -> RolloutManager:
    """A manager with one engine for each `rollout_num_gpus_per_engine` slots, built where it runs (imports torch).

    Args:
        in_actors: the engines where they are in actors, built.
    """
    from rllaunch.backends.base import BackendSpec
    from rllaunch.backends.embedded.tokenizer import load_tokenizer

    engines: list[RolloutEngine | ActorEngine] = list(in_actors)
    if not engines:
        engine_class = BackendSpec(context.config.rollout.backend, target).load()
        # An engine of several GPUs stands for their slots, from the first of them on.
        engines = [engine_class(context, slot) for slot in slots[:: context.config.rollout.rollout_num_gpus_per_engine]]
    return RolloutManager(
        context, engines, load_tokenizer(context.config, context.vocabulary), prompts, eval_prompts, reward
    )
