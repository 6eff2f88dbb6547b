"""Faulting in pages by several threads; page-locking itself needs a GPU (`tests/gpu`)."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from pathlib import Path

import psutil
import pytest
import torch

from rllaunch.backends.embedded import pinned
from rllaunch.errors import RunError

MIB = 2**20


def mapped(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)


def test_pages_are_there_afterwards_with_what_was_in_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pinned, "_CHUNK_BYTES", 16 * MIB)  # several, the last one short
    host_bytes = mapped(100 * MIB)
    host_bytes[5], host_bytes[-1] = 7, 9
    before = psutil.Process().memory_info().rss
    pinned.fault_in(host_bytes)
    assert psutil.Process().memory_info().rss - before > 90 * MIB
    assert (int(host_bytes[5]), int(host_bytes[-1]), int(host_bytes.sum())) == (7, 9, 16)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EFAULT])
def test_memory_that_is_not_there_is_an_error_and_no_signal(monkeypatch: pytest.MonkeyPatch, code: int):
    def refuse(*arguments: int) -> int:
        pinned.ctypes.set_errno(code)
        return -1

    monkeypatch.setattr(pinned, "_libc", type("Libc", (), {"madvise": staticmethod(refuse)}))
    with pytest.raises(RunError, match=os.strerror(code)):
        pinned.fault_in(mapped(MIB))


def test_an_older_kernel_faults_in_when_pages_are_locked(monkeypatch: pytest.MonkeyPatch):
    def unknown(*arguments: int) -> int:
        pinned.ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(pinned, "_libc", type("Libc", (), {"madvise": staticmethod(unknown)}))
    pinned.fault_in(mapped(MIB))


def test_a_file_in_memory_that_outgrows_its_disk_is_an_error(tmp_path: object):
    """A page beyond the end of its file would end the process by a signal, were it touched."""
    with open(f"{tmp_path}/short", "w+b") as file:
        file.truncate(2 * MIB)
        host_bytes = torch.frombuffer(mmap.mmap(file.fileno(), 2 * MIB), dtype=torch.uint8)
        file.truncate(MIB)
        with pytest.raises(RunError, match="refuses 2,097,152 bytes"):
            pinned.fault_in(host_bytes)


class Driver:
    """The two calls of the CUDA runtime: like it, it refuses an address that is still locked (error 712)."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.unlocked = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if address in self.locked:
            return 712
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert is_mapped(address), "pages are unlocked while they are there"
        del self.locked[address]
        self.unlocked += 1
        return 0


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_locked_memory_that_nobody_gave_back_is_unlocked_before_it_is_unmapped(driver: Driver):
    kept = pinned.allocate_pinned(MIB)
    view = pinned.allocate_pinned(MIB)[5:9]
    gc.collect()
    assert len(driver.locked) == 2, "a view keeps all of it"
    del view
    gc.collect()
    assert list(driver.locked) == [kept.data_ptr()]
    assert driver.unlocked == 1, "an error in a finalizer is only printed"
    # The kernel gives the same address again: the driver must have forgotten it.
    again = pinned.allocate_pinned(MIB)
    pinned.release_pinned(again)
    pinned.release_pinned(kept)
    assert not driver.locked
    del kept, again
    gc.collect()  # what was released is not unlocked a second time
    assert (driver.locked, driver.unlocked) == ({}, 3)


def test_memory_that_another_made_is_unlocked_at_an_address_that_was_ours(driver: Driver):
    ours = pinned.allocate_pinned(MIB)
    address = ours.data_ptr()
    pinned.release_pinned(ours)
    driver.cudaHostRegister(address, MIB, 0)  # as if an arena's file were mapped there now
    pinned.release_pinned(ours)
    assert not driver.locked
