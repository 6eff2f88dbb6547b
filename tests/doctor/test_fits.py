"""The rules about memory: what a launch that breaks one is told, and that the advice is true."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from launches import chosen, plugins_without_other_cells, resolved

from rllaunch.doctor.engine import builtin_rules

DENSE = "--model qwen3-0.6b --hardware H100"
MOE = (
    "--model qwen3-30b-a3b --hardware H100 --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 8"
    " --expert-tensor-parallel-size 1 --recompute-granularity full --max-tokens-per-gpu 8192 --rollout-num-gpus-per-engine 4"
)
DSV4 = "--model dsv4 --hardware GB300"
CPU_ORDER = f"{DSV4} --colocate-memory-peak-device cpu"


@pytest.fixture
def doctor(rllaunch: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`doctor(words)` → the exit code and the findings about memory by code; of the cells DeepSeek-V4's alone counts."""
    monkeypatch.setattr("rllaunch.pipeline.load_plugins", plugins_without_other_cells)

    def run(words: str) -> tuple[int, dict[str, dict[str, Any]]]:
        result = rllaunch("doctor", "--no-probe", "--json", *shlex.split(words))
        findings = [f for f in result.json()["findings"] if f["code"].startswith("RL2")]
        by_code = {finding["code"]: finding for finding in findings}
        assert len(by_code) == len(findings), "one finding a rule"
        return result.code, by_code

    return run


