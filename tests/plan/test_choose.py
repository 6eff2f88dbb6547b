"""`auto`: what was set stays, the fastest that fits is taken, and each of the others is told why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launches import chosen, resolved

from rllaunch.plan.choose import Candidate, Choice, Unknown, decided, least_room, plan_launch
from rllaunch.plan.handoff import build_schedule, check

AUTO = "--colocate-memory-peak-device auto"
SMALL = "--model qwen3-0.6b --hardware H100"
MOE = (
    "--model qwen3-30b-a3b --hardware H100 --num-nodes 2 --tensor-model-parallel-size 4 --expert-model-parallel-size 8"
    " --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 4 --recompute-granularity full --max-tokens-per-gpu 8192"
)
AIR = (
    "--model glm-4.5-air --hardware GB200 --num-nodes 4 --tensor-model-parallel-size 4 --expert-model-parallel-size 16"
    " --expert-tensor-parallel-size 1 --rollout-num-gpus-per-engine 4 --recompute-granularity full --max-tokens-per-gpu 8192"
)
LAUNCHES = {
    "small": f"{SMALL} {AUTO}",
    "small, one GPU": f"{SMALL} --num-gpus-per-node 1 {AUTO}",
    "moe": f"{MOE} {AUTO}",
    "moe that does not fit": f"{MOE.replace('--num-nodes 2', '--num-nodes 1')} {AUTO}",
    "moe, cpu order": MOE,
    "moe, mirror": f"{MOE} --engine-weights mirror {AUTO}",
    "moe, expert-parallel engines": f"{MOE} --sglang-ep-size 4 {AUTO}",
    "moe, much headroom": f"{MOE} --memory-headroom 0.3 {AUTO}",
    "air": f"{AIR} {AUTO}",
    "air, little host": f"{AIR} --set hardware.host_memory_bytes=600000000000 {AUTO}",
    "lora": f"{SMALL} --lora-rank 16 {AUTO}",
    "critic": f"{SMALL} --advantage-estimator ppo {AUTO}",
    "dsv4": "--model dsv4 --hardware GB300",
    "dsv4, cpu order": "--model dsv4 --hardware GB300 --colocate-memory-peak-device cpu",
    "dsv4, auto": f"--model dsv4 --hardware GB300 {AUTO}",
}


def candidates(choice: Choice) -> list[Candidate]:
    return [choice.taken, *choice.others]


def has_room(candidate: Candidate, headroom: float) -> bool:
    return all(
        limit is None or candidate.plan.peak(tier) <= (1 - headroom) * limit
        for tier, limit in (("gpu", candidate.plan.limits.gpu), ("host", candidate.plan.limits.host))
    )


@pytest.mark.parametrize("words", LAUNCHES.values(), ids=LAUNCHES)
def test_every_candidate_has_a_safe_schedule_and_every_one_that_lost_a_reason(words: str):
    choice = chosen(words)
    assert choice.taken.why_not == ""
    assert all(other.why_not for other in choice.others)
    assert all(check(build_schedule(candidate.plan.options)) == [] for candidate in candidates(choice))
    told = [(candidate.plan.options, candidate.optimizer_cpu_offload) for candidate in candidates(choice)]
    assert len(told) == len(set(told)), "a way is priced once"


@pytest.mark.parametrize("words", LAUNCHES.values(), ids=LAUNCHES)
def test_no_faster_candidate_fits_with_the_headroom_that_was_asked_for(words: str):
    launch = resolved(words)
    choice = plan_launch(launch)
    assert isinstance(choice, Choice)
    headroom = launch.config.handoff.memory_headroom
    is_open = [other for other in choice.others if "not open" not in other.why_not]
    roomy = [other for other in is_open if has_room(other, headroom)]
    if roomy:
        assert has_room(choice.taken, headroom)
        # Hundredths of a second are no reason to move more.
        assert choice.taken.plan.seconds_added <= min(other.plan.seconds_added for other in roomy) + 0.01
    elif any(other.plan.fits for other in is_open):
        assert choice.taken.plan.fits
        room = least_room(choice.taken.plan)[0]
        assert room >= max(least_room(other.plan)[0] for other in is_open) - 0.001
    elif not choice.fits:
        assert all(least_room(other.plan)[0] <= least_room(choice.taken.plan)[0] for other in is_open)


@pytest.mark.parametrize("words", LAUNCHES.values(), ids=LAUNCHES)
def test_a_reason_is_true(words: str):
    launch = resolved(words)
    choice = plan_launch(launch)
    assert isinstance(choice, Choice)
    for other in choice.others:
        plan, why = other.plan, other.why_not
        assert why.startswith("exceeds the ") is not plan.fits, why
        if "slower a cycle" in why:
            assert plan.seconds_added > choice.taken.plan.seconds_added
        if "more on the host" in why:
            assert plan.peak("host") > choice.taken.plan.peak("host")
        if "holds more on the GPU" in why:
            assert plan.peak("gpu") > choice.taken.plan.peak("gpu")
        if "are asked for" in why:
            assert not has_room(other, launch.config.handoff.memory_headroom)
        if "is as good" in why or "is as fast" in why:
            assert plan.seconds_added == pytest.approx(choice.taken.plan.seconds_added, abs=0.05)


@pytest.mark.parametrize(
    ("flag", "key", "value"),
    [
        ("--offload-train", "handoff.offload_train", True),
        ("--no-offload-train", "handoff.offload_train", False),
        ("--offload-rollout", "handoff.offload_rollout", True),
        ("--no-offload-rollout", "handoff.offload_rollout", False),
        ("--offload-rollout-level kv_cache", "handoff.offload_rollout_level", ("kv_cache",)),
        ("--offload-train-buffers fresh", "handoff.offload_train_buffers", "fresh"),
        ("--engine-weights mirror", "handoff.engine_weights", "mirror"),
        ("--optimizer-cpu-offload", "trainer.optimizer_cpu_offload", True),
        ("--no-optimizer-cpu-offload", "trainer.optimizer_cpu_offload", False),
    ],
)
def test_what_was_set_stays_whatever_else_is_open(flag: str, key: str, value: object):
    launch = resolved(f"{MOE} {AUTO} {flag}")
    choice, made = plan_launch(launch), decided(launch)
    assert isinstance(choice, Choice)
    assert made.value(key) == value
    assert made.origins[key] == launch.origins[key]
    for candidate in candidates(choice):
        options = candidate.plan.options
        of_candidate = {
            "handoff.offload_train": options.offload_train,
            "handoff.offload_rollout": options.offload_rollout,
            # What is not used is not looked at.
            "handoff.offload_rollout_level": tuple(options.level) if options.offload_rollout else value,
            "handoff.offload_train_buffers": options.buffers if options.offload_train else value,
            "handoff.engine_weights": options.engine_weights if options.releases_weights else value,
            "trainer.optimizer_cpu_offload": candidate.optimizer_cpu_offload,
        }
        assert of_candidate[key] == value


def test_an_order_that_was_set_is_kept_and_the_other_is_shown_with_who_set_it():
    choice = chosen("--model dsv4 --hardware GB300 --colocate-memory-peak-device cpu")
    assert not choice.fits
    assert {c.plan.options.order for c in candidates(choice) if "not open" not in c.why_not} == {"cpu"}
    (other,) = (c for c in choice.others if c.plan.options.order == "gpu")
    assert other.plan.fits
    assert other.why_not == (
        "fits; not open: handoff.colocate_memory_peak_device is set (--colocate-memory-peak-device cpu)"
    )


def test_deepseek_v4_on_gb300_takes_gpu_order_with_one_arena_for_mirror_and_backup():
    choice = chosen("--model dsv4 --hardware GB300")
    options = choice.taken.plan.options
    assert (options.order, options.buffers, options.weights_mode) == ("gpu", "shared", "mirror")
    # Backup and mirror in turn in one arena of the larger's size.
    sizes = choice.taken.plan.sizes
    arenas = {step.host["arena"] for step in choice.taken.plan.steps if "arena" in step.host}
    assert arenas == {max(sizes.node["weights"], sizes.node["params"] + sizes.node["optimizer"])}
    assert not any({"weights", "params", "optimizer"} & set(step.host) for step in choice.taken.plan.steps)


def test_with_auto_deepseek_v4_keeps_the_engines_weights_on_gpus_that_have_the_room():
    choice = chosen(f"--model dsv4 --hardware GB300 {AUTO}")
    assert choice.taken.plan.options.weights_mode == "resident"
    mirrors = [c for c in choice.others if c.plan.options.has_mirror and c.plan.options.order == "gpu"]
    assert {c.plan.options.buffers for c in mirrors} == {"retained", "shared", "fresh"}
    assert min(m.plan.peak("host") for m in mirrors) > choice.taken.plan.peak("host")


def test_a_small_model_stays_where_it_is():
    choice = chosen(f"{SMALL} {AUTO}")
    assert choice.taken.label == "nothing offloaded"
    assert choice.taken.plan.seconds_added == min(c.plan.seconds_added for c in candidates(choice) if c.plan.fits)


def test_without_auto_an_order_offloads_as_it_always_did():
    options = chosen(SMALL).taken.plan.options
    assert (options.order, options.offload_train, options.offload_rollout) == ("cpu", True, True)


def test_a_larger_headroom_is_kept_where_something_can():
    fast, roomy = chosen(f"{MOE} {AUTO}"), chosen(f"{MOE} {AUTO} --memory-headroom 0.2")
    assert has_room(roomy.taken, 0.2)
    assert not has_room(fast.taken, 0.2)
    reasons = [other.why_not for other in roomy.others if other.plan.options == fast.taken.plan.options]
    assert any(reason.endswith("free at its peak, 20% are asked for") for reason in reasons)


def test_lora_and_a_critic_leave_cpu_order_only():
    for more in ("--lora-rank 16", "--advantage-estimator ppo"):
        assert {c.plan.options.order for c in candidates(chosen(f"{SMALL} {AUTO} {more}"))} == {"cpu"}


def test_lora_never_discards_the_weights_that_no_update_brings_back():
    assert "discard" not in {c.plan.options.weights_mode for c in candidates(chosen(f"{SMALL} {AUTO} --lora-rank 16"))}


def test_expert_parallel_engines_mirror_what_no_update_sends_again():
    launch = f"{MOE} {AUTO} --sglang-ep-size 4"
    assert "discard" not in {c.plan.options.weights_mode for c in candidates(chosen(launch))}


# -- what is decided becomes the config -------------------------------------------------------------


def test_what_auto_took_is_in_the_config_as_derived():
    made = decided(resolved(f"{SMALL} {AUTO}"))
    assert made.value("handoff.colocate_memory_peak_device") == "cpu"
    assert (made.value("handoff.offload_train"), made.value("handoff.offload_rollout")) == (False, False)
    for key in ("colocate_memory_peak_device", "offload_train", "offload_rollout"):
        origin = made.origin(f"handoff.{key}")
        assert (origin.layer, origin.source) == (
            "derived",
            "handoff.colocate_memory_peak_device = auto: the fastest that fits",
        )


def test_what_is_decided_is_planned_again_as_it_was():
    for words in LAUNCHES.values():
        launch = resolved(words)
        before = plan_launch(launch)
        made = decided(launch)
        # A config read back from a run's record is planned without what was kept in memory.
        again = plan_launch(type(made)(made.config.model_copy(), made.origins, made.profiles))
        assert isinstance(before, Choice)
        assert isinstance(again, Choice)
        assert again.taken.plan.to_json() == before.taken.plan.to_json()


def test_where_nothing_is_open_nothing_is_changed():
    words = (
        f"{MOE} --colocate-memory-peak-device gpu --offload-train-buffers shared --engine-weights mirror"
        " --no-optimizer-cpu-offload --update-weights-from host"
    )
    launch = resolved(words)
    assert decided(launch) is launch


# -- what cannot be planned -------------------------------------------------------------------------


def unknown(words: str) -> Unknown:
    answer = plan_launch(resolved(words))
    assert isinstance(answer, Unknown)
    return answer


def test_where_no_handoff_is_legal_every_reason_is_told():
    answer = unknown(f"{SMALL} --colocate-memory-peak-device gpu --no-offload-train --lora-rank 8")
    assert answer.what == (
        "no handoff is legal: gpu order needs offload_train and offload_rollout; gpu order cannot run with LoRA"
    )
    assert answer.where == ('handoff.colocate_memory_peak_device = "gpu"   flag: --colocate-memory-peak-device gpu',)


def test_an_architecture_that_nobody_knows_is_named_with_those_that_are_known():
    answer = unknown(f"{SMALL} --set model.architecture.model_type=quen3")
    assert "quen3" in answer.what
    assert "qwen3" in answer.fix


def test_a_missing_fact_is_named_with_its_file(tmp_path: Path):
    facts = {"model_type": "deepseek_v3", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    answer = unknown(f"--model {tmp_path} --hardware H100")
    assert answer.what == "the architecture of model_type 'deepseek_v3' lacks the fact 'q_lora_rank'"
    assert answer.where
    assert str(tmp_path) in answer.where[0]
    assert answer.fix


def test_stages_that_do_not_hold_the_layers_are_told_not_guessed():
    answer = unknown(
        f"{SMALL} --pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 4"
    )
    assert answer.what == "2 pipeline stages with 4 in the first and 4 in the last do not hold 28 layers"


def test_a_launch_that_is_not_colocated_is_not_planned():
    assert unknown(f"{SMALL} --no-colocate").what == "trainer and engines on GPUs of their own are not planned"
