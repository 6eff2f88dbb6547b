"""The directory of a run's books and shared buffers on each node, in memory where the machine allows it.

A lock on a file inside says that whoever made it lives: a process id would not, where containers share memory but not
processes. What is not locked was left behind by a run that was killed, and goes when the next one starts on the node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_LOCK = "lock"


@contextlib.contextmanager
def local_ledgers() -> Iterator[str]:
    """The driver's; its name is the run's on every node."""
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
    directory = base / f"{_prefix()}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    with hold(directory):
        yield str(directory)


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[None]:
    """`directory` on this node, locked inside the block and removed after it."""
    _clear(directory.parent)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (directory / _LOCK).open("wb") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)
        try:
            yield
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def is_held(directory: Path) -> bool:
    """Whether some process of this node, or of one that shares its memory, holds it."""
    try:
        with (directory / _LOCK).open("r+b") as file:
            return not _locked(file)
    except OSError:
        return False


def _clear(base: Path) -> None:
    for left in base.glob(f"{_prefix()}*"):
        with contextlib.suppress(OSError), (left / _LOCK).open("r+b") as file:
            if _locked(file):
                shutil.rmtree(left, ignore_errors=True)


def _locked(file: IO[bytes]) -> bool:
    """Take its lock, if nobody has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _prefix() -> str:
    return f"rllaunch-{os.getuid()}-"
