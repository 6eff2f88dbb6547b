"""Prompts, labels and rewards of the shipped tasks."""

from __future__ import annotations

import json
import random
import tomllib
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rllaunch_profiles.rewards import digits_in_place

TASKS = Path(str(files("rllaunch_profiles"))) / "tasks"
SEED = 20261129


def lines_of(task: str, key: str) -> list[dict[str, str]]:
    """The JSON objects of a task's file, found as a run finds it: relative to the TOML."""
    choices = tomllib.loads((TASKS / f"{task}.toml").read_text(encoding="utf-8"))["choices"]["task"]
    return [json.loads(line) for line in (TASKS / choices[key]).read_text(encoding="utf-8").splitlines()]


def prompts_of(task: str, key: str) -> list[str]:
    return [line["prompt"].removesuffix("=") for line in lines_of(task, key)]


def test_reverse_holds_each_of_the_thousand_strings_once():
    train, heldout = prompts_of("reverse", "prompt_data"), prompts_of("reverse", "eval_prompt_data")
    assert (len(train), len(heldout)) == (800, 200)
    assert sorted(train + heldout) == [f"{number:03d}" for number in range(1000)]


def test_sort_holds_different_four_digit_strings():
    train, heldout = prompts_of("sort", "prompt_data"), prompts_of("sort", "eval_prompt_data")
    assert (len(train), len(heldout)) == (2000, 200)
    assert len({*train, *heldout}) == 2200
    assert all(len(digits) == 4 and digits.isdecimal() for digits in train + heldout)


def test_the_splits_are_those_of_the_documented_seed():
    reverse = [f"{number:03d}" for number in range(1000)]
    random.Random(SEED).shuffle(reverse)
    assert reverse == prompts_of("reverse", "prompt_data") + prompts_of("reverse", "eval_prompt_data")
    sort = [f"{number:04d}" for number in random.Random(SEED).sample(range(10000), 2200)]
    assert sort == prompts_of("sort", "prompt_data") + prompts_of("sort", "eval_prompt_data")
    for task in ("reverse", "sort"):
        assert f"seed {SEED}" in (TASKS / f"{task}.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("key", ["prompt_data", "eval_prompt_data"])
def test_every_label_is_right(key):
    for line in lines_of("reverse", key):
        assert line == {"prompt": line["label"][::-1] + "=", "label": line["label"]}
    for line in lines_of("sort", key):
        assert line["label"] == "".join(sorted(line["prompt"].removesuffix("=")))
        assert set(line) == {"prompt", "label"}


@pytest.mark.parametrize("task", ["reverse", "sort"])
def test_the_reward_of_a_task_can_be_imported_and_is_full_for_the_label(task):
    choices = tomllib.loads((TASKS / f"{task}.toml").read_text(encoding="utf-8"))["choices"]["task"]
    module, _, function = choices["reward"].partition(":")
    reward = getattr(import_module(module), function)
    line = lines_of(task, "prompt_data")[0]
    assert reward(line["prompt"], line["label"], line["label"]) == 1.0


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("321", 4),  # three digits and the end
        ("3210", 3),  # all digits, did not stop
        ("32", 2),  # stopped early: two digits, the end is not in its place
        ("", 0),
        ("3", 1),
        ("123", 2),  # the middle digit and the end
        ("999", 1),  # the end only
        ("9999", 0),
        ("0321", 0),  # right digits in wrong places
        ("321=123", 3),
    ],
)
def test_a_response_earns_a_quarter_for_each_digit_in_place_and_for_the_end(response, right):
    assert digits_in_place("123=", response, "321") == right / 4


@given(response=st.text(max_size=6), label=st.text(max_size=6))
def test_a_reward_lies_between_0_and_1_and_is_1_for_the_label_only(response, label):
    reward = digits_in_place("", response, label)
    assert 0.0 <= reward <= 1.0
    assert (reward == 1.0) == (response == label)


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("37 + 58 = 95", "95", 1.0),
        ("The answer is 95.", "95", 1.0),
        ("95", "95", 1.0),
        ("It is 95, not 96", "95", 0.0),
        ("so 12 - 40 = -28", "-28", 1.0),
        ("7-5", "5", 1.0),
        ("1,204", "1204", 1.0),
        ("95.0", "95", 1.0),
        ("no idea", "95", 0.0),
        ("", "95", 0.0),
    ],
)
def test_last_number_reads_the_last_number(response, label, reward):
    from rllaunch_profiles.rewards import last_number

    assert last_number("What is it?", response, label) == reward


def test_arithmetic_labels_are_right_and_nothing_is_held_out_twice():
    import re

    train, held_out = (lines_of("arithmetic", key) for key in ("prompt_data", "eval_prompt_data"))
    assert (len(train), len(held_out)) == (2000, 200)
    for line in [*train, *held_out]:
        a, sign, b = re.match(r"What is (\d+) (.) (\d+)\?", line["prompt"]).groups()
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "×": int(a) * int(b)}[sign]
        assert line["label"] == str(value)
    assert len({line["prompt"] for line in [*train, *held_out]}) == 2200
