"""A backend in a process of its own, for suites that need two of them: the groups of ranks of most trainers are their
process's, so that a second trainer beside the first is no twin of it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Mapping, Sequence
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
        self._methods: frozenset[str] = self._answer(None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._methods:
            return self._ask(None, "__getattribute__", [name], {})
        return lambda *args, **kwargs: self._call(name, args, kwargs)

    def _call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        given = [*args, *kwargs.values()]
        sink = next((value for value in given if hasattr(value, "begin_weight_update")), None)

        def sent(value: Any) -> Any:
            return _SINK if sink is not None and value is sink else value

        answer = self._ask(sink, name, [sent(a) for a in args], {n: sent(v) for n, v in kwargs.items()})
        if name == "shutdown":
            self._process.join(60)
            if self._process.is_alive():
                self._process.kill()
            self._connection.close()
        return answer

    def _ask(self, sink: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            self._connection.send((name, args, kwargs))
        except OSError:
            raise self._ended() from None
        return self._answer(sink)

    def _ended(self) -> RunError:
        self._process.join(60)
        return RunError(f"the backend's process ended with exit code {self._process.exitcode}")

    def _answer(self, sink: Any) -> Any:
        """What the call gives, with its calls of the sink made here meanwhile."""
        while True:
            try:
                kind, *words = self._connection.recv()
            except (EOFError, ConnectionResetError):
                raise self._ended() from None
            if kind == "given":
                return words[0]
            if kind == "raised":
                raise words[0]
            name, argument = words
            self._connection.send(_tried(sink, name, [argument], {}))


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
    methods = frozenset(n for n in dir(type(backend)) if not n.startswith("_") and callable(getattr(type(backend), n)))
    connection.send(("given", methods))
    sink = _SinkThere(connection)
    while True:
        try:
            name, args, kwargs = connection.recv()
        except EOFError:
            return  # the caller is gone
        args = [_here(a, sink) for a in args]
        connection.send(_tried(backend, name, args, {n: _here(v, sink) for n, v in kwargs.items()}))
        if name == "shutdown":
            return


def _here(value: Any, sink: _SinkThere) -> Any:
    return sink if isinstance(value, str) and value == _SINK else value


def _tried(owner: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, Any]:
    try:
        return "given", getattr(owner, name)(*args, **kwargs)
    except Exception as err:
        return "raised", _portable(err)


def _portable(err: Exception) -> Exception:
    """Of a library's own error the class may not be importable on the other side."""
    return err if isinstance(err, RllaunchError) else RuntimeError(f"{type(err).__name__}: {err}")
