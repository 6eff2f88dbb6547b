"""JSON Schemas of the files a user writes, from the schema of the configuration: editors complete and check with them.

Written for draft 7, which Taplo (Even Better TOML) and the JSON tools of editors read.
"""

from __future__ import annotations

from typing import Any

from rllaunch.resolve.profiles import KINDS
from rllaunch.resolve.resolve import field_of, is_list
from rllaunch.resolve.schema import LaunchConfig, descriptions

DRAFT = "http://json-schema.org/draft-07/schema#"
Schema = dict[str, Any]


def config_schema() -> Schema:
    """Of a `--config` file: `[section]` tables of keys."""
    sections, definitions = _sections()
    return {
        "$schema": DRAFT,
        "title": "rllaunch --config file",
        "type": "object",
        "additionalProperties": False,
        "properties": sections,
        "$defs": definitions,
    }


def profile_schema() -> Schema:
    """Of a profile's file. What kind it is decides which facts and tables it may have."""
    sections, definitions = _sections()
    facts = {kind: _facts(definitions[_name(kind)]) for kind in ("hardware", "model")}
    return {
        "$schema": DRAFT,
        "title": "rllaunch profile",
        "type": "object",
        "additionalProperties": False,
        "required": ["profile"],
        "properties": {
            "profile": _head(),
            "facts": {"type": "object", "description": "What is: values with a source each."},
            "choices": {
                "description": "What was chosen for it, as [choices.SECTION].",
                "type": "object",
                "additionalProperties": False,
                "properties": sections,
            },
            "detect": {
                "description": "How `--hardware auto` recognises a machine.",
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "gpu_names": _texts("Words of the GPU's name as the driver gives it, such as NVIDIA H200.")
                },
            },
            "verified": {
                "description": "Who ran what, when, with what evidence.",
                "type": "array",
                "items": {"type": "object"},
            },
        },
        "allOf": [
            _where("hardware", {"properties": {"facts": facts["hardware"]}}),
            _where("model", {"properties": {"facts": facts["model"], "detect": False}}),
            _where("task", {"properties": {"facts": False, "detect": False}}),
            _where(
                "cell",
                {
                    "properties": {
                        "facts": False,
                        "detect": False,
                        "profile": {"required": ["kind", "name", "model", "hardware"]},
                    }
                },
            ),
        ],
        "$defs": definitions,
    }


def _head() -> Schema:
    text = {"type": "string"}
    return {
        "description": "What the profile is, and where its facts are from.",
        "type": "object",
        "additionalProperties": False,
        "required": ["kind", "name"],
        "properties": {
            "kind": {"enum": list(KINDS)},
            "name": {"type": "string", "minLength": 1, "description": "As --hardware or --model names it."},
            "aliases": _texts("Other names for it."),
            "description": text | {"description": "One line for `rllaunch profiles list`."},
            "source": text | {"description": "Where the facts are from that name no source of their own."},
            "extends": text | {"description": "A profile of the same kind, whose values this one has unless it says."},
            "model": text | {"description": "Of a cell: its model profile."},
            "hardware": text | {"description": "Of a cell: its hardware profile."},
        },
    }


def _facts(section: Schema) -> Schema:
    """The keys of a section, each plain or as `{ value = …, source = "…" }`."""
    keys = {key: _fact(value) for key, value in section["properties"].items() if key != "name"}
    return {"type": "object", "additionalProperties": False, "properties": keys}


def _fact(value: Schema) -> Schema:
    source = {"type": "string", "minLength": 1, "description": "Where the value is from."}
    with_source = {
        "type": "object",
        "additionalProperties": False,
        "required": ["value"],
        "properties": {"value": value, "source": source},
    }
    return {"description": value.get("description", ""), "anyOf": [value, with_source]}


def _where(kind: str, then: Schema) -> Schema:
    return {"if": {"properties": {"profile": {"properties": {"kind": {"const": kind}}}}}, "then": then}


def _texts(description: str) -> Schema:
    return {"description": description, "type": "array", "items": {"type": "string", "minLength": 1}}


def _sections() -> tuple[Schema, Schema]:
    """The sections of the configuration by name, and what they refer to."""
    made = LaunchConfig.model_json_schema()
    definitions: Schema = made["$defs"]
    for section in LaunchConfig.model_fields:
        properties = definitions[_name(section)].get("properties", {})
        for key, value in properties.items():
            dotted = f"{section}.{key}"
            value.pop("title", None)
            if is_list(field_of(dotted)):
                # One word stands for a list of one, as on the command line.
                text = {"type": "string"}
                value["anyOf"] = [{k: value.pop(k) for k in ("type", "items") if k in value}, text]
            value["description"] = descriptions()[dotted]
    for definition in definitions.values():
        definition.pop("title", None)
    return {section: {"$ref": f"#/$defs/{_name(section)}"} for section in LaunchConfig.model_fields}, definitions


def _name(section: str) -> str:
    annotation = LaunchConfig.model_fields[section].annotation
    assert isinstance(annotation, type), "every field of the config is a section"
    return annotation.__name__
