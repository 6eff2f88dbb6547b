"""`plan --fit`: the fewest nodes, and layouts that a user can launch as they are told."""

from __future__ import annotations

import pytest
from launches import resolved

from rllaunch.doctor.engine import builtin_rules, diagnose
from rllaunch.plan.choose import Choice, architecture_of, choose, plan_launch
from rllaunch.plan.fit import FitAnswer, Layout, fit, laid_out, layouts

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
def test_with_one_node_less_no_layout_fits(words: str):
    made = answer(words)
    fewest = made.found[0].layout.nodes
    assert sorted(made.smaller) == list(range(1, fewest))
    launch = resolved(words)
    architecture = architecture_of(launch)
    cp = launch.config.trainer.context_parallel_size
    given = launch.config.trainer.optimizer_cpu_offload
    for (tp, pp, ep), engines in layouts(launch, architecture, fewest - 1) if fewest > 1 else []:
        for on_host in {given, given or not launch.is_set("trainer.optimizer_cpu_offload")}:
            last = (
                None
                if len(architecture.layers) % pp == 0
                else len(architecture.layers) - (pp - 1) * -(-len(architecture.layers) // pp)
            )
            layout = Layout(fewest - 1, tp, pp, cp, ep, engines[-1], on_host, last)
            plan = choose(laid_out(launch, layout), architecture, compare=False).taken.plan
            assert not (plan.fits and plan.sizes.gpu["kv_cache"] > 0), layout.label


def test_layouts_divide_gpus_layers_heads_and_experts():
    launch = resolved("--model qwen3-30b-a3b --hardware H100")
    seen = [(sizes, tuple(engines)) for sizes, engines in layouts(launch, architecture_of(launch), 2)]
    assert len(set(seen)) == len(seen) > 20
    for (tp, pp, ep), engines in seen:
        assert 16 % (tp * pp) == 0
        assert 16 % (ep * pp) == 0
        assert 32 % tp == 0
        assert 128 % ep == 0
        assert pp <= 48
        assert all(engine <= 8 or engine % 8 == 0 for engine in engines)
        assert tp <= 8, "a tensor-parallel group stays in a node"


def test_best_first_is_fewest_nodes_then_least_communication():
    found = answer(LAUNCHES["moe"]).found
    assert [f.layout.nodes for f in found] == sorted(f.layout.nodes for f in found)


def test_what_leaves_headroom_comes_before_what_does_not_wherever_the_optimizer_lives():
    words = "--model glm-4.5 --hardware B200 --num-nodes 6"
    found = answer(words).found
    rooms = [
        min(room for tier in ("gpu", "host") if (room := f.candidate.plan.headroom(tier)) is not None) for f in found
    ]
    is_tight = [room < 0.05 for room in rooms]
    assert is_tight == sorted(is_tight)
    diagnosed = diagnose(resolved(f"{words} {found[0].flags}"), builtin_rules(), probe=False)
    assert [f.code for f in diagnosed if f.code == "RL203"] == []


def test_each_smaller_count_says_what_its_nearest_layout_lacks():
    made = answer(LAUNCHES["dsv4"])
    assert made.found[0].layout.nodes == 8
    assert sorted(made.smaller) == [1, 2, 3, 4, 5, 6, 7]
    for why in made.smaller.values():
        assert why.startswith(("exceeds the ", "the trainer's state alone takes ", "no layout divides"))
        assert "(closest: TP" in why or why == "no layout divides"


def test_more_headroom_is_looked_for_where_more_is_asked_for():
    words = "--model glm-4.5 --hardware B200 --num-nodes 6"
    best = [answer(f"{words} --memory-headroom {share}").found[0].candidate.plan for share in (0.05, 0.2)]
    assert [plan.headroom("gpu") for plan in best] == pytest.approx([0.19, 0.256], abs=0.001)


def test_where_nothing_fits_every_count_says_why():
    made = answer(LAUNCHES["dsv4"], max_nodes=4)
    assert made.found == ()
    assert sorted(made.smaller) == [1, 2, 3, 4]


def test_a_split_of_layers_that_was_set_for_another_layout_does_not_stop_the_search():
    made = answer("--model dsv4 --hardware GB300")
    assert {fitted.layout.pp for fitted in made.found} - {8}


def test_a_limit_that_was_set_is_the_one_that_counts():
    less = answer(f"{LAUNCHES['moe']} --set hardware.host_memory_bytes=500000000000")
    assert less.found[0].layout.nodes > answer(LAUNCHES["moe"]).found[0].layout.nodes


def test_the_context_parallel_size_that_was_set_is_kept():
    made = answer(f"{LAUNCHES['moe']} --context-parallel-size 2")
    assert {fitted.layout.cp for fitted in made.found} == {2}


def test_layers_that_do_not_divide_leave_a_short_last_stage():
    made = answer("--model deepseek-v3 --hardware H200")
    for fitted in made.found:
        pp, last = fitted.layout.pp, fitted.layout.last_stage
        assert (61 % pp == 0) == (last is None)
        assert last is None or (61 - last) % (pp - 1) == 0


def test_flags_name_what_a_profile_or_the_user_had_otherwise():
    flags = answer("--model dsv4 --hardware GB300").found[0].flags
    assert "--pipeline-model-parallel-size" in flags
    assert "--set trainer.decoder_first_pipeline_num_layers=unset" in flags
    assert "null" not in flags
    assert "--num-nodes" not in flags, "the cell has as many"
    small = answer("--model qwen3-0.6b --hardware H100").found[0]
    assert small.flags == ""


def test_every_data_parallel_rank_gets_as_many_samples():
    launch = resolved("--model qwen3-0.6b --hardware H100 --rollout-batch-size 3 --n-samples-per-prompt 2")
    assert {8 // (tp * pp) for (tp, pp, _), _ in layouts(launch, architecture_of(launch), 1)} == {1, 2}


def test_kv_heads_divide_the_ranks_or_the_ranks_them():
    twelve = "--set model.architecture.num_attention_heads=24 --set model.architecture.num_key_value_heads=12"
    launch = resolved(f"--model qwen3-0.6b --hardware H100 {twelve}")
    assert {tp for (tp, _, _), _ in layouts(launch, architecture_of(launch), 1)} == {1, 2, 4}
