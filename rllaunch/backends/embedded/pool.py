"""Memory pools with exact books, shared between processes, and the flat buffers charged to them.

A pool stands for the memory of one device or of one node's host RAM. Trainer rank and rollout manager
are different processes that share both, so the books of a pool are a small file that each of them maps.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from rllaunch.backends.base import LaunchContext, Slot, TensorSlice
from rllaunch.errors import FitError, RunError

_MAGIC = b"RLLPOOL1"
_HEADER = struct.Struct("<8s64sq")  # magic, name, capacity (-1: no limit)
_STATE = struct.Struct("<qq")  # peak, rows ever used (those after them are free)
_ENTRY = struct.Struct("<48s24sq")  # owner (empty: the row is free), region, bytes
# A device pool has at most twelve rows, a host pool one and four per slot of the node: this serves 63 slots.
_NUM_ENTRIES = 256
_FIRST_ROW = _HEADER.size + _STATE.size
_FILE_BYTES = _FIRST_ROW + _NUM_ENTRIES * _ENTRY.size


class Pool:
    """The books of one memory pool: bytes by owner and region, a capacity, and the most ever in use.

    Charging what is charged and releasing what is not are errors: the books are only worth something if each
    region is booked once. Every method may be called from several threads and processes at a time.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._thread_lock = threading.RLock()  # flock excludes other processes, not threads that share the file
        with open(self.path, "r+b") as file:
            self._fd = os.dup(file.fileno())
            self._map = mmap.mmap(self._fd, _FILE_BYTES)
        magic, name, capacity = _HEADER.unpack_from(self._map, 0)
        if magic != _MAGIC:
            raise RunError(f"{self.path} is no pool ledger")
        self.name = name.rstrip(b"\0").decode()
        self.capacity_bytes: int | None = None if capacity < 0 else capacity

    @classmethod
    def create(cls, path: str | os.PathLike[str], name: str, capacity_bytes: int | None) -> Pool:
        """New, empty books at `path`.

        Raises:
            RunError: there are books already; emptying them under a process that uses them would make
                every later figure wrong.
        """
        if not cls._write_new(Path(path), name, capacity_bytes):
            raise RunError(
                f"pool ledger {path} exists already",
                fix="give each run a ledger directory of its own, or open the pool instead of creating it",
            )
        return cls(path)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Pool:
        """The books at `path`, which some process created."""
        if not Path(path).exists():
            raise RunError(f"no pool ledger at {path}: the pool was not created, or its directory is gone")
        return cls(path)

    @classmethod
    def open_or_create(cls, path: str | os.PathLike[str], name: str, capacity_bytes: int | None) -> Pool:
        """The books at `path`; whoever comes first creates them.

        Raises:
            RunError: they exist with another capacity.
        """
        cls._write_new(Path(path), name, capacity_bytes)
        pool = cls(path)
        if pool.capacity_bytes != capacity_bytes:
            raise RunError(
                f"pool {pool.name} has a capacity of {_bytes_text(pool.capacity_bytes)}, "
                f"but {_bytes_text(capacity_bytes)} is expected of it",
                str(path),
                "every process of a run must be given the same configuration",
            )
        return pool

    @staticmethod
    def _write_new(path: Path, name: str, capacity_bytes: int | None) -> bool:
        # Written beside and linked into place, so that nobody maps a half-written file and only one creator wins.
        draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
        header = _HEADER.pack(_MAGIC, name.encode(), -1 if capacity_bytes is None else capacity_bytes)
        draft.write_bytes(header.ljust(_FILE_BYTES, b"\0"))
        try:
            os.link(draft, path)
        except FileExistsError:
            return False
        finally:
            draft.unlink()
        return True

    def charge(self, owner: str, region: str, nbytes: int) -> None:
        """Book `nbytes` of `region` to `owner`, before the memory is allocated.

        Raises:
            FitError: they do not fit; the text lists who holds what.
            RunError: the region is booked already, or the table is full.
        """
        with self._locked():
            self._charge(owner, region, nbytes)

    def charge_once(self, owner: str, region: str, nbytes: int) -> bool:
        """Book it unless it is booked with these bytes already, as two processes share it; whether it was new."""
        with self._locked():
            booked = self._entries().get((owner, region))
            if booked == nbytes:
                return False
            self._charge(owner, region, nbytes)
            return True

    def release(self, owner: str, region: str) -> None:
        """Take `region` of `owner` off the books, after its memory is freed.

        Raises:
            RunError: it is not booked.
        """
        with self._locked():
            for index, (holder, held, _) in self._rows():
                if (holder, held) == (owner, region):
                    _ENTRY.pack_into(self._map, self._offset(index), b"", b"", 0)
                    return
            raise RunError(f"pool {self.name}: {owner} releases {region}, which it does not hold")

    def used(self) -> int:
        """Bytes in use by all owners."""
        with self._locked():
            return sum(self._entries().values())

    def by_region(self) -> dict[str, int]:
        """Bytes in use by region, over all owners."""
        with self._locked():
            total: Counter[str] = Counter()
            for (_, region), nbytes in self._entries().items():
                total[region] += nbytes
            return dict(total)

    def entries(self) -> dict[tuple[str, str], int]:
        """(owner, region) → bytes in use."""
        with self._locked():
            return self._entries()

    def peak(self) -> int:
        """Most bytes in use at any moment since the last reset."""
        with self._locked():
            return self._state()[0]

    def reading(self) -> tuple[int, int]:
        """Bytes in use and the peak, and a new peak begins: what a step's record needs, under one lock."""
        with self._locked():
            used = sum(nbytes for _, (_, _, nbytes) in self._rows())
            peak = self._state()[0]
            self._write_peak(used)
            return used, peak

    def reset_peak(self) -> None:
        with self._locked():
            self._write_peak(sum(self._entries().values()))

    def close(self) -> None:
        """Unmap the books; the file stays."""
        self._map.close()
        os.close(self._fd)

    def _charge(self, owner: str, region: str, nbytes: int) -> None:
        if nbytes < 0:
            raise RunError(f"pool {self.name}: {owner} asks for {nbytes} bytes of {region}")
        entries = self._entries()
        if (owner, region) in entries:
            raise RunError(f"pool {self.name}: {owner} asks for {region} twice")
        used = sum(entries.values())
        if self.capacity_bytes is not None and used + nbytes > self.capacity_bytes:
            raise self._does_not_fit(owner, region, nbytes, entries)
        index = next((i for i in range(_NUM_ENTRIES) if not self._map[self._offset(i)]), None)
        if index is None:
            raise RunError(f"pool {self.name}: all {_NUM_ENTRIES} rows of its ledger are taken")
        _ENTRY.pack_into(self._map, self._offset(index), _field(owner, 48), _field(region, 24), nbytes)
        peak, rows = self._state()
        _STATE.pack_into(self._map, _HEADER.size, max(used + nbytes, peak), max(rows, index + 1))

    def _does_not_fit(self, owner: str, region: str, nbytes: int, entries: dict[tuple[str, str], int]) -> FitError:
        used = sum(entries.values())
        assert self.capacity_bytes is not None, "only a pool with a capacity can be too small"
        largest_first = sorted(entries.items(), key=lambda item: (-item[1], item[0]))
        kind = self.name.partition("-")[0]
        setting = f" (pools.{kind}_capacity_bytes)" if kind in ("device", "host") else ""
        return FitError(
            f"pool {self.name} is too small: {owner} asks for {nbytes:,} bytes of {region}, "
            f"{self.capacity_bytes - used:,} are free",
            [
                f"capacity {self.capacity_bytes:,} bytes{setting}, in use {used:,}",
                *(f"in use: {holder} {held} {size:,} bytes" for (holder, held), size in largest_first),
            ],
            "hold less at once (--colocate-memory-peak-device, --engine-weights, --offload-train-buffers), "
            "or raise the capacity",
        )

    def _entries(self) -> dict[tuple[str, str], int]:
        return {(owner, region): nbytes for _, (owner, region, nbytes) in self._rows()}

    def _rows(self) -> Iterator[tuple[int, tuple[str, str, int]]]:
        """Index and content of the rows that are taken."""
        # Free rows are taken from the front, so a few rows of the whole table are ever used.
        rows = self._map[_FIRST_ROW : self._offset(self._state()[1])]
        for index, (owner, region, nbytes) in enumerate(_ENTRY.iter_unpack(rows)):
            if owner[0]:
                yield index, (owner.rstrip(b"\0").decode(), region.rstrip(b"\0").decode(), nbytes)

    def _state(self) -> tuple[int, int]:
        # For callers that hold the lock: taking it again here would let it go at the inner end.
        peak, rows = _STATE.unpack_from(self._map, _HEADER.size)
        return peak, rows

    def _write_peak(self, peak: int) -> None:
        _STATE.pack_into(self._map, _HEADER.size, peak, self._state()[1])

    @staticmethod
    def _offset(index: int) -> int:
        return _FIRST_ROW + index * _ENTRY.size

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._thread_lock:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)


