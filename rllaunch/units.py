"""Bytes, and counts of parameters, as a person reads and writes them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

# By the prefix; the B of a byte is a capital, since Gb/s are gigabits.
PREFIXES: Mapping[str, int] = {
    "": 1,
    **{name: 1000**power for power, name in enumerate("kmgtp", 1)},
    **{f"{name}i": 1024**power for power, name in enumerate("kmgtp", 1)},
}
# What a text with an amount looks like, by what is counted: bytes, or bytes a second.
AMOUNT: Mapping[str, str] = {
    "B": r"^\s*\d+(\.\d+)?\s*([kKmMgGtTpP][iI]?)?B\s*$",
    "B/s": r"^\s*\d+(\.\d+)?\s*([kKmMgGtTpP][iI]?)?B/s\s*$",
}


# A unit, its bytes, and from how many of them on it is shown. The memory of a GPU or a node stays in GiB, in which
# people give it to a cgroup and to Slurm: 1600 GiB would be 1.6 TiB, as 1638 are.
SHOWN_UNITS: tuple[tuple[str, int, int], ...] = (
    ("TiB", 2**40, 10),
    ("GiB", 2**30, 1),
    ("MiB", 2**20, 1),
    ("KiB", 2**10, 1),
)


def count(number: int) -> str:
    """A number of parameters as people say it: 284.3 B, 596.0 M, 75.9 k."""
    for size, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {name}"
    return str(number)


def gib(nbytes: float) -> str:
    """Bytes in binary units, one decimal; GiB below 10 TiB."""
    for unit, size, least in SHOWN_UNITS:
        if abs(nbytes) >= least * size:
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
    is_rate = unit == "B/s"
    end = "/s" if is_rate else ""
    prefix = given.removesuffix(f"B{end}").lower()
    if not given.endswith(f"B{end}") or prefix not in PREFIXES:
        binary, decimal = (", ".join(f"{p}{kind}{end}" for p in "kMGT") for kind in ("iB", "B"))
        some = f"{binary.replace('k', 'K')} (powers of 1024) or {decimal} (of 1000)"
        raise ValueError(f"{given!r} is no unit of {'bytes a second' if is_rate else 'bytes'}: {some}")
    amount = float(number) * PREFIXES[prefix]
    return amount if is_rate else round(amount)
