"""The fixture `rllaunch_project`: files, plugins and the command line, in this process."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import rllaunch.cli
from rllaunch.plugins import DISABLE_VARIABLE

# Variables of whoever runs the tests that would be layers of their launches.
FOREIGN_PREFIX = "RLLAUNCH_"
FOREIGN = ("RAY_ADDRESS", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Result:
    """What a command left behind: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Project:
    """A directory that is the working directory, without the plugins this machine happens to have.

    Args:
        directory: empty at first.
    """

    directory: Path
    _monkeypatch: pytest.MonkeyPatch
    _capsys: pytest.CaptureFixture[str]

    def write(self, name: str, text: str) -> Path:
        """A file of the project; its folders are made."""
        file = self.directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return file

    def use(self, name: str, module: str, version: str = "0.0.0") -> None:
        """Have a plugin for this test: the installed one of that name and module, or one whose module can be imported.

        Args:
            name: of the entry point.
            version: of one that is not installed.
        """
        if (name, module) not in _guests():
            add_distribution(self.directory / ".site", name, {name: module}, version, self._monkeypatch)
        others = {n for n, m in _guests() if n != name}
        left_out = set(filter(None, os.environ.get(DISABLE_VARIABLE, "").split(","))) - {name}
        _leave_out(left_out & others, self._monkeypatch)

    def run(self, *words: object) -> Result:
        """`rllaunch WORDS…`, in this process."""
        return run_command([str(word) for word in words], self._capsys)

    def json(self, *words: object) -> Any:
        """What a command prints with `--json`; where it ends with an error instead, that is the test's failure."""
        result = self.run(*words, "--json")
        try:
            answer = result.json()
        except ValueError:
            answer = None
        # Findings are told as data alone; an error that ended the command stands on stderr too.
        has_ended = any(line.startswith("error") for line in result.err.splitlines())
        if answer is None or (has_ended and isinstance(answer, dict) and answer.get("ok") is False):
            pytest.fail(f"rllaunch {' '.join(map(str, words))} --json exits {result.code}: {result.err or result.out}")
        return answer

    def findings(self, *words: object) -> list[dict[str, Any]]:
        """What `rllaunch doctor --no-probe` finds in a launch: `code`, `level`, `message`, `origins`, `fix`."""
        found: list[dict[str, Any]] = self.json("doctor", "--no-probe", *words)["findings"]
        return found


@pytest.fixture
def rllaunch_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Project:
    """A project in a directory of its own: `use` your plugin, `write` files, `run` commands, read `findings`."""
    clean_environment(monkeypatch)
    monkeypatch.chdir(tmp_path)
    _leave_out({name for name, _ in _guests()}, monkeypatch)
    return Project(tmp_path, monkeypatch, capsys)


def run_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> Result:
    """A command line in this process; what was printed before it is not part of the result."""
    capsys.readouterr()
    code = 0
    try:
        rllaunch.cli.main(words)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    out, err = capsys.readouterr()
    return Result(code, out, err)


def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables that would be layers of a launch, and with room for whole lines of a table."""
    for name in [n for n in os.environ if n.startswith(FOREIGN_PREFIX) or n in FOREIGN]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "200")


def add_distribution(
    site: Path, name: str, modules: Mapping[str, str], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metadata of a distribution whose entry points are `modules` by their names, in front of the path."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [f"{entry} = {module}" for entry, module in modules.items()]
    (info / "entry_points.txt").write_text("\n".join(["[rllaunch]", *lines, ""]), encoding="utf-8")
    monkeypatch.syspath_prepend(str(site))
    forget_commands(monkeypatch)


def forget_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins' commands are looked for once a process; have them looked for again."""
    monkeypatch.setattr(rllaunch.cli, "_found", None)


def _guests() -> list[tuple[str, str]]:
    """Name and module of every entry point that is not rllaunch's own."""
    found = entry_points(group="rllaunch")
    return [(e.name, e.value) for e in found if e.dist is None or e.dist.name != "rllaunch"]


def _leave_out(names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if names:
        monkeypatch.setenv(DISABLE_VARIABLE, ",".join(sorted(names)))
    else:
        monkeypatch.delenv(DISABLE_VARIABLE, raising=False)
    forget_commands(monkeypatch)
