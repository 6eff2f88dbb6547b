"""What the loop counts on, as tests: inherit a suite, name a factory, and pytest runs them on your backend.

They ask for what `rllaunch.backends.base` promises, with one rank and one engine on a model of a few thousand
parameters. Override `sections` where the backend needs other settings, and `send` where a bucket is not a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from rllaunch.backends.base import (
    Bucket,
    GenerateRequest,
    GenerateResult,
    LaunchContext,
    RankInfo,
    RolloutEngine,
    Slot,
    TensorSlice,
    TrainBatch,
    TrainerBackend,
    WeightSink,
)
from rllaunch.errors import RllaunchError
from rllaunch.plan.architecture import read_architecture
from rllaunch.plan.handoff import ENGINE_REGIONS, HandoffOptions, Region
from rllaunch.resolve.schema import LaunchConfig

# B samples, P prompt tokens, L response tokens; G samples of a prompt
P, L, G, B = 5, 4, 2, 8
FloatArray = npt.NDArray[np.float32]
VOCABULARY = "0123456789"
PAD_ID, FIRST_TOKEN_ID = 0, 3  # pad, begin and end stand before the vocabulary
VOCAB_SIZE = FIRST_TOKEN_ID + len(VOCABULARY)

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


class Conformance:
    """What both suites share: the launch, and where it runs."""

    factory: ClassVar[Callable[[LaunchContext, Slot], Any]]
    """The backend's class, or `staticmethod(function)` with the same arguments."""
    device: ClassVar[str] = "cpu"
    """Of the slot: `cpu`, `cuda:0`."""
    sections: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Settings over those of the suite, as `{section: {key: value}}`."""

    def context(self, options: HandoffOptions | None = None, **sections: Any) -> LaunchContext:
        """The launch of the suite; `sections` stand above the class's own."""
        facts: dict[str, dict[str, Any]] = {
            "model": {"architecture": QWEN3, "dtype": "float32"},
            "trainer": {"lr": 1e-2, "num_steps_per_rollout": 2, "init_method_std": 0.3, "precision": "fp32"},
            "rollout": {
                "dtype": "float32",
                "rollout_batch_size": B // G,
                "n_samples_per_prompt": G,
                "rollout_max_response_len": L,
            },
            "run": {"num_rollout": 10, "seed": 7},
        }
        for layer in (self.sections, sections):
            for name, values in layer.items():
                facts[name] = {**facts.get(name, {}), **values}
        config = LaunchConfig.model_validate(facts)
        return LaunchContext(config, options or self.options(), VOCABULARY, P, 1)

    def options(self) -> HandoffOptions:
        return HandoffOptions()

    def made(self, context: LaunchContext, directory: Path) -> Any:
        """A backend that was not started; its pool is its own."""
        if not hasattr(type(self), "factory"):
            pytest.fail(f"{type(self).__name__} names no backend: factory = …, a class or a staticmethod")
        directory.mkdir(parents=True, exist_ok=True)
        return type(self).factory(context, Slot(0, 0, self.device, str(directory)))


def expected_tensors(context: LaunchContext) -> dict[str, tuple[int, ...]]:
    """Name → shape of every tensor of the launch's model, as transformers names them."""
    model = read_architecture(context.config.model.architecture)
    whole = {weight.name: weight.shape for weight in (*model.embedding, *model.head)}
    return whole | {
        f"model.layers.{index}.{weight.name}": weight.shape
        for index, layer in enumerate(model.layers)
        for weight in layer.weights
    }


def random_weights(context: LaunchContext, seed: int = 0) -> dict[str, FloatArray]:
    """A float32 value for every tensor of the launch's model."""
    rng = np.random.default_rng(seed)
    return {n: rng.normal(0, 0.3, shape).astype(np.float32) for n, shape in sorted(expected_tensors(context).items())}


def bucket_file(path: Path, tensors: Mapping[str, FloatArray]) -> Bucket:
    """Tensors as a bucket in a file, which an engine on a CPU maps."""
    slices, end = [], 0
    for name, tensor in tensors.items():
        slices.append(TensorSlice(name, str(tensor.dtype), tensor.shape, end))
        end += tensor.nbytes
    path.write_bytes(b"".join(np.ascontiguousarray(tensor).tobytes() for tensor in tensors.values()))
    return Bucket(str(path), end, tuple(slices))


