"""The prompt files are there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.resolve.origins import Resolved

FLAGS = {"task.prompt_data": "--prompt-data", "task.eval_prompt_data": "--eval-prompt-data"}


def _check(resolved: Resolved) -> Iterator[Finding]:
    for key, flag in FLAGS.items():
        path = resolved.value(key)
        if path and not Path(path).is_file():
            what = "is a directory" if Path(path).is_dir() else "does not exist"
            yield RULE.error(resolved, f"the prompt file {path} {what}", [key], f"{flag} with a JSONL file")


RULE = Rule(
    code="RL349",
    name="the prompt files exist",
    reason="a typo in a path should not cost a bring-up (NVIDIA-NeMo/RL#2783)",
    check=_check,
    # A path of the configuration's, so its exit code; looked for where the run would be only.
    probes=True,
)
RULES = (RULE,)
