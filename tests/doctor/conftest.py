"""What every test of the doctor runs in: an environment without variables that rules look at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rllaunch.doctor.gpus import forget
from rllaunch.doctor.rules.allocator import ALLOCATOR_VARIABLES

# `doctor_cases` is imported by name; pytest's importlib mode leaves the directory of a test off the path.
sys.path.append(str(Path(__file__).parent))

from fake_nvml import FakeNvml


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this shell exports, a case sees only its own variables."""
    nccl = ("NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")
    for name in (*ALLOCATOR_VARIABLES, *nccl, "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    forget()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeNvml]]:
    """`gpus(2, …)`: a machine with two GPUs, as NVML would show them."""

    def install(count: int = 8, **answers: Any) -> FakeNvml:
        nvml = FakeNvml(count, **answers)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        forget()
        return nvml

    yield install
    forget()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`packages("sglang", "0.5.17", "torch==2.11.0")`: a package in the import path, with what it asks for."""
    site = tmp_path / "site-packages"
    site.mkdir()
    monkeypatch.syspath_prepend(site)

    def install(name: str, version: str, *requires: str, extras: tuple[str, ...] = ()) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        lines += [f"Requires-Dist: {line}" for line in requires]
        (info / "METADATA").write_text("\n".join(lines) + "\n")

    return install
