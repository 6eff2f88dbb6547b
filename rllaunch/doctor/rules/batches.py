"""Prompts, samples, optimizer steps and ranks multiply out, and a run trains at least once."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.layout import layout_of
from rllaunch.doctor.numbers import decided_int, divisors, either, flag_with, gpus_key, nearest, plural, samples_per_step
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
            f"{product} ÷ {plural(steps, 'step')} = {samples // steps} samples a step, but global_batch_size is {batch}",
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
            either(flag_with("--global-batch-size", nearest(_whole_steps(resolved), batch)), _more_prompts(resolved, batch)),
        )


def _check_iterations(resolved: Resolved) -> Iterator[Finding]:
    if not _trains_never(resolved):
        return
    config, batch = resolved.config, resolved.config.trainer.global_batch_size
    assert batch is not None, "a run trains never only because of a batch that is set"
    rollouts, prompts, each = config.run.num_rollout, config.rollout.rollout_batch_size, config.rollout.n_samples_per_prompt
    yield ITERATIONS.error(
        resolved,
        f"num_rollout × rollout_batch_size × n_samples_per_prompt = {rollouts} × {prompts} × {each} = "
        f"{plural(rollouts * prompts * each, 'sample')}, and must reach global_batch_size = {batch}: "
        "the run would have no training iteration",
        [ROLLOUTS, PROMPTS, SAMPLES, BATCH],
        either(flag_with("--global-batch-size", nearest(_whole_steps(resolved), batch)), _more_prompts(resolved, batch)),
    )


def _whole_steps(resolved: Resolved) -> list[int]:
    """Batches that cut a rollout into whole optimizer steps, and those into whole shares of the ranks if any do."""
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
    if ranks is None or batch is None or _trains_never(resolved):
        return
    micro = trainer.micro_batch_size
    if batch % ranks:
        group = f" ({layout.world} GPUs ÷ TP × PP × CP = {layout.dense_group})" if layout.dense_group > 1 else ""
        sizes = [TP, PP, CP] if layout.dense_group > 1 else []
        decided = decided_int(resolved, BATCH) is not None
        yield RANKS.error(
            resolved,
            f"a batch of {plural(batch, 'sample')} cannot be divided over {ranks} data-parallel ranks{group}",
            [*([BATCH] if decided else [PROMPTS, SAMPLES, STEPS]), "cluster.num_nodes", gpus_key(resolved), *sizes],
            _divisible(resolved, ranks, decided=decided) or "choose a batch that is a multiple of the ranks",
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


def _divisible(resolved: Resolved, ranks: int, *, decided: bool) -> str:
    """The nearest batch that is whole for ranks and rollout; where the batch follows, the nearest prompts."""
    config = resolved.config
    if decided and not decided_int(resolved, STEPS):
        batch = config.trainer.global_batch_size or 1
        whole = [n for n in divisors(config.num_samples) if n % ranks == 0]
        if whole:
            return flag_with("--global-batch-size", nearest(whole, batch))
    steps = config.trainer.num_steps_per_rollout or 1
    unit = ranks * steps // gcd(ranks * steps, config.rollout.n_samples_per_prompt)
    near = config.rollout.rollout_batch_size // unit * unit
    prompts = flag_with("--rollout-batch-size", [n for n in (near, near + unit) if n])
    return prompts if not decided else ""


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
    reason="zero iterations end in a bare assertion of the learning-rate schedule, after bring-up (THUDM/slime#2366)",
    check=_check_iterations,
)
RANKS = Rule(
    code="RL322",
    name="a batch divides over ranks and micro-batches",
    reason="every data-parallel rank trains on as many samples in as many passes, or the others wait for ever",
    check=_check_ranks,
)
RULES = (STEPS_RULE, ITERATIONS, RANKS)
