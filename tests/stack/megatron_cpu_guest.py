"""A plugin that brings the megatron trainer on the CPU, for whole runs: `--trainer-backend megatron-cpu`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rllaunch.backends.base import BackendSpec
from rllaunch.hooks import hookimpl


@hookimpl
def rllaunch_trainer_backends() -> Sequence[BackendSpec]:
    return [BackendSpec("megatron-cpu", "megatron_cpu_guest:on_cpu", loads_any_layout=True)]


def on_cpu(*args: Any) -> Any:
    """The trainer in a process that takes CUDA's places for the CPU's."""
    from megatron_cpu import use_cpu

    use_cpu()
    from rllaunch.backends.megatron.trainer import MegatronTrainer

    return MegatronTrainer(*args)
