"""Draws what `handoff_gpu.py --json` measured: seconds of a handoff, and the host copies that each way of it holds.

python benchmarks/draw_handoff.py benchmarks/results/2026-11-30-{handoff,update}-h200.json 4b docs/handoff-h200.png

The ways in `WAYS`, which differ; the tables beside the JSON have all that were measured. Of several files, and of
several runs in one, the last that has a way is drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Backend, buffers, engine weights, order, where an update reads → how the row is called.
WAYS = {
    ("torch_memory_saver", "fresh", "mirror", "cpu", "host"): "torch_memory_saver as it comes, with a mirror",
    ("arena", "fresh", "mirror", "cpu", "host"): "fresh buffers, with a mirror",
    ("arena", "fresh", "discard", "cpu", "host"): "fresh buffers",
    ("arena", "retained", "mirror", "cpu", "host"): "retained buffers, with a mirror",
    ("arena", "shared", "mirror", "gpu", "host"): "shared buffer, gpu order, with a mirror",
    ("arena", "retained", "discard", "cpu", "host"): "retained buffers (the default)",
    ("arena", "retained", "discard", "gpu", "gpu"): "retained buffers, gpu order: update from the GPU",
}
PARTS = (
    ("trainer out", ("trainer.offload",), "#7fb3dd"),
    ("trainer in", ("trainer.onload",), "#1f6fb4"),
    ("engine weights, their mirror", ("engine.offload_weights", "engine.onload_weights"), "#e08f4f"),
    ("update", ("update_weights",), "#3d8a4f"),
)
REST = "#9a9aa5"
HELD = "#b9b3d6"


def way(row: dict[str, Any]) -> tuple[str, ...]:
    return row["backend"], row["buffers"], row["engine_weights"], row["order"], row.get("update_from", "host")


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    plt.rcParams.update({"font.size": 11})
    latest = {way(row): row for row in rows if way(row) in WAYS}
    rows = sorted(latest.values(), key=lambda row: row["sum"])
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10.5, 0.44 * len(rows) + 1.75), sharey=True, width_ratios=(5, 3), layout="constrained"
    )
    for y, row in enumerate(rows):
        parts = [(sum(row["seconds"].get(step, 0.0) for step in steps), colour) for _, steps, colour in PARTS]
        parts.append((row["sum"] - sum(seconds for seconds, _ in parts), REST))
        start = 0.0
        for seconds, colour in parts:
            left.barh(y, seconds, left=start, color=colour, height=0.7)
            start += seconds
        left.text(start, y, f" {row['sum']:.1f} s", va="center", fontweight="bold")
        has_own_mirror = row["engine_weights"] == "mirror" and row["buffers"] != "shared"
        backup_gib = row["backup_gib"] if has_own_mirror else row["host_gib"]
        right.barh(y, backup_gib, color=HELD, height=0.7)
        right.barh(y, row["host_gib"] - backup_gib, left=backup_gib, color=PARTS[2][2], height=0.7)
        right.text(row["host_gib"], y, f" {row['host_gib']:.1f} GiB", va="center", fontweight="bold")
    left.set_yticks(range(len(rows)), [WAYS[way(row)] for row in rows])
    left.set_title("seconds of one handoff", loc="left", fontsize=11)
    right.set_title("copies on the host", loc="left", fontsize=11)
    left.set_xlim(0, max(row["sum"] for row in rows) * 1.14)
    right.set_xlim(0, max(row["host_gib"] for row in rows) * 1.42)
    for axes in (left, right):
        axes.spines[["top", "right", "bottom"]].set_visible(False)
        axes.tick_params(left=False)
        axes.set_xticks([])
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, _, colour in PARTS]
    names = [name for name, _, _ in PARTS]
    handles.append(plt.Rectangle((0, 0), 1, 1, color=HELD))
    left.legend(handles, [*names, "trainer's state on the host"], fontsize=10, frameon=False, loc="lower right")
    first = rows[0]
    figure.suptitle(
        f"{first['parameters'] / 1e9:.1f} B parameters on one H200: {first['backup_gib']:.0f} GiB of trainer state and "
        f"{first['update_gib']:.1f} GiB of engine weights change places",
        fontsize=12,
    )
    figure.savefig(target, dpi=150)


def main() -> None:
    *sources, size, target = sys.argv[1:]
    rows: list[dict[str, Any]] = []
    for source in sources:
        its_rows = json.loads(Path(source).read_text(encoding="utf-8"))
        rows += sorted((row for row in its_rows if row["size"] == size), key=lambda row: row["run"])
    draw(rows, Path(target))


if __name__ == "__main__":
    main()
