"""Line numbers for the keys of a TOML file: `tomllib` gives values, this gives the place of each."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from rllaunch.errors import ConfigError

_HEADER = re.compile(r"^\s*(\[\[?)\s*(?P<name>[^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY = re.compile(r"""^\s*(?P<key>(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_STRING = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\])*"|\'[^\']*\'|#|[\[\]{}]')


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The values of a TOML text.

    Raises:
        ConfigError: malformed, with `where:line`.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        message = str(err)
        at = re.search(r"at line (\d+), column (\d+)", message)
        line = at.group(1) if at else str(text.count("\n") + 1)
        reason = re.sub(r"\s*\(at .*\)$", "", message)
        raise ConfigError(f"malformed TOML: {reason}", f"{where}:{line}", "correct that line; TOML: https://toml.io") from err


def read_text(path: Path, what: str, fix: str = "") -> str:
    """A UTF-8 file's text.

    Raises:
        ConfigError: the file is missing, a directory, unreadable or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{what} does not exist: {path}", "", fix or "check the path") from None
    except UnicodeDecodeError as err:
        raise ConfigError(f"{what} is not UTF-8 text: {path}", "", f"byte {err.start}: {err.reason}") from None
    except OSError as err:
        raise ConfigError(f"{what} cannot be read: {path}: {err.strerror}", "", fix or "check the path") from None


def key_lines(text: str) -> dict[str, int]:
    """Dotted key → 1-based line where it is set, for tables too.

    Keys inside an inline table or an array carry the line of the key that holds them.
    """
    lines: dict[str, int] = {}
    table = ""
    depth, quote = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        rest = line
        if not depth and not quote:
            if header := _HEADER.match(line):
                table = _normal(header.group("name"))
                lines.setdefault(table, number)
                continue
            if key := _KEY.match(line):
                dotted = _normal(key.group("key"))
                lines.setdefault(f"{table}.{dotted}" if table else dotted, number)
                rest = line[key.end() :]
        depth, quote = _scan(rest, depth, quote)
    return lines


def line_of(lines: dict[str, int], key: str) -> int:
    """The line of a key, or of the nearest table or key that holds it."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return 1


def _normal(key: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in key.split("."))


def _scan(text: str, depth: int, quote: str) -> tuple[int, str]:
    """Bracket depth and open multi-line string after `text`."""
    position = 0
    while position < len(text):
        if quote:
            end = text.find(quote, position)
            if end < 0:
                return depth, quote
            position, quote = end + 3, ""
            continue
        match = _STRING.search(text, position)
        if match is None:
            break
        token = match.group()
        position = match.end()
        if token == "#":
            break
        if token in ('"""', "'''"):
            quote = token
        elif token in "[{":
            depth += 1
        elif token in "]}":
            depth = max(0, depth - 1)
    return depth, quote