@dataclass
class Collected:
    """A sink that keeps an update: content by name, and the calls in their order."""

    calls: list[str] = field(default_factory=list)
    content: dict[str, bytes] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    nbytes: int = 0

    def begin_weight_update(self, version: int) -> None:
        self.calls.append(f"begin {version}")

    def end_weight_update(self, version: int) -> None:
        self.calls.append(f"end {version}")

    def load_bucket(self, bucket: Bucket) -> None:
        assert isinstance(bucket.handle, str), "override `collected` for buckets that are not files"
        content = Path(bucket.handle).read_bytes()
        self.calls.append("bucket")
        self.nbytes += bucket.nbytes
        for piece in bucket.tensors:
            assert piece.name not in self.content, f"{piece.name} was sent twice"
            end = piece.offset + math.prod(piece.shape) * _item_bytes(piece.dtype)
            assert end <= bucket.nbytes, f"{piece.name} ends behind its bucket"
            self.content[piece.name] = content[piece.offset : end]
            self.shapes[piece.name] = piece.shape


def _item_bytes(dtype: str) -> int:
    return {"float32": 4, "bfloat16": 2, "float16": 2}[dtype]


class TrainerConformance(Conformance):
    """Promises of a `TrainerBackend`, of one rank."""

    # -- what an author may override --

    def batch(self, context: LaunchContext, rollout_id: int = 0) -> TrainBatch:
        """Random responses of different lengths, whose log-probs are about those of an untrained model."""
        rng = np.random.default_rng([3, rollout_id])
        prompt_ids_BP = np.repeat(rng.integers(FIRST_TOKEN_ID, VOCAB_SIZE, (B // G, P)), G, axis=0)
        mask_BL = (np.arange(L) < rng.integers(1, L + 1, (B, 1))).astype(np.float32)
        ids_BL = np.where(mask_BL > 0, rng.integers(FIRST_TOKEN_ID, VOCAB_SIZE, (B, L)), PAD_ID)
        logprob_BL = (-math.log(VOCAB_SIZE) + rng.normal(0, 0.2, (B, L))) * mask_BL
        reward_B = rng.normal(0, 1, B).astype(np.float32)
        lens_B = np.full(B, P, dtype=np.int64)
        return TrainBatch(
            rollout_id, prompt_ids_BP, lens_B, ids_BL.astype(np.int64), logprob_BL.astype(np.float32), mask_BL, reward_B
        )

    def collected(self) -> Any:
        """A sink with `calls`, `content`, `shapes` and `nbytes`."""
        return Collected()

    # -- fixtures and helpers --

    def started(self, directory: Path, **sections: Any) -> TrainerBackend:
        trainer: TrainerBackend = self.made(self.context(**sections), directory)
        trainer.init(RankInfo(0, 1, "", 0))
        return trainer

    @pytest.fixture
    def trainer(self, tmp_path: Path) -> Iterator[TrainerBackend]:
        trainer = self.started(tmp_path / "trainer")
        yield trainer
        trainer.shutdown()

    def sent(self, trainer: TrainerBackend, version: int = 1) -> dict[str, bytes]:
        sink = self.collected()
        trainer.update_weights(version, sink)
        content: dict[str, bytes] = sink.content
        return content

    # -- promises --

    def test_its_regions_have_a_size_and_are_on_the_gpu_after_init(self, trainer: TrainerBackend) -> None:
        sizes = trainer.region_bytes()
        assert {"params", "optimizer", "grads"} <= set(sizes)
        assert all(isinstance(size, int) and size >= 0 for size in sizes.values()), sizes
        assert sizes["params"] > 0
        assert trainer.memory().gpu_bytes >= sizes["params"]

    def test_offload_frees_the_gpu_and_onload_fills_it_again(self, trainer: TrainerBackend) -> None:
        awake = trainer.memory().gpu_bytes
        trainer.offload()
        asleep = trainer.memory().gpu_bytes
        trainer.onload()
        assert asleep <= awake - trainer.region_bytes()["params"]
        assert trainer.memory().gpu_bytes > asleep

    def test_a_second_offload_and_a_second_onload_do_nothing(self, trainer: TrainerBackend) -> None:
        for move in (trainer.offload, trainer.onload):
            move()
            once = trainer.memory()
            move()
            again = trainer.memory()
            assert (again.gpu_bytes, again.moved_bytes) == (once.gpu_bytes, 0), move.__name__

    def test_offload_and_onload_change_no_bit_of_what_is_trained(self, trainer: TrainerBackend, tmp_path: Path) -> None:
        never_moved = self.started(tmp_path / "twin")
        for rollout_id in range(3):
            batch = self.batch(self.context(), rollout_id)
            moved = trainer.train(batch).values
            assert moved == never_moved.train(batch).values, f"rollout {rollout_id}"
            trainer.offload()
            trainer.onload()
        assert self.sent(trainer) == self.sent(never_moved)
        never_moved.shutdown()

    def test_training_changes_the_weights_and_its_figures_are_finite(self, trainer: TrainerBackend) -> None:
        before = self.sent(trainer)
        figures = trainer.train(self.batch(self.context())).values
        assert figures
        assert all(math.isfinite(value) for value in figures.values()), figures
        assert self.sent(trainer, 2) != before

    def test_training_while_offloaded_is_an_error(self, trainer: TrainerBackend) -> None:
        trainer.offload()
        with pytest.raises(RllaunchError):
            trainer.train(self.batch(self.context()))

    def test_an_update_sends_every_tensor_once_between_begin_and_end(self, trainer: TrainerBackend) -> None:
        sink = self.collected()
        sent = trainer.update_weights(3, sink)
        assert sink.calls[0] == "begin 3"
        assert sink.calls[-1] == "end 3"
        assert set(sink.calls[1:-1]) == {"bucket"}
        assert sink.shapes == expected_tensors(self.context())
        assert sent == sink.nbytes >= sum(map(len, sink.content.values()))

    def test_an_update_may_come_from_the_backup(self, trainer: TrainerBackend) -> None:
        trainer.train(self.batch(self.context()))
        from_the_gpu = self.sent(trainer)
        trainer.offload()
        assert self.sent(trainer) == from_the_gpu

    def test_clear_memory_keeps_what_is_sent_and_what_is_trained(self, trainer: TrainerBackend, tmp_path: Path) -> None:
        twin = self.started(tmp_path / "twin")
        for each in (trainer, twin):
            each.train(self.batch(self.context()))
        before = self.sent(trainer)
        trainer.clear_memory()
        assert self.sent(trainer) == before
        trainer.offload()
        trainer.onload()
        batch = self.batch(self.context(), 1)
        assert trainer.train(batch).values == twin.train(batch).values
        twin.shutdown()

    def test_a_resumed_trainer_goes_on_as_if_it_had_never_stopped(
        self, trainer: TrainerBackend, tmp_path: Path
    ) -> None:
        directory = tmp_path / "checkpoint"
        directory.mkdir()
        trainer.train(self.batch(self.context()))
        trainer.save(str(directory))
        resumed = self.started(tmp_path / "resumed")
        resumed.load(str(directory))
        assert self.sent(resumed) == self.sent(trainer)
        batch = self.batch(self.context(), 1)
        assert resumed.train(batch).values == trainer.train(batch).values
        assert self.sent(resumed, 2) == self.sent(trainer, 2)
        resumed.shutdown()

    def test_shutdown_is_possible_awake_asleep_and_before_init(self, tmp_path: Path) -> None:
        self.made(self.context(), tmp_path / "before").shutdown()
        self.started(tmp_path / "awake").shutdown()
        asleep = self.started(tmp_path / "asleep")
        asleep.offload()
        asleep.shutdown()


class RolloutConformance(Conformance):
    """Promises of a `RolloutEngine`: strict, because the rollout manager keeps the state."""

    # -- what an author may override --

    def send(self, sink: WeightSink, tensors: Mapping[str, FloatArray], directory: Path) -> None:
        """One bucket of an update."""
        sink.load_bucket(bucket_file(directory / "bucket", tensors))

    def weights(self, context: LaunchContext, seed: int = 0) -> dict[str, FloatArray]:
        """Every tensor of an update, in the dtype the trainer sends."""
        return random_weights(context, seed)

    # -- fixtures and helpers --

    def options(self) -> HandoffOptions:
        return HandoffOptions(engine_weights="mirror", buffers="fresh")

    def started(self, directory: Path, options: HandoffOptions | None = None) -> RolloutEngine:
        engine: RolloutEngine = self.made(self.context(options), directory)
        engine.start()
        return engine

    @pytest.fixture
    def engine(self, tmp_path: Path) -> Iterator[RolloutEngine]:
        """Started, with the weights of seed 0 as version 1."""
        engine = self.started(tmp_path / "engine")
        self.update(engine, 1, tmp_path)
        yield engine
        engine.shutdown()

    def update(
        self,
        engine: RolloutEngine,
        version: int,
        directory: Path,
        seed: int = 0,
        tensors: Mapping[str, FloatArray] | None = None,
    ) -> None:
        """A whole update: of `tensors`, or of the weights of a seed."""
        engine.begin_weight_update(version)
        self.send(engine, self.weights(self.context(), seed) if tensors is None else tensors, directory)
        engine.end_weight_update(version)

    def request(self, version: int = 1, seed: int = 0) -> GenerateRequest:
        rng = np.random.default_rng(seed)
        lens_B = rng.integers(1, P + 1, B)
        ids_BP = rng.integers(FIRST_TOKEN_ID, VOCAB_SIZE, (B, P))
        ids_BP = np.where(np.arange(P) < P - lens_B[:, None], PAD_ID, ids_BP)
        return GenerateRequest(ids_BP, lens_B, version, rng.random((B, L), dtype=np.float32))

    # -- promises --

    def test_after_start_all_of_it_is_there_but_no_version(self, tmp_path: Path) -> None:
        engine = self.started(tmp_path / "engine")
        assert set(engine.region_bytes()) == set(ENGINE_REGIONS)
        assert engine.check_health()
        assert engine.version is None
        with pytest.raises(RllaunchError):
            engine.generate(self.request(version=0))
        engine.shutdown()

    def test_answers_are_tokens_to_the_end_and_padding_behind_it(self, engine: RolloutEngine) -> None:
        result = engine.generate(self.request())
        assert result.response_ids_BL.shape == result.logprob_BL.shape == result.mask_BL.shape == (B, L)
        assert set(np.unique(result.mask_BL)) <= {0.0, 1.0}
        assert (result.mask_BL[:, 0] == 1).all(), "every answer has a token"
        assert (np.diff(result.mask_BL, axis=1) <= 0).all(), "nothing comes after the end"
        assert (result.response_ids_BL[result.mask_BL == 0] == PAD_ID).all()
        assert np.isfinite(result.logprob_BL).all()
        assert (result.logprob_BL <= 0).all()

    def test_the_same_numbers_give_the_same_answers(self, engine: RolloutEngine) -> None:
        assert _equal(engine.generate(self.request()), engine.generate(self.request()))

    @pytest.mark.parametrize("asked", [0, 2])
    def test_another_version_than_it_holds_is_an_error(self, engine: RolloutEngine, asked: int) -> None:
        with pytest.raises(RllaunchError):
            engine.generate(self.request(version=asked))

    @pytest.mark.parametrize("region", ENGINE_REGIONS)
    def test_a_second_release_and_a_second_resume_are_errors(self, engine: RolloutEngine, region: Region) -> None:
        with pytest.raises(RllaunchError):
            engine.resume_memory_occupation([region])
        engine.release_memory_occupation([region])
        with pytest.raises(RllaunchError):
            engine.release_memory_occupation([region])
        engine.resume_memory_occupation([region])
        engine.generate(self.request())

    def test_a_region_it_does_not_have_is_an_error_before_any_is_released(self, engine: RolloutEngine) -> None:
        with pytest.raises(RllaunchError):
            engine.release_memory_occupation(["kv_cache", "params"])
        assert engine.check_health()

    @pytest.mark.parametrize("region", ENGINE_REGIONS)
    def test_while_anything_is_released_it_does_not_answer(self, engine: RolloutEngine, region: Region) -> None:
        engine.release_memory_occupation([region])
        with pytest.raises(RllaunchError):
            engine.generate(self.request())
        engine.resume_memory_occupation([region])
        assert engine.check_health()

    def test_mirrored_weights_come_back_as_they_were(self, engine: RolloutEngine) -> None:
        answers, checksum = engine.generate(self.request()), engine.weights_checksum()
        engine.release_memory_occupation(list(ENGINE_REGIONS))
        engine.resume_memory_occupation(list(ENGINE_REGIONS))
        assert engine.weights_checksum() == checksum
        assert _equal(engine.generate(self.request()), answers)

    def test_discarded_weights_answer_nothing_until_the_next_update(self, tmp_path: Path) -> None:
        engine = self.started(tmp_path / "engine", HandoffOptions(engine_weights="discard"))
        self.update(engine, 1, tmp_path)
        checksum = engine.weights_checksum()
        engine.release_memory_occupation(["weights"])
        engine.resume_memory_occupation(["weights"])
        with pytest.raises(RllaunchError):
            engine.generate(self.request())
        self.update(engine, 2, tmp_path)
        assert engine.weights_checksum() == checksum
        engine.generate(self.request(version=2))
        engine.shutdown()

    def test_release_frees_the_gpu(self, engine: RolloutEngine) -> None:
        awake = engine.memory().gpu_bytes
        engine.release_memory_occupation(list(ENGINE_REGIONS))
        assert engine.memory().gpu_bytes <= awake - sum(engine.region_bytes().values())

    def test_checksums_are_equal_for_equal_weights_and_for_no_others(
        self, engine: RolloutEngine, tmp_path: Path
    ) -> None:
        other = self.started(tmp_path / "other")
        self.update(other, 1, tmp_path, seed=1)
        assert other.weights_checksum() != engine.weights_checksum()
        self.update(other, 2, tmp_path, seed=0)
        assert other.weights_checksum() == engine.weights_checksum()
        other.shutdown()

    def test_an_update_is_the_new_version_and_other_answers(self, engine: RolloutEngine, tmp_path: Path) -> None:
        before = engine.generate(self.request())
        self.update(engine, 5, tmp_path, seed=1)
        assert engine.version == 5
        assert not _equal(engine.generate(self.request(version=5)), before)

    def test_an_update_that_lacks_a_tensor_is_an_error(self, engine: RolloutEngine, tmp_path: Path) -> None:
        tensors = self.weights(self.context())
        tensors.popitem()
        engine.begin_weight_update(2)
        self.send(engine, tensors, tmp_path)
        with pytest.raises(RllaunchError):
            engine.end_weight_update(2)
        with pytest.raises(RllaunchError):
            engine.generate(self.request(version=2))

    def test_a_tensor_it_does_not_have_is_an_error(self, engine: RolloutEngine, tmp_path: Path) -> None:
        tensors = self.weights(self.context()) | {"model.no_such.weight": np.zeros((2, 2), np.float32)}
        with pytest.raises(RllaunchError):
            self.update(engine, 2, tmp_path, tensors=tensors)

    def test_a_bucket_outside_an_update_and_an_end_of_another_are_errors(
        self, engine: RolloutEngine, tmp_path: Path
    ) -> None:
        with pytest.raises(RllaunchError):
            self.send(engine, self.weights(self.context()), tmp_path)
        engine.begin_weight_update(2)
        with pytest.raises(RllaunchError):
            engine.begin_weight_update(3)
        with pytest.raises(RllaunchError):
            engine.end_weight_update(3)

    def test_no_answers_during_an_update(self, engine: RolloutEngine) -> None:
        engine.begin_weight_update(2)
        for version in (1, 2):
            with pytest.raises(RllaunchError):
                engine.generate(self.request(version=version))

    def test_shutdown_is_possible_awake_asleep_and_before_start(self, tmp_path: Path) -> None:
        self.made(self.context(), tmp_path / "before").shutdown()
        self.started(tmp_path / "awake").shutdown()
        asleep = self.started(tmp_path / "asleep")
        asleep.release_memory_occupation(list(ENGINE_REGIONS))
        asleep.shutdown()


def _equal(one: GenerateResult, other: GenerateResult) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("response_ids_BL", "logprob_BL", "mask_BL")
    )
