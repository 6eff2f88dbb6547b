"""`plan --fit`: the fewest nodes, and layouts that a user can launch as they are told."""

from __future__ import annotations

import pytest
from launches import resolved

from rllaunch.doctor.engine import builtin_rules, diagnose
from rllaunch.plan.choose import Choice, architecture_of, choose, plan_launch
from rllaunch.plan.fit import FitAnswer, fit, laid_out, layouts

LAUNCHES = {
    "small": "--model qwen3-0.6b --hardware H100",
    "dense": "--model qwen3-32b --hardware H100 --recompute-granularity full --max-tokens-per-gpu 8192",
    "moe": "--model qwen3-30b-a3b --hardware H100 --recompute-granularity full --max-tokens-per-gpu 8192",
    "moe, trays": "--model glm-4.5-air --hardware GB200 --recompute-granularity full --max-tokens-per-gpu 8192",
    "mla": "--model moonlight-16b-a3b --hardware H200 --recompute-granularity full --max-tokens-per-gpu 8192",
    "dsv4": "--model dsv4 --hardware GB300",
    "dsv4, PCIe": "--model dsv4 --hardware H200",
}


def answer(words: str, max_nodes: int = 64) -> FitAnswer:
    launch = resolved(words)
    return fit(launch, architecture_of(launch), max_nodes=max_nodes)


@pytest.mark.parametrize("words", LAUNCHES.values(), ids=LAUNCHES)
def test_every_layout_that_is_told_fits_and_passes_the_doctor_with_its_flags(words: str):
    made = answer(words)
    assert 1 <= len(made.found) <= 10
    for fitted in made.found:
        launch = resolved(f"{words} {fitted.flags}")
        choice = plan_launch(launch)
        assert isinstance(choice, Choice)
        assert choice.fits, fitted.flags
        assert choice.taken.plan.to_json() == fitted.candidate.plan.to_json(), "as flags it is what was planned"
        found = [f for f in diagnose(launch, builtin_rules(), probe=False) if f.level == "error" and f.code < "RL5"]
        assert found == [], fitted.flags


@pytest.mark.parametrize("words", LAUNCHES.values(), ids=LAUNCHES)
def test_with_half_the_nodes_no_layout_fits(words: str):
    made = answer(words)
    fewest = made.found[0].layout.nodes
    assert sorted(made.smaller) == [2**i for i in range(fewest.bit_length() - 1)]
    if fewest == 1:
        return
    launch = resolved(words)
    architecture = architecture_of(launch)
    planned = 0
    for layout in layouts(launch, architecture, fewest // 2):
        plan = choose(laid_out(launch, layout), architecture, compare=False).taken.plan
        planned += 1
        assert not (plan.fits and plan.sizes.gpu["kv_cache"] > 0), layout.label
    assert planned > 10


def test_layouts_divide_gpus_layers_heads_and_experts():
    launch = resolved("--model qwen3-30b-a3b --hardware H100")
    seen = list(layouts(launch, architecture_of(launch), 2))
    assert len(set(seen)) == len(seen) > 50
    for layout in seen:
        assert 16 % (layout.tp * layout.pp * layout.cp) == 0
        assert 16 % (layout.ep * layout.pp) == 0
        assert 32 % layout.tp == 0
        assert 128 % layout.ep == 0
        assert layout.pp <= 48
        assert layout.engine_gpus <= 8 or layout.engine_gpus % 8 == 0
        assert layout.tp <= 8, "a tensor-parallel group stays in a node"


def test_best_first_is_fewest_nodes_then_least_communication():
    found = answer(LAUNCHES["moe"]).found
    assert [f.layout.nodes for f in found] == sorted(f.layout.nodes for f in found)


def test_each_smaller_count_says_what_its_nearest_layout_lacks():
    made = answer(LAUNCHES["dsv4"])
    assert made.found[0].layout.nodes == 8
    assert sorted(made.smaller) == [1, 2, 4]
    for why in made.smaller.values():
        assert why.startswith("exceeds the ")
        assert "(closest: TP" in why


def test_where_nothing_fits_every_count_says_why():
    made = answer(LAUNCHES["dsv4"], max_nodes=4)
    assert made.found == ()
    assert sorted(made.smaller) == [1, 2, 4]


def test_a_split_of_layers_that_was_set_for_another_layout_does_not_stop_the_search():
    made = answer("--model dsv4 --hardware GB300")
    assert {fitted.layout.pp for fitted in made.found} - {8}


def test_a_limit_that_was_set_is_the_one_that_counts():
    less = answer(f"{LAUNCHES['moe']} --set hardware.host_memory_bytes=500000000000")
    assert less.found[0].layout.nodes > answer(LAUNCHES["moe"]).found[0].layout.nodes


def test_the_context_parallel_size_that_was_set_is_kept():
    made = answer(f"{LAUNCHES['moe']} --context-parallel-size 2")
    assert {fitted.layout.cp for fitted in made.found} == {2}


def test_layers_that_do_not_divide_leave_short_stages_at_the_ends_as_the_recipe_has_them():
    launch = resolved("--model dsv4 --hardware GB300")
    ends = {layout.pp: layout.ends for layout in layouts(launch, architecture_of(launch), 8)}
    assert ends[1] is None
    assert ends[2] == (22, 21)
    assert ends[8] == (4, 3)  # profiles' cell, radixark/miles@31f1ca9 scripts/run_deepseek_v4.py: 4, six times 6, 3


def test_flags_name_what_a_profile_or_the_user_had_otherwise():
    made = answer("--model dsv4 --hardware GB300 --actor-num-nodes 8")
    flags = made.found[0].flags
    assert "--actor-num-nodes" not in flags, "8 is what was set"
    assert "--set trainer.decoder_first_pipeline_num_layers=unset" in flags
    assert f"--sglang-tp-size {made.found[0].layout.engine_gpus}" in flags
    small = answer("--model qwen3-0.6b --hardware H100").found[0]
    assert small.flags == "--num-nodes 1 --tensor-model-parallel-size 1 --rollout-num-gpus-per-engine 1"


def test_every_data_parallel_rank_gets_as_many_samples():
    launch = resolved("--model qwen3-0.6b --hardware H100 --rollout-batch-size 3 --n-samples-per-prompt 2")
    assert {8 // (at.tp * at.pp) for at in layouts(launch, architecture_of(launch), 1)} == {1, 2}


def test_kv_heads_divide_the_ranks_or_the_ranks_them():
    twelve = "--set model.architecture.num_attention_heads=24 --set model.architecture.num_key_value_heads=12"
    launch = resolved(f"--model qwen3-0.6b --hardware H100 {twelve}")
    assert {at.tp for at in layouts(launch, architecture_of(launch), 1)} == {1, 2, 4}
