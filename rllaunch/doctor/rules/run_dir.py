"""The run directory can be written, is not another run's, and its disk has room."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.resolve.origins import Resolved

RUN_DIR = "run.run_dir"
RESERVE = "run.disk_reserve_bytes"
DEFAULT_PARENT = "runs"


def run_directory(resolved: Resolved) -> Path:
    """Where the run will write: its directory, or the one that will hold it."""
    return Path(resolved.config.run.run_dir or DEFAULT_PARENT).expanduser()


def existing(path: Path) -> Path:
    """`path`, or the nearest directory or file above it that exists."""
    path = path.absolute()
    return next((p for p in (path, *path.parents) if p.exists()), path)


def check_run_dir(resolved: Resolved, resume: bool) -> list[Finding]:
    """What is wrong with the run directory.

    Args:
        resume: the run in it goes on, so that it may hold one.
    """
    path = run_directory(resolved)
    if not resume and resolved.config.run.run_dir and (path / "config.json").exists():
        return [
            WRITABLE.error(
                resolved,
                f"the run directory already holds a run: {path / 'config.json'} exists",
                [RUN_DIR],
                "--resume to go on with that run, or another --run-dir",
            )
        ]
    if why := _not_writable(existing(path)):
        what = f"the run directory {path} cannot be written: {why}"
        return [WRITABLE.error(resolved, what, [RUN_DIR], "another --run-dir")]
    return []


def _not_writable(place: Path) -> str:
    """Why nothing can be created in `place`: permissions alone do not tell, a disk may be read-only."""
    if not place.is_dir():
        return f"{place} is not a directory"
    try:
        with tempfile.TemporaryFile(dir=place):
            return ""
    except OSError as err:
        return f"{place}: {(err.strerror or str(err)).lower()}"


def check_disk(resolved: Resolved, checkpoint_bytes: int = 0) -> list[Finding]:
    """Whether the run directory's disk has room.

    Args:
        checkpoint_bytes: estimate for all checkpoints that are kept at once; 0 while nothing is known.
    """
    path = run_directory(resolved)
    place = existing(path)
    free_bytes = shutil.disk_usage(place).free
    reserve_bytes = resolved.config.run.disk_reserve_bytes
    needed_bytes = reserve_bytes + checkpoint_bytes
    if free_bytes >= needed_bytes:
        return []
    keys, parts = [RUN_DIR, RESERVE], ""
    if checkpoint_bytes:
        keys.append("run.save_total_limit")
        parts = f" = {_gib(checkpoint_bytes)} of checkpoints + {_gib(reserve_bytes)} reserve"
    what = (
        f"no room for the run directory {path}: needs {_gib(needed_bytes)}{parts}, "
        f"the disk of {place} has {_gib(free_bytes)} free"
    )
    return [DISK.error(resolved, what, keys, "free some space, or choose a --run-dir on another disk")]


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def _check_run_dir(resolved: Resolved) -> Iterator[Finding]:
    yield from check_run_dir(resolved, resume=False)


def _check_disk(resolved: Resolved) -> Iterator[Finding]:
    yield from check_disk(resolved)


WRITABLE = Rule(
    code="RL504",
    name="the run directory is new and can be written",
    reason="the first checkpoint of a run is late to learn it, and two runs in one directory spoil both",
    check=_check_run_dir,
    probes=True,
)
DISK = Rule(
    code="RL505",
    name="the disk has room for the run",
    reason="a checkpoint that stops half-way leaves nothing to resume from",
    check=_check_disk,
    probes=True,
    overridable=True,
)
RULES = (WRITABLE, DISK)
