"""Line numbers for the keys of a TOML file: `tomli` gives values, this gives the place of each.

Not `tomllib`, its twin in the standard library: tomli comes compiled and reads all profiles in a third of the time.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from rllaunch.errors import ConfigError

_BARE_OR_QUOTED = r"""(?:[A-Za-z0-9_-]+|"(?:\\.|[^"\\])*"|'[^']*')"""
_KEY = re.compile(rf"{_BARE_OR_QUOTED}(?:[ \t]*\.[ \t]*{_BARE_OR_QUOTED})*")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}' r"|'{3}.*?'{3,5}" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'",
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]+")
_SPACE = re.compile(r"[ \t]*")
_BETWEEN = re.compile(r"(?:[\s,]|#[^\n]*)*")


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The values of a TOML text.

    Raises:
        ConfigError: malformed, with `where:line`.
    """
    try:
        return tomli.loads(text)
    except RecursionError:
        raise ConfigError("malformed TOML: nested too deeply", where, "write fewer brackets in brackets") from None
    except ValueError as err:
        # TOMLDecodeError, or what `int` says of more digits than it converts.
        message = str(err)
        at = re.search(r"at line (\d+), column (\d+)", message)
        line = at.group(1) if at else str(text.rstrip().count("\n") + 1)
        reason = re.sub(r"\s*\(at .*\)$", "", message)
        fix = "correct that line; TOML: https://toml.io"
        raise ConfigError(f"malformed TOML: {reason}", f"{where}:{line}", fix) from err


def read_text(path: Path, what: str, fix: str = "") -> str:
    """A UTF-8 file's text.

    Raises:
        ConfigError: the file is missing, a directory, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist: {path}", "", fix or "check the path") from None
    except UnicodeDecodeError as err:
        raise ConfigError(f"{what} is not UTF-8 text: {path}", "", f"byte {err.start}: {err.reason}") from None
    except OSError as err:
        raise ConfigError(f"{what} cannot be read: {path}: {err.strerror}", "", fix or "check the path") from None


def key_lines(text: str) -> dict[str, int]:
    """Dotted key → 1-based line where it is first set, for tables and the keys of inline tables too.

    Items of an array go by the key that holds it: `verified.mode` is the first `mode` in any `[[verified]]`.

    Args:
        text: well-formed TOML, as `parse_toml` accepts it.
    """
    return _Scanner(text).scan()


def line_of(lines: dict[str, int], key: str) -> int:
    """The line of a key, or of the nearest table or key that holds it."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return 1


@dataclass
class _Scanner:
    """One pass over a well-formed text; values are skipped, keys noted."""

    text: str
    position: int = 0
    lines: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.newlines = [m.start() for m in re.finditer("\n", self.text)]

    def scan(self) -> dict[str, int]:
        table = ""
        while self._take(_BETWEEN) is not None and self.position < len(self.text):
            if self._here() == "[":
                depth = 2 if self.text.startswith("[[", self.position) else 1
                self.position += depth
                table = self._key("")
                self._take(_SPACE)
                self.position += depth
            else:
                self._key_and_value(table)
        return self.lines

    def _key_and_value(self, table: str) -> None:
        key = self._key(table)
        self._take(_SPACE)
        self.position += 1  # the "="
        self._value(key)

    def _key(self, table: str) -> str:
        self._take(_SPACE)
        start = self.position
        written = self._take(_KEY)
        assert written, f"a key stands at {start} of a text that was parsed before"
        line = bisect_left(self.newlines, start) + 1
        for part in _parts(written):
            table = f"{table}.{part}" if table else part
            self.lines.setdefault(table, line)
        return table

    def _value(self, key: str) -> None:
        self._take(_SPACE)
        opening = self._here()
        if opening not in ("[", "{"):
            self._take(_STRING) or self._take(_SCALAR)
            return
        self.position += 1
        while self._take(_BETWEEN) is not None and self._here() not in ("]", "}"):
            if opening == "[":
                self._value(key)
            else:
                self._key_and_value(key)
        self.position += 1

    def _here(self) -> str:
        return self.text[self.position : self.position + 1]

    def _take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.position)
        if match is None:
            return None
        self.position = match.end()
        return match.group()


def _parts(written: str) -> list[str]:
    """The names in a dotted key, unquoted and with their escapes read."""
    if '"' not in written and "'" not in written:
        return [part.strip() for part in written.split(".")]
    parts, node = [], tomli.loads(f"{written} = 0")
    while isinstance(node, dict):
        (name,) = node
        parts.append(name)
        node = node[name]
    return parts
