"""Secrets come from the environment of whoever starts the run, never from its configuration."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.secrets import FREE_SECTIONS, is_secret


def _check_secrets(resolved: Resolved) -> Iterator[Finding]:
    for section in FREE_SECTIONS:
        for name, value in (getattr(resolved.config, section).model_extra or {}).items():
            key = f"{section}.{name}"
            if is_secret(key, value):
                yield Finding(
                    "RL338",
                    "error",
                    f"{key} would write a secret into the run directory and every command line",
                    (resolved.describe(key),),
                    f"export {name.upper()} where Ray is started (for a local run: where rllaunch is started)",
                )


RULES = (
    Rule(
        code="RL338",
        name="no secrets in the configuration",
        reason="the resolved config is written into the run directory and printed by resolve and --dry-run",
        check=_check_secrets,
    ),
)
