"""A trainer's memory between its turns: state that waits off the device, and gradients that nobody misses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from rllaunch.backends.base import TensorSlice
from rllaunch.backends.embedded.host_copies import HostCopies
from rllaunch.backends.embedded.layout import view_of
from rllaunch.errors import RunError
from rllaunch.plan.handoff import BACKED_UP, Region

Reader = Callable[[TensorSlice], Tensor]
"""The tensor at a place in a region, wherever the region is; to be read only, and before the region moves."""


class DeviceRegion(Protocol):
    """Memory of the device that is charged as one region while it is there."""

    @property
    def owner(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def is_resident(self) -> bool: ...

    def allocate(self) -> None: ...

    def free(self) -> None: ...

    def pieces(self) -> Sequence[tuple[int, Tensor]]:
        """Offset in the region and bytes of each storage it consists of."""
        ...

    def at(self, piece: TensorSlice) -> Tensor:
        """The tensor at a place."""
        ...


class Backup(Protocol):
    """Where the regions of `BACKED_UP` wait, all of them or none."""

    def store(self) -> None:
        """Keep their content and free them."""
        ...

    def restore(self) -> None:
        """Allocate them and bring their content back."""
        ...

    def reader(self, region: Region) -> Reader:
        """What waits, as it lies; an error where nothing does."""
        ...

    def take_moved(self) -> int:
        """Bytes copied either way since the last call."""
        ...

    def shutdown(self) -> None: ...


class CopiedState:
    """A backup in host copies, one region after the other: the device never lacks more than it must."""

    def __init__(self, regions: Mapping[Region, DeviceRegion], copies: HostCopies) -> None:
        self._regions = {r: regions[r] for r in BACKED_UP}
        self._copies = copies

    def store(self) -> None:
        for name, region in self._regions.items():
            self._copies.store(name, region.pieces())
            region.free()

    def restore(self) -> None:
        for name, region in self._regions.items():
            region.allocate()
            self._copies.restore(name, region.pieces())

    def reader(self, region: Region) -> Reader:
        host_bytes = self._copies.read(region)
        return lambda piece: view_of(host_bytes, piece)

    def take_moved(self) -> int:
        return self._copies.take_moved()

    def shutdown(self) -> None:
        self._copies.shutdown()


class TrainerMemory:
    """A trainer's regions and their way off the device and back.

    Args:
        regions: those of `BACKED_UP`, `grads`, and whatever else is freed at the end.
        backup: None where nothing is ever offloaded.
    """

    def __init__(self, regions: Mapping[Region, DeviceRegion], backup: Backup | None = None) -> None:
        self.regions = regions
        self.backup = backup

    @property
    def is_resident(self) -> bool:
        """Whether the state is on the device; gradients may be missing."""
        return self.regions["params"].is_resident

    @property
    def can_offload(self) -> bool:
        return self.backup is not None and self.is_resident

    @property
    def can_onload(self) -> bool:
        return self.backup is not None and not self.is_resident

    def offload(self) -> None:
        """Nothing happens where it has happened already, or never does."""
        if self.backup is None or not self.is_resident:
            return
        self.free_grads()
        self.backup.store()

    def onload(self) -> None:
        """The counterpart of `offload`; the gradients' content is undefined."""
        if self.backup is None or self.is_resident:
            return
        self.backup.restore()
        if not self.regions["grads"].is_resident:
            self.regions["grads"].allocate()

    def free_grads(self) -> None:
        if self.regions["grads"].is_resident:
            self.regions["grads"].free()

    def require(self, *names: Region, to: str, fix: str = "onload first") -> None:
        """
        Raises:
            RunError: one of the regions is offloaded; `to` says what it was needed for.
        """
        for name in names:
            region = self.regions[name]
            if not region.is_resident:
                raise RunError(f"{region.owner}: {to} while {name} is offloaded", "", fix)

    def reader(self, region: Region) -> Reader:
        """Of the device where the region is there, else of what waits."""
        if self.regions[region].is_resident:
            return self.regions[region].at
        assert self.backup is not None, "what is offloaded waits somewhere"
        return self.backup.reader(region)

    def take_moved(self) -> int:
        """Bytes copied either way since the last call."""
        return self.backup.take_moved() if self.backup is not None else 0

    def shutdown(self) -> None:
        if self.backup is not None:
            self.backup.shutdown()
        for region in self.regions.values():
            if region.is_resident:
                region.free()
