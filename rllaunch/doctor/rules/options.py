"""Options that pass through are ones that their program has."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.backends.megatron.option_names import ALIASES, FOREIGN, OWN, UNSERVED
from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.options import known
from rllaunch.errors import did_you_mean
from rllaunch.resolve.origins import Resolved

# Section → the key whose value says that its options are read.
READ_BY = {"megatron": "trainer.backend", "sglang": "rollout.backend"}
# What the megatron trainer takes beside Megatron-core's own.
BESIDE = {"megatron": {*ALIASES, *FOREIGN, *OWN, *UNSERVED}, "sglang": set[str]()}


def _check(resolved: Resolved) -> Iterator[Finding]:
    for section, backend in READ_BY.items():
        if resolved.value(backend) != section:
            continue
        release, names = known(section)
        for name in getattr(resolved.config, section).model_extra or {}:
            if name in names or name in BESIDE[section]:
                continue
            own = type(getattr(resolved.config, section)).model_fields
            hint = did_you_mean(name, {*names, *BESIDE[section], *own})
            near = hint if hint.startswith("did you mean") else f"take it out, unless a release after {release} has it"
            text = f"{release} has no option {name!r}"
            yield RULE.finding("warning", resolved, text, [f"{section}.{name}"], near)


RULE = Rule(
    code="RL348",
    name="options that pass through exist",
    reason="the backends refuse an option they do not know, but after Ray is up; a flag with a slip is found before",
    check=_check,
)
RULES = (RULE,)
