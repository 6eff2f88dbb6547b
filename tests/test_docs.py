"""The documentation says what the code does."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
GENERATED = ["exit-codes.md", "hooks.md", "index.md", "keys.md", "rules.md"]
# Commands that answer in a second and leave nothing behind but files where they run.
QUICK = ("resolve", "plan", "explain", "diff", "profiles", "schema", "plugins")


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", GENERATED)
def test_generated_pages_are_up_to_date(name: str):
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == generator().PAGES[name](), "run `make docs`"


def test_every_page_that_is_generated_is_held_against_the_code():
    assert sorted(generator().PAGES) == GENERATED


@dataclass(frozen=True)
class Shown:
    """A command line of a page, and what the page shows as its output (`…` for what it leaves out)."""

    page: str
    line: str
    output: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)[1:]

    @property
    def is_quick(self) -> bool:
        looks_at_no_machine = {"--no-probe", "--explain"} & set(self.words)
        return self.words[0] in QUICK or bool(self.words[0] == "doctor" and looks_at_no_machine)

    @property
    def stands_alone(self) -> bool:
        """Whether it needs nothing that its page makes before: a plugin to install, a profile that was written."""
        return self.page != "profiles.md" and "acme" not in self.words

    def __str__(self) -> str:
        return f"{self.page}: {self.line}"


def shown_commands() -> Iterator[Shown]:
    """Every `rllaunch …` line in a ```-block of a page, once; with `$ ` before it, what follows is its output."""
    for page in sorted(DOCS.glob("*.md")):
        for block in re.findall(r"^```\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            lines = block.replace("\\\n", " ").splitlines()
            for number, line in enumerate(lines):
                if line.removeprefix("$ ").startswith("rllaunch "):
                    after = lines[number + 1 :] if line.startswith("$ ") else []
                    ends = next((i for i, each in enumerate(after) if each.startswith("$ ")), len(after))
                    yield Shown(page.name, line.removeprefix("$ "), tuple(after[:ends]))


COMMANDS_SHOWN = list(shown_commands())


def parse(words: list[str]) -> None:
    """Read a command line as the program would, and run nothing."""
    from rllaunch.cli import app

    command: Any = typer.main.get_command(app)
    context = command.make_context("rllaunch", list(words))
    while hasattr(command, "resolve_command"):
        rest = [*context._protected_args, *context.args]
        if not rest:
            return  # a group that lists
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("shown", COMMANDS_SHOWN, ids=str)
def test_every_command_line_of_a_page_can_be_read(shown: Shown):
    parse(shown.words)


def test_command_lines_are_looked_for_where_they_are():
    pages = {shown.page for shown in COMMANDS_SHOWN}
    assert {"index.md", "concepts.md", "profiles.md", "plugins.md", "rules.md"} <= pages
    assert len(COMMANDS_SHOWN) >= 30
    assert sum(shown.is_quick and shown.stands_alone for shown in COMMANDS_SHOWN) >= 12


@pytest.mark.parametrize("line", ["rllaunch doctor --no-prob", "rllaunch profiles lst", "rllaunch plan --modl tiny"])
def test_a_command_line_with_a_slip_would_be_noticed(line: str):
    with pytest.raises(Exception, match=r"(?i)(no such|unknown) (option|command|flag)"):
        parse(shlex.split(line)[1:])


@pytest.mark.parametrize("shown", [s for s in COMMANDS_SHOWN if s.is_quick and s.stands_alone], ids=str)
def test_every_quick_command_of_a_page_answers_as_shown(rllaunch: Any, shown: Shown):
    result = rllaunch(*shown.words)
    said = result.out + result.err
    assert result.code == 0 or any(line.startswith("error[") for line in shown.output), said
    missing = [line for line in shown.output if line != "…" and line not in said]
    assert not missing, said


def test_the_page_about_concepts_has_the_steps_of_both_orders_and_every_region():
    from rllaunch.plan.handoff import REGIONS, HandoffOptions, build_schedule

    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    blocks = [" ".join(block.split()) for block in re.findall(r"```\n(.*?)```", page, re.DOTALL)]
    options = (
        HandoffOptions(engine_weights="mirror"),
        HandoffOptions("gpu", engine_weights="mirror", buffers="shared", update_from="gpu"),
    )
    assert blocks[:2] == [" → ".join(step.name for step in build_schedule(each).cycle) for each in options]
    assert re.findall(r"^\| `(\w+)` \| (?:the|both)", page, re.MULTILINE) == list(REGIONS)


def test_the_page_of_rules_tells_what_explain_tells(rllaunch: Any):
    page = (DOCS / "rules.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (RL\d+)\n\n(.*?)(?=\n## |\Z)", page, re.DOTALL | re.MULTILINE))
    assert len(sections) > 70
    for code in ("RL010", "RL203", "RL301", "RL408", "RL410"):
        told = rllaunch("doctor", "--explain", code).out.removeprefix(f"{code}: ").splitlines()
        shown = [re.sub(r"^- |\*\*", "", line) for line in sections[code].splitlines()]
        assert [line.strip() for line in told if line] == [line.replace("**", "") for line in shown if line]


def test_every_page_is_in_the_sites_menu_and_every_link_of_a_page_leads_somewhere():
    menu = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2])
    assert sorted(menu) == sorted(page.name for page in DOCS.glob("*.md"))
    links = 0
    for page in [*DOCS.glob("*.md"), ROOT / "README.md"]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                links += 1
                assert (page.parent / target).exists(), f"{page.name}: {target}"
    assert links > 30


def test_the_site_builds_without_a_warning(tmp_path: Path):
    pytest.importorskip("material", reason="the docs extra is not installed")
    words = ["build", "--strict", "--quiet", "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(tmp_path)]
    built = subprocess.run([sys.executable, "-m", "mkdocs", *words], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    rules = (tmp_path / "rules.html").read_text(encoding="utf-8")
    assert rules.count("<h2") > 70
    assert '<h2 id="rl203">RL203: leaves headroom' in rules
    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert [src for src in re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="([^"]+)"', start) if "//" in src] == []
    assert 'src="site/iframe-worker.js"' in start, "search in pages that are opened as files"
    assert "leaves headroom" in (tmp_path / "search/search_index.js").read_text(encoding="utf-8")


def test_the_first_page_has_what_the_readme_says_of_using_it():
    start = (DOCS / "index.md").read_text(encoding="utf-8")
    for title in ("Will it fit?", "What a handoff costs", "Where it stands"):
        assert f"\n## {title}\n" in start


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
