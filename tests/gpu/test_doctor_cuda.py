"""What `rllaunch doctor --gpu-test` runs, on a GPU.

python -m pytest -m gpu tests/gpu/test_doctor_cuda.py     (any CUDA GPU with 4 GiB free)
"""

from __future__ import annotations

import os
import sys

import pytest

from rllaunch.doctor.gpus import read_node
from rllaunch.doctor.packages import torch_cuda
from rllaunch.doctor.rules.gpu_tests import PROGRAMS, run_program

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def test_two_processes_share_memory_of_each_gpu() -> None:
    answer = run_program([sys.executable, "-m", f"{PROGRAMS}.cuda_ipc"], environment())
    assert answer.ok, answer.text
    assert answer.text.startswith(f"{torch.cuda.device_count()} GPU")


def test_paused_memory_is_free_and_comes_back() -> None:
    pytest.importorskip("torch_memory_saver")
    answer = run_program([sys.executable, "-m", f"{PROGRAMS}.memory_saver"], environment())
    assert answer.ok, answer.text
    assert answer.text.startswith("2 GiB released in ")


def test_a_paused_region_that_frees_nothing_is_seen() -> None:
    """Expandable segments are such memory (RL330)."""
    pytest.importorskip("torch_memory_saver")
    env = environment(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    answer = run_program([sys.executable, "-m", f"{PROGRAMS}.memory_saver"], env)
    assert not answer.ok, answer.text


def test_nvml_shows_what_torch_sees() -> None:
    node = read_node()
    assert len(node.visible) == torch.cuda.device_count()
    assert node.visible[0].name == torch.cuda.get_device_name(0)
    assert node.visible[0].used_bytes < node.visible[0].memory_bytes
    assert node.cuda is not None
    assert torch_cuda() == tuple(map(int, torch.version.cuda.split(".")[:2]))