# What breaks each rule, what of the launch's codes that leaves, and the same launch mended.
CASES: dict[str, tuple[str, set[str], str]] = {
    "RL200": (f"{DENSE} --set hardware.host_memory_bytes=unset", {"RL200", "RL207"}, DENSE),
    "RL200, an unknown model": (f"{DENSE} --set model.architecture.model_type=quen3", {"RL200"}, DENSE),
    "RL201": (CPU_ORDER, {"RL201", "RL208"}, DSV4),
    "RL202": (f"{MOE} --recompute-granularity none", {"RL202"}, f"{MOE} --num-nodes 2"),
    "RL203": (DSV4, {"RL203"}, f"{DSV4} --num-nodes 16"),
    "RL203, the GPU": (MOE, {"RL203"}, f"{MOE} --num-nodes 2"),
    "RL204, too much": (f"{DENSE} --sglang-mem-fraction-static 0.97", {"RL202", "RL204"}, f"{DENSE} --sglang-mem-fraction-static 0.9"),
    "RL204, too little": (f"{MOE} --num-nodes 2 --sglang-mem-fraction-static 0.1", {"RL204"}, f"{MOE} --num-nodes 2"),
    "RL205": (f"{MOE} --num-nodes 2 --engine-weights mirror", {"RL205"}, f"{MOE} --num-nodes 2 --engine-weights discard"),
    "RL206": (
        f"{MOE} --num-nodes 2 --sglang-speculative-algorithm EAGLE --engine-weights discard",
        {"RL206"},
        f"{MOE} --num-nodes 2 --sglang-speculative-algorithm EAGLE",
    ),
    "RL207": (DENSE, {"RL207"}, f"{DENSE} --no-offload-train --no-offload-rollout"),
    "RL208": (CPU_ORDER, {"RL201", "RL208"}, f"{CPU_ORDER} --no-optimizer-cpu-offload"),
    "RL210": (
        "--model qwen3-8b --hardware cpu --set hardware.host_memory_bytes=25276510208",
        {"RL210"},
        "--model tiny --hardware cpu --set hardware.host_memory_bytes=25276510208",
    ),
    "RL209": (f"{MOE} --num-nodes 2 --set env.RAY_memory_usage_threshold=0.2", {"RL209"}, f"{MOE} --num-nodes 2"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_a_launch_that_breaks_a_rule_is_told_so_and_the_mended_one_is_not(doctor: Any, name: str, case: Any):
    bad, expected, good = case
    code, found = doctor(bad)
    assert set(found) == expected
    assert all(finding["origins"] and finding["fix"] for finding in found.values())
    assert code == (4 if any(finding["level"] == "error" for finding in found.values()) else 0)
    code, found = doctor(good)
    assert name[:5] not in found
    assert code == 0


def test_every_rule_about_memory_is_broken_by_a_case():
    codes = {rule.code for rule in builtin_rules() if rule.code.startswith("RL2")}
    assert codes == {name[:5] for name in CASES} == {f"RL2{n:02}" for n in range(11)}


# -- whole texts -----------------------------------------------------------------------------------


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def test_a_host_that_is_too_small_is_told_with_both_numbers_the_sum_and_what_mends_it(doctor: Any):
    plan = chosen(CPU_ORDER).taken.plan
    (step,) = (s for s in plan.steps if (s.phase, s.name) == ("init", "trainer.offload"))
    parts = sorted(step.host.items(), key=lambda item: -item[1])
    names = {"weights": "mirror", "params": "params backup"}
    told = " + ".join(f"{names.get(n, n.replace('_', ' '))} {gib(size)}" for n, size in parts if size >= 2**26)
    need = sum(step.host.values())
    mended = chosen(DSV4).taken.plan.peak("host")
    _, found = doctor(CPU_ORDER)
    assert found["RL201"]["message"] == (
        f"does not fit in a node's host memory: trainer.offload at start-up needs {gib(need)}, 898.0 GiB are there"
        f" (cpu order, mirror, fresh backup)\ntrainer.offload at start-up: {told}"
    )
    assert found["RL201"]["origins"][0].startswith(
        "hardware.host_memory_bytes = 964220157952   hardware profile: GB300 (rllaunch "
    )
    assert found["RL201"]["origins"][1].startswith(
        'handoff.colocate_memory_peak_device = "cpu"   flag: --colocate-memory-peak-device cpu (was "gpu", '
    )
    assert found["RL201"]["fix"].startswith(
        f"--colocate-memory-peak-device gpu frees {gib(need - mended)} ({gib(mended)} at the host's peak: fits), or "
    )


def test_a_gpu_that_is_too_small_names_the_first_step_and_the_worst(doctor: Any):
    words = f"{MOE} --recompute-granularity none --rollout-max-response-len 4096"
    plan = chosen(words).taken.plan
    over = [step for step in plan.steps if sum(step.gpu.values()) > 85_520_809_984 - 2**30]
    _, found = doctor(words)
    assert over[0].name == "train"
    assert found["RL202"]["message"].splitlines()[0] == (
        f"does not fit in a GPU's memory: train needs {gib(sum(over[0].gpu.values()))}, {gib(85_520_809_984 - 2**30)} are there"
        f" ({plan.label})"
    )
    assert found["RL202"]["fix"].startswith(
        "--recompute-granularity full --megatron-recompute-method uniform --megatron-recompute-num-layers 1 frees "
    )


@pytest.mark.parametrize(
    "words", ["--model qwen3-30b-a3b --hardware H100", "--model deepseek-v3 --hardware H200 --num-nodes 16"]
)
def test_where_no_single_change_is_enough_a_layout_that_fits_is_named(doctor: Any, words: str):
    code, found = doctor(words)
    first = found.get("RL202") or found["RL201"]
    said = [f["fix"] for f in found.values() if f["fix"].startswith("another layout fits: ")]
    assert code == 4
    assert first["level"] == "error"
    assert len(said) == 1, "one finding looks for it"
    flags = said[0].removeprefix("another layout fits: ").partition(" (")[0]
    code, mended = doctor(f"{words} {flags}")
    assert code == 0
    assert not {"RL201", "RL202", "RL204"} & mended.keys()


def test_where_no_layout_fits_the_advice_says_so(doctor: Any):
    _, found = doctor("--model glm-4.5 --hardware H100 --num-nodes 1 --pipeline-model-parallel-size 1")
    fix = found["RL202"]["fix"]
    assert fix.startswith(
        "`rllaunch plan --fit --num-nodes 1` looks for a layout on as many nodes or more; "
        "no single change is enough: --expert-model-parallel-size 4 frees "
    )
    assert fix.count(" too much") == 3


def test_little_room_is_told_with_its_share_and_the_host_s_with_ray_s_threshold(doctor: Any):
    plan = chosen(DSV4).taken.plan
    share = 1 - plan.peak("host") / 964_220_157_952
    _, found = doctor(DSV4)
    first, _, last = found["RL203"]["message"].splitlines()
    assert first == f"fits, but leaves {share:.1%} of the host's 898.0 GiB free: save needs {gib(plan.peak('host'))}"
    assert last == "Ray ends workers at 95% of a node unless RAY_memory_usage_threshold says more"
    assert found["RL203"]["level"] == "warning"


def test_a_side_without_a_limit_is_said_and_the_other_is_planned_all_the_same(doctor: Any):
    code, found = doctor(f"{MOE} --recompute-granularity none --set hardware.host_memory_bytes=unset")
    assert found["RL200"]["message"] == (
        "the profile does not say how much host memory there is: that side is planned without a limit"
    )
    assert found["RL200"]["level"] == "info"
    assert "RL202" in found
    assert code == 4


def test_what_cannot_be_counted_is_said_with_the_nearest_name(doctor: Any):
    code, found = doctor(f"{DENSE} --set model.architecture.model_type=quen3")
    assert code == 0
    assert found["RL200"]["message"] == "whether it fits is not known: unknown model_type 'quen3'"
    assert found["RL200"]["fix"] == "did you mean 'qwen3'?"


def test_a_fraction_without_room_for_a_kv_cache_is_raised_until_there_is(doctor: Any):
    words = (
        "--model qwen3-32b --hardware H100 --num-nodes 2 --tensor-model-parallel-size 8 --rollout-num-gpus-per-engine 1"
    )
    _, found = doctor(f"{words} --sglang-mem-fraction-static 0.5")
    # 32.76 B parameters in bf16 on a GPU that has 76.5 GiB for the engine.
    assert found["RL204"]["message"] == (
        "mem_fraction_static 0.5 leaves no room for a KV cache: 0.5 × 76.5 GiB is less than the engine's weights, 61.0 GiB a GPU"
    )
    mended = chosen(f"{words} {found['RL204']['fix']}").taken.plan
    assert mended.fits
    assert mended.sizes.gpu["kv_cache"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "--model llama3.1-70b --hardware H100 --num-nodes 4 --tensor-model-parallel-size 8 --sequence-parallel "
            "--pipeline-model-parallel-size 2 --recompute-granularity full --megatron-recompute-method uniform "
            "--megatron-recompute-num-layers 1",
            "leaves room: its weights are 32.9 GiB a GPU",
        ),
        (
            "--model llama3.1-405b --hardware H100 --num-nodes 8",
            "leaves room for a KV cache, though the launch does not fit then; "
            "`rllaunch plan --fit --num-nodes 8` looks for a layout on as many nodes or more",
        ),
    ],
    ids=["fits", "does not"],
)
def test_weights_that_no_fraction_makes_room_for_are_spread_over_the_fewest_gpus_that_do(
    doctor: Any, words: str, told: str
):
    flag, number, *rest = doctor(words)[1]["RL204"]["fix"].split()
    assert flag == "--rollout-num-gpus-per-engine"
    assert " ".join(rest) == told
    code, mended = doctor(f"{words} {flag} {number}")
    assert "RL204" not in mended
    assert (code == 0) == told.startswith("leaves room:")
    assert "RL204" in doctor(f"{words} {flag} {int(number) // 2}")[1], "half as many do not"


