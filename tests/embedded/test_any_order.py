"""Engine and trainer on one slot, called in any order, against a small model of what is where."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rig import Rig, make_context

from rllaunch.backends.base import RankInfo
from rllaunch.errors import RunError
from rllaunch.plan.handoff import HandoffOptions

TRAINER = {"params", "optimizer"}


class AnyOrder(RuleBasedStateMachine):
    """The model: three sets of regions. The books of both pools must say the same after every call."""

    @initialize(
        weights=st.sampled_from(["mirror", "discard"]),
        buffers=st.sampled_from(["retained", "fresh"]),
        offload_train=st.booleans(),
        offload_rollout=st.booleans(),
    )
    def start(self, weights: str, buffers: str, offload_train: bool, offload_rollout: bool) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.options = HandoffOptions("cpu", offload_train, offload_rollout, engine_weights=weights, buffers=buffers)  # type: ignore[arg-type]
        self.rig = Rig(make_context("grpo", self.options), self.directory)
        self.rig.manager.start()
        self.rig.trainer.init(RankInfo(0, 1, "", 0))
        self.rig.trainer.update_weights(0, self.rig.manager)
        self.version = 0
        self.current = True  # the engine's weights are whole and of the trainer's version
        self.engine = {"weights", "kv_cache", "cuda_graph"}
        self.trainer = {"params", "optimizer", "grads"}
        self.host: set[str] = set()

    @rule()
    def trainer_offload(self) -> None:
        self.rig.trainer.offload()
        if self.options.offload_train and self.trainer & TRAINER:
            self.trainer = set()
            self.host |= TRAINER

    @rule()
    def trainer_onload(self) -> None:
        self.rig.trainer.onload()
        if self.options.offload_train and not self.trainer & TRAINER:
            self.trainer = {"params", "optimizer", "grads"}
            if self.options.buffers == "fresh":
                self.host -= TRAINER

    @rule()
    def clear_memory(self) -> None:
        self.rig.trainer.clear_memory()
        self.trainer -= {"grads"}

    @rule()
    def offload_kv(self) -> None:
        self.rig.manager.offload_kv()
        if self.options.offload_rollout:
            self.engine -= {"kv_cache", "cuda_graph"}

    @rule()
    def onload_kv(self) -> None:
        self.rig.manager.onload_kv()
        self.engine |= {"kv_cache", "cuda_graph"}

    @rule()
    def offload_weights(self) -> None:
        self.rig.manager.offload_weights()
        if self.options.offload_rollout and "weights" in self.engine:
            self.engine -= {"weights"}
            if self.options.has_mirror:
                self.host |= {"weights"}
            else:
                self.current = False

    @rule()
    def onload_weights(self) -> None:
        self.rig.manager.onload_weights()
        self.engine |= {"weights"}
        if self.options.buffers == "fresh":
            self.host -= {"weights"}

    @rule()
    def update(self) -> None:
        if "weights" not in self.engine:
            with pytest.raises(RunError, match="offloaded"):
                self.rig.trainer.update_weights(self.version, self.rig.manager)
            return
        self.rig.trainer.update_weights(self.version, self.rig.manager)
        self.current = True

    @rule()
    def generate(self) -> None:
        if self.engine == {"weights", "kv_cache", "cuda_graph"} and self.current:
            self.rig.batch, _ = self.rig.manager.generate(0, self.version)
        else:
            with pytest.raises(RunError):
                self.rig.manager.generate(0, self.version)

    @rule()
    def train(self) -> None:
        if self.rig.batch is None:
            return
        if self.trainer >= {"params", "optimizer", "grads"}:
            self.rig.trainer.train(self.rig.batch)
            self.version += 1
            self.current = False
        else:
            with pytest.raises(RunError, match="is offloaded"):
                self.rig.trainer.train(self.rig.batch)

    @invariant()
    def the_books_say_what_the_model_says(self) -> None:
        if not hasattr(self, "rig"):
            return
        sizes, reading = self.rig.sizes, self.rig.engine.memory()
        assert reading.gpu_bytes == sum(sizes[r] for r in self.engine | self.trainer)  # type: ignore[index]
        assert reading.host_bytes == sum(sizes[r] for r in self.host)  # type: ignore[index]

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.shutdown()
            assert self.rig.engine.memory().gpu_bytes == 0
            shutil.rmtree(self.directory)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
