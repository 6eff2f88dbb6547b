"""Page-locked host memory of exactly the size that was asked for, made by several threads.

torch's own pinned allocator rounds up to a power of two, up to twice what is needed, and cudaHostAlloc pins 2 GiB/s.
Pages that are faulted in by eight threads and then registered come at more than twice that (20 GiB on one H200: 3.2 s
to fault in huge pages and 0.5 s to register them, against 10 s).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rllaunch.errors import RunError

_THREADS = 8
_CHUNK_BYTES = 256 * 2**20
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # linux/mman.h; the second since Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def allocate_pinned(nbytes: int) -> Tensor:
    """Fresh page-locked bytes, unlocked by `release_pinned`, at the latest when the last view of them goes.

    Raises:
        RunError: the machine has not so much memory, or the driver refuses to lock it.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)  # there is no mapping of nothing
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as err:
        raise RunError(f"the machine refuses {nbytes:,} bytes of host memory: {err}") from err
    # Whoever views the pages holds this, and this holds them: it goes before they are unmapped.
    held = (ctypes.c_ubyte * nbytes).from_buffer(pages)
    host_bytes = torch.frombuffer(held, dtype=torch.uint8)
    # Advice: kernels without huge pages ignore it.
    _libc.madvise(host_bytes.data_ptr(), nbytes, _MADV_HUGEPAGE)
    pin(host_bytes)
    # Pages unmapped while they are locked stay locked for the driver, which refuses whoever gets their address next.
    unlock = weakref.finalize(held, _unlock, host_bytes.data_ptr())
    unlock.atexit = False  # the driver may be gone by then
    _UNLOCK[host_bytes.data_ptr()] = unlock
    return host_bytes


_UNLOCK: dict[int, weakref.finalize[[int], ctypes.Array[ctypes.c_ubyte]]] = {}
"""Of each mapping made here and still locked what unlocks it, by its address."""


def release_pinned(host_bytes: Tensor) -> None:
    """Unlock them; unmapped they are when the last view of them goes."""
    if not host_bytes.numel():
        return
    address = host_bytes.data_ptr()
    if (unlock := _UNLOCK.get(address)) is not None:
        unlock()
    else:
        _unregister(address)


def _unlock(address: int) -> None:
    del _UNLOCK[address]
    _unregister(address)


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def pin(host_bytes: Tensor) -> None:
    """Fault in and page-lock mapped memory, for this process.

    Raises:
        RunError: there is not so much memory, or the driver refuses.
    """
    fault_in(host_bytes)
    status = torch.cuda.cudart().cudaHostRegister(host_bytes.data_ptr(), host_bytes.numel(), 0)  # type: ignore[no-untyped-call]
    if int(status) != 0:
        raise RunError(
            f"cannot page-lock {host_bytes.numel():,} bytes of host memory: CUDA error {int(status)}",
            "",
            "raise the limit of locked memory (ulimit -l unlimited), or leave more host memory free",
        )


def fault_in(host_bytes: Tensor) -> None:
    """Have every page of mapped memory there now, each still zero or as it was.

    Raises:
        RunError: the machine or the container has not so much memory.
    """
    start, nbytes = host_bytes.data_ptr(), host_bytes.numel()
    offsets = range(0, nbytes, _CHUNK_BYTES)

    def populate(offset: int) -> int:
        size = min(_CHUNK_BYTES, nbytes - offset)
        failed = _libc.madvise(start + offset, size, _MADV_POPULATE_WRITE)
        return ctypes.get_errno() if failed else 0

    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        errors = {code for code in threads.map(populate, offsets) if code}
    if not errors or errors == {errno.EINVAL}:
        return  # an older kernel faults the pages in when they are locked, at its own speed
    code = min(errors)
    raise RunError(f"the machine refuses {nbytes:,} bytes of host memory: {os.strerror(code)}")
