"""Ctrl-C, SIGTERM and a closed terminal while a run goes: one exception, one clean-up, one exit code."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C or SIGTERM; the run can be resumed."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(signal.Signals(number).name)


def install_handlers() -> None:
    """Ctrl-C and SIGTERM raise `Interrupted`; ray.init puts a SIGTERM handler of its own in place."""
    if threading.current_thread() is threading.main_thread():
        for number in NUMBERS:
            # Under nohup a closed terminal is to be ignored, and stays so.
            if signal.getsignal(number) is not signal.SIG_IGN or number is not signal.SIGHUP:
                signal.signal(number, _interrupt)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.getsignal(n) for n in NUMBERS}
    install_handlers()
    try:
        yield
    except KeyboardInterrupt:
        # Cleaned up and on the way out: another Ctrl-C must not turn the exit code into a signal's.
        before = dict.fromkeys(before, signal.SIG_IGN)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def quiet_signals() -> Iterator[None]:
    """While we clean up, an impatient second Ctrl-C does not stop the cleaning."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {n: signal.signal(n, signal.SIG_IGN) for n in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
