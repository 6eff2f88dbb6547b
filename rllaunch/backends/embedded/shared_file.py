"""A file mapped by several processes at once: shared memory with a name.

On a memory-backed directory this is POSIX shared memory; on a plain one it still works, through the page cache.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from rllaunch.errors import RunError


class SharedFile:
    """`nbytes` shared bytes behind a path, as one uint8 tensor.

    Args:
        nbytes: the file is created, or grown, to this; None: take the file as it is.
    Raises:
        RunError: the directory's disk is full. Reserved up front, because a page that cannot be had later
            ends the process by a signal instead of an error.
    """

    def __init__(self, path: str | os.PathLike[str], nbytes: int | None = None) -> None:
        self.path = Path(path)
        flags = os.O_RDWR if nbytes is None else os.O_RDWR | os.O_CREAT
        fd = os.open(self.path, flags, 0o600)
        try:
            size = os.fstat(fd).st_size
            if nbytes is not None and size < nbytes:
                try:
                    os.posix_fallocate(fd, 0, nbytes)
                except OSError as err:
                    raise RunError(
                        f"cannot reserve {nbytes:,} bytes of shared memory: {err.strerror}",
                        str(self.path),
                        "the directory of the shared ledgers needs room for the arena and the update bucket",
                    ) from err
                size = nbytes
            self.nbytes = size
            self._map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        # The tensor keeps the map alive; the map outlives a deleted file.
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def remove(self) -> None:
        """Delete the file; whoever has it mapped keeps its memory until it lets go."""
        self.path.unlink(missing_ok=True)
