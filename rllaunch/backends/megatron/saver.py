"""The trainer's state under torch_memory_saver: tensors keep their addresses while their pages come and go.

The arena of our own is the default; this is for comparing with it, and for what needs stable addresses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rllaunch.backends.base import TensorSlice
from rllaunch.backends.embedded.trainer_memory import Reader
from rllaunch.backends.megatron.regions import StorageRegion
from rllaunch.errors import EnvironmentProblem, RunError
from rllaunch.plan.handoff import BACKED_UP, Region
from rllaunch.resolve.schema import LaunchConfig

TAG = "trainer_state"
_LIBRARY = "torch_memory_saver_hook_mode_preload"


def environment_of(config: LaunchConfig) -> dict[str, str]:
    """What a trainer's process must be started with under this config: the saver sees allocations from the start.

    Raises:
        EnvironmentProblem: torch_memory_saver is not installed, or not for this CUDA.
    """
    uses_saver = config.trainer.backend == "megatron" and config.hardware.accelerator == "cuda"
    if not uses_saver or config.handoff.trainer_offload_backend != "torch_memory_saver":
        return {}
    try:
        from torch_memory_saver.utils import get_binary_path_from_package

        library = str(get_binary_path_from_package(_LIBRARY))
    except (ImportError, RuntimeError) as err:
        raise EnvironmentProblem(
            f"torch_memory_saver cannot be used: {err}",
            "handoff.trainer_offload_backend = torch_memory_saver",
            "pip install torch_memory_saver, or --trainer-offload-backend arena",
        ) from None
    return {"LD_PRELOAD": os.pathsep.join(filter(None, [library, os.environ.get("LD_PRELOAD", "")]))}


class SavedState:
    """A backup in the saver's memory, which the regions are moved into here: it pauses all of them at once.

    Args:
        is_retained: the saver's host buffers stay pinned; else they are pinned anew at each pause.
    """

    def __init__(self, regions: Mapping[Region, StorageRegion], *, is_retained: bool) -> None:
        self._saver = _saver()
        self._regions = {r: regions[r] for r in BACKED_UP}
        for region in self._regions.values():
            kept = [piece.cpu() for _, piece in region.pieces()]
            region.free()
            torch.cuda.empty_cache()
            with self._saver.region(tag=TAG, enable_cpu_backup=True):
                region.allocate()
            for (_, piece), content in zip(region.pieces(), kept, strict=True):
                piece.copy_(content)
        # Its setter wants the library loaded, which the first region did.
        self._saver.retain_cpu_backup = is_retained
        self._moved_bytes = 0

    def store(self) -> None:
        """They must be resident: the saver answers a second pause by ending the process."""
        for region in self._regions.values():
            region.leave()
        torch.cuda.synchronize()
        self._saver.pause(TAG)
        self._moved_bytes += self._nbytes

    def restore(self) -> None:
        for region in self._regions.values():
            region.enter()
        self._saver.resume(TAG)
        self._moved_bytes += self._nbytes

    @property
    def _nbytes(self) -> int:
        return sum(region.nbytes for region in self._regions.values())

    def take_moved(self) -> int:
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved

    def reader(self, region: Region) -> Reader:
        """What the saver holds of paused tensors, in pinned memory."""
        paused = self._regions[region]

        def host_copy(piece: TensorSlice) -> Tensor:
            found: Tensor | None = self._saver.get_cpu_backup(paused.at(piece), zero_copy=True)
            if found is None:
                raise RunError(f"torch_memory_saver holds no copy of {piece.name}, which it paused")
            return found

        return host_copy

    def shutdown(self) -> None:
        """The saver's buffers end with the process."""


def _saver() -> Any:
    """The saver, driving the library this process was started with.

    Importing megatron.core sets another mode (0.16.1 `core/inference/contexts/dynamic_context.py`), in which pausing
    works and taking memory out of it silently does not: set back before the first use.

    Raises:
        EnvironmentProblem: the process was started without the library.
    """
    if _LIBRARY not in os.environ.get("LD_PRELOAD", ""):
        raise EnvironmentProblem(
            "this process was started without torch_memory_saver's library",
            f"LD_PRELOAD = {os.environ.get('LD_PRELOAD', '')!r}",
            "start it with the variables of environment_of, or use --trainer-offload-backend arena",
        )
    from torch_memory_saver import torch_memory_saver as saver

    if saver._impl is None:
        saver.hook_mode = "preload"
    elif saver._impl._hook_mode != "preload":
        raise EnvironmentProblem(
            f"torch_memory_saver was used in its mode {saver._impl._hook_mode!r} before the trainer could set it",
            "a module of this process uses it at import",
            "--trainer-offload-backend arena",
        )
    return saver
