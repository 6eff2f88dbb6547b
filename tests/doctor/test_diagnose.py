"""The engine: every rule runs, none hides another, and a user can overrule what may be overruled."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
from doctor_cases import resolved_of
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import PydanticUndefined

from rllaunch.doctor.engine import builtin_rules, diagnose, exit_code, render
from rllaunch.doctor.finding import Finding, Rule
from rllaunch.plan.handoff import options_of
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.resolve import field_of, known_keys


def rule(code: str, check: Any, **options: Any) -> Rule:
    options = {"plugin": "guest 1.0", "name": "a guest's rule", "reason": "a test"} | options
    return Rule(code=code, check=check, **options)


def test_all_mistakes_of_a_launch_show_at_once() -> None:
    launch = resolved_of(
        {
            "handoff.colocate_memory_peak_device": "gpu",
            "handoff.offload_rollout": False,
            "algorithm.lora_rank": 8,
            "handoff.offload_rollout_level": ["kv", "weight", "weight"],
            "rollout.n_samples_per_prompt": 1,
        }
    )
    found = diagnose(launch, builtin_rules(), probe=False)
    assert [(f.level, f.code) for f in found] == [
        ("error", "RL301"),
        ("error", "RL303"),
        ("error", "RL304"),
        ("error", "RL323"),
        ("warning", "RL304"),
    ]
    assert exit_code(found) == 3


def test_a_finding_is_shown_with_its_origins_and_a_hint() -> None:
    launch = resolved_of({"handoff.colocate_memory_peak_device": "gpu", "handoff.offload_rollout": False})
    assert render(diagnose(launch, builtin_rules(), probe=False)) == (
        "error[RL301]: gpu order needs both offloads on\n"
        '  handoff.colocate_memory_peak_device = "gpu"   '
        'flag: --set handoff.colocate_memory_peak_device="gpu"\n'
        "  handoff.offload_rollout = false   flag: --set handoff.offload_rollout=false\n"
        "  hint: remove --set handoff.offload_rollout=false, or --colocate-memory-peak-device cpu"
    )


def test_findings_are_a_line_apart_and_a_table_is_indented() -> None:
    table = Finding("RL502", "error", "too few\nnode  GPUs\n0     8", ("a = 1   b.toml:1",), "get more")
    assert render([table, Finding("RL317", "info", "no effect")]) == (
        "error[RL502]: too few\n  node  GPUs\n  0     8\n  a = 1   b.toml:1\n  hint: get more\n\ninfo[RL317]: no effect"
    )
    assert render([]) == ""


def test_a_rule_that_fails_is_a_finding_and_hides_no_other() -> None:
    def fails(resolved: Resolved) -> Iterator[Finding]:
        yield Finding("RL901", "warning", "what it had found")
        raise ValueError("no such thing")

    found = diagnose(resolved_of({"algorithm.lora_rank": 0}), [rule("RL901", fails), *builtin_rules()], probe=False)
    assert [(f.code, f.level, f.message) for f in found] == [
        (
            "RL001",
            "error",
            "rule RL901 (a guest's rule) of plugin guest 1.0 failed: ValueError: no such thing",
        ),
        ("RL901", "warning", "what it had found"),
    ]
    assert re.fullmatch(r".*test_diagnose\.py:\d+ in fails", found[0].origins[0])
    assert found[0].fix == (
        "correct it if it is yours; else update or uninstall guest 1.0, or leave it out with RLLAUNCH_DISABLE_PLUGINS"
    )
    assert exit_code(found) == 3


def test_a_rule_that_fails_in_a_library_is_told_with_its_own_line() -> None:
    def fails(resolved: Resolved) -> Iterator[Finding]:
        yield Finding("RL901", "warning", resolved.config.no_such_section)  # type: ignore[attr-defined]  # raised by pydantic

    (found,) = diagnose(resolved_of(), [rule("RL901", fails)], probe=False)
    assert re.fullmatch(r".*test_diagnose\.py:\d+ in fails", found.origins[0])


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda resolved: ["text"], "TypeError: a rule yields findings, not 'text'"),
        (lambda resolved: None, "TypeError: 'NoneType' object is not iterable"),
        (lambda: iter(()), "TypeError: .* takes 0 positional arguments but 1 was given"),
    ],
    ids=["an item that is no finding", "nothing to iterate", "a check without an argument"],
)
def test_a_rule_that_answers_nonsense_has_failed(answer: Any, error: str) -> None:
    (found,) = diagnose(resolved_of(), [rule("RL901", answer)], probe=False)
    assert found.code == "RL001"
    assert re.fullmatch(rf"rule RL901 \(a guest's rule\) of plugin guest 1\.0 failed: {error}", found.message)


def test_the_second_rule_of_a_code_does_not_run_and_both_plugins_are_named() -> None:
    def never(resolved: Resolved) -> list[Finding]:
        raise AssertionError("the second rule of a code runs")

    rules = [
        rule("RL901", lambda resolved: [], plugin="first 2.1"),
        rule("RL901", never, plugin="second 0.3"),
    ]
    (found,) = diagnose(resolved_of(), rules, probe=False)
    assert (found.code, found.level) == ("RL002", "warning")
    assert found.message == (
        "rule RL901 (a guest's rule) of plugin second 0.3 does not run: "
        "first 2.1 (a guest's rule) has that code already"
    )


def test_a_rule_cannot_take_a_code_of_the_engine() -> None:
    (found,) = diagnose(resolved_of(), [rule("RL001", lambda resolved: [])], probe=False)
    assert found.code == "RL002"
    assert "rllaunch (a rule failed) has that code already" in found.message


def test_rules_that_probe_run_only_when_asked_to() -> None:
    probing = rule("RL901", lambda resolved: [Finding("RL901", "info", "looked")], probes=True)
    assert diagnose(resolved_of(), [probing], probe=False) == []
    assert [f.message for f in diagnose(resolved_of(), [probing], probe=True)] == ["looked"]


def test_an_allowed_finding_is_a_warning_that_says_who_allowed_it() -> None:
    sizes = {"trainer.pipeline_model_parallel_size": 3}
    (error,) = diagnose(resolved_of(sizes), builtin_rules(), probe=False)
    (allowed,) = diagnose(resolved_of({**sizes, "run.allow": ["RL312"]}), builtin_rules(), probe=False)
    assert (error.level, allowed.level) == ("error", "warning")
    assert allowed.message == error.message + ' (allowed, flag: --set run.allow=["RL312"])'
    assert (allowed.origins, allowed.fix) == (error.origins, error.fix)
    assert exit_code([allowed]) == 0


def test_allowing_what_does_not_occur_is_fine() -> None:
    assert diagnose(resolved_of({"run.allow": ["RL312"]}), builtin_rules(), probe=False) == []


def test_a_failing_rule_cannot_be_allowed_away() -> None:
    def fails(resolved: Resolved) -> list[Finding]:
        raise ValueError("no such thing")

    guest = rule("RL901", fails, overridable=True)
    (found,) = diagnose(resolved_of({"run.allow": ["RL901"]}), [guest], probe=False)
    assert (found.code, found.level) == ("RL001", "error")


@pytest.mark.parametrize(
    ("code", "message", "fix"),
    [
        ("RL301", "RL301 cannot be allowed: gpu order needs both offloads", "take RL301 out of run.allow"),
        ("RL001", "RL001 cannot be allowed: a rule failed", "take RL001 out of run.allow"),
        ("RL3l2", "run.allow names RL3l2, which is no rule's code", "did you mean 'RL312'?"),
        ("nccl", "run.allow names nccl, which is no rule's code", "can be allowed: RL200, RL201, "),
    ],
)
def test_an_allow_that_has_no_effect_is_an_error(code: str, message: str, fix: str) -> None:
    (found,) = diagnose(resolved_of({"run.allow": [code]}), builtin_rules(), probe=False)
    assert (found.code, found.level, found.message) == ("RL390", "error", message)
    assert found.fix.startswith(fix)
    assert found.origins == (f'run.allow = ["{code}"]   flag: --set run.allow=["{code}"]',)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        (["RL501"], 5),
        (["RL501", "RL201"], 4),
        (["RL201", "RL501", "RL301"], 3),
        (["RL001", "RL201"], 3),
    ],
)
def test_the_gravest_error_decides_the_exit_code(codes: list[str], expected: int) -> None:
    findings = [Finding(code, "error", "") for code in codes]
    assert exit_code([*findings, Finding("RL302", "warning", ""), Finding("RL303", "info", "")]) == expected


def test_builtin_rules_have_distinct_codes_in_order() -> None:
    codes = [rule.code for rule in builtin_rules()]
    assert codes == sorted(set(codes))
    assert len(codes) >= 33


# Keys whose values are free text or facts: as types they say nothing about what is sensible.
SMALL = st.integers(1, 24)
FREE: dict[str, st.SearchStrategy[Any]] = {
    "model.architecture": st.fixed_dictionaries(
        {},
        optional={
            name: st.one_of(SMALL, st.sampled_from([0, -1, 2.5, True, None, "12", [4, 8]]))
            for name in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_experts")
        },
    ),
    "handoff.offload_rollout_level": st.lists(
        st.sampled_from(["kv_cache", "weight", "weights", "", "cuda_graph", "x"]), max_size=3
    ),
    "run.allow": st.lists(st.sampled_from(["RL301", "RL312", "RL322", "", "x"]), max_size=2),
    "task.reward": st.sampled_from(["", "a:b", "a.py", ":"]),
    "trainer.backend": st.sampled_from(["megatron", "embedded", "guest"]),
    "rollout.backend": st.sampled_from(["sglang", "embedded", "guest"]),
}


def values_of(key: str) -> st.SearchStrategy[Any]:
    """Values of a key that its type accepts; small whole numbers, where products matter."""
    if key in FREE:
        return FREE[key]
    info = field_of(key)
    assert info is not None, key
    choices: list[st.SearchStrategy[Any]] = []
    for part in [a for a in get_args(info.annotation) if a is not None] or [info.annotation]:
        if get_origin(info.annotation) is Literal:
            return st.sampled_from(get_args(info.annotation))
        if part is bool:
            choices.append(st.booleans())
        elif part is int:
            choices.append(st.integers(2, 24) if "context_len" in key else SMALL)
        elif part is type(None):
            choices.append(st.none())
    default = info.get_default(call_default_factory=True)
    return st.one_of(*choices) if choices else st.just("" if default is PydanticUndefined else default)


KEYS = [key for key in known_keys() if key not in ("model.name", "hardware.name")]
CONFIGS = st.fixed_dictionaries({}, optional={key: values_of(key) for key in KEYS})


@settings(max_examples=150, deadline=None)
@given(values=CONFIGS, derive=st.booleans())
def test_no_rule_fails_whatever_the_configuration(values: dict[str, Any], derive: bool) -> None:
    found = diagnose(resolved_of(values, derive=derive), builtin_rules(), probe=False)
    assert [f.message for f in found if f.code == "RL001"] == []
    assert all(f.message and f.origins and f.fix for f in found)
    assert render(found).count("[RL") >= len(found)


def test_a_typo_in_a_number_does_not_make_the_doctor_slow() -> None:
    huge = {
        "cluster.num_nodes": 10**9,
        "trainer.pipeline_model_parallel_size": 7,
        "trainer.expert_model_parallel_size": 11,
        "rollout.rollout_batch_size": 10**9 + 7,
        "trainer.num_steps_per_rollout": 13,
        "rollout.rollout_num_gpus_per_engine": 17,
    }
    begin = time.monotonic()
    found = diagnose(resolved_of(huge), builtin_rules(), probe=False)
    assert {"RL312", "RL313", "RL314", "RL320"} <= {f.code for f in found}
    assert time.monotonic() - begin < 10  # half a second on an idle core


HANDOFF = [key for key in KEYS if key.startswith("handoff.") and key != "handoff.offload_rollout_level"]
HANDOFF += ["algorithm.advantage_estimator", "algorithm.lora_rank"]
LEGALITY = {"RL301", "RL302", "RL303", "RL331", "RL334", "RL344"}


@settings(max_examples=200, deadline=None)
@given(values=st.fixed_dictionaries({}, optional={key: values_of(key) for key in HANDOFF}))
def test_the_doctor_refuses_exactly_what_has_no_schedule(values: dict[str, Any]) -> None:
    if values.get("handoff.colocate_memory_peak_device") == "auto":
        del values["handoff.colocate_memory_peak_device"]
    launch = resolved_of(values)
    found = {f.code for f in diagnose(launch, builtin_rules(), probe=False) if f.level == "error"}
    assert bool(found & LEGALITY) == bool(options_of(launch.config).illegal())
