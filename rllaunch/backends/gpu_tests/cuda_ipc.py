"""CUDA IPC: memory of one process is read and written by another, on each visible GPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.multiprocessing as mp

from rllaunch.backends.gpu_tests.answer import TestFailed, answer

NUMBERS = 4 * 2**20
SECONDS = 60


def _other_process(inbox: Any, outbox: Any) -> None:
    while True:
        tensor = inbox.get()
        total = int(tensor.sum())
        tensor.add_(1)
        torch.cuda.synchronize(tensor.device)
        del tensor
        outbox.put(total)


def _round_trips() -> str:
    count = torch.cuda.device_count()
    if count == 0:
        raise TestFailed("torch sees no GPU")
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    other = context.Process(target=_other_process, args=(inbox, outbox), daemon=True)
    other.start()
    try:
        for device in range(count):
            mine = torch.arange(NUMBERS, dtype=torch.int64, device=f"cuda:{device}")
            expected = int(mine.sum())
            inbox.put(mine)
            if outbox.get(timeout=SECONDS) != expected:
                raise TestFailed(f"GPU {device}: the other process read other bytes than were written")
            if int(mine.sum()) != expected + NUMBERS:
                raise TestFailed(f"GPU {device}: what the other process wrote did not arrive")
    finally:
        other.kill()
    return f"{count} GPU{'s' if count > 1 else ''}, torch {torch.__version__}"


if __name__ == "__main__":
    answer(_round_trips)
