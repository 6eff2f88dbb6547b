"""Our part in SGLang's own processes: the mirror of an engine's weights in the arena that it shares with the trainer.

SGLang calls `register` in each of its processes, as it does for every plugin of its entry-point group
`sglang.srt.plugins` (sglang 0.5.17 `plugins/__init__.py`). Without our variable in the environment it does nothing.
torch_memory_saver has host buffers of its own only; so it frees and brings back the weights without a copy, and their
bytes are copied here, before and after. Which bytes: all that SGLang allocated under the tag, from torch's own list of
that memory pool, since not every tensor a model computes with is one of its parameters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from rllaunch.backends.base import Slot
    from rllaunch.backends.embedded.host_copies import ArenaCopies

VARIABLE = "RLLAUNCH_SHARED_MIRROR"
_ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal"
_ALIGNMENT_BYTES = 512


def environment_of(slots: Sequence[Slot]) -> dict[str, str]:
    """Variables of an engine whose ranks mirror their weights in the arenas of these slots."""
    told = {"directory": slots[0].ledger_dir, "slots": [[slot.index, slot.node] for slot in slots]}
    names = {VARIABLE: json.dumps(told)}
    if only := os.environ.get("SGLANG_PLUGINS"):
        names["SGLANG_PLUGINS"] = f"{only},rllaunch"
    return names


def owner_of(slot: Slot) -> str:
    """How an arena names the rank of an engine on this slot."""
    return f"engine-rank-{slot.index}"


def register() -> None:
    if VARIABLE not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    mirror = _Mirror(json.loads(os.environ[VARIABLE]))
    HookRegistry.register(f"{_ADAPTER}.pause", mirror.around_pause, HookType.AROUND)
    HookRegistry.register(f"{_ADAPTER}.resume", mirror.around_resume, HookType.AROUND)


class _Mirror:
    def __init__(self, told: Mapping[str, Any]) -> None:
        self._told = told
        self._copies: ArenaCopies | None = None
        self._pieces: list[tuple[int, Tensor]] = []

    def around_pause(self, pause: Callable[..., Any], adapter: Any, tag: str) -> Any:
        if tag == "weights":
            self._prepare()
            assert self._copies is not None, "just made"
            self._copies.store("weights", self._pieces)
        return pause(adapter, tag)

    def around_resume(self, resume: Callable[..., Any], adapter: Any, tag: str) -> Any:
        answer = resume(adapter, tag)
        if tag == "weights":
            assert self._copies is not None, "nothing comes back that did not go"
            self._copies.restore("weights", self._pieces)
        return answer

    def _prepare(self) -> None:
        if self._copies is not None:
            return
        import torch
        import torch.distributed as dist

        from rllaunch.backends.base import Slot
        from rllaunch.backends.embedded.host_copies import Arena, ArenaCopies
        from rllaunch.backends.embedded.pool import Pool, host_pool_path
        from rllaunch.errors import RunError

        index, node = self._told["slots"][dist.get_rank() if dist.is_initialized() else 0]
        slot = Slot(index, node, "cuda", self._told["directory"])
        pool = Pool.open(host_pool_path(slot))
        # The trainer made it, with room for this.
        nbytes = pool.entries()[f"slot{slot.index}", "arena"]
        self._pieces = _pieces_of("weights")
        needed = sum(piece.numel() + _ALIGNMENT_BYTES for _, piece in self._pieces)
        if needed > nbytes:
            raise RunError(f"the arena of slot {index} has {nbytes:,} bytes, the engine's weights take {needed:,}")
        self._copies = ArenaCopies(
            Arena(slot, pool, nbytes, is_pinned=torch.cuda.is_available()), owner_of(slot), {"weights": needed}
        )


def _pieces_of(tag: str) -> list[tuple[int, Tensor]]:
    """What lives in the memory pools of a tag: offset in the mirror, and the bytes on the GPU."""
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    pools = [pool for key, pool in saver._impl._mem_pools.items() if key[0] == tag]
    pieces: list[tuple[int, Tensor]] = []
    offset = 0
    for pool in pools:
        for segment in torch.cuda.memory_snapshot(pool.id):  # type: ignore[no-untyped-call]
            address = segment["address"]
            for block in segment["blocks"]:
                if block["state"].startswith("active"):
                    piece = torch.as_tensor(_Memory(address, block["size"]), device=f"cuda:{segment['device']}")
                    pieces.append((offset, piece))
                    offset += -(-block["size"] // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                address += block["size"]
    return pieces


class _Memory:
    """Bytes at an address of the GPU, as torch takes them without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
