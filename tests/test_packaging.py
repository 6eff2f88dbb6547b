"""Clone, wheel and sdist find the same profiles and the same command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return out


def listed(python_path: str) -> list[dict[str, str]]:
    """`profiles list` with another installation in front."""
    env = {**os.environ, "PYTHONPATH": python_path}
    script = "from rllaunch.cli import main; main(['profiles', 'list', '--json'])"
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    rows: list[dict[str, str]] = json.loads(done.stdout)
    return [r for r in rows if r["plugin"].startswith("rllaunch ")]


def test_the_wheel_finds_what_the_clone_finds(built: Path, tmp_path: Path):
    wheel = next(built.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
        names = archive.namelist()
    assert "rllaunch_profiles/hardware/GB300.toml" in names
    assert "rllaunch_profiles/tasks/reverse/train.jsonl" in names
    assert any(n.endswith("licenses/LICENSE") for n in names)
    script = "import rllaunch; print(rllaunch.__file__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    where = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True).stdout
    assert where.startswith(str(tmp_path)), "the wheel's own code is what runs"
    from_wheel, from_clone = listed(str(tmp_path / "site")), listed("")
    assert from_wheel == from_clone
    assert len(from_wheel) >= 15


def test_the_sdist_builds_a_wheel_with_the_same_profiles(built: Path, tmp_path: Path):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        archive.extractall(tmp_path, filter="data")
    inside = next(tmp_path.glob("rllaunch-*"))
    profiles = sorted(p.name for p in (inside / "profiles").rglob("*.toml"))
    assert profiles == sorted(p.name for p in (ROOT / "profiles").rglob("*.toml"))
    assert (inside / "tests" / "conftest.py").exists()
