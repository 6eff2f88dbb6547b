"""What a link between a GPU and host RAM carries, by the words in which profiles name it."""

from __future__ import annotations

import re

# Bytes per second that a lane carries one way after its coding (128b/130b; Gen6: PAM4 with FLITs).
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.56e9, 7: 15.1e9}
C2C_BYTES_PER_SECOND = 450e9
# Of what a link carries, what pinned copies reach on PCIe Gen4 and Gen5 boards (0.80 to 0.88 in the shipped profiles).
REACHED = 0.83
LANES = (1, 2, 4, 8, 16)
_PCIE = re.compile(r"PCIe Gen(\d+)(?: x(\d+))?")


def link_bytes_per_second(text: str) -> float | None:
    """Bytes per second one way of a link as profiles write it; 16 lanes where none are named. None: not known."""
    if text == "NVLink-C2C":
        return C2C_BYTES_PER_SECOND
    found = _PCIE.fullmatch(text)
    lane, lanes = (PCIE_LANE.get(int(found[1])), int(found[2] or 16)) if found else (None, 0)
    return lane * lanes if lane and lanes in LANES else None


def why_unknown(text: str) -> str:
    """What is wrong with a text that seems to name a link whose speed is not known; empty for other texts."""
    if (found := _PCIE.fullmatch(text)) is None:
        looks_like_one = re.search(r"pci|c2c|gen ?\d", text, re.IGNORECASE)
        return f"{text!r} names no generation of a link" if looks_like_one else ""
    if int(found[1]) not in PCIE_LANE:
        return f"{text!r}: no PCIe generation {found[1]} is known"
    *some, most = LANES
    return f"{text!r}: a link has {', '.join(map(str, some))} or {most} lanes, not {found[2]}"


def reached_bytes_per_second(text: str) -> tuple[float, str] | None:
    """What pinned copies reach on that link where nobody measured it, and a sentence that says so; None: not known."""
    carries = link_bytes_per_second(text)
    if carries is None:
        return None
    said = f"not measured: {REACHED:.0%} of the {carries / 1e9:.1f} GB/s that {text} carries"
    return round(carries * REACHED, -8), said
