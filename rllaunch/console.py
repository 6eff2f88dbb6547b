"""The only place that prints: data to stdout, everything else to stderr.

Colour only where stderr or stdout is a terminal and `NO_COLOR` is not set.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_COLOURS = {"error": "1;31", "warning": "1;33", "info": "1;36", "hint": "1;32", "note": "1;36"}
_HEAD = re.compile(r"^(\s*)(error|warning|info|hint|note)(\[\w+\])?:", re.MULTILINE)


def wants_colour(stream: IO[str]) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    """A line for a person, on stderr."""
    _write(sys.stderr, _tinted(text) if wants_colour(sys.stderr) else text)


def data(text: str) -> None:
    """A line of output that something may read, on stdout."""
    _write(sys.stdout, text)


def data_json(value: Any, *, one_line: bool = False) -> None:
    data(json.dumps(value, indent=None if one_line else 2, ensure_ascii=one_line, allow_nan=False))


def tinted_data(text: str) -> None:
    """Findings as the output of a command: coloured for a terminal, plain for a pipe."""
    _write(sys.stdout, _tinted(text) if wants_colour(sys.stdout) else text)


def _tinted(text: str) -> str:
    return _HEAD.sub(lambda m: f"{m[1]}\033[{_COLOURS[m[2]]}m{m[2]}{m[3] or ''}:\033[0m", text)


def _write(stream: IO[str], text: str) -> None:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
    stream.flush()


def stdout_console() -> Console:
    """A rich console on stdout; in a pipe wide enough that no cell is cut."""
    from rich.console import Console

    # rich reads COLUMNS itself; in a pipe without it no cell is cut.
    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else 200
    made = Console(width=width, highlight=False)
    made.on_broken_pipe = _broken_pipe  # type: ignore[method-assign]
    return made


def _broken_pipe() -> None:
    """A reader that has seen enough (`| head`) is told of as everywhere else, not as a failed run."""
    raise BrokenPipeError


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for name, width in zip(columns, _widths([columns, *rows], stdout_console().width), strict=True):
        made.add_column(name, width=width, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


# Between two columns stand their two paddings and the box's own blank; one blank at each end.
_GAP, _ENDS = 3, 2


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int | None]:
    """Widths at which a table fits into `room` with whole words; None for each where it fits as it is.

    rich narrows the widest columns alike, and so cuts words of one while another has room.
    """
    columns = list(zip(*rows, strict=True))
    room -= _GAP * (len(columns) - 1) + _ENDS
    widths = [max(len(line) for cell in column for line in cell.splitlines() or [""]) for column in columns]
    if sum(widths) <= room:
        return [None] * len(columns)
    # A number stays with its unit.
    pieces = [[cell] if len(cell) <= 10 else cell.split() for row in rows for cell in row]
    words = [max(len(piece) for cell in pieces[n :: len(columns)] for piece in cell) for n in range(len(columns))]
    while sum(widths) > room and max(widths) > 1:
        # The widest that has more than its longest word; where none has, the widest.
        narrowed = [w if w > least else 0 for w, least in zip(widths, words, strict=True)]
        widest = narrowed if any(narrowed) else widths
        widths[widest.index(max(widest))] -= 1
    return list(widths)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    stdout_console().print(table(columns, rows, title))