@pytest.mark.parametrize(
    "words",
    ["--model deepseek-v3 --hardware H100 --num-nodes 1", "--model qwen3-235b-a22b --hardware H100 --num-nodes 8"],
)
def test_weights_that_no_engine_has_room_for_lead_to_another_layout(doctor: Any, words: str):
    """On one node there are too few GPUs; engines of eight would cut through the second model's blocks in FP8."""
    fix = doctor(words)[1]["RL204"]["fix"]
    assert fix.startswith(
        "no number of GPUs per engine that these nodes allow has room for the weights; `rllaunch plan --fit "
    )


def test_a_fraction_above_what_fits_is_lowered_to_the_largest_that_does(doctor: Any):
    _, found = doctor(f"{DENSE} --sglang-mem-fraction-static 0.97")
    flag, value = found["RL204"]["fix"].split()
    assert chosen(f"{DENSE} {flag} {value}").fits
    assert not chosen(f"{DENSE} {flag} {float(value) + 0.01:.2f}").fits
    assert found["RL204"]["message"].endswith(f"÷ 76.5 GiB = {value}")


@pytest.mark.parametrize(
    "words",
    [
        f"{DENSE} --sglang-mem-fraction-static 0.97",
        f"{MOE} --num-nodes 2 --no-offload-train",
        f"{MOE} --num-nodes 2 --no-offload-rollout",
        f"{MOE} --num-nodes 2 --offload-rollout-level weight",
    ],
)
def test_the_sum_that_leads_to_the_largest_fraction_is_right(doctor: Any, words: str):
    """The sizes as they are printed, added up by hand: whatever step is the fullest, it holds no more than itself."""
    _, found = doctor(words)
    told = re.search(r"above what fits: \((.*)\) ÷ (.*) = ([\d.]+)$", found["RL204"]["message"])
    assert told
    sizes = [float(n) / (1 if unit == "GiB" else 1024) for n, unit in re.findall(r"([\d.]+) (GiB|MiB)", told[1])]
    signs = [1, *(-1 if sign == "−" else 1 for sign in re.findall(r" ([−+]) ", told[1]))]
    total = sum(sign * size for sign, size in zip(signs, sizes, strict=True))
    # In hundredths, rounded down.
    assert -0.002 < total / float(told[2].removesuffix(" GiB")) - float(told[3]) < 0.012


