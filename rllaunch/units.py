"""Bytes as a person reads and writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

UNITS: Mapping[str, int] = {
    "b": 1,
    **{f"{name}b": 1000**power for power, name in enumerate("kmgtp", 1)},
    **{f"{name}ib": 1024**power for power, name in enumerate("kmgtp", 1)},
}
# What a text with an amount looks like, by what is counted: bytes, or bytes a second.
AMOUNT: Mapping[str, str] = {
    "B": r"^\s*\d+(\.\d+)?\s*([kKmMgGtTpP][iI]?)?[bB]\s*$",
    "B/s": r"^\s*\d+(\.\d+)?\s*([kKmMgGtTpP][iI]?)?[bB]/s\s*$",
}


def gib(nbytes: float) -> str:
    """Bytes in binary units, one decimal."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def parse_amount(text: str, unit: Literal["B", "B/s"]) -> int | float | str:
    """Bytes, or bytes a second, of an amount with its unit; a text without one comes back as it is.

    Raises:
        ValueError: a unit that is none, or that may mean two; the text names those there are.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z][a-zA-Z/]*)\s*", text)
    if found is None:
        return text
    number, given = found.groups()
    name, slash, second = given.lower().partition("/")
    is_rate = unit == "B/s"
    end = "/s" if is_rate else ""
    if name not in UNITS or (slash, second) != (("/", "s") if is_rate else ("", "")):
        binary, decimal = (", ".join(f"{p}{kind}{end}" for p in "kMGT") for kind in ("iB", "B"))
        some = f"{binary.replace('k', 'K')} (powers of 1024) or {decimal} (of 1000)"
        raise ValueError(f"{given!r} is no unit of {'bytes a second' if is_rate else 'bytes'}: {some}")
    amount = float(number) * UNITS[name]
    return amount if is_rate else round(amount)
