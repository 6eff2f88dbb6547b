"""Where offloaded state waits on the host: buffers of one's own, or one arena that trainer and engine use in turn."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from rllaunch.backends.base import Slot
from rllaunch.backends.embedded.pinned import allocate_pinned, pin, release_pinned
from rllaunch.backends.embedded.pool import FlatBuffer, Pool
from rllaunch.backends.embedded.shared_file import SharedFile
from rllaunch.errors import RunError
from rllaunch.plan.handoff import HandoffOptions, Region

DeviceBytes = Tensor | Sequence[tuple[int, Tensor]]
"""A region on the device: one flat uint8 tensor, or the pieces it consists of with their offsets."""


class HostCopies(Protocol):
    """Host copies of one owner's regions, all contents as flat uint8 tensors."""

    def store(self, region: Region, device_bytes: DeviceBytes) -> None:
        """Allocate the host copy (where it is not kept) and fill it from the device."""
        ...

    def restore(self, region: Region, device_bytes: DeviceBytes) -> None:
        """Fill the device from the host copy and free that (where it is not kept)."""
        ...

    def read(self, region: Region) -> Tensor:
        """The host copy as it lies; an error where there is none."""
        ...

    def take_moved(self) -> int:
        """Bytes copied either way since the last call."""
        ...

    def shutdown(self) -> None: ...