def test_a_mirror_nobody_reads_is_told_with_its_bytes(doctor: Any):
    words = f"{MOE} --num-nodes 2 --engine-weights mirror"
    _, found = doctor(words)
    assert found["RL205"]["message"] == (
        "every update rewrites all of the engine's weights, yet they are mirrored: "
        f"{gib(8 * chosen(words).taken.plan.sizes.gpu['weights'])} a node"
    )
    assert found["RL205"]["fix"] == "--engine-weights discard"


@pytest.mark.parametrize("more", ["--sglang-ep-size 4", "--lora-rank 8", "--sglang-speculative-algorithm EAGLE"])
def test_a_mirror_that_is_needed_is_taken_and_nobody_advises_against_it(doctor: Any, more: str):
    words = f"{MOE} --num-nodes 2 {more}"
    assert chosen(words).taken.plan.options.has_mirror
    _, found = doctor(words)
    assert "RL205" not in found
    assert not any("--engine-weights discard" in finding["fix"] for finding in found.values())


def test_offloading_for_nothing_is_told_with_what_it_costs(doctor: Any):
    _, found = doctor(DENSE)
    resident = chosen(f"{DENSE} --no-offload-train --no-offload-rollout").taken.plan
    cost = chosen(DENSE).taken.plan.seconds - resident.seconds
    assert found["RL207"]["message"] == (
        f"everything fits on the GPU at once ({gib(resident.peak('gpu'))} at its peak): offloading costs {cost:.1f} s a cycle for nothing"
    )


