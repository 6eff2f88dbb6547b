"""The reward of `example-copy`."""

from __future__ import annotations


def same_digits(prompt: str, response: str, label: str) -> float:
    """Share of the label's characters that stand in their place, 0 if the response is longer than the label."""
    if len(response) > len(label):
        return 0.0
    return sum(a == b for a, b in zip(response, label, strict=False)) / len(label)
