"""A process beside the test's that uses the same pool; apart from the tests so that it imports little."""

from __future__ import annotations

from typing import Any

from rllaunch.backends.embedded.pool import Pool


def charge_many(path: str, owner: str, rounds: int, start: Any) -> None:
    """Take and give back two regions again and again, and keep a third.

    Args:
        start: a barrier, so that all processes use the pool at the same time.
    """
    pool = Pool.open(path)
    start.wait(60)
    for _ in range(rounds):
        pool.charge(owner, "params", 10)
        pool.charge(owner, "grads", 1)
        pool.release(owner, "params")
        pool.release(owner, "grads")
    pool.charge(owner, "optimizer", 100)