def test_ray_s_threshold_is_raised_above_the_plan_s_peak(doctor: Any, monkeypatch: pytest.MonkeyPatch):
    words = f"{MOE} --num-nodes 2"
    peak = chosen(words).taken.plan.peak("host")
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.2")
    _, found = doctor(words)
    assert found["RL209"]["message"] == (
        f"Ray ends workers when a node uses 20% of 1862.6 GiB = {gib(0.2 * 2e12)}; the plan's peak is {gib(peak)}"
    )
    (share,) = re.findall(r"RAY_memory_usage_threshold=([\d.]+) in", found["RL209"]["fix"])
    assert peak < float(share) * 2e12
    monkeypatch.setenv("RAY_memory_usage_threshold", share)
    assert "RL209" not in doctor(words)[1]
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.2")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "0")
    assert "RL209" not in doctor(words)[1]


def test_a_peak_in_the_last_twentieth_is_told_once(doctor: Any):
    _, found = doctor(DSV4)
    assert "RL203" in found
    assert "RL209" not in found


# -- the advice ------------------------------------------------------------------------------------

BROKEN = {
    "host, cpu order": CPU_ORDER,
    "host, small": f"{MOE} --num-nodes 2 --set hardware.host_memory_bytes=450000000000",
    "host, optimizer": f"{MOE} --optimizer-cpu-offload --set hardware.host_memory_bytes=500000000000",
    "host, set sizes": f"{CPU_ORDER} --actor-num-nodes 8 --rollout-num-gpus 32",
    "host, mirror": f"{MOE} --num-nodes 2 --engine-weights mirror --set hardware.host_memory_bytes=470000000000",
    "gpu, activations": f"{MOE} --recompute-granularity none",
    "gpu, optimizer": f"{MOE} --max-tokens-per-gpu 16384",
    "gpu, KV cache": f"{DENSE} --sglang-mem-fraction-static 0.97",
    "gpu, trainer stays": f"{MOE} --num-nodes 2 --no-offload-train",
    "gpu, engines stay": f"{MOE} --num-nodes 2 --no-offload-rollout",
    "gpu, KV cache stays": f"{MOE} --num-nodes 2 --offload-rollout-level weight",
}


def flags_in(fix: str) -> list[str]:
    """The flags of each way a fix tells to fit."""
    return [re.sub(r" frees .*", "", way) for way in fix.split(", or ") if way.endswith(": fits)")]


@pytest.mark.parametrize("words", BROKEN.values(), ids=BROKEN)
def test_each_advised_change_makes_the_launch_fit_as_it_says(doctor: Any, words: str):
    code, found = doctor(words)
    assert code == 4
    told = found.get("RL201") or found["RL202"]
    tier = "host" if told["code"] == "RL201" else "gpu"
    ways = flags_in(told["fix"])
    assert ways, told["fix"]
    for flags, way in zip(ways, told["fix"].split(", or "), strict=False):
        plan = chosen(f"{words} {flags}").taken.plan
        assert plan.fits, flags
        assert f"({gib(plan.peak(tier))} at the {tier}'s peak: fits)" in way
        assert doctor(f"{words} {flags}")[0] == 0, flags


def test_advice_for_little_room_leaves_more(doctor: Any):
    for words in (DSV4, MOE, f"{DENSE} --sglang-mem-fraction-static 0.95"):
        _, found = doctor(words)
        ways = flags_in(found["RL203"]["fix"])
        assert ways, found["RL203"]["fix"]
        for flags in ways:
            assert "RL203" not in doctor(f"{words} {flags}")[1], flags


def test_a_finding_s_origins_are_those_of_the_launch(doctor: Any):
    _, found = doctor(f"{CPU_ORDER} --set hardware.host_memory_bytes=800000000000")
    assert found["RL201"]["origins"][0] == resolved(
        f"{CPU_ORDER} --set hardware.host_memory_bytes=800000000000"
    ).describe("hardware.host_memory_bytes")
