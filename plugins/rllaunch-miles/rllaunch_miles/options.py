"""The options miles' parser takes, from `options.txt`, and how a value is written for one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

KINDS = ("switch", "off", "boolean", "value", "values")


@dataclass(frozen=True)
class Option:
    """
    Args:
        kind: one of `KINDS`; `options.txt` says what each takes.
        sets: the attribute it sets.
    """

    flag: str
    kind: str
    sets: str


class NotTaken(ValueError):
    """Miles takes no such option, or not with this value; the message says which."""


@cache
def options() -> dict[str, Option]:
    """Flag → option. A name that stands twice is what it is where it stands first."""
    found: dict[str, Option] = {}
    for line in files(__package__).joinpath("options.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("--"):
            flag, kind, *sets = line.split()
            found.setdefault(flag, Option(flag, kind, sets[0] if sets else flag[2:].replace("-", "_")))
    return found


@cache
def _by_attribute() -> dict[str, Option]:
    """What sets an attribute; what turns it on before what turns it off."""
    found: dict[str, Option] = {}
    for option in sorted(options().values(), key=lambda o: o.kind == "off"):
        found.setdefault(option.sets, option)
    return found


def written(name: str, value: Any) -> tuple[str, ...]:
    """The words that give option `name` (dashes or underscores, without the first two) a value; none where that is
    what miles does without a word.

    Raises:
        NotTaken: there is no such option, or it takes another kind of value.
    """
    option = options().get("--" + name.replace("_", "-")) or _by_attribute().get(name.replace("-", "_"))
    if option is None:
        raise NotTaken(f"train.py of miles has no option --{name.replace('_', '-')}")
    if option.kind in ("switch", "off", "boolean"):
        if not isinstance(value, bool):
            raise NotTaken(f"{option.flag} of miles is on or off, and takes no value")
        # An `off` that is named itself (`no_save_optim = true`) is given; one found by what it sets turns that off.
        is_named = option.kind == "off" and option.flag[2:] == name.replace("_", "-")
        if option.kind == "boolean" and not value:
            return (f"--no-{option.flag[2:]}",)
        return (option.flag,) if value == (option.kind != "off" or is_named) else ()
    if isinstance(value, (list, tuple)):
        if option.kind == "values" and value:
            return (option.flag, *map(_text, value))
        if option.kind == "values":
            raise NotTaken(f"{option.flag} of miles takes at least one value")
        return (option.flag, json.dumps(list(value), separators=(",", ":")))
    return (option.flag, _text(value))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
