"""An engine's process seen from the actor that has it: started, asked, and ended with everything below it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from multiprocessing.connection import Connection
from typing import Any

import psutil

from rllaunch.errors import RllaunchError, RunError

# SGLang waits up to 60 s for its ranks to let go of their GPU (sglang 0.5.23 `entrypoints/engine.py`).
SHUTDOWN_SECONDS = 70.0
KILL_SECONDS = 10.0
# How soon a death is noticed that no call runs into.
WATCH_SECONDS = 0.5


class EngineProcess:
    """A child that runs `module` and answers calls by name, one at a time.

    Args:
        owner: how errors name it, and the log it writes to.
        environment: variables it has beyond ours.
        module: has `main`, which is given the number of a file descriptor.
    """

    def __init__(self, owner: str, environment: Mapping[str, str], module: str) -> None:
        self.owner = owner
        self._lock = threading.Lock()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=_log_fd(),
                stderr=_log_fd(),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
                pass_fds=[theirs.fileno()],
                # Ctrl-C is the driver's to handle: it ends the engines in its own order.
                start_new_session=True,
            )
        self._connection = Connection(ours.detach())
        self._tree = [psutil.Process(self._process.pid)]
        self._ranks: list[psutil.Process] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Of it and of the processes below it that were there at the last look."""
        return [process.pid for process in self._tree]

    def call(self, name: str, *arguments: Any) -> Any:
        """The answer of `name(*arguments)` over there.

        Raises:
            RllaunchError: what was raised over there, or RunError: the process has ended.
        """
        with self._lock:
            if dead := [p.pid for p in self._ranks if not _is_running(p)]:
                # SGLang would take a minute to find out.
                raise RunError(f"{self.owner}: its process {dead[0]} ended before {name}", "", self._last_words)
            try:
                self._connection.send((name, arguments))
                succeeded, answer = self._connection.recv()
            except (EOFError, OSError) as err:
                raise RunError(
                    f"{self.owner}: its process {self._end_of_process()} during {name}", "", self._last_words
                ) from err
        if succeeded:
            return answer
        assert isinstance(answer, RllaunchError), "what fails is told as an error of ours"
        raise answer

    def is_alive(self) -> bool:
        """Whether it and its ranks run; does not wait for a call under way."""
        return self._process.poll() is None and all(map(_is_running, self._ranks))

    def wait(self) -> str:
        """Return only when it is no longer alive; what became of it."""
        while self.is_alive():
            time.sleep(WATCH_SECONDS)
        if self._process.poll() is not None:
            return f"{self.owner}: its process {self._end_of_process()}"
        dead = [p.pid for p in self._ranks if not _is_running(p)]
        return f"{self.owner}: its process {dead[0]} ended"

    @property
    def _last_words(self) -> str:
        return f"the run's {self.owner}.log has SGLang's last words; was it killed for memory? `dmesg` knows"

    def watch(self, pids: Iterable[int]) -> None:
        """Processes below it without which it is not alive.

        SGLang notices a dead rank by a signal that its event loop takes, and that runs during a call only
        (sglang 0.5.23 `utils/watchdog.py`, `managers/tokenizer_manager.py`).
        """
        self._note_children()
        self._ranks = [p for p in self._tree if p.pid in set(pids)]

    def _note_children(self) -> None:
        """Remember the processes below it: should it be killed, they are ours to end."""
        with contextlib.suppress(psutil.Error):
            found = psutil.Process(self._process.pid).children(recursive=True)
            self._tree += [p for p in found if p not in self._tree]

    def kill(self) -> None:
        """End it and what is below it at once; a call under way then fails."""
        self._note_children()
        for process in self._tree:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def shutdown(self) -> None:
        """End it, in order if it still answers, and whatever is left of the processes below it."""
        self._note_children()
        if self._process.poll() is None and self._lock.acquire(timeout=KILL_SECONDS):
            with contextlib.suppress(OSError, EOFError, ValueError):
                self._connection.send(("shutdown", ()))
                if self._connection.poll(SHUTDOWN_SECONDS):
                    self._connection.recv()
            self._lock.release()
        with contextlib.suppress(OSError):
            self._connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_SECONDS)
        for process in self._tree:
            with contextlib.suppress(psutil.Error):
                process.kill()
        deadline = time.monotonic() + KILL_SECONDS
        while any(map(_is_running, self._tree)) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _end_of_process(self) -> str:
        try:
            code = self._process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"


def _is_running(process: psutil.Process) -> bool:
    """Not over yet; one that is over may stay in the table until who is above it looks."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _log_fd() -> int | None:
    """Where this process writes its errors: in an actor a file of the run, not the terminal."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return None
