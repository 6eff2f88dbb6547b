"""Fixtures: the command line in this process, with what it printed."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each test in a directory of its own, without variables that would be layers of its launch."""
    for name in [n for n in os.environ if n.startswith("RLLAUNCH_") or n in ("RAY_ADDRESS", "PYTORCH_CUDA_ALLOC_CONF")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")
    # Where the platform's config folder is looked for: profiles of whoever runs the tests are none of theirs.
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def rllaunch(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command line in this process: `rllaunch("resolve", "--model", "tiny")` → code, out, err."""
    from rllaunch.cli import main

    def run(*words: str) -> Result:
        capsys.readouterr()
        code = 0
        try:
            main([str(w) for w in words])
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        out, err = capsys.readouterr()
        return Result(code, out, err)

    return run
