"""`offload_rollout_level`: a part that is not known would silently stay on the GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from difflib import get_close_matches

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.errors import did_you_mean
from rllaunch.resolve.origins import Resolved

KEY = "handoff.offload_rollout_level"
PARTS = ("kv_cache", "weight")
# What people write, and what they mean by it.
MEANT = {
    "weights": "weight",
    "model": "weight",
    "kv": "kv_cache",
    "kvcache": "kv_cache",
    "kv_caches": "kv_cache",
    "cache": "kv_cache",
}
GRAPHS = ("cuda_graph", "cuda_graphs", "graph", "graphs")


def _check(resolved: Resolved) -> Iterator[Finding]:
    level = resolved.config.handoff.offload_rollout_level
    for part in dict.fromkeys(level):
        if part not in PARTS:
            yield _unknown(resolved, part)
        elif level.count(part) > 1:
            message = f"offload_rollout_level names {part} {level.count(part)} times"
            yield RULE.finding("warning", resolved, message, [KEY], _with(dict.fromkeys(level)))
    if not level and resolved.config.handoff.offload_rollout:
        yield RULE.finding(
            "warning",
            resolved,
            "offload_rollout_level is empty, so an engine releases its CUDA graphs only",
            [KEY, "handoff.offload_rollout"],
            "--offload-rollout-level kv_cache weight, or --no-offload-rollout",
        )


def _unknown(resolved: Resolved, part: str) -> Finding:
    level = resolved.config.handoff.offload_rollout_level
    corrected = _with(dict.fromkeys(p for p in map(_meant, level) if p in PARTS))
    what = f"offload_rollout_level has no part {part!r}"
    if _folded(part) in GRAPHS:
        what += ": CUDA graphs always go with the KV cache's turn and are not named"
        return RULE.error(resolved, what, [KEY], corrected)
    hint = did_you_mean(_meant(part), PARTS, "parts of an engine")
    return RULE.error(resolved, what, [KEY], f"{hint}{' ' if hint.endswith('?') else '; '}{corrected}")


def _folded(part: str) -> str:
    return part.casefold().replace("-", "_")


def _meant(part: str) -> str:
    """The part that a name is near to, or the name itself."""
    name = MEANT.get(_folded(part), _folded(part))
    return next(iter(get_close_matches(name, PARTS, n=1)), name)


def _with(parts: Iterable[str]) -> str:
    return f"--offload-rollout-level {' '.join(parts) or 'kv_cache weight'}"


RULE = Rule(
    code="RL304",
    name="offload_rollout_level names what an engine can release",
    reason="a misspelt part stays on the GPU without a word, and the trainer wakes into an out-of-memory",
    check=_check,
)
RULES = (RULE,)
