"""What each shipped launch resolves to, as the explicit command; `UPDATE_GOLDEN=1 pytest` writes it anew.

Read a change of these files before you commit it: it is a change of what people's runs do.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LAUNCHES = [
    ("tiny", "cpu"),
    ("qwen3-0.6b", "H100"),
    ("qwen3-0.6b", "B200"),
    ("qwen3-0.6b", "B300"),
    ("qwen3-0.6b", "GB200"),
    ("dsv4", "GB300"),
    ("dsv4", "H200"),
    ("qwen3-0.6b", "A100"),
    ("qwen3-0.6b", "A100-40GB"),
    ("qwen3-0.6b", "GH200"),
    ("qwen3-0.6b", "H20"),
    ("qwen3-0.6b", "H800"),
    ("qwen3-0.6b", "L20"),
    ("qwen3-0.6b", "L40S"),
    ("qwen3-0.6b", "MI300X"),
    ("qwen3-0.6b", "MI308X"),
    ("qwen3-0.6b", "RTX-4090"),
    ("qwen3-0.6b", "RTX-PRO-6000"),
    ("qwen3-0.6b", "VR-NVL72"),
    ("qwen3-4b", "MI350X"),
    ("dsv4", "MI355X"),
]


@pytest.mark.parametrize(("model", "hardware"), LAUNCHES, ids="-".join)
def test_a_shipped_launch_resolves_to_its_golden_command(rllaunch: Any, model: str, hardware: str):
    command = rllaunch("resolve", "--model", model, "--hardware", hardware, "--json").json()["command"]
    text = ""
    for word in command:
        text += ("\n" if word.startswith("--") else " " if text else "") + word
    file = GOLDEN / f"{model}-{hardware}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text + "\n", encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text + "\n"


def test_every_hardware_profile_has_a_golden_launch(rllaunch: Any):
    names = {
        p["name"]
        for p in rllaunch("profiles", "list", "--kind", "hardware", "--json").json()
        if p["plugin"].startswith("rllaunch ")
    }
    assert names == {hardware for _, hardware in LAUNCHES}
