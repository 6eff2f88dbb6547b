"""The shipped TOML files themselves, read as TOML: what each must say, and what must hold between them."""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from rllaunch.resolve.schema import LaunchConfig

ROOT = Path(str(files("rllaunch_profiles")))
PROFILES: dict[str, dict[str, Any]] = {
    str(path.relative_to(ROOT)): tomllib.loads(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.toml"))
}
EXTENSIBLE = {"env", "megatron", "sglang"}
GPUS_PER_NODE = {
    "A100": 8,
    "A100-40GB": 8,
    "B200": 8,
    "B300": 8,
    "GB200": 4,
    "GB300": 4,
    "GH200": 1,
    "H100": 8,
    "H20": 8,
    "H200": 8,
    "H800": 8,
    "L20": 1,
    "L40S": 4,
    "MI300X": 8,
    "MI308X": 8,
    "MI350X": 8,
    "MI355X": 8,
    "RTX-4090": 1,
    "RTX-PRO-6000": 1,
    "VR-NVL72": 4,
    "cpu": 1,
}
AMD = {"MI300X", "MI308X", "MI350X", "MI355X"}
# Of these the sources at hand do not say how much memory a host has, or how fast a GPU reaches it.
NO_HOST_MEMORY = {"A100-40GB", "H20", "MI308X", "MI350X", "RTX-4090", "RTX-PRO-6000"}
NO_HOST_LINK = {"MI308X", "VR-NVL72"}
# Known by no name that a driver gives them: AMD's are not asked for, and the H800's card has that of its board.
NOT_DETECTED = AMD | {"H800", "VR-NVL72"}
GIB = 2**30


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {p["profile"]["name"]: p for p in PROFILES.values() if p["profile"]["kind"] == kind}


def facts(profile: dict[str, Any]) -> dict[str, Any]:
    """Values of the facts, those of the extended profile included."""
    base = profile["profile"].get("extends")
    own = {
        key: fact["value"] if isinstance(fact, dict) and set(fact) == {"value", "source"} else fact
        for key, fact in profile.get("facts", {}).items()
    }
    return (facts(of_kind(profile["profile"]["kind"])[base]) if base else {}) | own


def choice(profile: dict[str, Any], section: str, key: str) -> Any:
    return profile.get("choices", {}).get(section, {}).get(key)


def config_of(*profiles: dict[str, Any]) -> LaunchConfig:
    """The configuration that these profiles alone make, lowest layer first."""
    sections: dict[str, dict[str, Any]] = {}
    for profile in profiles:
        kind = profile["profile"]["kind"]
        if kind in ("hardware", "model"):
            sections.setdefault(kind, {}).update(facts(profile))
        for section, values in profile.get("choices", {}).items():
            sections.setdefault(section, {}).update(values)
    return LaunchConfig(**sections)


every_profile = pytest.mark.parametrize("name", PROFILES)
every_cell = pytest.mark.parametrize("name", of_kind("cell"))


def test_all_profiles_are_here():
    assert set(of_kind("hardware")) == set(GPUS_PER_NODE)
    assert len(of_kind("model")) == 36  # named in test_models.py
    assert len(of_kind("cell")) == 22  # named in test_cells.py
    assert set(of_kind("task")) == {"arithmetic", "reverse", "sort"}
    assert len(PROFILES) == 82


@every_profile
def test_a_profile_lies_in_the_folder_of_its_kind_under_its_name(name):
    profile = PROFILES[name]["profile"]
    folder = {"hardware": "hardware", "model": "models", "cell": "cells", "task": "tasks"}[profile["kind"]]
    assert name == f"{folder}/{profile['name']}.toml"
    assert profile["description"]


@every_profile
def test_every_fact_has_a_source(name):
    profile = PROFILES[name]
    assert profile["profile"]["source"]
    for key, fact in profile.get("facts", {}).items():
        if isinstance(fact, dict) and "value" in fact:
            assert set(fact) == {"value", "source"}, key
            assert fact["source"], key


@every_profile
def test_every_key_exists_in_the_configuration(name):
    profile = PROFILES[name]
    kind = profile["profile"]["kind"]
    sections = {**profile.get("choices", {}), **({kind: profile["facts"]} if "facts" in profile else {})}
    for section, values in sections.items():
        field = LaunchConfig.model_fields[section]
        for key in values:
            assert key in field.annotation.model_fields or section in EXTENSIBLE, f"[{section}] {key}"


@every_profile
def test_a_profile_makes_a_valid_configuration(name):
    config_of(PROFILES[name])


@every_profile
def test_environment_values_are_strings(name):
    assert all(isinstance(value, str) for value in PROFILES[name].get("choices", {}).get("env", {}).values())


@pytest.mark.parametrize("kind", ["hardware", "model", "task", "cell"])
def test_names_and_aliases_of_a_kind_are_distinct(kind):
    heads = [profile["profile"] for profile in of_kind(kind).values()]
    names = [name.casefold() for head in heads for name in (head["name"], *head.get("aliases", ()))]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", GPUS_PER_NODE)
def test_hardware_says_how_many_gpus_a_node_has_in_its_own_file(name):
    assert of_kind("hardware")[name]["facts"]["gpus_per_node"] == GPUS_PER_NODE[name]
    accelerator = "cpu" if name == "cpu" else "rocm" if name in AMD else "cuda"
    assert facts(of_kind("hardware")[name])["accelerator"] == accelerator


@pytest.mark.parametrize("name", [n for n in GPUS_PER_NODE if n != "cpu"])
def test_gpu_hardware_says_how_much_memory_there_is_and_how_fast_it_is_reached(name):
    said = facts(of_kind("hardware")[name])
    assert ("host_memory_bytes" not in said) == (name in NO_HOST_MEMORY)
    assert ("host_link_bytes_per_second" not in said) == (name in NO_HOST_LINK)
    sizes = [said[key] for key in ("gpus_per_node", "gpu_memory_bytes", "host_memory_bytes") if key in said]
    assert all(type(size) is int for size in sizes)
    assert 20 * GIB < said["gpu_memory_bytes"] < 300 * GIB
    assert said.get("host_memory_bytes", math.inf) > said["gpu_memory_bytes"]
    # Reached faster the nearer it is.
    speeds = [said[key] for link in ("host_link", "gpu_link", "hbm") if (key := f"{link}_bytes_per_second") in said]
    assert speeds == sorted(set(speeds))
    assert all(speed > 20e9 for speed in speeds)
    assert bool(of_kind("hardware")[name].get("detect", {}).get("gpu_names")) == (name not in NOT_DETECTED)


def test_bytes_are_what_the_driver_and_the_cgroup_show():
    hardware = of_kind("hardware")
    visible_mib = {
        "A100": 81920,
        "A100-40GB": 40960,
        "B200": 183359,
        "GB200": 189471,
        "GB300": 284208,
        "GH200": 97871,
        "H100": 81559,
        "H20": 97871,
        "H200": 143771,
        "L40S": 46068,
        "MI300X": 196592,
        "RTX-4090": 24564,
        "RTX-PRO-6000": 97887,
    }
    assert {n: facts(hardware[n])["gpu_memory_bytes"] for n in visible_mib} == {
        n: mib * 2**20 for n, mib in visible_mib.items()
    }
    assert facts(hardware["GB300"])["host_memory_bytes"] == 898 * GIB
    assert facts(hardware["GB200"])["host_memory_bytes"] == 960 * GIB


def test_gb300_and_only_gb300_puts_the_handoff_peak_on_the_gpu():
    peaks = {n: choice(p, "handoff", "colocate_memory_peak_device") for n, p in PROFILES.items()}
    assert {n: peak for n, peak in peaks.items() if peak is not None} == {
        "hardware/GB300.toml": "gpu",
        # Engines and trainer of GLM-5.2 do not fit a GPU together.
        "cells/glm-5.2-gb300.toml": "cpu",
    }


def test_cpu_has_no_memory_facts_and_runs_the_embedded_backends():
    cpu = of_kind("hardware")["cpu"]
    assert cpu["facts"] == {"accelerator": "cpu", "gpus_per_node": 1}
    assert "detect" not in cpu
    config = config_of(cpu)
    assert (config.trainer.backend, config.rollout.backend) == ("embedded", "embedded")
    assert config.handoff.train_memory_margin_bytes == 0


@every_cell
def test_a_cell_keeps_its_own_rules(name):
    cell = of_kind("cell")[name]
    model, hardware = (
        of_kind("model")[cell["profile"]["model"]],
        of_kind("hardware")[cell["profile"]["hardware"]],
    )
    config = config_of(model, hardware, cell)
    trainer, rollout, layers = config.trainer, config.rollout, config.model.architecture["num_hidden_layers"]
    tp, pp, cp = (
        trainer.tensor_model_parallel_size,
        trainer.pipeline_model_parallel_size,
        trainer.context_parallel_size,
    )
    ep, etp = trainer.expert_model_parallel_size, trainer.expert_tensor_parallel_size
    first, last = trainer.decoder_first_pipeline_num_layers, trainer.decoder_last_pipeline_num_layers
    samples = trainer.global_batch_size or config.num_samples
    assert config.cluster.num_gpus_per_node == config.hardware.gpus_per_node
    assert config.world_size % (tp * pp * cp) == 0
    assert config.world_size % (etp * ep * pp) == 0
    ends = [count for count in (first, last) if count is not None]
    assert pp == 1 or (layers - sum(ends)) % (pp - len(ends)) == 0
    assert config.world_size % rollout.rollout_num_gpus_per_engine == 0
    assert config.model.architecture["num_attention_heads"] % tp == 0
    assert config.num_samples % samples == 0
    assert samples % (config.world_size // (tp * pp * cp)) == 0
    # Megatron asks for sequence parallelism with experts and TP, miles for all-gather with DeepSeek-V4 and CP.
    assert trainer.sequence_parallel == (tp > 1)
    assert model["profile"]["name"] != "dsv4" or config.megatron.model_extra.get("allgather_cp", False) == (cp > 1)


@every_cell
def test_a_cell_repeats_no_choice_of_its_model_differently(name):
    cell = of_kind("cell")[name]
    model = of_kind("model")[cell["profile"]["model"]]
    for section, values in model["choices"].items():
        for key, value in values.items():
            assert choice(cell, section, key) in (None, value), f"[{section}] {key}"


def test_the_two_cells_of_dsv4_on_nvidia_differ_in_layout_only():
    gb300, h200 = (
        {(s, k): v for s, values in of_kind("cell")[n]["choices"].items() for k, v in values.items()}
        for n in ("dsv4-gb300", "dsv4-h200")
    )
    pairs = {key: (gb300.get(key), h200.get(key)) for key in {*gb300, *h200}}
    assert {key: (ours, theirs) for key, (ours, theirs) in pairs.items() if ours != theirs} == {
        ("cluster", "num_gpus_per_node"): (4, 8),
        ("trainer", "tensor_model_parallel_size"): (2, 8),
        ("trainer", "context_parallel_size"): (2, 1),
        ("trainer", "expert_model_parallel_size"): (4, 8),
        ("rollout", "rollout_num_gpus_per_engine"): (8, 4),
        ("sglang", "ep_size"): (8, 4),
        ("megatron", "allgather_cp"): (True, None),
    }


def test_expert_parallel_engines_of_dsv4_keep_a_mirror():
    model = of_kind("model")["dsv4"]
    cells = [cell for cell in of_kind("cell").values() if cell["profile"]["model"] == "dsv4"]
    assert len(cells) == 3
    for cell in cells:
        config = config_of(model, of_kind("hardware")[cell["profile"]["hardware"]], cell)
        assert config.sglang.ep_size > 1
        assert config.handoff.engine_weights == "mirror"
        assert (config.trainer.precision, config.rollout.dtype) == ("fp8", "fp8")


def test_claims_name_a_known_cell_a_mode_and_who_says_so():
    claims = [row for profile in PROFILES.values() for row in profile.get("verified", [])]
    assert len(claims) == 16
    for claim in claims:
        assert claim["model"] in of_kind("model")
        assert claim["hardware"] in of_kind("hardware")
        assert claim["mode"] in ("cpu", "gpu")
        assert claim["source"]
    counted = Counter((c["model"], c["hardware"], c["mode"], c["status"]) for c in claims)
    assert counted == {
        ("deepseek-v4-pro", "H200", "cpu", "verified"): 1,
        ("dsv4", "GB300", "cpu", "doc-only"): 1,
        ("dsv4", "GB300", "cpu", "verified"): 1,
        ("dsv4", "GB300", "gpu", "verified"): 1,
        ("dsv4", "H200", "cpu", "verified"): 1,
        ("dsv4", "MI355X", "cpu", "verified"): 1,
        ("glm-5", "H200", "cpu", "verified"): 1,
        ("glm-5.2", "H200", "cpu", "verified"): 1,
        ("inkling", "GB300", "cpu", "verified"): 3,
        ("nemotron-3-nano-30b-a3b", "H200", "cpu", "verified"): 5,
    }


@every_cell
def test_a_cell_claims_for_its_own_model_and_hardware(name):
    head, claims = of_kind("cell")[name]["profile"], of_kind("cell")[name].get("verified", [])
    assert {(claim["model"], claim["hardware"]) for claim in claims} <= {(head["model"], head["hardware"])}


def test_profiles_come_through_the_hook_of_any_plugin():
    import pluggy
    import rllaunch_profiles

    from rllaunch.hooks import PROJECT, Specs

    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(Specs)
    manager.register(rllaunch_profiles)
    manager.check_pending()
    [directories] = manager.hook.rllaunch_profile_dirs()
    assert [Path(str(directory)) for directory in directories] == [ROOT]
