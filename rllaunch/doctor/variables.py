"""Environment variables as the processes of a run get them."""

from __future__ import annotations

import os

from rllaunch.resolve.origins import Resolved, show_value


def process_variable(resolved: Resolved, name: str) -> tuple[str, str, bool]:
    """A variable's value as the processes get it, a line saying where it is from, and whether the user's
    environment (which wins) has it."""
    if name in os.environ:
        return os.environ[name], f"{name} = {show_value(os.environ[name])}   this environment", True
    configured = (resolved.config.env.model_extra or {}).get(name)
    if configured is None:
        return "", "", False
    return str(configured), resolved.describe(f"env.{name}"), False
