"""Starting whole runs as a user does: a process of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = ("train", "--model", "tiny", "--hardware", "cpu")


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str
    path: Path

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.rows("metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.rows("events.jsonl")

    def without_seconds(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in self.metrics]


def start(path: Path, *words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rllaunch", *TINY, "--run-dir", str(path), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env={**os.environ, **(env or {})}
    )


def finish(process: subprocess.Popen[str], path: Path, timeout: float = 180) -> Run:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the run did not end\n{out}\n{err}") from None
    return Run(process.returncode, out, err, path)
