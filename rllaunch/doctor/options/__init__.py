"""Names that options of Megatron-core and SGLang have, for launches that are looked at where neither is installed."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def known(section: str) -> tuple[str, frozenset[str]]:
    """The release that `megatron` or `sglang` was read from, and the names of its options.

    Written with `known_options` and `known_names` of the two backends.
    """
    release, *names = (files(__name__) / f"{section}.txt").read_text(encoding="utf-8").split("\n")
    return release.removeprefix("# "), frozenset(filter(None, names))
