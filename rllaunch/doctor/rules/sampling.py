"""What is sampled can be learned from, and fits its context."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.numbers import either
from rllaunch.resolve.origins import Resolved


def _check_group(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if config.algorithm.advantage_estimator == "grpo" and config.rollout.n_samples_per_prompt == 1:
        yield GROUP.error(
            resolved,
            "with one sample a prompt every advantage of GRPO is zero: there is no other to compare it with",
            ["rollout.n_samples_per_prompt", "algorithm.advantage_estimator"],
            either("--n-samples-per-prompt 8", "--advantage-estimator ppo"),
        )


def _check_context(resolved: Resolved) -> Iterator[Finding]:
    rollout = resolved.config.rollout
    context, response = rollout.rollout_max_context_len, rollout.rollout_max_response_len
    if context is not None and context <= response:
        yield CONTEXT.error(
            resolved,
            f"a context of {context} tokens leaves none for the prompt, as a response may have {response}",
            ["rollout.rollout_max_context_len", "rollout.rollout_max_response_len"],
            either(f"--rollout-max-context-len {2 * response}", f"--rollout-max-response-len {context // 2}"),
        )


GROUP = Rule(
    code="RL323",
    name="a group of GRPO has two samples or more",
    reason="the reward minus the mean of a group of one is zero, normalised or not (GRPO, arXiv:2402.03300)",
    check=_check_group,
)
CONTEXT = Rule(
    code="RL324",
    name="a context holds more than the response",
    reason="a prompt needs at least one token, or nothing can be generated (miles and slime, arguments.py)",
    check=_check_context,
)
RULES = (GROUP, CONTEXT)
