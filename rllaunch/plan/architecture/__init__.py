"""The exact tensors of a model, from the facts of its Hugging Face `config.json`, without torch or transformers.

One file a family. What is counted is what transformers' causal LM builds from the same facts; the tests build both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from rllaunch.plan.architecture.facts import Facts, text_facts
from rllaunch.plan.architecture.tensors import Architecture, Layer, Split, Weight

__all__ = ["KNOWN_MODEL_TYPES", "Architecture", "Layer", "Split", "Weight", "read_architecture", "text_facts"]

# model_type → module and function here; a launch reads one family, so one is imported.
FAMILIES: dict[str, str] = {
    "llama": "gqa.llama",
    "qwen2": "gqa.qwen2",
    "qwen3": "gqa.qwen3",
    "qwen3_moe": "gqa.qwen3_moe",
    "glm4_moe": "gqa.glm4_moe",
    "gpt_oss": "gqa.gpt_oss",
    "minimax_m2": "gqa.minimax_m2",
    "deepseek_v3": "mla.deepseek_v3",
    # Kimi's name for the same thing, as transformers 5.24.0 reads it: models/kimi_k25/configuration_kimi_k25.py.
    "kimi_k2": "mla.deepseek_v3",
    "kimi_k25": "mla.deepseek_v3",
    "deepseek_v32": "mla.deepseek_v32",
    "glm4_moe_lite": "mla.glm4_moe_lite",
    "glm_moe_dsa": "mla.glm_moe_dsa",
    "deepseek_v4": "deepseek_v4.deepseek_v4",
    "qwen3_next": "delta_net.qwen3_next",
    "qwen3_5": "delta_net.qwen3_5",
    "qwen3_5_text": "delta_net.qwen3_5",
    "qwen3_5_moe": "delta_net.qwen3_5_moe",
    "qwen3_5_moe_text": "delta_net.qwen3_5_moe",
    "nemotron_h": "nemotron_h.nemotron_h",
    "inkling_text": "inkling.inkling",
    "inkling_mm_model": "inkling.inkling",
}
KNOWN_MODEL_TYPES: tuple[str, ...] = tuple(FAMILIES)


def read_architecture(facts: Mapping[str, Any], where: str = "") -> Architecture:
    """The tensors of the causal language model that `facts` describe.

    Args:
        facts: as in `config.json`, `model_type` among them. A multi-modal config's `text_config` is taken, its towers
            are not counted. What the file may leave out takes the default of transformers' class.
        where: the place the facts come from, for errors.
    Raises:
        ConfigError: an unknown `model_type`, or a fact that is missing or malformed.
    """
    known = Facts(facts, where)
    family = FAMILIES.get(known.model_type)
    if family is None:
        raise known.unknown_model_type(KNOWN_MODEL_TYPES)
    module, _, function = family.partition(".")
    read: Callable[[Facts], Architecture] = getattr(import_module(f"{__name__}.{module}"), function)
    return read(known)
