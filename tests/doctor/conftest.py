"""What every test of the doctor runs in: an environment without variables that rules look at."""

from __future__ import annotations

import pytest

from rllaunch.doctor.rules.allocator import ALLOCATOR_VARIABLES


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this shell exports, a case sees only its own variables."""
    for name in (*ALLOCATOR_VARIABLES, "NCCL_GRAPH_REGISTER", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
