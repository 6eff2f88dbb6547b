"""The handoff: every configuration walked, every neighbouring swap tried."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from rllaunch.errors import ScheduleError
from rllaunch.plan.handoff import HandoffOptions, Schedule, Step, build_schedule, check

LEVELS = [frozenset(c) for n in range(3) for c in itertools.combinations(("kv_cache", "weight"), n)]
BOTH = (True, False)
WAYS = (("mirror", "discard"), ("retained", "fresh", "shared"))
EVERY = [
    HandoffOptions(*values)
    for values in itertools.product(("cpu", "gpu"), BOTH, BOTH, LEVELS, *WAYS, BOTH, BOTH, ("host", "gpu"))
]
LEGAL = [options for options in EVERY if not options.illegal()]


def names(steps: tuple[Step, ...]) -> list[str]:
    return [step.name for step in steps]


def test_cpu_order_is_the_table():
    schedule = build_schedule(HandoffOptions(order="cpu", engine_weights="mirror"))
    assert names(schedule.init) == [
        "engine.offload_kv", "engine.offload_weights", "trainer.init", "trainer.offload",
        "engine.onload_weights", "update_weights", "engine.onload_kv",
    ]  # fmt: skip
    assert names(schedule.cycle) == [
        "generate", "engine.offload_kv", "engine.offload_weights", "trainer.onload", "train", "save",
        "trainer.offload", "engine.onload_weights", "update_weights", "engine.onload_kv", "eval",
    ]  # fmt: skip


def test_gpu_order_is_the_table():
    schedule = build_schedule(HandoffOptions(order="gpu", engine_weights="mirror", buffers="fresh"))
    assert names(schedule.init) == [
        "engine.offload_kv", "trainer.init", "trainer.offload", "update_weights", "engine.onload_kv",
    ]  # fmt: skip
    assert names(schedule.cycle) == [
        "generate", "engine.offload_kv", "trainer.onload", "engine.offload_weights", "train", "save",
        "trainer.clear_memory", "engine.onload_weights", "trainer.offload", "update_weights",
        "engine.onload_kv", "eval",
    ]  # fmt: skip


def test_gpu_order_may_update_before_the_offload():
    schedule = build_schedule(HandoffOptions(order="gpu", buffers="fresh", update_from="gpu"))
    assert names(schedule.init) == [
        "engine.offload_kv", "trainer.init", "trainer.clear_memory", "update_weights", "trainer.offload",
        "engine.onload_kv",
    ]  # fmt: skip
    assert names(schedule.cycle)[6:] == [
        "trainer.clear_memory", "engine.onload_weights", "update_weights", "trainer.offload", "engine.onload_kv", "eval",
    ]  # fmt: skip


def test_save_and_eval_run_only_on_their_steps():
    schedule = build_schedule(HandoffOptions())
    plain = [s.name for s in schedule.steps(save=False, evaluate=False)]
    assert "save" not in plain
    assert "eval" not in plain
    assert [s.name for s in schedule.steps(save=True, evaluate=True)] == names(schedule.cycle)


def test_every_configuration_is_safe_or_refused_with_a_reason():
    assert len(EVERY) == 1536
    assert len(LEGAL) == 580
    for options in EVERY:
        if options.illegal():
            with pytest.raises(ScheduleError, match="no handoff schedule exists"):
                build_schedule(options)
        else:
            # `check` walks start-up and two cycles for each combination of save and eval.
            assert check(build_schedule(options)) == [], options


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (HandoffOptions("gpu", offload_train=False), "offload_train and offload_rollout"),
        (HandoffOptions("gpu", offload_rollout=False), "offload_train and offload_rollout"),
        (HandoffOptions("gpu", critic=True), "critic"),
        (HandoffOptions("gpu", lora=True, engine_weights="mirror"), "LoRA"),
        (HandoffOptions("cpu", lora=True, engine_weights="discard"), "never come back"),
        (HandoffOptions("cpu", engine_weights="mirror", buffers="shared"), "share one arena"),
        (HandoffOptions("cpu", update_from="gpu"), "has left the GPU when the engines are updated"),
    ],
)
def test_what_no_schedule_can_do_is_named(options: HandoffOptions, reason: str):
    assert any(reason in text for text in options.illegal())


def test_weights_come_back_exactly_where_they_were_released():
    """A level without `weight` never leaves weights un-onloaded, in either order (radixark/miles#2781)."""
    for options in LEGAL:
        schedule = build_schedule(options)
        for part in (schedule.init, schedule.cycle):
            out = names(part).count("engine.offload_weights")
            back = names(part).count("engine.onload_weights")
            assert out == back == (0 if not options.releases_weights else out)
            if options.releases_weights and part is schedule.cycle:
                assert out == 1


# A swap of these two neighbours is no mistake under these options, and why.
HARMLESS = {
    (
        "trainer.offload",
        "update_weights",
    ): "the update reads the awake trainer instead of its backup; the engine's KV is away either way",
    (
        "update_weights",
        "trainer.offload",
    ): "the update reads the backup instead of the awake trainer; the engine's KV is away either way",
    ("save", "update_weights"): "the trainer never leaves the GPU, so it can be saved at any time after the step",
    (
        "save",
        "engine.onload_weights",
    ): "the trainer never leaves the GPU, so it can be saved at any time after the step",
    ("save", "trainer.clear_memory"): "a checkpoint holds no gradients",
    (
        "trainer.onload",
        "engine.offload_weights",
    ): "nothing goes to the host with the weights, or the backup is on it either way",
    (
        "engine.onload_weights",
        "trainer.offload",
    ): "nothing comes from the host with the weights, or the backup is on it either way",
}


def mutations(schedule: Schedule) -> list[tuple[Step, Step, Schedule]]:
    """The schedule with each pair of neighbouring steps swapped."""
    made = []
    for part in ("init", "cycle"):
        steps = getattr(schedule, part)
        for i in range(len(steps) - 1):
            swapped = [*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]]
            made.append((steps[i], steps[i + 1], replace(schedule, **{part: tuple(swapped)})))
    return made


