"""Fixtures: guests made for one test, and the example, beside rllaunch alone."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Protocol

import pytest

from rllaunch.testing.project import add_distribution, forget_commands, rllaunch_project

__all__ = ["rllaunch_project"]

EXAMPLE = Path(__file__).resolve().parents[2] / "plugins" / "rllaunch-example"


class Guest(Protocol):
    def __call__(
        self, source: str | None, name: str = "guest", distribution: str = "", module: str = ""
    ) -> ModuleType | None: ...


@pytest.fixture
def leave_out(_clean_environment: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Set `RLLAUNCH_DISABLE_PLUGINS` to some names and to those of the guests this machine has."""
    others = [e.name for e in entry_points(group="rllaunch") if e.dist is None or e.dist.name != "rllaunch"]

    def set_variable(names: str) -> None:
        if words := [*others, *filter(None, [names])]:
            monkeypatch.setenv("RLLAUNCH_DISABLE_PLUGINS", ",".join(words))

    return set_variable


@pytest.fixture(autouse=True)
def _rllaunch_alone(leave_out: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out("")
    forget_commands(monkeypatch)


@pytest.fixture
def guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Guest]:
    """Install a plugin, version 1.2.3, from the text of its module; None: its module is missing."""
    site = tmp_path / "site"
    modules = []

    def install(source: str | None, name: str = "guest", distribution: str = "", module: str = "") -> None:
        distribution = distribution or name
        module = module or f"{distribution}_module"
        modules.append(module)
        if source is not None:
            text = "from rllaunch.hooks import hookimpl\n" + textwrap.dedent(source)
            site.mkdir(exist_ok=True)
            (site / f"{module}.py").write_text(text, encoding="utf-8")
        add_distribution(site, distribution, {name: module}, "1.2.3", monkeypatch)

    yield install
    for name in modules:
        sys.modules.pop(name, None)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of rllaunch-example, from its source."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return import_module("rllaunch_example")
