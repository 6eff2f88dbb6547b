"""The embedded backend keeps the promises that every backend makes."""

from __future__ import annotations

from rllaunch.backends.embedded.engine import EmbeddedEngine
from rllaunch.backends.embedded.trainer import EmbeddedTrainer
from rllaunch.testing import RolloutConformance, TrainerConformance


class TestEmbeddedTrainer(TrainerConformance):
    factory = EmbeddedTrainer


class TestEmbeddedEngine(RolloutConformance):
    factory = EmbeddedEngine
