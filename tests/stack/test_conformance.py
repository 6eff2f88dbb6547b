"""The real backends keep the promises that every backend makes.

make test-stack ARGS="-k conformance"
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rllaunch.backends.sglang.engine import SglangEngine
from rllaunch.testing import RolloutConformance, TrainerConformance, in_own_process

pytestmark = pytest.mark.stack


def megatron_on_the_cpu(*args: Any) -> Any:
    from megatron_cpu_guest import on_cpu

    return on_cpu(*args)


class TestMegatronTrainer(TrainerConformance):
    # Megatron-core's groups are the process's.
    factory = staticmethod(in_own_process(megatron_on_the_cpu))
    sections: ClassVar = {"trainer": {"backend": "megatron"}}

    @pytest.fixture(autouse=True)
    def _needs(self) -> None:
        pytest.importorskip("megatron.core")


class TestSglangEngine(RolloutConformance):
    factory = SglangEngine
    # With them the seeds that the request's numbers give decide the samples.
    sections: ClassVar = {"rollout": {"backend": "sglang"}, "sglang": {"enable_deterministic_inference": True}}

    @pytest.fixture(autouse=True)
    def _needs(self) -> Iterator[None]:
        pytest.importorskip("sglang")
        stubs = str(Path(__file__).with_name("stubs"))
        sys.path.insert(0, stubs)
        yield
        sys.path.remove(stubs)
