"""How fast this machine moves bytes: `python -m rllaunch.backends.measure FOLDER BYTES`, one JSON object on stdout.

A process of its own, so that no command has to import torch, and what CUDA leaves behind ends with it. Rates are bytes
a second. What cannot be measured is left out, and `missing` says why.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rllaunch.backends.embedded.pinned import allocate_pinned, fault_in, release_pinned

REPEATS = 3
_BLOCK_BYTES = 16 * 2**20


def best(nbytes: int, step: Callable[[], object], repeats: int = REPEATS) -> float:
    """Bytes per second of the fastest of some runs: whatever else the machine does only makes them slower."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return nbytes / max(min(seconds), 1e-9)


def measure_host(nbytes: int) -> Iterator[tuple[str, float]]:
    """Copies within memory, and the making of fresh pages."""
    source = torch.ones(nbytes, dtype=torch.uint8)
    target = torch.empty_like(source).fill_(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield "memory_copy", best(nbytes, lambda: target.copy_(source))
    torch.set_num_threads(threads)

    def fault() -> None:
        pages = torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
        fault_in(pages)

    yield "page_faults", best(nbytes, fault)


def measure_disk(folder: Path, nbytes: int) -> Iterator[tuple[str, float]]:
    """Writing a file until it is on the disk, and reading it back; the file is gone afterwards."""
    block = os.urandom(_BLOCK_BYTES)
    blocks = max(1, nbytes // _BLOCK_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor = file.fileno()

        def write() -> None:
            os.lseek(descriptor, 0, os.SEEK_SET)
            for _ in range(blocks):
                os.write(descriptor, block)
            os.fsync(descriptor)

        def read() -> None:
            # What the page cache still has would come from memory.
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.lseek(descriptor, 0, os.SEEK_SET)
            while os.read(descriptor, _BLOCK_BYTES):
                pass

        yield "disk_write", best(blocks * _BLOCK_BYTES, write, 1)
        yield "disk_read", best(blocks * _BLOCK_BYTES, read, 1)


def measure_gpu(index: int, nbytes: int) -> dict[str, Any]:
    """Copies both ways with pinned and with pageable memory, and what pinned pages cost; one GPU by itself."""
    device = torch.device("cuda", index)
    with torch.cuda.device(device):
        on_gpu = torch.empty(nbytes, dtype=torch.uint8, device=device)

        def copy(target: Tensor, source: Tensor) -> Callable[[], None]:
            def step() -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize(device)

            step()  # the first copy sets things up
            return step

        begin = time.perf_counter()
        pinned = allocate_pinned(nbytes)
        pinning = time.perf_counter() - begin
        pinned.copy_(on_gpu)
        torch.cuda.synchronize(device)
        fresh = time.perf_counter() - begin
        rates = {
            "to_gpu": best(nbytes, copy(on_gpu, pinned)),
            "to_host": best(nbytes, copy(pinned, on_gpu)),
            "pinning": nbytes / pinning,
            "fresh_to_host": nbytes / fresh,
        }
        release_pinned(pinned)
        del pinned
        pageable = torch.zeros(nbytes, dtype=torch.uint8)
        rates["pageable_to_gpu"] = best(nbytes, copy(on_gpu, pageable))
        rates["pageable_to_host"] = best(nbytes, copy(pageable, on_gpu))
    return {"index": index, "bytes": nbytes, **rates}


def main(folder: Path, nbytes: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"bytes": nbytes, "gpus": [], "missing": []}
    parts = (("host memory", measure_host(nbytes)), (f"the disk under {folder}", measure_disk(folder, nbytes)))
    for what, steps in parts:
        try:
            answer |= dict(steps)
        except Exception as err:  # what one part lacks says nothing of the others
            answer["missing"].append(f"{what}: {err}")
    if not torch.cuda.is_available():
        reason = "torch is built without CUDA" if not torch.version.cuda else "torch sees no GPU"
        answer["missing"].append(f"links and pinned memory: {reason}")
        return answer
    for index in range(torch.cuda.device_count()):
        try:
            answer["gpus"].append(measure_gpu(index, nbytes))
        except Exception as err:  # one GPU that is in use says nothing of the others
            answer["missing"].append(f"GPU {index}: {str(err).splitlines()[0] if str(err) else type(err).__name__}")
        with contextlib.suppress(Exception):
            torch.cuda.empty_cache()
    return answer


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
