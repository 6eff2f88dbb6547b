"""A reward of rllaunch where miles asks for one: `--custom-rm-path rllaunch_miles.reward.score`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

VARIABLE = "RLLAUNCH_MILES_REWARD"


async def score(args: Any, sample: Any, **more: Any) -> float | list[float]:
    """The reward of a sample of miles, or of each of a list of them (miles asks for either).

    `RLLAUNCH_MILES_REWARD` says which: `module:function`, called as `function(prompt, response, label)`.
    """
    # In a thread: miles asks for many at once, and one that takes long would hold up the others.
    if isinstance(sample, list):
        return list(await asyncio.gather(*(asyncio.to_thread(_score, each) for each in sample)))
    return await asyncio.to_thread(_score, sample)


def _score(sample: Any) -> float:
    return float(_function(os.environ.get(VARIABLE, ""))(sample.prompt, sample.response, sample.label))


@cache
def _function(path: str) -> Callable[[str, str, Any], float]:
    module, colon, name = path.partition(":")
    if not colon:
        raise ValueError(f"{VARIABLE} = {path!r} is not module:function")
    function: Callable[[str, str, Any], float] = getattr(import_module(module), name)
    return function
