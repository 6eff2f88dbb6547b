"""`rllaunch schema`: every shipped profile fits it, and what the reader of profiles refuses does not."""

from __future__ import annotations

import copy
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

ROOT = Path(str(files("rllaunch_profiles")))
SHIPPED = {str(path.relative_to(ROOT)): tomllib.loads(path.read_text("utf-8")) for path in sorted(ROOT.rglob("*.toml"))}
H100 = SHIPPED["hardware/H100.toml"]


@pytest.fixture
def validator(rllaunch: Any) -> Any:
    schema = rllaunch("schema").json()
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


def test_every_shipped_profile_fits_the_schema(validator: Any):
    wrong = {name: error.message for name, data in SHIPPED.items() for error in validator.iter_errors(data)}
    assert wrong == {}
    assert len(SHIPPED) == 82


@pytest.mark.parametrize(
    "path",
    [
        ("profile", "kind", "hardwear"),
        ("profile", "sorce", "s"),
        ("profile", "aliases", "one"),
        ("profile", "name", ""),
        ("facts", "gpu_memroy_bytes", 1),
        ("facts", "gpu_memory_bytes", "80 gigs"),
        ("facts", "gpu_memory_bytes", 0),
        ("facts", "gpu_memory_bytes", {"value": 1, "sorce": "s"}),
        ("facts", "gpus_per_node", 0),
        ("facts", "accelerator", "gpu"),
        ("choices", "handof", {}),
        ("choices", "handoff", {"colocate_memory_peak_device": "tpu"}),
        ("detect", "gpu_name", ["x"]),
        ("detects", "gpu_names", ["x"]),
    ],
    ids=str,
)
def test_a_mistake_in_a_profile_does_not_fit(validator: Any, path: tuple[str, str, Any]):
    table, key, value = path
    data = copy.deepcopy(H100)
    data.setdefault(table, {})[key] = value
    assert not validator.is_valid(data)
    assert validator.is_valid(H100)


def test_facts_belong_to_the_kind(validator: Any):
    for kind in ("model", "task", "cell"):
        data = copy.deepcopy(H100)
        data["profile"]["kind"] = kind
        assert not validator.is_valid(data), kind


def test_every_key_has_its_sentence_for_the_editor(rllaunch: Any):
    schema = rllaunch("schema", "--of", "config").json()
    lr = schema["$defs"]["Trainer"]["properties"]["lr"]
    assert (lr["description"], lr["exclusiveMinimum"]) == ("Learning rate after warm-up.", 0)
    fact = rllaunch("schema").json()["allOf"][0]["then"]["properties"]["facts"]["properties"]["gpu_memory_bytes"]
    assert fact["description"] == "Memory of one GPU as the driver shows it, in bytes; unset when no source says."


def test_what_resolve_prints_fits_the_schema_of_a_config_file(rllaunch: Any):
    validator = jsonschema.Draft7Validator(rllaunch("schema", "--of", "config").json())
    for model, hardware in (("dsv4", "GB300"), ("tiny", "cpu")):
        data = tomllib.loads(rllaunch("resolve", "--all", "--model", model, "--hardware", hardware).out)
        assert [error.message for error in validator.iter_errors(data)] == []
    assert validator.is_valid({"handoff": {"offload_rollout_level": "kv_cache"}})
    assert validator.is_valid({"handoff": {"update_weight_buffer_size": "512 MiB"}})
    assert not validator.is_valid({"handoff": {"update_weight_buffer_size": "512 megs"}})
    assert not validator.is_valid({"trainer": {"learning_rate": 1}})
    assert not validator.is_valid({"lr": 1})


def test_another_schema_is_a_usage_error(rllaunch: Any):
    result = rllaunch("schema", "--of", "profiles")
    assert (result.code, result.err) == (
        2,
        "error: there is no schema of 'profiles'\n  --of profiles\nhint: did you mean 'profile'?\n",
    )
