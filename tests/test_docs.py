"""The documentation says what the code does."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[1]


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["keys.md", "rules.md"])
def test_generated_pages_are_up_to_date(name: str):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generator().PAGES[name](), "run `make docs`"


def test_every_flag_in_the_readme_exists():
    from rllaunch.cli import COMMANDS
    from rllaunch.flags import launch_flags

    known = {n for f in launch_flags().values() for n in (f.name, *f.aliases, f"--no-{f.name[2:]}")}
    known |= {"--config", "--set", "--help"}
    for name in COMMANDS:
        command: Any = typer.main.get_command(importlib.import_module(f"rllaunch.commands.{name}").app)
        for each in [command, *getattr(command, "commands", {}).values()]:
            known |= {word for option in each.params for word in (*option.opts, *option.secondary_opts)}
    used = set(re.findall(r"(?<![\w-])(--[a-z][a-z0-9-]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert len(used) > 10
    assert used - known == {"--megatron-", "--sglang-"} & used


def test_every_command_of_the_page_about_profiles_does_what_it_says(
    rllaunch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    page = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```\n(.*?)```", page, re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines()]
    assert len(commands) == 10
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "rllaunch"
        result = rllaunch(*words)
        assert result.code == 0, (command, result.err)
        assert "warning[" not in result.out + result.err, command
    assert sorted(p.name for p in (tmp_path / "profiles").iterdir()) == [
        "my-h100.toml",
        "ours.toml",
        "rllaunch-profile.schema.json",
    ]
    assert rllaunch("profiles", "list").out.count("(./profiles)") == 2


def test_the_page_about_profiles_names_every_code_of_the_check():
    from rllaunch.doctor.profile_facts import CODES

    page = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    assert set(re.findall(r"RL6\d\d", page)) == set(CODES)


def test_every_path_in_the_readmes_tree_exists():
    tree = re.search(r"<!-- tree -->\n```\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert tree is not None
    parents: list[str] = []
    found = 0
    for line in tree.group(1).splitlines():
        indent = len(line) - len(line.lstrip())
        name = line.split()[0]
        parents = [*parents[: indent // 2], name.rstrip("/")]
        path = ROOT.joinpath(*parents)
        assert path.exists(), path
        found += 1
    assert found > 20
