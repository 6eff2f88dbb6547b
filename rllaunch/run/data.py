"""Prompts from JSONL files and the reward function, both checked before Ray starts."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rllaunch.errors import RESUME, ConfigError, DataError, RunError
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.schema import LaunchConfig

Reward = Callable[[str, str, str], float]


@dataclass(frozen=True)
class Prompt:
    """One prompt of a file. `label` is what the reward compares with; empty when the line has none."""

    text: str
    label: str


@dataclass(frozen=True)
class PromptFile:
    """The prompts of a file, and what may be a slip in it."""

    prompts: list[Prompt]
    warning: str = ""


def load_prompts(path: str, where: str) -> PromptFile:
    """The prompts of a JSONL file, in its order; blank lines are skipped.

    Args:
        where: who named the file, for the error.
    Raises:
        DataError: the file is missing or empty, or a line is not an object with a string `prompt`;
            with the line's number.
    """
    file = Path(path)
    try:
        raw = file.read_bytes()
    except OSError as err:
        raise DataError(f"prompt file cannot be read: {path}: {err.strerror}", where, "check the path") from None
    prompts, unread = [], set[str]()
    for number, line in enumerate(raw.split(b"\n"), start=1):
        if not line.strip():
            continue
        place = (f"{path}:{number}", where)
        try:
            row = json.loads(line)
        except UnicodeDecodeError as err:
            raise DataError(
                f"line {number} is not UTF-8: {err.reason} at byte {err.start}", place, "save the file as UTF-8"
            ) from None
        except ValueError as err:
            raise DataError(
                f"line {number} is not JSON: {err}",
                place,
                'each line is an object such as {"prompt": "12=", "label": "21"}',
            ) from None
        prompts.append(_prompt(row, number, place))
        unread |= set(row) - {"prompt", "label"}
    if not prompts:
        raise DataError(f"prompt file has no prompts: {path}", where, 'write one {"prompt": …, "label": …} a line')
    if unread and not any(prompt.label for prompt in prompts):
        keys = ", ".join(sorted(map(repr, unread)))
        return PromptFile(prompts, f'no line of {path} has a "label" for the reward; keys that are not read: {keys}')
    return PromptFile(prompts)


def _prompt(row: Any, number: int, place: tuple[str, ...]) -> Prompt:
    if not isinstance(row, dict):
        raise DataError(
            f"line {number} is {type(row).__name__}, not an object", place, 'write {"prompt": …, "label": …}'
        )
    if "prompt" not in row:
        keys = ", ".join(map(repr, row)) or "none"
        raise DataError(f'line {number} has no "prompt" (keys: {keys})', place, 'name the text "prompt"')
    text, label = row["prompt"], row.get("label", "")
    if not isinstance(text, str) or not text:
        raise DataError(
            f'"prompt" in line {number} is {json.dumps(text)}, not a text', place, "give a non-empty string"
        )
    if not isinstance(label, str):
        raise DataError(f'"label" in line {number} is {json.dumps(label)}, not a text', place, "give a string")
    return Prompt(text, label)


def load_reward(target: str, where: str) -> Reward:
    """The function a `module:function` names; modules of the current directory are found too.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module_name, _, name = target.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as err:
        raise ConfigError(
            f"reward module {module_name!r} cannot be imported: {type(err).__name__}: {err}",
            where,
            "name an importable module; those of the current directory are found",
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        known = ", ".join(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(f"{module_name} has no function {name!r}", where, f"it has: {known or 'none'}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{target} is async", where, "a reward is a plain function that returns a number")
    with contextlib.suppress(ValueError):  # some built-in functions do not tell their parameters
        signature = inspect.signature(function)
        try:
            signature.bind("prompt", "response", "label")
        except TypeError as err:
            fix = "a reward is called as function(prompt, response, label)"
            raise ConfigError(f"{target}{signature} cannot be called with three texts: {err}", where, fix) from None
    reward: Reward = function
    return reward


def score(reward: Reward, name: str, prompt: Prompt, response: str) -> float:
    """The reward of one response.

    Raises:
        RunError: the function raised, or returned something that is no finite number; with the prompt.
    """
    shown = (f"prompt: {prompt.text!r}", f"response: {response!r}", f"label: {prompt.label!r}", f"reward: {name}")
    try:
        value = reward(prompt.text, response, prompt.label)
    except (Exception, SystemExit) as err:
        frame = traceback.extract_tb(err.__traceback__)[-1]
        raise RunError(
            f"the reward function raised {type(err).__name__}: {err}",
            (*shown, f"at {frame.filename}:{frame.lineno} in {frame.name}"),
            f"correct the function; {RESUME}",
        ) from None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RunError(
            f"the reward function returned {value!r}, not a finite number",
            shown,
            f"correct the function; {RESUME}",
        )
    return number


@dataclass(frozen=True)
class TaskData:
    """The prompts of a run, and what follows from them.

    Args:
        vocabulary: characters of a character tokenizer, in id order; empty for a checkpoint's tokenizer.
        warnings: what may be a slip in the prompt files.
    """

    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    vocabulary: str
    warnings: tuple[str, ...] = ()


def load_task(resolved: Resolved) -> TaskData:
    """Read the prompt files and import the reward: whatever is wrong with them shows before Ray starts.

    Raises:
        DataError, ConfigError: with the line of the file, or the name that cannot be imported.
    """
    config = resolved.config

    def origin(key: str) -> str:
        found = resolved.origin(key)
        return f"{key}   {found.layer}: {found.source}"

    keys = ("task.prompt_data", "task.eval_prompt_data")
    files = [load_prompts(path, origin(key)) if (path := resolved.value(key)) else PromptFile([]) for key in keys]
    prompts, eval_prompts = (file.prompts for file in files)
    load_reward(config.task.reward, origin("task.reward"))
    vocabulary = config.model.vocabulary
    if vocabulary == "auto":
        vocabulary = "".join(sorted({c for p in [*prompts, *eval_prompts] for c in p.text + p.label}))
    elif vocabulary:
        _check_vocabulary(config, vocabulary, prompts, eval_prompts, origin("model.vocabulary"))
    return TaskData(prompts, eval_prompts, vocabulary, tuple(file.warning for file in files if file.warning))


def _check_vocabulary(
    config: LaunchConfig, vocabulary: str, prompts: list[Prompt], eval_prompts: list[Prompt], where: str
) -> None:
    for path, group in ((config.task.prompt_data, prompts), (config.task.eval_prompt_data, eval_prompts)):
        for number, prompt in enumerate(group, start=1):
            if unknown := sorted(set(prompt.text) - set(vocabulary)):
                raise DataError(
                    f"prompt {number} has characters the vocabulary lacks: {''.join(unknown)!r}",
                    (path, where),
                    "--set model.vocabulary=auto takes the characters of the task",
                )
