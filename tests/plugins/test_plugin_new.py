"""`rllaunch plugins new`: a package that can be installed, whose tests pass before anything is changed in it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rllaunch.errors import EXIT_CONFIG, EXIT_USAGE
from rllaunch.scaffold import write_new

PIP = ("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
FILES = [
    ".github/workflows/test.yml",
    "README.md",
    "pyproject.toml",
    "rllaunch_acme/__init__.py",
    "rllaunch_acme/profiles/acme-H200.toml",
    "rllaunch_acme/py.typed",
    "rllaunch_acme/rules.py",
    "tests/conftest.py",
    "tests/test_acme.py",
]


def python(*words: str, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "RLLAUNCH_"))}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [path, environ.get("PYTHONPATH", "")]))
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environ, capture_output=True, text=True)


def test_its_tests_pass_once_it_is_installed(rllaunch: Any, tmp_path: Path):
    assert rllaunch("plugins", "new", "rllaunch-acme").code == 0
    package, site = tmp_path / "rllaunch-acme", tmp_path / "site"
    installed = python(*PIP, "--target", str(site), str(package), cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    tested = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package, path=str(site))
    assert tested.returncode == 0, tested.stdout
    assert "4 passed" in tested.stdout
    listed = python("-m", "rllaunch", "plugins", cwd=tmp_path, path=str(site)).stdout
    assert "hardware acme-H200" in listed
    assert "RL950" in listed


def test_its_tests_fail_once_what_they_are_about_is_gone(rllaunch: Any, tmp_path: Path):
    rllaunch("plugins", "new", "rllaunch-acme")
    package = tmp_path / "rllaunch-acme"
    rules = package / "rllaunch_acme" / "rules.py"
    rules.write_text(rules.read_text(encoding="utf-8").replace("RULES = (NODES,)", "RULES = ()"), encoding="utf-8")
    tested = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package)
    assert tested.returncode == 1
    assert "2 failed, 2 passed" in tested.stdout


def test_it_reads_well_to_linters(rllaunch: Any, tmp_path: Path):
    rllaunch("plugins", "new", "rllaunch-acme")
    for words in (("check",), ("format", "--check")):
        done = python("-m", "ruff", *words, "rllaunch-acme", cwd=tmp_path)
        assert done.returncode == 0, done.stdout
    texts = {name: (tmp_path / "rllaunch-acme" / name).read_text(encoding="utf-8") for name in FILES}
    assert [name for name, text in texts.items() if re.search(r"@\w+@", text)] == []


def test_what_was_written_is_listed(rllaunch: Any, tmp_path: Path):
    result = rllaunch("plugins", "new", "rllaunch-acme", "--json")
    answer = result.json()
    assert sorted(answer.pop("files")) == FILES
    assert answer == {
        "directory": "rllaunch-acme",
        "distribution": "rllaunch-acme",
        "module": "rllaunch_acme",
        "entry": "acme",
        "extends": "H200",
        "profile": "acme-H200",
        "code": "RL950",
    }
    package = tmp_path / "rllaunch-acme"
    assert sorted(str(p.relative_to(package)) for p in package.rglob("*") if p.is_file()) == FILES


def test_flags_choose_what_the_names_do_not_say(rllaunch: Any, tmp_path: Path):
    words = ("--extends", "gb300-tray", "--profile", "rack-7", "--rule", "RL907", "--directory", "there/it")
    answer = rllaunch("plugins", "new", "big-iron", *words, "--json").json()
    assert {k: answer[k] for k in ("module", "entry", "extends", "profile", "code")} == {
        "module": "big_iron", "entry": "big-iron", "extends": "GB300", "profile": "rack-7", "code": "RL907",
    }  # fmt: skip
    root = tmp_path / "there" / "it"
    profile = tomllib.loads((root / "big_iron" / "profiles" / "rack-7.toml").read_text(encoding="utf-8"))
    assert profile["facts"] == {"gpus_per_node": 4}
    tested = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=root)
    assert tested.returncode == 0, tested.stdout


def test_its_profile_says_what_is_still_to_be_filled_in(rllaunch: Any):
    rllaunch("plugins", "new", "rllaunch-acme")
    result = rllaunch("profiles", "check", "rllaunch-acme/rllaunch_acme/profiles/acme-H200.toml")
    assert result.code == EXIT_CONFIG
    assert "error[RL605]: the source of 1 fact is still to be filled in\n" in result.out


def test_what_is_said_to_be_typed_fits_the_machine_and_names_what_comes_first(rllaunch: Any, tmp_path: Path):
    made = rllaunch("plugins", "new", "rllaunch-acme")
    assert (
        made.err
        == "hint: where rllaunch is installed: pip install -e 'rllaunch-acme[test]', then pytest rllaunch-acme\n"
    )
    readme = (tmp_path / "rllaunch-acme/README.md").read_text(encoding="utf-8")
    command = next(line for line in readme.splitlines() if line.startswith("rllaunch plan "))
    directory = "rllaunch-acme/rllaunch_acme/profiles"
    assert rllaunch(*command.split()[1:], "--profile-dir", directory).code == 0


def test_nothing_is_overwritten(rllaunch: Any, tmp_path: Path):
    (tmp_path / "rllaunch-acme").mkdir()
    assert rllaunch("plugins", "new", "rllaunch-acme").code == 0  # an empty directory is a place like any
    mine = tmp_path / "rllaunch-acme" / "README.md"
    mine.write_text("mine", encoding="utf-8")
    result = rllaunch("plugins", "new", "rllaunch-acme")
    assert (result.code, result.out) == (EXIT_USAGE, "")
    assert result.err.startswith(
        "error: rllaunch-acme is there and not empty\n  --directory\nhint: nothing was written"
    )
    assert mine.read_text(encoding="utf-8") == "mine"
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert rllaunch("plugins", "new", "rllaunch-acme", "--directory", "file").code == EXIT_USAGE


def test_what_comes_into_being_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from rllaunch.errors import EnvironmentProblem

    target = tmp_path / "new"
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(()))
    target.mkdir()
    (target / "a").write_text("mine", encoding="utf-8")
    with pytest.raises(EnvironmentProblem, match="cannot write: File exists"):
        write_new(target, {"a": "theirs"})
    assert (target / "a").read_text(encoding="utf-8") == "mine"


TAKEN = """
    from rllaunch.doctor.finding import Rule

    @hookimpl
    def rllaunch_rules():
        return [Rule("RL950", "taken", "", lambda resolved: [])]
