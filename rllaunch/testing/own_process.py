"""A backend in a process of its own, for suites that need two of them: the groups of ranks of most trainers are their
process's, so that a second trainer beside the first is no twin of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rllaunch.backends.base import LaunchContext, Slot
from rllaunch.errors import RllaunchError, RunError

Factory = Callable[[LaunchContext, Slot], Any]
_SINK = "the caller's sink"


def in_own_process(factory: Factory) -> Factory:
    """A factory whose backends live in a process each, and are called as if they were here.

        class TestMyTrainer(TrainerConformance):
            factory = staticmethod(in_own_process(MyTrainer))

    Args:
        factory: a class or function that the other process can import.
    """
    return lambda context, slot: _Remote(factory, context, slot)


class _Remote:
    """The backend seen from here; its process ends with `shutdown`, or with ours."""

    def __init__(self, factory: Factory, context: LaunchContext, slot: Slot) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, factory, context, slot), daemon=True)
        self._process.start()
        theirs.close()
        self._answer(None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self._call(name, *args)

    def _call(self, name: str, *args: Any) -> Any:
        sink = next((a for a in args if hasattr(a, "begin_weight_update")), None)
        self._connection.send((name, [_SINK if a is sink and sink is not None else a for a in args]))
        answer = self._answer(sink)
        if name == "shutdown":
            self._process.join(60)
            self._connection.close()
        return answer

    def _answer(self, sink: Any) -> Any:
        """What the call gives, with its calls of the sink made here meanwhile."""
        while True:
            try:
                kind, *words = self._connection.recv()
            except EOFError:
                self._process.join()
                raise RunError(f"the backend's process ended with exit code {self._process.exitcode}") from None
            if kind == "given":
                return words[0]
            if kind == "raised":
                raise words[0]
            name, argument = words
            self._connection.send(_tried(sink, name, [argument]))


class _SinkThere:
    """The caller's sink, seen from the backend's process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        def call(argument: Any) -> None:
            self._connection.send(("sink", name, argument))
            kind, value = self._connection.recv()
            if kind == "raised":
                raise value

        return call


def _serve(connection: Connection, factory: Factory, context: LaunchContext, slot: Slot) -> None:
    try:
        backend = factory(context, slot)
    except Exception as err:
        connection.send(("raised", _portable(err)))
        return
    connection.send(("given", None))
    sink = _SinkThere(connection)
    while True:
        try:
            name, args = connection.recv()
        except EOFError:
            return  # the caller is gone
        args = [sink if isinstance(a, str) and a == _SINK else a for a in args]
        connection.send(_tried(backend, name, args))
        if name == "shutdown":
            return


def _tried(owner: Any, name: str, args: Sequence[Any]) -> tuple[str, Any]:
    try:
        return "given", getattr(owner, name)(*args)
    except Exception as err:
        return "raised", _portable(err)


def _portable(err: Exception) -> Exception:
    """Of a library's own error the class may not be importable on the other side."""
    return err if isinstance(err, RllaunchError) else RuntimeError(f"{type(err).__name__}: {err}")
