"""The plan's bytes are the backend's bytes: every step of every legal handoff, and every result the same."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from rig import ALGORITHMS, Rig, make_context

from rllaunch.backends.base import MemoryReading
from rllaunch.plan.handoff import BACKED_UP, HandoffOptions
from rllaunch.plan.memory import Ledger

LEVELS = [frozenset(c) for n in range(3) for c in itertools.combinations(("kv_cache", "weight"), n)]


def legal(algorithm: str) -> list[HandoffOptions]:
    """Every option that has a schedule, each once: what a launch never looks at stays at its default."""
    found: set[HandoffOptions] = set()
    for order, train, rollout, level, weights, buffers in itertools.product(
        ("cpu", "gpu"), (True, False), (True, False), LEVELS, ("mirror", "discard"), ("retained", "fresh", "shared")
    ):
        options = HandoffOptions(
            order, train, rollout, level, weights, buffers, algorithm == "ppo", algorithm == "lora"
        )
        if options.illegal():
            continue
        level = level if rollout else frozenset()
        weights = weights if options.releases_weights else "mirror"
        buffers = buffers if train else "retained"
        found.add(replace(options, level=level, engine_weights=weights, buffers=buffers))
    return sorted(found, key=name_of)


def name_of(options: HandoffOptions) -> str:
    level = "+".join(sorted(options.level)) or "none"
    offload = ("train" if options.offload_train else "") + ("rollout" if options.offload_rollout else "")
    return f"{options.order}-{options.weights_mode}-{options.buffers}-{level}-{offload or 'nothing'}"


# All of them with GRPO; with the others, which only change what the regions hold, those that move everything.
CASES = [
    (algorithm, options)
    for algorithm in ALGORITHMS
    for options in legal(algorithm)
    if algorithm == "grpo" or (options.offload_train and options.level == LEVELS[-1])
]


class Outcome(NamedTuple):
    """What a launch came to: losses and the engine's weights after two cycles."""

    losses: tuple[float, ...]
    weights: str


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, Outcome]]:
    """algorithm → name of the options → outcome, of the launches that ran so far."""
    return {algorithm: {} for algorithm in ALGORITHMS}


@pytest.mark.parametrize(("algorithm", "options"), CASES, ids=[f"{a}-{name_of(o)}" for a, o in CASES])
def test_every_step_holds_what_the_plan_says_and_the_result_is_that_of_all_other_handoffs(
    algorithm: str, options: HandoffOptions, tmp_path: Path, outcomes: dict[str, dict[str, Outcome]]
):
    rig = Rig(make_context(algorithm, options), tmp_path)
    plan = Ledger(rig.schedule, rig.sizes)
    for phase, step, measured in rig.run(cycles=2):
        planned = plan.apply(phase, step)
        expected = MemoryReading(
            planned.gpu_total, planned.host_total, planned.gpu_peak, planned.host_peak, planned.bytes_moved
        )
        assert measured == expected, f"{phase}, after {step}"
    losses = tuple(m["loss"] for m in rig.metrics)
    outcomes[algorithm][name_of(options)] = Outcome(losses, rig.engine.weights_checksum())
    assert len(losses) == 2
    assert losses[0] != losses[1]
    assert len(set(outcomes[algorithm].values())) == 1, outcomes[algorithm]
    rig.shutdown()
    assert rig.engine.memory().gpu_bytes == 0
    assert rig.engine.memory().host_bytes == 0


def test_the_cases_cover_both_orders_and_every_buffer_and_mode():
    assert len(CASES) == 62  # an empty product would pass every test here
    for algorithm, orders in (("grpo", {"cpu", "gpu"}), ("kl", {"cpu", "gpu"}), ("ppo", {"cpu"}), ("lora", {"cpu"})):
        options = [o for a, o in CASES if a == algorithm]
        assert {o.order for o in options} == orders
        assert {o.weights_mode for o in options} >= ({"mirror"} if algorithm == "lora" else {"mirror", "discard"})


def together(options: HandoffOptions, directory: Path) -> tuple[int, int, int]:
    """Most bytes ever on the host, the mirror's bytes, the backup's bytes."""
    rig = Rig(make_context("grpo", options), directory)
    peak = max(measured.host_peak_bytes for _, _, measured in rig.run(cycles=2))
    backup = sum(rig.sizes[r] for r in BACKED_UP)
    rig.shutdown()
    return peak, rig.sizes["weights"], backup


@pytest.mark.parametrize("buffers", ["fresh", "shared"])
def test_gpu_order_never_holds_mirror_and_backup_together_on_the_host(buffers: str, tmp_path: Path):
    peak, mirror, backup = together(HandoffOptions("gpu", engine_weights="mirror", buffers=buffers), tmp_path)
    assert peak == max(mirror, backup)


@pytest.mark.parametrize(("order", "buffers"), [("cpu", "fresh"), ("cpu", "retained"), ("gpu", "retained")])
def test_cpu_order_and_retained_buffers_hold_mirror_and_backup_together(order: str, buffers: str, tmp_path: Path):
    peak, mirror, backup = together(HandoffOptions(order, engine_weights="mirror", buffers=buffers), tmp_path)
    assert peak == mirror + backup


def test_a_discarding_engine_holds_nothing_on_the_host(tmp_path: Path):
    peak, _, backup = together(HandoffOptions("cpu", engine_weights="discard"), tmp_path)
    assert peak == backup


def host_bytes_after(options: HandoffOptions, step_name: str, directory: Path) -> int:
    rig = Rig(make_context("grpo", options), directory)
    last = [measured.host_bytes for _, step, measured in rig.run(cycles=1) if step.name == step_name][-1]
    rig.shutdown()
    return last


@pytest.mark.parametrize(("buffers", "is_kept"), [("fresh", False), ("retained", True)])
def test_a_fresh_backup_is_gone_while_training_and_a_retained_one_is_not(buffers: str, is_kept: bool, tmp_path: Path):
    options = HandoffOptions("cpu", engine_weights="discard", buffers=buffers)
    backup = sum(Rig(make_context(), tmp_path / "sizes").sizes[r] for r in BACKED_UP)
    assert host_bytes_after(options, "train", tmp_path) == (backup if is_kept else 0)
