"""Directories of books and shared buffers: held while a run lives, cleared when the next one starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rllaunch.run.ledgers import hold, is_held

HOLDER = "import sys, time; from pathlib import Path; from rllaunch.run.ledgers import hold\nwith hold(Path(sys.argv[1])): time.sleep(60)"


def named(base: Path, name: str) -> Path:
    return base / f"rllaunch-{os.getuid()}-{name}"


def test_a_directory_is_held_inside_the_block_and_gone_after_it(tmp_path: Path):
    mine = named(tmp_path, "mine")
    with hold(mine):
        (mine / "arena-0.bin").write_bytes(b"x")
        assert is_held(mine)
    assert not mine.exists()
    assert not is_held(mine)


def test_what_a_killed_run_left_is_cleared_and_what_a_living_one_has_is_not(tmp_path: Path):
    killed, living = named(tmp_path, "killed"), named(tmp_path, "living")
    holders = [subprocess.Popen([sys.executable, "-c", HOLDER, str(d)]) for d in (killed, living)]
    try:
        deadline = time.monotonic() + 60
        while not (is_held(killed) and is_held(living)) and time.monotonic() < deadline:
            time.sleep(0.05)
        holders[0].kill()
        holders[0].wait()
        assert not is_held(killed)
        other = tmp_path / "somebody-else"
        other.mkdir()
        with hold(named(tmp_path, "next")):
            assert not killed.exists()
            assert living.exists()
            assert other.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_a_directory_that_books_made_already_is_taken_over(tmp_path: Path):
    mine = named(tmp_path, "mine")
    mine.mkdir()
    (mine / "device-0.ledger").write_bytes(b"books")
    with hold(mine):
        assert (mine / "device-0.ledger").exists()
