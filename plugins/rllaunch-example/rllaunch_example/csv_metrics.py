"""A sink for metrics: one line of CSV a rollout, with what the handoff took."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FIGURES = ("rollout_id", "reward_mean", "loss", "entropy", "grad_norm")
COLUMNS = (*FIGURES, "handoff_seconds", "handoff_bytes")


class CsvMetrics:
    """Writes to a file that is whole after each rollout.

    A resumed run goes on in the file, without the rollouts it repeats.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.rows: list[dict[str, Any]] = []
        if file.exists():
            with file.open(newline="", encoding="utf-8") as stream:
                self.rows = list(csv.DictReader(stream))
        self._start_rollout()

    def on_event(self, event: Mapping[str, Any]) -> None:
        if event["step"].rpartition(".")[2].startswith(("offload", "onload")):
            self.handoff_seconds += event["seconds"]
            self.handoff_bytes += event["bytes_moved"]

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        row = {key: metrics.get(key) for key in FIGURES}
        row |= {"handoff_seconds": round(self.handoff_seconds, 6), "handoff_bytes": self.handoff_bytes}
        self.rows = [r for r in self.rows if int(r["rollout_id"]) < metrics["rollout_id"]] + [row]
        self._write()
        self._start_rollout()

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Nothing is left to do: the file was whole after each rollout."""

    def _start_rollout(self) -> None:
        self.handoff_seconds, self.handoff_bytes = 0.0, 0

    def _write(self) -> None:
        staging = self.file.with_suffix(".tmp")
        with staging.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        staging.replace(self.file)