"""


def test_the_first_code_that_nobody_has_is_taken(guest, rllaunch: Any):
    guest(TAKEN)
    assert rllaunch("plugins", "new", "rllaunch-acme", "--json").json()["code"] == "RL951"
    result = rllaunch("plugins", "new", "rllaunch-other", "--rule", "RL950")
    assert (result.code, result.err) == (
        EXIT_USAGE,
        "error: rule code RL950 is taken by guest 1.2.3\n  --rule\nhint: choose another, or leave it out\n",
    )


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("Acme",), EXIT_USAGE, "error: 'Acme' cannot be the name of a plugin\n"),
        (("acme/../x",), EXIT_USAGE, "error: 'acme/../x' cannot be the name of a plugin\n"),
        (("rllaunch",), EXIT_USAGE, "error: 'rllaunch' cannot be the name of a plugin\n"),
        (("acme", "--extends", "H2000"), EXIT_CONFIG, "error: unknown hardware profile 'H2000'\n  --extends\nhint: did you mean 'H200'? (a file of yours is found in ./profiles or with --profile-dir DIR)\n"),
        (("acme", "--profile", "h100"), EXIT_USAGE, "error: hardware profile 'h100' is taken by rllaunch "),
        (("acme", "--profile", "../x"), EXIT_USAGE, "error: '../x' cannot be the name of a profile\n"),
        (("acme", "--rule", "RL301"), EXIT_USAGE, "error: 'RL301' is no code of a plugin's rule\n"),
        ((), EXIT_USAGE, "error: missing argument 'name'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_clear_error_and_writes_nothing(
    words: tuple[str, ...], code: int, says: str, rllaunch: Any, tmp_path: Path
):
    result = rllaunch("plugins", "new", *words)
    assert (result.code, result.out) == (code, "")
    assert result.err.startswith(says)
    assert list(tmp_path.iterdir()) == []


def test_the_list_is_still_there_and_another_word_is_an_error(rllaunch: Any):
    assert "rllaunch:profiles" in rllaunch("plugins").out
    assert rllaunch("plugins", "--json").json()["plugins"]
    assert rllaunch("plugins", "neww").code == EXIT_USAGE


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (
            "__init__.py",
            "import Sequence",
            "import Sequence\nimport no_such_library",
            "No module named 'no_such_library'",
        ),
        (
            "profiles/acme-H200.toml",
            'extends = "H200"',
            'extends = "H2000"',
            "extends unknown hardware profile 'H2000'",
        ),
        (
            "rules.py",
            "    config = ",
            "    raise ValueError('no nodes')\n    config = ",
            "failed: ValueError: no nodes",
        ),
    ],
)
def test_its_failing_tests_show_what_rllaunch_says(
    rllaunch: Any, tmp_path: Path, file: str, old: str, new: str, told: str
):
    rllaunch("plugins", "new", "rllaunch-acme")
    package = tmp_path / "rllaunch-acme"
    broken = package / "rllaunch_acme" / file
    text = broken.read_text(encoding="utf-8")
    assert old in text
    broken.write_text(text.replace(old, new, 1), encoding="utf-8")
    tested = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=package)
    assert tested.returncode == 1
    failures = re.split(r"^_{5,} (\w+).*_{5,}$", tested.stdout.partition("short test summary")[0], flags=re.MULTILINE)[
        1:
    ]
    assert failures
    assert [name for name, text in zip(failures[::2], failures[1::2], strict=True) if told not in text] == []
