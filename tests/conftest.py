"""Fixtures: the command line in this process, with what it printed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rllaunch.testing.project import Result, clean_environment, run_command

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # as in `ray_session`: no test starts a Ray by a call too late


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test in a directory of its own, without variables that would be layers of its launch."""
    clean_environment(monkeypatch)
    # Where the platform's config folder is looked for: profiles of whoever runs the tests are none of theirs.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rllaunch(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process: `rllaunch("resolve", "--model", "tiny")` → code, out, err."""

    def run(*words: str) -> Result:
        return run_command([str(w) for w in words], capsys)

    return run