class _Moving:
    """Counts what is copied between device and host."""

    _moved_bytes = 0

    def _to_host(self, host_bytes: Tensor, device_bytes: DeviceBytes) -> None:
        self._copy((host, device) for host, device in _side_by_side(host_bytes, device_bytes))

    def _to_device(self, device_bytes: DeviceBytes, host_bytes: Tensor) -> None:
        self._copy((device, host) for host, device in _side_by_side(host_bytes, device_bytes))

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each second into its first; all are there on return. On a GPU one after the other without a pause."""
        streams = set()
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
            self._moved_bytes += target.numel()
            streams |= {torch.cuda.current_stream(t.device) for t in (target, source) if t.is_cuda}
        for stream in streams:
            stream.synchronize()

    def take_moved(self) -> int:
        moved, self._moved_bytes = self._moved_bytes, 0
        return moved


def _side_by_side(host_bytes: Tensor, device_bytes: DeviceBytes) -> Iterator[tuple[Tensor, Tensor]]:
    pieces = [(0, device_bytes)] if isinstance(device_bytes, Tensor) else device_bytes
    for offset, piece in pieces:
        yield host_bytes[offset : offset + piece.numel()], piece


class OwnCopies(_Moving):
    """A host buffer for each region.

    Args:
        is_retained: allocated at the first store and kept; else at each store, and freed at each restore.
    """

    def __init__(
        self, pool: Pool, owner: str, sizes: Mapping[Region, int], *, is_retained: bool, is_pinned: bool = False
    ) -> None:
        self.is_retained = is_retained
        buffer_class = _PinnedBuffer if is_pinned else FlatBuffer
        self._buffers: dict[Region, FlatBuffer] = {r: buffer_class(pool, owner, r, n) for r, n in sizes.items()}
        # A retained buffer stays allocated while the device content moves on; then it is only memory.
        self._is_current: dict[Region, bool] = dict.fromkeys(sizes, False)

    def store(self, region: Region, device_bytes: DeviceBytes) -> None:
        buffer = self._buffers[region]
        if not buffer.is_resident:
            buffer.allocate()
        self._to_host(buffer.bytes, device_bytes)
        self._is_current[region] = True

    def restore(self, region: Region, device_bytes: DeviceBytes) -> None:
        self._to_device(device_bytes, self.read(region))
        self._is_current[region] = False
        if not self.is_retained:
            self._buffers[region].free()

    def read(self, region: Region) -> Tensor:
        buffer = self._buffers[region]
        if not self._is_current[region]:
            raise RunError(f"{buffer.owner}: the host holds no current copy of {region}")
        return buffer.bytes

    def shutdown(self) -> None:
        for region, buffer in self._buffers.items():
            self._is_current[region] = False
            if buffer.is_resident:
                buffer.free()


@dataclass
class _Marker:
    holder: str = ""
    whole: list[str] = field(default_factory=list)
    """Regions of the holder whose content is complete."""

    @classmethod
    def read(cls, page: bytes) -> _Marker:
        text = page.rstrip(b"\0")
        return cls(**json.loads(text)) if text else cls()


def _arena_path(slot: Slot) -> Path:
    return Path(slot.ledger_dir) / f"arena-{slot.index}.bin"


_MAPPED: dict[Path, SharedFile] = {}


class Arena:
    """One host memory that a slot's trainer and engine use in turn; mapped whole at its first use and kept.

    Its first page says who holds it and which regions lie in it whole, so that a wrong order of steps is an
    error in the process that makes it, not a model that trains on another's bytes.

    Args:
        nbytes: the larger of the trainer's backup and the engine's mirror; charged once to `pool`.
    """

    _PAGE_BYTES = 4096

    def __init__(self, slot: Slot, pool: Pool, nbytes: int, *, is_pinned: bool = False) -> None:
        self.name = f"slot{slot.index}"
        self.nbytes = nbytes
        self._path = _arena_path(slot)
        self._pool = pool
        self._is_pinned = is_pinned
        self._file: SharedFile | None = None

    def claim(self, owner: str, region: Region) -> None:
        """`owner` is about to overwrite `region`.

        Raises:
            RunError: another owner's content lies in the arena.
        """
        with self._marker() as marker:
            if marker.holder not in ("", owner):
                raise RunError(
                    f"the arena of {self.name} holds {', '.join(marker.whole) or 'nothing whole'} of {marker.holder}; "
                    f"{region} of {owner} would overwrite it",
                    fix="offload and onload in the order of the schedule",
                )
            marker.holder = owner
            marker.whole = [r for r in marker.whole if r != region]

    def mark_whole(self, owner: str, region: Region) -> None:
        with self._marker() as marker:
            assert marker.holder == owner, "a region is marked whole by the owner that claimed the arena"
            marker.whole.append(region)

    def give_back(self, owner: str, region: Region) -> None:
        """`region` is no longer needed; with the last one the arena is free for the other owner."""
        self.require(owner, region)
        with self._marker() as marker:
            marker.whole.remove(region)
            if not marker.whole:
                marker.holder = ""

    def require(self, owner: str, region: Region) -> None:
        """
        Raises:
            RunError: `region` of `owner` does not lie in the arena whole.
        """
        with self._marker() as marker:
            if marker.holder != owner or region not in marker.whole:
                held = f"{', '.join(marker.whole) or 'nothing whole'} of {marker.holder or 'nobody'}"
                raise RunError(f"the arena of {self.name} does not hold {region} of {owner}; it holds {held}")

    def content(self) -> Tensor:
        return self._mapped().bytes[self._PAGE_BYTES :]

    def shutdown(self) -> None:
        """Remove the file and its entry in the books, if this process used it; harmless when another did so before."""
        if self._file is None:
            return
        if self._is_pinned and self._path in _MAPPED:
            release_pinned(self._file.bytes)
        self._file.remove()
        self._file = None
        _MAPPED.pop(self._path, None)
        if (self.name, "arena") in self._pool.entries():
            self._pool.release(self.name, "arena")

    def _mapped(self) -> SharedFile:
        if self._file is None:
            is_new = self._pool.charge_once(self.name, "arena", self.nbytes)
            try:
                self._file = self._shared_mapping()
            except RunError:
                if is_new:
                    self._pool.release(self.name, "arena")
                raise
        return self._file

    def _shared_mapping(self) -> SharedFile:
        """This process's one mapping of the file: the driver pins the same pages once a process, not twice."""
        file = _MAPPED.get(self._path)
        if file is None or not self._path.exists():
            is_new = not self._path.exists()
            file = SharedFile(self._path, self._PAGE_BYTES + self.nbytes)
            try:
                if self._is_pinned:
                    pin(file.bytes)
            except RunError:
                if is_new:
                    file.remove()
                raise
            _MAPPED[self._path] = file
        return file

    @contextlib.contextmanager
    def _marker(self) -> Iterator[_Marker]:
        """The marker under a lock; changes to it are written unless the block raises."""
        page = self._mapped().bytes[: self._PAGE_BYTES].numpy()
        with open(self._path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            marker = _Marker.read(page.tobytes())
            yield marker
            page[:] = memoryview(json.dumps(asdict(marker)).encode().ljust(self._PAGE_BYTES, b"\0"))


def lies_in_arena(slot: Slot, owner: str, region: Region) -> bool:
    """Whether `region` of `owner` lies whole in a slot's arena; for who uses no arena itself."""
    try:
        with _arena_path(slot).open("rb") as file:
            marker = _Marker.read(file.read(Arena._PAGE_BYTES))
    except FileNotFoundError:
        return False
    return marker.holder == owner and region in marker.whole


class ArenaCopies(_Moving):
    """Host copies of one owner in a shared arena, one region after another from its start."""

    def __init__(self, arena: Arena, owner: str, sizes: Mapping[Region, int]) -> None:
        self._arena = arena
        self._owner = owner
        self._span: dict[Region, slice] = {}
        end = 0
        for region, nbytes in sizes.items():
            self._span[region] = slice(end, end + nbytes)
            end += nbytes
        assert end <= arena.nbytes, "an arena has room for each of its owners"

    def store(self, region: Region, device_bytes: DeviceBytes) -> None:
        self._arena.claim(self._owner, region)
        self._to_host(self._arena.content()[self._span[region]], device_bytes)
        self._arena.mark_whole(self._owner, region)

    def restore(self, region: Region, device_bytes: DeviceBytes) -> None:
        self._to_device(device_bytes, self.read(region))
        self._arena.give_back(self._owner, region)

    def read(self, region: Region) -> Tensor:
        self._arena.require(self._owner, region)
        return self._arena.content()[self._span[region]]

    def shutdown(self) -> None:
        self._arena.shutdown()


class _PinnedBuffer(FlatBuffer):
    """A page-locked host buffer, which a GPU copies to and from at the speed of its link.

    Allocated anew each time, since nothing keeps a view of a host copy.
    """

    def allocate(self) -> None:
        if self.is_resident:
            raise RunError(f"{self.owner}: {self.region} is allocated twice")
        self.pool.charge(self.owner, self.region, self.nbytes)
        try:
            self._bytes = allocate_pinned(self.nbytes)
        except RunError as err:
            self.pool.release(self.owner, self.region)
            raise RunError(f"{self.owner}: {self.region}: {err.what}", err.where, err.fix) from err
        self.is_resident = True

    def free(self) -> None:
        if not self.is_resident:
            raise RunError(f"{self.owner}: {self.region} is released twice")
        release_pinned(self.bytes)
        self._bytes = None
        self.is_resident = False
        self.pool.release(self.owner, self.region)


def make_host_copies(
    options: HandoffOptions,
    slot: Slot,
    pool: Pool,
    owner: str,
    sizes: Mapping[Region, int],
    arena_bytes: Callable[[], int],
) -> HostCopies:
    """Held as the options say: in the slot's arena where a trainer shares one, else in buffers of the owner's own.

    Args:
        pool: of the slot's host.
        sizes: of the owner's regions that are copied.
        arena_bytes: asked only where there is an arena; the trainer's answer and the engine's must agree.
    """
    is_pinned = slot.device != "cpu"
    if options.buffers == "shared" and options.offload_train:
        return ArenaCopies(Arena(slot, pool, arena_bytes(), is_pinned=is_pinned), owner, sizes)
    return OwnCopies(pool, owner, sizes, is_retained=options.buffers == "retained", is_pinned=is_pinned)
