"""What a multi-modal checkpoint calls the tensors of its language model, and which it has besides.

Qwen3.5's releases are such: `model.language_model.layers.0…` where the text model alone has `model.layers.0…`. Plain
names, without torch.
Source: transformers 5.24.0 models/qwen3_5/modeling_qwen3_5.py, conversion_mapping.py; sglang 0.5.23
`models/qwen3_5.py`, `load_weights`, which takes both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_INNER, _PLAIN = "model.language_model.", "model."
_VISION = ("model.visual.", "visual.")
# Of layers behind the model's own, which predict further tokens.
FURTHER = "mtp."
_STACKED = re.compile(r"(?P<at>.*\.mlp\.experts)\.(?P<which>gate_up_proj|down_proj)$")


def text_name(name: str) -> str | None:
    """What the text model alone calls a tensor of a checkpoint; None: it has no such, it is of a vision tower."""
    if name.startswith(_VISION):
        return None
    return _PLAIN + name.removeprefix(_INNER) if name.startswith(_INNER) else name


def is_inner(name: str) -> bool:
    """Whether a checkpoint that has this name is of more than a text model."""
    return name.startswith(_INNER)


def of_each_expert(name: str, number: int) -> Iterator[tuple[str, int, int, int]]:
    """Name of an expert's matrix, the expert, and which of how many parts of its rows: of a tensor that stacks them.

    Nothing if `name` is no stack of experts.
    """
    if (found := _STACKED.match(name)) is None:
        return
    parts = ("gate_proj", "up_proj") if found["which"] == "gate_up_proj" else ("down_proj",)
    for expert in range(number):
        for index, part in enumerate(parts):
            yield f"{found['at']}.{expert}.{part}.weight", expert, index, len(parts)
