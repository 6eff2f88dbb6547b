"""Bytes as a person reads them."""

from __future__ import annotations


def gib(nbytes: float) -> str:
    """Bytes in binary units, one decimal."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"
