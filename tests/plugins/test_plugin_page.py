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
from rllaunch.testing import Project, RolloutConformance, TrainerConformance

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


def test_the_doctor_has_nothing_against_the_launch_that_the_page_shows(acme, rllaunch):
    acme("A hardware profile of your own")
    text = PAGE.read_text(encoding="utf-8").split("\n## A hardware profile of your own")[1]
    command = next(line for line in text.splitlines() if line.startswith("rllaunch doctor "))
    result = rllaunch(*command.split()[1:], "--profile-dir", "rllaunch_acme/profiles", "--json")
    assert result.json() == {"ok": True, "findings": []}


def test_the_package_with_hooks_works(acme):
    module, names = acme("The same in Python")
    assert names == ["rllaunch_acme/__init__.py"]
    plugins = checked(module)
    assert launch(plugins, "acme-H200-small").config.hardware.host_memory_bytes == 2**40
    resolved = launch(plugins, "acme-H200-large", cluster__num_nodes=17)
    assert resolved.config.hardware.host_memory_bytes == 2**41
    (found,) = [f for f in diagnose(resolved, plugins.rules(), probe=False) if f.code == "RL942"]
    assert (found.level, found.message) == ("error", "Acme lends 16 nodes at most")


def block(section: str) -> str:
    """The first block of Python in a section of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}")[1].split("\n## ")[0]
    return text.split("```python\n")[1].split("```")[0]


def test_the_export_target_works(guest, rllaunch):
    guest(block("Exporting to another program"))
    result = rllaunch("export", "--to", "acme-rl", "--model", "dsv4", "--hardware", "GB300")
    assert result.code == 0, result.err
    assert result.out.endswith("acme-rl train \\\n  --nodes 8 \\\n  --tp 2\n")
    assert 'left out: handoff.engine_weights = "mirror"' in result.err
    assert "  acme-rl keeps the engines' weights\n" in result.err


def test_the_conftest_and_the_test_it_shows_work(acme, rllaunch_project, monkeypatch: pytest.MonkeyPatch):
    acme("The same in Python")
    rllaunch_project.use("acme", "rllaunch_acme")
    shown = PAGE.read_text(encoding="utf-8")
    assert block("Testing a plugin").splitlines()[-1] == "    return rllaunch_project"
    test = shown.split("```python\ndef test_acme_lends_sixteen_nodes")[1].split("```")[0]
    space: dict[str, object] = {}
    exec("def test" + test.replace('"acme"', '"acme-H200-large"'), space)
    space["test"](rllaunch_project)  # type: ignore[operator]
    exec("def test" + test.replace('"acme"', '"acme-H200-large"').replace("17)", "16)"), space)
    with pytest.raises(AssertionError):
        space["test"](rllaunch_project)  # type: ignore[operator]


def test_the_page_names_what_a_project_and_the_suites_have():
    text = PAGE.read_text(encoding="utf-8")
    methods = [name for name, value in vars(Project).items() if callable(value) and not name.startswith("_")]
    assert sorted(methods) == ["findings", "json", "run", "use", "write"]
    assert all(f"| `{name}(" in text for name in methods)
    for suite in (TrainerConformance, RolloutConformance):
        assert f"({suite.__name__}):" in text
        assert all(hasattr(suite, name) for name in ("device", "sections", "options"))
    for suite, names in ((RolloutConformance, ("send", "weights")), (TrainerConformance, ("batch", "collected"))):
        assert all(hasattr(suite, name) and f"`{name}()`" in text for name in names)
