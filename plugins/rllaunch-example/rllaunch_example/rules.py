"""A rule of this plugin. Codes from RL900 on are for plugins."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.resolve.origins import Resolved

MANY_ROLLOUTS = 1000


def _check(resolved: Resolved) -> Iterator[Finding]:
    run = resolved.config.run
    if run.num_rollout > MANY_ROLLOUTS and not run.save_interval:
        yield LONG_RUN.finding(
            "warning",
            resolved,
            f"a run of {run.num_rollout} rollouts writes its only checkpoint after the last",
            ["run.num_rollout", "run.save_interval"],
            "--save-interval 100",
        )


LONG_RUN = Rule(
    code="RL901",
    name="a long run keeps checkpoints",
    reason=f"what ends a run of more than {MANY_ROLLOUTS} rollouts would cost all of them",
    check=_check,
)
RULES = (LONG_RUN,)
