"""The packages that docs/plugins.md shows are what they are said to be: each is written out and used."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from rllaunch.doctor.engine import diagnose
from rllaunch.plugins import Plugins, load_plugins
from rllaunch.resolve.resolve import Request, Setting, resolve

PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
FILE = re.compile(
    r"^(?:[^`\n]*)`(?P<name>[\w./-]+\.(?:py|toml))`:\n\n```\w+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


def written_out(section: str, directory: Path) -> list[str]:
    """Write the files of a section of the page; their names."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}")[1].split("\n## ")[0]
    names = []
    for match in FILE.finditer(text):
        file = directory / match["name"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(match["text"], encoding="utf-8")
        names.append(match["name"])
    return names


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def load(section: str) -> tuple[ModuleType, list[str]]:
        names = written_out(section, tmp_path)
        monkeypatch.syspath_prepend(str(tmp_path))
        return import_module("rllaunch_acme"), names

    yield load
    sys.modules.pop("rllaunch_acme", None)


def launch(plugins: Plugins, hardware: str, **values: object):
    flags = [Setting("model.name", "dsv4", ""), Setting("hardware.name", hardware, "")]
    flags += [Setting(key.replace("__", "."), value, "") for key, value in values.items()]
    return resolve(Request(flags=tuple(flags), environ={}), plugins)


def checked(module: ModuleType) -> Plugins:
    plugins = load_plugins(extra=[("acme", module)])
    plugins.check()
    assert plugins.problems == []
    assert plugins.profiles().problems == []
    return plugins


def test_the_package_with_a_toml_file_works(acme):
    module, names = acme("A hardware profile of your own")
    assert names == ["pyproject.toml", "rllaunch_acme/__init__.py", "rllaunch_acme/profiles/acme-h200.toml"]
    resolved = launch(checked(module), "acme")
    assert resolved.config.hardware.name == "acme-H200"
    assert resolved.config.hardware.host_memory_bytes == 2**40
    assert resolved.origin("hardware.host_memory_bytes").source == "acme-H200 (acme test) acme-h200.toml:11"
    assert resolved.config.handoff.colocate_memory_peak_device == "gpu"


def test_the_package_with_hooks_works(acme):
    module, names = acme("The same in Python")
    assert names == ["rllaunch_acme/__init__.py"]
    plugins = checked(module)
    assert launch(plugins, "acme-H200-small").config.hardware.host_memory_bytes == 2**40
    resolved = launch(plugins, "acme-H200-large", cluster__num_nodes=17)
    assert resolved.config.hardware.host_memory_bytes == 2**41
    (found,) = [f for f in diagnose(resolved, plugins.rules(), probe=False) if f.code == "RL942"]
    assert (found.level, found.message) == ("error", "Acme lends 16 nodes at most")
