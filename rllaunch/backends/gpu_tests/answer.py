"""What a test of the GPU answers: one line of JSON, whatever happens."""

from __future__ import annotations

import json
import os
from collections.abc import Callable


class TestFailed(Exception):
    """The GPU did something else than was asked of it."""

    __test__ = False


def answer(test: Callable[[], str]) -> None:
    """Run a test, print its answer and end the process, without the clean-up of whatever it left half-way.

    Args:
        test: returns what was seen, or raises.
    """
    try:
        ok, text = True, test()
    except Exception as err:
        ok, text = False, str(err).strip() if isinstance(err, TestFailed) else f"{type(err).__name__}: {err}".strip()
    print(json.dumps({"ok": ok, "text": text.splitlines()[0] if text else ""}), flush=True)
    os._exit(0)
