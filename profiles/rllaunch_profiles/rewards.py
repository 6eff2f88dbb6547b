"""Rewards of the tasks that ship with rllaunch: pure functions of prompt, response and label."""

from __future__ import annotations

import re


def digits_in_place(prompt: str, response: str, label: str) -> float:
    """Share of right characters from 0 to 1: those of the label in their places, and the end in its place.

    The end counts as one more character and is right if the response is exactly as long as the label.
    The response comes without its end token, so a response that was cut at the length limit right after
    the label's last character looks like one that stopped there and earns that share too. Give responses
    one token more than the label has characters, and a response that did not stop is longer.

    Args:
        prompt: not used; a reward gets it because some rewards need it.
    """
    right = sum(response[place : place + 1] == character for place, character in enumerate(label))
    ends_in_place = len(response) == len(label)
    return (right + ends_in_place) / (len(label) + 1)


def last_number(prompt: str, response: str, label: str) -> float:
    """1 if the last number of the response is the label's, else 0.

    Thousands commas are ignored; a minus sign counts only where no digit or letter stands before it, so that
    `7-5` ends with 5 and `= -5` with −5. A response without a number earns 0.
    """
    numbers = re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?|\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3}\b)", "", response))
    return float(bool(numbers) and float(numbers[-1]) == float(label))
