"""There is something to train on: prompts and a reward."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.resolve.origins import Resolved

TARGET = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
PROMPTS = "task.prompt_data"
REWARD = "task.reward"


def _check(resolved: Resolved) -> Iterator[Finding]:
    task = resolved.config.task
    if not task.name and not (task.prompt_data and task.reward):
        present = next((key for key in (PROMPTS, REWARD) if resolved.value(key)), None)
        absent = REWARD if present == PROMPTS else PROMPTS
        what = "there is nothing to train on: neither a task nor prompts with a reward"
        yield RULE.error(
            resolved,
            f"{present} is given, but {absent} is not" if present else what,
            [present or "task.name"],
            "--task NAME (`rllaunch profiles list --kind task` has them), "
            "or --prompt-data FILE and --reward MODULE:FUNCTION",
        )
    if task.reward and not TARGET.fullmatch(task.reward):
        yield RULE.error(
            resolved,
            f"{task.reward!r} does not name a reward function",
            [REWARD],
            "--reward MODULE:FUNCTION, such as my_package.rewards:exact_match",
        )


RULE = Rule(
    code="RL333",
    name="a task is given",
    reason="without prompts and a reward a run fails after its models are up (NVIDIA-NeMo/RL#2783)",
    check=_check,
)
RULES = (RULE,)
