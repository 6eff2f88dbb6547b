"""The embedded backend keeps the promises that every backend makes, and one that breaks a promise is told which."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rllaunch.backends.base import Bucket, GenerateRequest, GenerateResult, TrainBatch, TrainMetrics, WeightSink
from rllaunch.backends.embedded.engine import EmbeddedEngine
from rllaunch.backends.embedded.trainer import EmbeddedTrainer
from rllaunch.errors import RunError
from rllaunch.plan.handoff import Region
from rllaunch.testing import RolloutConformance, TrainerConformance, in_own_process
from rllaunch.testing.conformance import Conformance


class TestEmbeddedTrainer(TrainerConformance):
    factory = EmbeddedTrainer


class TestEmbeddedEngine(RolloutConformance):
    factory = EmbeddedEngine


# -- in a process of its own ------------------------------------------------------------------------------


class FailsInItsLibrary(EmbeddedTrainer):
    def train(self, batch: TrainBatch) -> TrainMetrics:
        raise ValueError("no such kernel")

    def clear_memory(self) -> None:
        os._exit(9)


def test_a_backend_in_a_process_of_its_own_is_called_as_if_it_were_here(tmp_path: Path):
    suite: Any = type("Suite", (TrainerConformance,), {"factory": staticmethod(in_own_process(FailsInItsLibrary))})()
    here: Any = type("Suite", (TrainerConformance,), {"factory": EmbeddedTrainer})()
    trainer, twin = suite.started(tmp_path / "it"), here.started(tmp_path / "twin")
    assert trainer.region_bytes() == twin.region_bytes()
    assert suite.sent(trainer) == here.sent(twin), "the sink's calls come back"
    sink = suite.collected()
    trainer.update_weights(version=2, sink=sink)
    assert sink.calls[0] == "begin 2"
    assert trainer.slot == replace(twin.slot, ledger_dir=str(tmp_path / "it"))
    with pytest.raises(RuntimeError, match="ValueError: no such kernel"):
        trainer.train(suite.batch(suite.context()))
    trainer.offload()
    with pytest.raises(RunError, match="while params is offloaded"):
        trainer.save(str(tmp_path))
    for _ in range(2):
        with pytest.raises(RunError, match="exit code 9"):
            trainer.clear_memory()
    twin.shutdown()


# -- backends that break one promise each --------------------------------------------------------------


class ForgetsATensor(EmbeddedTrainer):
    def update_weights(self, version: int, sink: WeightSink) -> int:
        return super().update_weights(version, _Without("lm_head.weight", sink))


@dataclass
class _Without:
    name: str
    sink: WeightSink

    def begin_weight_update(self, version: int) -> None:
        self.sink.begin_weight_update(version)

    def end_weight_update(self, version: int) -> None:
        self.sink.end_weight_update(version)

    def load_bucket(self, bucket: Bucket) -> None:
        self.sink.load_bucket(replace(bucket, tensors=tuple(t for t in bucket.tensors if t.name != self.name)))


class SaysItSentMore(EmbeddedTrainer):
    def update_weights(self, version: int, sink: WeightSink) -> int:
        return super().update_weights(version, sink) + 1


class StaysOnTheGpu(EmbeddedTrainer):
    def offload(self) -> None: ...

    def onload(self) -> None: ...


class ChangesABit(EmbeddedTrainer):
    def onload(self) -> None:
        super().onload()
        self._buffers["params"].bytes[3] ^= 1


class LosesItsOptimizer(EmbeddedTrainer):
    def onload(self) -> None:
        super().onload()
        self._buffers["optimizer"].bytes.zero_()


class ResumesWithoutItsOptimizer(EmbeddedTrainer):
    def load(self, directory: str) -> None:
        before = self._buffers["optimizer"].bytes.clone()
        super().load(directory)
        self._buffers["optimizer"].bytes.copy_(before)


class TrainsAsleep(EmbeddedTrainer):
    def train(self, batch: TrainBatch) -> TrainMetrics:
        self.onload()
        return super().train(batch)


class LearnsNothing(EmbeddedTrainer):
    def train(self, batch: TrainBatch) -> TrainMetrics:
        return TrainMetrics({"loss": 0.0})


class ForgivesASecondRelease(EmbeddedEngine):
    def release_memory_occupation(self, tags: Sequence[Region]) -> None:
        with_mercy(super().release_memory_occupation, tags)


def with_mercy(call: Callable[[Sequence[Region]], None], tags: Sequence[Region]) -> None:
    try:
        call(tags)
    except RunError as err:
        if "no region" in err.what:
            raise


class AnswersWithWhatItHas(EmbeddedEngine):
    def generate(self, request: GenerateRequest) -> GenerateResult:
        return super().generate(replace(request, version=self.version or 0))


class AnswersAsleep(EmbeddedEngine):
    def generate(self, request: GenerateRequest) -> GenerateResult:
        gone = [region for region, buffer in self._buffers.items() if not buffer.is_resident]
        self.resume_memory_occupation(gone)
        answer = super().generate(request)
        self.release_memory_occupation(gone)
        return answer


class SumsNothing(EmbeddedEngine):
    def weights_checksum(self) -> str:
        return "0"


class SumsItself(EmbeddedEngine):
    def weights_checksum(self) -> str:
        return str(id(self))


class TakesHalfAnUpdate(EmbeddedEngine):
    def end_weight_update(self, version: int) -> None:
        self._missing = set()
        super().end_weight_update(version)


class DrawsItsOwnNumbers(EmbeddedEngine):
    draws = 0

    def generate(self, request: GenerateRequest) -> GenerateResult:
        self.draws += 1
        assert request.uniform_BL is not None
        return super().generate(replace(request, uniform_BL=(request.uniform_BL + 0.37 * self.draws) % 1))


class ForgetsItsMirror(EmbeddedEngine):
    def resume_memory_occupation(self, tags: Sequence[Region]) -> None:
        super().resume_memory_occupation(tags)
        if "weights" in tags:
            self._buffers["weights"].bytes.zero_()


BROKEN: list[tuple[type[Any], str]] = [
    (ForgetsATensor, "an_update_sends_every_tensor_once_between_begin_and_end"),
    (SaysItSentMore, "an_update_sends_every_tensor_once_between_begin_and_end"),
    (StaysOnTheGpu, "offload_frees_the_gpu_and_onload_fills_it_again"),
    (StaysOnTheGpu, "training_while_offloaded_is_an_error"),
    (ChangesABit, "offload_and_onload_change_no_bit_of_what_is_trained"),
    (LosesItsOptimizer, "offload_and_onload_change_no_bit_of_what_is_trained"),
    (LosesItsOptimizer, "clear_memory_keeps_what_is_sent_and_what_is_trained"),
    (ResumesWithoutItsOptimizer, "a_resumed_trainer_goes_on_as_if_it_had_never_stopped"),
    (TrainsAsleep, "training_while_offloaded_is_an_error"),
    (LearnsNothing, "training_changes_the_weights_and_its_figures_are_finite"),
    (ForgivesASecondRelease, "a_second_release_and_a_second_resume_are_errors[weights]"),
    (ForgivesASecondRelease, "a_second_release_and_a_second_resume_are_errors[kv_cache]"),
    (AnswersWithWhatItHas, "another_version_than_it_holds_is_an_error[0]"),
    (AnswersWithWhatItHas, "another_version_than_it_holds_is_an_error[2]"),
    (AnswersAsleep, "while_anything_is_released_it_does_not_answer[cuda_graph]"),
    (SumsNothing, "checksums_are_equal_for_equal_weights_and_for_no_others"),
    (SumsItself, "checksums_are_equal_for_equal_weights_and_for_no_others"),
    (TakesHalfAnUpdate, "an_update_that_lacks_a_tensor_is_an_error"),
    (DrawsItsOwnNumbers, "the_same_numbers_give_the_same_answers"),
    (ForgetsItsMirror, "mirrored_weights_come_back_as_they_were"),
]


@pytest.mark.parametrize(("backend", "promise"), BROKEN, ids=[f"{b.__name__}, {p}" for b, p in BROKEN])
def test_a_backend_that_breaks_a_promise_fails_the_test_of_it(backend: type[Any], promise: str, tmp_path: Path):
    base: type[Conformance] = TrainerConformance if issubclass(backend, EmbeddedTrainer) else RolloutConformance
    suite: Any = type("Suite", (base,), {"factory": backend})()
    name, _, parameter = promise.rstrip("]").partition("[")
    made = suite.started(tmp_path / "it")
    if base is RolloutConformance:
        suite.update(made, 1, tmp_path)
    known = {
        "trainer": made, "engine": made, "tmp_path": tmp_path,
        "region": parameter, "asked": int(parameter) if parameter.isdigit() else None,
    }  # fmt: skip
    test = getattr(suite, f"test_{name}")
    wanted = test.__code__.co_varnames[1 : test.__code__.co_argcount]
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        test(**{argument: known[argument] for argument in wanted})
