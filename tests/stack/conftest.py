"""What whole runs of these tests need in their environment."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _without_idle_groups() -> Iterator[None]:
    """A trainer's process groups have threads that poll, and reference cycles keep them: after a hundred tests the
    machine would do little else."""
    yield
    if len(os.listdir("/proc/self/task")) > 200:
        gc.collect()


@pytest.fixture(scope="session")
def cpu_guest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables under which a plugin brings `--trainer-backend megatron-cpu`."""
    site = tmp_path_factory.mktemp("site")
    info = site / "cpu_guest-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu_guest\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rllaunch]\ncpu_guest = megatron_cpu_guest\n")
    path = [str(Path(__file__).parent), str(site), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, path))}
