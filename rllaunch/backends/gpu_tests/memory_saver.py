"""torch_memory_saver: memory is released to other processes, and comes back with what was in it.

Called without the library in LD_PRELOAD, it calls itself with it, as SGLang starts its scheduler.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from rllaunch.backends.gpu_tests.answer import TestFailed, answer

NBYTES = 2**30


def _round_trip() -> str:
    import torch
    from torch_memory_saver import torch_memory_saver as saver

    if not torch.cuda.is_available():
        raise TestFailed("torch sees no GPU")
    with saver.region(tag="kept", enable_cpu_backup=True):
        kept = torch.arange(NBYTES // 8, dtype=torch.int64, device="cuda")
    with saver.region(tag="dropped"):
        dropped = torch.zeros(NBYTES, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    address, awake = kept.data_ptr(), torch.cuda.mem_get_info()[0]
    begin = time.perf_counter()
    saver.pause("kept")
    saver.pause("dropped")
    paused_seconds = time.perf_counter() - begin
    released = torch.cuda.mem_get_info()[0] - awake
    if released < 1.9 * NBYTES:
        raise TestFailed(f"2 GiB were paused and the GPU has {released} bytes more free")
    saver.resume("kept")
    saver.resume("dropped")
    if kept.data_ptr() != address or not torch.equal(kept, torch.arange(NBYTES // 8, device="cuda")):
        raise TestFailed("memory with a host copy came back with other bytes in it")
    dropped.fill_(1)
    torch.cuda.synchronize()
    return f"2 GiB released in {paused_seconds:.2f} s and brought back"


def _again_with_the_library() -> int:
    from torch_memory_saver import configure_subprocess

    with configure_subprocess():
        return subprocess.run([sys.executable, "-m", "rllaunch.backends.gpu_tests.memory_saver"]).returncode


def _start() -> str:
    """Only what goes wrong before the second process has the word."""
    code = _again_with_the_library()
    if code:
        raise TestFailed(f"the process with the library ended with {code}")
    os._exit(0)


if __name__ == "__main__":
    answer(_round_trip if "torch_memory_saver" in os.environ.get("LD_PRELOAD", "") else _start)