def device_pool_path(slot: Slot) -> Path:
    return Path(slot.ledger_dir) / f"device-{slot.index}.ledger"


def host_pool_path(slot: Slot) -> Path:
    return Path(slot.ledger_dir) / f"host-{slot.node}.ledger"


def open_pools(context: LaunchContext, slot: Slot) -> tuple[Pool, Pool]:
    """The slot's device pool and its node's host pool, created by whichever process asks first.

    What is in use all the time is booked in both for good: it belongs to no process that could release it.
    """
    pools = context.config.pools
    Path(slot.ledger_dir).mkdir(parents=True, exist_ok=True)
    device = Pool.open_or_create(device_pool_path(slot), f"device-{slot.index}", pools.device_capacity_bytes)
    host = Pool.open_or_create(host_pool_path(slot), f"host-{slot.node}", pools.host_capacity_bytes)
    for pool, nbytes in ((device, pools.device_static_bytes), (host, pools.host_static_bytes)):
        if nbytes:
            pool.charge_once("static", "static", nbytes)
    return device, host


class FlatBuffer:
    """One region's memory: a flat tensor of bytes that can be freed and brought back under living views.

    Freeing resizes the storage to nothing in place, so parameters that are views of it stay valid objects
    and are whole again once the buffer is back (with undefined content). In between they must not be touched:
    torch reads a zero-size storage behind a view without a check and the process ends by signal 11. So
    everything goes through `bytes` and `view`, which refuse.

    Args:
        nbytes: charged to `pool` as `owner`'s `region` while allocated.
    """

    def __init__(self, pool: Pool, owner: str, region: str, nbytes: int, device: torch.device | str = "cpu") -> None:
        self.pool = pool
        self.owner = owner
        self.region = region
        self.nbytes = nbytes
        self.device = torch.device(device)
        self.is_resident = False
        self._bytes: Tensor | None = None

    def allocate(self) -> None:
        """Charge and allocate; the content is undefined.

        Raises:
            FitError: the pool is too small.
            RunError: it is allocated already, or the machine itself has no memory left.
        """
        if self.is_resident:
            raise RunError(f"{self.owner}: {self.region} is allocated twice")
        self.pool.charge(self.owner, self.region, self.nbytes)
        try:
            if self._bytes is None:
                self._bytes = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            else:
                self._bytes.untyped_storage().resize_(self.nbytes)
        except RuntimeError as err:  # torch.OutOfMemoryError is one
            self.pool.release(self.owner, self.region)
            raise RunError(f"{self.owner}: the machine refuses {self.nbytes:,} bytes for {self.region}: {err}") from err
        self.is_resident = True

    def free(self) -> None:
        """Give the memory back and take it off the books.

        Raises:
            RunError: it is free already.
        """
        storage = self.bytes.untyped_storage()
        self.is_resident = False
        storage.resize_(0)
        if self.device.type == "cuda":
            # The slot's other process needs the memory: the caching allocator must hand it to the driver.
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self.pool.release(self.owner, self.region)

    @property
    def bytes(self) -> Tensor:
        """All of it as uint8.

        Raises:
            RunError: it is offloaded.
        """
        if not self.is_resident or self._bytes is None:
            raise RunError(
                f"{self.owner}: {self.region} is used while it is offloaded",
                fix="bring it back first (onload, resume_memory_occupation)",
            )
        return self._bytes

    def view(self, dtype: torch.dtype, offset: int, shape: tuple[int, ...]) -> Tensor:
        """A tensor inside the buffer; `offset` in bytes, a multiple of the dtype's size."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        return self.bytes[offset : offset + num_bytes].view(dtype).view(shape)

    def pieces(self) -> list[tuple[int, Tensor]]:
        """All of it, at its beginning: what a region consists of, as `HostCopies` takes it."""
        return [(0, self.bytes)]

    def at(self, piece: TensorSlice) -> Tensor:
        """The tensor at a place in the buffer."""
        return self.view(getattr(torch, piece.dtype), piece.offset, piece.shape)


def _field(text: str, size: int) -> bytes:
    data = text.encode()
    if not 0 < len(data) <= size:
        raise RunError(f"{text!r} does not fit into a ledger's field of {size} bytes")
    return data


def _bytes_text(nbytes: int | None) -> str:
    return "no limit" if nbytes is None else f"{nbytes:,} bytes"
