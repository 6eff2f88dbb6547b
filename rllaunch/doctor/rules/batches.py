"""Prompts, samples, optimizer steps and ranks multiply out, and a run trains at least once."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import layout_of
from rllaunch.doctor.numbers import (
    decided_int,
    divisors,
    either,
    flag_with,
    gpus_key,
    nearest,
    plural,
    samples_per_step,
)
from rllaunch.doctor.rules.groups import CP, PP, TP
from rllaunch.resolve.origins import Resolved

BATCH = "trainer.global_batch_size"
STEPS = "trainer.num_steps_per_rollout"
MICRO = "trainer.micro_batch_size"
PROMPTS = "rollout.rollout_batch_size"
SAMPLES = "rollout.n_samples_per_prompt"
ROLLOUTS = "run.num_rollout"


def _trains_never(resolved: Resolved) -> bool:
    batch = decided_int(resolved, BATCH)
    return batch is not None and resolved.config.run.num_rollout * resolved.config.num_samples < batch


def _check_steps(resolved: Resolved) -> Iterator[Finding]:
    if _trains_never(resolved):
        return
    rollout, samples = resolved.config.rollout, resolved.config.num_samples
    batch, steps = decided_int(resolved, BATCH), decided_int(resolved, STEPS)
    product = f"{rollout.rollout_batch_size} prompts × {rollout.n_samples_per_prompt} samples"
    if steps and samples % steps:
        whole = [samples // batch] if batch and samples % batch == 0 else nearest(divisors(samples), steps)
        yield STEPS_RULE.error(
            resolved,
            f"{product} = {samples} cannot be divided into {plural(steps, 'optimizer step')}",
            [PROMPTS, SAMPLES, STEPS],
            flag_with("--num-steps-per-rollout", whole),
        )
    elif steps and batch and batch * steps != samples:
        yield STEPS_RULE.error(
            resolved,
            f"{product} ÷ {plural(steps, 'step')} = {samples // steps} samples a step, "
            f"but global_batch_size is {batch}",
            [PROMPTS, SAMPLES, STEPS, BATCH],
            either(
                f"--global-batch-size {samples // steps}",
                f"--num-steps-per-rollout {samples // batch}" if samples % batch == 0 else "",
            ),
        )
    elif batch and not steps and samples % batch:
        yield STEPS_RULE.error(
            resolved,
            f"{product} = {samples} are no whole number of optimizer steps of {batch}",
            [PROMPTS, SAMPLES, BATCH],
            _another_batch(resolved, batch),
        )


def _check_iterations(resolved: Resolved) -> Iterator[Finding]:
    if not _trains_never(resolved):
        return
    config, batch = resolved.config, resolved.config.trainer.global_batch_size
    assert batch is not None, "a run trains never only because of a batch that is set"
    rollouts, prompts = config.run.num_rollout, config.rollout.rollout_batch_size
    each = config.rollout.n_samples_per_prompt
    yield ITERATIONS.error(
        resolved,
        f"num_rollout × rollout_batch_size × n_samples_per_prompt = {rollouts} × {prompts} × {each} = "
        f"{plural(rollouts * prompts * each, 'sample')}, and must reach global_batch_size = {batch}: "
        "the run would have no training iteration",
        [ROLLOUTS, PROMPTS, SAMPLES, BATCH],
        _another_batch(resolved, batch),
    )


def _another_batch(resolved: Resolved, batch: int) -> str:
    nearby = flag_with("--global-batch-size", nearest(_whole_steps(resolved), batch))
    return either(nearby, _more_prompts(resolved, batch))


def _whole_steps(resolved: Resolved) -> list[int]:
    """Batches that cut a rollout into whole optimizer steps; those that divide over the ranks, if any do."""
    whole = divisors(resolved.config.num_samples)
    if steps := decided_int(resolved, STEPS):
        whole = [n for n in whole if n * steps == resolved.config.num_samples] or whole
    ranks = layout_of(resolved).data_parallel or 1
    return [n for n in whole if n % ranks == 0] or whole


def _more_prompts(resolved: Resolved, batch: int) -> str:
    """The fewest further prompts with which a rollout is whole steps of `batch`."""
    if decided_int(resolved, STEPS):
        return ""
    rollout = resolved.config.rollout
    unit = batch // gcd(batch, rollout.n_samples_per_prompt)
    return f"--rollout-batch-size {-(-rollout.rollout_batch_size // unit) * unit}"


def _check_ranks(resolved: Resolved) -> Iterator[Finding]:
    layout, trainer = layout_of(resolved), resolved.config.trainer
    ranks, batch = layout.data_parallel, samples_per_step(resolved.config)
    # A batch that does not even cut the rollout into steps is RL320's; one mistake, one finding.
    if ranks is None or batch is None or _trains_never(resolved) or any(_check_steps(resolved)):
        return
    micro = trainer.micro_batch_size
    if batch % ranks:
        is_grouped = layout.dense_group > 1
        group = f" ({layout.world} GPUs ÷ TP × PP × CP = {layout.dense_group})" if is_grouped else ""
        sizes = [TP, PP, CP] if is_grouped else []
        decided = decided_int(resolved, BATCH) is not None
        batch_keys = [BATCH] if decided else [PROMPTS, SAMPLES, STEPS]
        mend = _divisible_batch if decided else _divisible_prompts
        yield RANKS.error(
            resolved,
            f"a batch of {plural(batch, 'sample')} cannot be divided over {ranks} data-parallel ranks{group}",
            [*batch_keys, "cluster.num_nodes", gpus_key(resolved), *sizes],
            mend(resolved, ranks) or "choose a batch that is a multiple of the ranks",
        )
    elif micro is not None and (batch // ranks) % micro:
        share = batch // ranks
        yield RANKS.error(
            resolved,
            f"a rank's share of {plural(share, 'sample')} ({batch} ÷ {ranks} ranks) cannot be divided into "
            f"micro-batches of {micro}",
            [MICRO, BATCH],
            flag_with("--micro-batch-size", nearest(divisors(share), micro)),
        )


def _divisible_batch(resolved: Resolved, ranks: int) -> str:
    """The nearest batch that is whole for rollout and ranks; empty if steps or samples forbid it."""
    whole = [n for n in _whole_steps(resolved) if n % ranks == 0]
    return flag_with("--global-batch-size", nearest(whole, resolved.config.trainer.global_batch_size or 1))


def _divisible_prompts(resolved: Resolved, ranks: int) -> str:
    """The nearest number of prompts whose samples are whole shares of the ranks in every step."""
    rollout = resolved.config.rollout
    shares = ranks * (resolved.config.trainer.num_steps_per_rollout or 1)
    unit = shares // gcd(shares, rollout.n_samples_per_prompt)
    below = rollout.rollout_batch_size // unit * unit
    return flag_with("--rollout-batch-size", [n for n in (below, below + unit) if n])


STEPS_RULE = Rule(
    code="RL320",
    name="a rollout is a whole number of optimizer steps",
    reason="samples that fill no step would be dropped, and a batch that disagrees would win or lose unseen "
    "(miles, arguments.py)",
    check=_check_steps,
)
ITERATIONS = Rule(
    code="RL321",
    name="a run has at least one training iteration",
    reason="zero iterations end in a bare assertion of the learning-rate schedule (THUDM/slime#2366)",
    check=_check_iterations,
)
RANKS = Rule(
    code="RL322",
    name="a batch divides over ranks and micro-batches",
    reason="a rank with fewer samples or passes than the others leaves them waiting in a collective",
    check=_check_ranks,
)
RULES = (STEPS_RULE, ITERATIONS, RANKS)
