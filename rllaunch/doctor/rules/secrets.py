"""Secrets come from the environment of whoever starts the run, never from its configuration."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.resolve.origins import Resolved

SECRET_NAME = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY)($|_)", re.IGNORECASE)


def _check_secrets(resolved: Resolved) -> Iterator[Finding]:
    for name, value in (resolved.config.env.model_extra or {}).items():
        if SECRET_NAME.search(name):
            # The value is what must not be shown, and a flag's origin repeats it.
            origin = resolved.origin(f"env.{name}")
            source = origin.source.replace(str(value), "…")
            yield Finding(
                "RL338",
                "error",
                f"env.{name} would write a secret into the run directory and every command line",
                (f"env.{name} = …   {origin.layer}: {source}",),
                f"export {name} where the run is started; its processes inherit it",
            )


RULES = (
    Rule(
        code="RL338",
        name="no secrets in the configuration",
        reason="the resolved config is written into the run directory and printed by resolve and --dry-run",
        check=_check_secrets,
    ),
)
