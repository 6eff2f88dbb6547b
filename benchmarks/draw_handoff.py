"""Draws what `handoff_gpu.py --json` measured: seconds of a handoff by step, and the host copies it holds.

python benchmarks/draw_handoff.py benchmarks/results/2026-11-30-{handoff,update}-h200.json 4b docs/handoff-h200.png

Of several files, and of several runs in one, the last that has a way of handing over is drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS = {
    "trainer.onload": ("trainer in", "#1f6fb4"),
    "trainer.offload": ("trainer out", "#7fb3dd"),
    "engine.offload_weights": ("engine weights out", "#c8601a"),
    "engine.onload_weights": ("engine weights in", "#efab78"),
    "update_weights": ("weight update", "#3d8a4f"),
}
OTHER = ("KV cache and graphs", "#9a9aa5")


def label(row: dict[str, Any]) -> str:
    who = "torch_memory_saver" if row["backend"] == "torch_memory_saver" else "rllaunch arena"
    source = ", update from host" if row["order"] == "gpu" and row.get("update_from", "host") == "host" else ""
    return f"{who}, {row['buffers']}, {row['engine_weights']}, {row['order']} order{source}"


def draw(rows: list[dict[str, Any]], target: Path) -> None:
    latest = {label(row): row for row in rows}
    rows = sorted(latest.values(), key=lambda row: row["sum"], reverse=True)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 0.42 * len(rows) + 1.7), sharey=True, width_ratios=(3, 2))
    for y, row in enumerate(rows):
        start = 0.0
        rest = row["sum"] - sum(row["seconds"].get(step, 0.0) for step in STEPS)
        parts = [(row["seconds"].get(step, 0.0), *look) for step, look in STEPS.items()] + [(rest, *OTHER)]
        for seconds, _, colour in parts:
            left.barh(y, seconds, left=start, color=colour, height=0.72)
            start += seconds
        left.text(start, y, f"  {row['sum']:.1f} s", va="center", fontsize=9)
        if row["host_gib"] is None:
            continue
        right.barh(y, row["host_gib"], color="#b9b3d6", height=0.72)
        right.plot([row["planned_host_gib"]] * 2, [y - 0.36, y + 0.36], color="#3a2f7a", linewidth=2)
        right.text(row["host_gib"], y, f"  {row['host_gib']:.1f}", va="center", fontsize=9)
    left.set_yticks(range(len(rows)), [label(row) for row in rows], fontsize=9)
    left.set_xlabel("seconds of one handoff, both ways")
    right.set_xlabel("GiB of host copies (line: planned)")
    left.set_xlim(0, max(row["sum"] for row in rows) * 1.1)
    right.set_xlim(0, max(row["host_gib"] or 0.0 for row in rows) * 1.15)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in (*STEPS.values(), OTHER)]
    left.legend(handles, [name for name, _ in (*STEPS.values(), OTHER)], fontsize=8, frameon=False, loc="upper right")
    first = rows[-1]
    figure.suptitle(
        f"{first['parameters'] / 1e9:.1f} B parameters on one H200: {first['backup_gib']:.1f} GiB of trainer state, "
        f"{first['update_gib']:.1f} GiB of engine weights change places",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def main() -> None:
    *sources, size, target = sys.argv[1:]
    rows: list[dict[str, Any]] = []
    for source in sources:
        its_rows = json.loads(Path(source).read_text(encoding="utf-8"))
        rows += sorted((row for row in its_rows if row["size"] == size), key=lambda row: row["run"])
    draw(rows, Path(target))


if __name__ == "__main__":
    main()
