"""What every test of the doctor runs in: an environment without variables that rules look at."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rllaunch.doctor.rules.allocator import ALLOCATOR_VARIABLES

# `doctor_cases` is imported by name; pytest's importlib mode leaves the directory of a test off the path.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this shell exports, a case sees only its own variables."""
    for name in (*ALLOCATOR_VARIABLES, "NCCL_GRAPH_REGISTER", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
