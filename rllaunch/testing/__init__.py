"""For tests of plugins: a project in a directory of its own, and what every backend promises as tests to inherit.

`pytest -p rllaunch.testing` (or `addopts = "-p rllaunch.testing"`) brings the fixture; the suites are imported:

    from rllaunch.testing import TrainerConformance

    class TestMyTrainer(TrainerConformance):
        factory = MyTrainer

Needs pytest, which rllaunch itself does not ask for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from rllaunch.testing.project import Project, Result, rllaunch_project

if TYPE_CHECKING:
    from rllaunch.testing.conformance import RolloutConformance, TrainerConformance
    from rllaunch.testing.own_process import in_own_process

pytest.register_assert_rewrite("rllaunch.testing.conformance")

__all__ = ["Project", "Result", "RolloutConformance", "TrainerConformance", "in_own_process", "rllaunch_project"]


def __getattr__(name: str) -> Any:
    """The suites on use: they import numpy, which a test of a profile does not need."""
    if name in ("RolloutConformance", "TrainerConformance"):
        from rllaunch.testing import conformance

        return getattr(conformance, name)
    if name == "in_own_process":
        from rllaunch.testing import own_process

        return own_process.in_own_process
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
