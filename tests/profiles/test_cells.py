"""Every shipped cell, as it resolves: the doctor has nothing against it, and its plan is the golden one.

The golden texts say what is taken and what it costs; `UPDATE_GOLDEN=1 pytest` writes them anew. Read a change
of them before you commit it: it is a change of what people are told about their launches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rllaunch.resolve.schema import LaunchConfig

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "cells"
CELLS = {
    "deepseek-v4-pro-h200": ("deepseek-v4-pro", "H200"),
    "dsv4-gb300": ("dsv4", "GB300"),
    "dsv4-h200": ("dsv4", "H200"),
    "dsv4-mi355x": ("dsv4", "MI355X"),
    "glm-4.7-flash-b200": ("glm-4.7-flash", "B200"),
    "glm-4.7-flash-h200": ("glm-4.7-flash", "H200"),
    "glm-5-gb300": ("glm-5", "GB300"),
    "glm-5-h200": ("glm-5", "H200"),
    "glm-5.2-gb300": ("glm-5.2", "GB300"),
    "glm-5.2-h100": ("glm-5.2", "H100"),
    "glm-5.2-h200": ("glm-5.2", "H200"),
    "inkling-gb300": ("inkling", "GB300"),
    "nemotron-3-nano-h200": ("nemotron-3-nano-30b-a3b", "H200"),
    "qwen3-30b-a3b-b300": ("qwen3-30b-a3b", "B300"),
    "qwen3-30b-a3b-gb200": ("qwen3-30b-a3b", "GB200"),
    "qwen3-30b-a3b-gb300": ("qwen3-30b-a3b", "GB300"),
    "qwen3-30b-a3b-h100": ("qwen3-30b-a3b", "H100"),
    "qwen3-4b-gb300": ("qwen3-4b", "GB300"),
    "qwen3-4b-h100": ("qwen3-4b", "H100"),
    "qwen3-4b-mi350x": ("qwen3-4b", "MI350X"),
    "qwen3.5-35b-a3b-b300": ("qwen3.5-35b-a3b", "B300"),
    "qwen3.5-35b-a3b-h200": ("qwen3.5-35b-a3b", "H200"),
}

# RL338 takes `megatron.moe_token_dispatcher_type` for a token of the secret kind. Empty this once it does not.
# Its recipe offloads the trainer to a disk, which a plan counts as host memory, and predates `gpu` order.
DOES_NOT_FIT = {"inkling-gb300": {"RL201", "RL202"}}

every_cell = pytest.mark.parametrize("name", CELLS)


def of_cell(name: str, *words: str) -> list[str]:
    model, hardware = CELLS[name]
    return [*words, "--model", model, "--hardware", hardware]


def ours(rllaunch: Any, kind: str) -> list[str]:
    listed = rllaunch("profiles", "list", "--kind", kind, "--json").json()
    return sorted(p["name"] for p in listed if p["plugin"].startswith("rllaunch "))


def test_every_shipped_cell_is_in_the_table(rllaunch: Any):
    assert ours(rllaunch, "cell") == sorted(CELLS)
    assert len(CELLS) == 22
    assert len(ours(rllaunch, "hardware")) == 21


def test_every_golden_plan_is_of_a_cell():
    assert sorted(file.stem for file in GOLDEN.glob("*.txt")) == sorted(CELLS)


@every_cell
def test_a_launch_of_its_model_and_hardware_takes_the_cell(rllaunch: Any, name: str):
    result = rllaunch(*of_cell(name, "resolve", "--json"))
    assert result.code == 0, result.err
    last = result.json()["origins"]["sglang.mem_fraction_static"][-1]
    assert (last["layer"], last["source"].split()[0]) == ("cell", name)


@every_cell
def test_no_rule_about_the_configuration_has_anything_against_a_cell(rllaunch: Any, name: str):
    result = rllaunch(*of_cell(name, "doctor", "--no-probe", "--json"))
    errors = {f["code"] for f in result.json()["findings"] if f["level"] == "error"}
    assert errors == DOES_NOT_FIT.get(name, set())


@every_cell
def test_the_plan_of_a_cell_is_its_golden_one(rllaunch: Any, name: str):
    config = LaunchConfig(**rllaunch(*of_cell(name, "resolve", "--json")).json()["config"])
    result = rllaunch(*of_cell(name, "plan", "--json"))
    plan = result.json()
    assert result.code == (4 if name in DOES_NOT_FIT else 0), result.err
    assert plan["fits"] == (name not in DOES_NOT_FIT)
    assert plan["peaks"]["gpu"] > 0
    assert plan["peaks"]["host"] > 0
    text = told(config, plan)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    assert file.read_text(encoding="utf-8") == text


def test_glm_5_2_fits_its_trays_in_cpu_order(rllaunch: Any):
    result = rllaunch(*of_cell("glm-5.2-gb300", "plan", "--json"), "--colocate-memory-peak-device", "cpu")
    assert (result.code, result.json()["fits"]) == (0, True)


def told(config: LaunchConfig, plan: dict[str, Any]) -> str:
    """A plan as a few lines of text: headline, layout, handoff, peaks, and each step with its GiB on GPU and host."""
    cluster, hardware = config.cluster, config.hardware
    billions, verdict = plan["parameters"] / 1e9, "fits" if plan["fits"] else "does not fit"
    steps = [
        f"  {step['phase']:5}  {step['name']:23}  {gib(step['gpu']['total'])}  {gib(step['host']['total'])}"
        for step in plan["steps"]
    ]
    peaks = [
        f"{tier} peak {gib(plan['peaks'][key]).strip()} of {gib(plan['limits'][key]).strip()} GiB"
        for tier, key in (("GPU", "gpu"), ("host", "host"))
    ]
    lines = [
        f"{config.model.name} ({billions:.1f} B parameters) on {cluster.num_nodes} × {cluster.num_gpus_per_node} "
        f"{hardware.name}: {verdict}",
        f"layout: {layout(config)}",
        f"handoff: {handoff(config, plan)}",
        *peaks,
        f"  phase  {'step':23}  {'GPU':>7}  {'host':>7}",
        *steps,
    ]
    return "\n".join(lines) + "\n"


def layout(config: LaunchConfig) -> str:
    trainer, rollout, sglang = config.trainer, config.rollout, config.sglang
    sizes = (
        f"TP{trainer.tensor_model_parallel_size} PP{trainer.pipeline_model_parallel_size} "
        f"CP{trainer.context_parallel_size} EP{trainer.expert_model_parallel_size}"
    )
    ends = (trainer.decoder_first_pipeline_num_layers, trainer.decoder_last_pipeline_num_layers)
    named = [f"{place} {count}" for place, count in zip(("first", "last"), ends, strict=True) if count is not None]
    stages = f" ({', '.join(named)} layers)" if named else ""
    attention = f", attention over DP{sglang.dp_size}" if sglang.enable_dp_attention else ""
    engines = f"engines of {rollout.rollout_num_gpus_per_engine} in {rollout.dtype}, EP{sglang.ep_size}{attention}"
    return f"{sizes}{stages} in {trainer.precision}; {engines}"


def handoff(config: LaunchConfig, plan: dict[str, Any]) -> str:
    backup = f"{plan['buffers']} backup" if plan["offload_train"] else "trainer stays"
    optimizer = "host" if config.trainer.optimizer_cpu_offload else "GPU"
    return f"{plan['order']} order, {plan['engine_weights']}, {backup}, optimizer on the {optimizer}"


def gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:7.1f}"