def test_every_swap_of_neighbours_that_matters_is_caught():
    caught, harmless = 0, set()
    for options in LEGAL:
        for first, second, mutant in mutations(build_schedule(options)):
            pair = (first.name, second.name)
            if check(mutant):
                caught += 1
                continue
            assert pair in HARMLESS, (pair, options)
            harmless.add(pair)
            if pair in (("trainer.onload", "engine.offload_weights"), ("engine.onload_weights", "trainer.offload")):
                assert not options.has_mirror or options.buffers == "retained", options
            if pair in (("save", "update_weights"), ("save", "engine.onload_weights")):
                assert not options.offload_train, options
    assert caught > 2000
    assert harmless == set(HARMLESS), "a pair that no configuration needs does not belong in the list"


def test_every_step_left_out_is_caught():
    """But for clearing memory for weights that never left."""
    for options in LEGAL:
        schedule = build_schedule(options)
        for part in ("init", "cycle"):
            steps = getattr(schedule, part)
            for i, step in enumerate(steps):
                if step.name == "trainer.clear_memory" and not options.releases_weights:
                    continue
                mutant = replace(schedule, **{part: (*steps[:i], *steps[i + 1 :])})
                assert check(mutant), (part, step.name, options)


@pytest.mark.parametrize(
    ("order", "swap", "problem"),
    [
        ("gpu", ("trainer.onload", "engine.offload_weights"), "mirror and the trainer's backup on the host together"),
        ("gpu", ("engine.onload_weights", "trainer.offload"), "mirror and the trainer's backup on the host together"),
        ("gpu", ("trainer.clear_memory", "engine.onload_weights"), "return before the gradients are freed"),
        ("gpu", ("engine.offload_kv", "trainer.onload"), "KV cache and the trainer's state are on the GPU together"),
        ("cpu", ("engine.offload_weights", "trainer.onload"), "weights and the trainer's state on the GPU together"),
        ("cpu", ("update_weights", "engine.onload_kv"), "kv_cache comes back before the update"),
        ("cpu", ("engine.onload_weights", "update_weights"), "writes weights that are offloaded"),
        ("cpu", ("save", "trainer.offload"), "params is used by save while it is offloaded"),
        ("cpu", ("train", "save"), "saves another version than the one just trained"),
        ("cpu", ("generate", "engine.offload_kv"), "used by generate while it is offloaded"),
        ("cpu", ("engine.onload_kv", "eval"), "used by eval while it is offloaded"),
    ],
)
def test_a_swap_is_named_for_what_it_breaks(order: str, swap: tuple[str, str], problem: str):
    buffers = "fresh" if order == "gpu" else "retained"
    schedule = build_schedule(HandoffOptions(order, engine_weights="mirror", buffers=buffers))
    mutant = next(m for a, b, m in reversed(mutations(schedule)) if (a.name, b.name) == swap)
    assert any(problem in text for text in check(mutant)), check(mutant)
