"""What DeepSeek-V4's release calls the tensors of its model, and what transformers' module does. Plain names, without
torch.

transformers saves a third set of names, the release's with the module's beginning, which SGLang does not know.
Source: transformers 5.24.0 conversion_mapping.py, "deepseek_v4"; sglang 0.5.23 models/deepseek_v4.py, `load_weights`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

TABLE = ".gate.tid2eid"
"""Which experts each token id has, in layers that ask a table: whole numbers, which nothing trains."""

_OUTSIDE = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "model.hc_head.hc_fn": "hc_head_fn",
    "model.hc_head.hc_base": "hc_head_base",
    "model.hc_head.hc_scale": "hc_head_scale",
}
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "mlp.gate": "ffn.gate",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
} | {f"{block}_hc.{part}": f"hc_{block}_{part}" for block in ("attn", "ffn") for part in ("fn", "base", "scale")}
for _theirs, _released in (("compressor", "compressor"), ("compressor.indexer", "indexer.compressor")):
    for _part, _short in (("position_bias", "ape"), ("kv_proj", "wkv"), ("gate_proj", "wgate"), ("kv_norm", "norm")):
        _IN_LAYER[f"self_attn.{_theirs}.{_part}"] = f"attn.{_released}.{_short}"
_OF_EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_MODULE_OUTSIDE = {released: name for name, released in _OUTSIDE.items()}
_MODULE_IN_LAYER = {released: name for name, released in _IN_LAYER.items()} | {"attn.norm": "self_attn.kv_norm"}
_MODULE_OF_EXPERT = {released: name for name, released in _OF_EXPERT.items()}
_LAYER = re.compile(r"(?:model\.)?layers\.(\d+)\.(.*)$")
_ENDING = re.compile(r"(.*?)(\.(?:weight|scale|weight_scale_inv))?$")
_EXPERT = re.compile(r"(.*\.(?:experts\.\d+|shared_experts))\.(\w+)$")
_WIDE = re.compile(r"_hc\.|hc_head\.|\.sinks$|\.position_bias$|\.compressor\.(?:indexer\.)?kv_norm\.")


def stays_float32(name: str) -> bool:
    """Whether SGLang holds a tensor, by the module's name of it, in float32 whatever its other weights are."""
    return _WIDE.search(name) is not None


def release_name(name: str) -> str:
    """Of a tensor of the module, each expert's matrices by themselves."""
    if (found := _LAYER.match(name)) is None:
        return _OUTSIDE.get(name, name)
    inner = _renamed(found[2], _IN_LAYER, _OF_EXPERT, ("mlp.", "ffn."))
    return f"layers.{found[1]}.{inner}"


def module_name(name: str) -> str:
    """Of a tensor of a checkpoint, whichever of the three ways it is named; one that the model has not stays as it
    is. A scale keeps its ending."""
    if (found := _LAYER.match(name)) is None:
        bare = name.removeprefix("model.")
        return _MODULE_OUTSIDE.get(bare, _MODULE_OUTSIDE.get(bare.replace("hc_head.hc_", "hc_head_"), name))
    inner = _renamed(found[2], _MODULE_IN_LAYER, _MODULE_OF_EXPERT, ("ffn.", "mlp."))
    return f"model.layers.{found[1]}.{inner}"


def _renamed(inner: str, names: Mapping[str, str], of_expert: Mapping[str, str], block: tuple[str, str]) -> str:
    if inner in names:
        return names[inner]
    stem, end = _split(inner)
    if (expert := _EXPERT.match(stem)) is not None:
        return f"{expert[1].replace(*block, 1)}.{of_expert.get(expert[2], expert[2])}{end}"
    return names.get(stem, stem) + end


def _split(inner: str) -> tuple[str, str]:
    found = _ENDING.match(inner)
    assert found is not None, "it matches any name"
    return found[1], found[2] or ""
