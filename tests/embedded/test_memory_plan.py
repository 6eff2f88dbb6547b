"""The plan's bytes are the backend's bytes: every step of every legal handoff, and every result the same."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from rig import ALGORITHMS, Rig, make_context

from rllaunch.backends.base import MemoryReading, RankInfo, Slot
from rllaunch.backends.embedded.trainer import EmbeddedTrainer
from rllaunch.errors import FitError
from rllaunch.plan.handoff import BACKED_UP, HandoffOptions, build_schedule
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
    (algorithm, options, "")
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


# Sizes as a larger launch has them, every one above what the tiny model needs and none the multiple of another. The
# trainer's backup is larger than the engine's mirror, and the other way round.
STATIC = {"device_static_bytes": 70_001, "host_static_bytes": 90_001}
LARGER = {
    "weights": 500_009, "kv_cache": 300_017, "cuda_graph": 20_011, "params": 400_009, "optimizer": 900_007,
    "grads": 600_011, "activations": 800_011, "update_bucket": 100_003,
}  # fmt: skip
POOLS: dict[str, dict[str, Any]] = {
    "": {},
    "larger": {"region_bytes": LARGER, **STATIC},
    "larger-mirror": {"region_bytes": {**LARGER, "weights": 2_000_003}, **STATIC},
}
# With larger regions those options that move everything.
CASES += [
    (algorithm, options, pools)
    for pools in POOLS if pools
    for algorithm, options, _ in CASES if options.offload_train and options.level == LEVELS[-1]
]  # fmt: skip


@pytest.mark.parametrize(
    ("algorithm", "options", "pools"), CASES, ids=[f"{a}-{name_of(o)}{'-' * bool(p)}{p}" for a, o, p in CASES]
)
def test_every_step_holds_what_the_plan_says_and_the_result_is_that_of_all_other_handoffs(
    algorithm: str, options: HandoffOptions, pools: str, tmp_path: Path, outcomes: dict[str, dict[str, Outcome]]
):
    rig = Rig(make_context(algorithm, options, pools=POOLS[pools]), tmp_path)
    static_gpu, static_host = (POOLS[pools].get(name, 0) for name in STATIC)
    plan = Ledger(rig.schedule, rig.sizes, static_gpu=static_gpu, static_host=static_host)
    for phase, step, measured in rig.run(cycles=2):
        planned = plan.apply(phase, step)
        expected = MemoryReading(
            planned.gpu_total, planned.host_total, planned.gpu_peak, planned.host_peak, planned.bytes_moved
        )
        assert measured == expected, f"{phase}, after {step}"
    losses = tuple(m["loss"] for m in rig.metrics)
    outcomes[algorithm][f"{name_of(options)}-{pools}"] = Outcome(losses, rig.engine.weights_checksum())
    assert len(losses) == 2
    assert losses[0] != losses[1]
    assert len(set(outcomes[algorithm].values())) == 1, outcomes[algorithm]
    rig.shutdown()
    assert rig.engine.memory().gpu_bytes == static_gpu
    assert rig.engine.memory().host_bytes == static_host


def test_larger_regions_are_allocated_as_large_as_they_are_booked(tmp_path: Path):
    options = HandoffOptions("gpu", engine_weights="mirror", buffers="shared")
    rig = Rig(make_context("grpo", options, pools=POOLS["larger"]), tmp_path)
    assert rig.sizes == LARGER
    allocated: dict[str, int] = {}
    for _, step, _ in rig.run(cycles=1):
        if step.name == "train":
            parameter = next(rig.trainer.models["actor"].parameters())
            moments = next(iter(rig.trainer.optimizer.adam.state.values()))
            tensors = {"params": parameter, "grads": parameter.grad, "optimizer": moments["exp_avg"]}
        elif step.name == "generate":
            tensors = {"weights": next(rig.engine.model.parameters())}
        else:
            continue
        allocated |= {name: tensor.untyped_storage().nbytes() for name, tensor in tensors.items()}
    assert allocated == {name: LARGER[name] for name in ("params", "grads", "optimizer", "weights")}
    shared = {path.name: path.stat().st_size for path in (tmp_path / "ledgers").glob("*.bin")}
    backup = LARGER["params"] + LARGER["optimizer"]
    assert shared == {"update-0.bin": LARGER["update_bucket"], "arena-0.bin": 4096 + backup}
    rig.shutdown()


def test_activations_are_there_while_training_and_only_then(tmp_path: Path):
    rig = Rig(make_context("grpo", HandoffOptions("cpu"), pools=POOLS["larger"]), tmp_path)
    by_step = {step.name: measured for _, step, measured in rig.run(cycles=1)}
    trainer_state = sum(LARGER[r] for r in ("params", "optimizer", "grads"))
    assert by_step["train"].gpu_bytes == STATIC["device_static_bytes"] + trainer_state
    assert by_step["train"].gpu_peak_bytes == by_step["train"].gpu_bytes + LARGER["activations"]
    rig.shutdown()


def test_regions_smaller_than_their_content_are_given_what_it_needs(tmp_path: Path):
    plain = Rig(make_context(), tmp_path / "plain").sizes
    padded = Rig(make_context(pools={"region_bytes": {"weights": 1, "grads": 10_000_000}}), tmp_path / "padded").sizes
    assert padded == plain | {"grads": 10_000_000}


def test_a_checkpoint_holds_no_padding_and_fits_every_padding(tmp_path: Path):
    plain = Rig(make_context(), tmp_path / "plain")
    larger = Rig(make_context(pools=POOLS["larger"]), tmp_path / "larger")
    for rig in (plain, larger):
        for _ in rig.run(cycles=1):
            pass
    files = [rig.directory / "save" / "trainer.pt" for rig in (plain, larger)]
    assert files[0].stat().st_size == files[1].stat().st_size
    larger.trainer.onload()
    larger.trainer.load(str(plain.directory / "save"))
    plain.shutdown()
    larger.shutdown()


def test_a_pool_too_small_for_the_larger_regions_says_who_holds_what(tmp_path: Path):
    pools = {**POOLS["larger"], "device_capacity_bytes": 1_300_000}
    rig = Rig(make_context(pools=pools), tmp_path)
    with pytest.raises(FitError, match="trainer-0 asks for 900,007 bytes of optimizer") as caught:
        list(rig.run(cycles=1))
    assert "in use: static static 70,001 bytes" in str(caught.value)
    rig.shutdown()


def test_static_bytes_of_the_host_are_of_the_node_and_copies_of_each_slot(tmp_path: Path):
    context = make_context("grpo", HandoffOptions("cpu", buffers="fresh"), pools=POOLS["larger"])
    slots = [Slot(index, 0, "cpu", str(tmp_path)) for index in range(3)]
    trainers = [EmbeddedTrainer(context, slot) for slot in slots]
    plan = Ledger(
        build_schedule(context.options), LARGER, static_host=STATIC["host_static_bytes"], slots_per_node=len(slots)
    )
    for trainer in trainers:
        trainer.init(RankInfo(0, 1, "", 0))
        trainer.offload()
    planned = [plan.apply("init", step) for step in build_schedule(context.options).init]
    offloaded = next(p for p in planned if p.name == "trainer.offload")
    assert trainers[0].memory().host_bytes == offloaded.host_total
    assert offloaded.host_total == STATIC["host_static_bytes"] + 3 * (LARGER["params"] + LARGER["optimizer"])


def test_the_cases_cover_both_orders_and_every_buffer_and_mode():
    assert [sum(c[2] == pools for c in CASES) for pools in POOLS] == [62, 29, 29]  # an empty product would pass
    for algorithm, orders in (("grpo", {"cpu", "gpu"}), ("kl", {"cpu", "gpu"}), ("ppo", {"cpu"}), ("lora", {"cpu"})):
        options = [o for a, o, _ in CASES if a == algorithm]
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
