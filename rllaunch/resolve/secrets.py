"""Which settings are secrets by their name, and how they are shown: not at all."""

from __future__ import annotations

import re
from typing import Any

FREE_SECTIONS = ("env", "megatron", "sglang")
# A token at the end of a name is a secret; `moe_token_dispatcher_type` speaks of another kind.
_NAME = re.compile(
    r"(^|_)TOKEN$|(^|_)(PAT|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)($|_)|_KEY$",
    re.IGNORECASE,
)
HIDDEN = "…"


def is_secret_name(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret, by the way such things are named."""
    return _NAME.search(name) is not None


def is_secret(key: str, value: Any) -> bool:
    """Whether `section.key` of a free section holds a secret; numbers (`pad_token_id`) are none."""
    section, _, name = key.partition(".")
    return section in FREE_SECTIONS and isinstance(value, str) and value != "" and is_secret_name(name)
