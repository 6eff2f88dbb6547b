"""What tests on a GPU share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shm() -> Iterator[Path]:
    """A memory-backed directory, as a run's ledgers have: pages of a plain file cannot be pinned everywhere."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        yield Path(directory)
