"""`rllaunch example-tail RUN_DIR`: where a run is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rllaunch import console
from rllaunch.errors import UsageError


def example_tail(run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run.")]) -> None:
    """Print the last metrics of a run as one line."""
    file = run_dir / "metrics.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as err:
        raise UsageError(f"no metrics: {err.strerror}", str(file), "give the directory of a run") from None
    if not lines:
        raise UsageError("no metrics yet", str(file), "wait for the first rollout")
    row = json.loads(lines[-1])
    figures = (f"{key} {row[key]:.4g}" for key in ("reward_mean", "loss", "entropy") if row.get(key) is not None)
    console.data(f"rollout {row['rollout_id']}  {'  '.join(figures)}")
