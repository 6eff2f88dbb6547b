"""`rllaunch doctor --explain CODE`: what a rule is, without a launch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rllaunch.doctor.engine import builtin_rules
from rllaunch.doctor.explain import Explanation, explanations
from rllaunch.doctor.finding import Finding, Rule

ROOT = Path(__file__).resolve().parents[2]


def test_a_rule_is_explained_with_its_reason_and_the_text_of_its_check(rllaunch: Any):
    result = rllaunch("doctor", "--explain", "RL203")
    assert result.code == 0
    assert result.err == ""
    assert result.out == (
        "RL203: leaves headroom\n"
        "  why: page cache and long samples take what a forecast does not see (ray-project/ray#59796, THUDM/slime#1951)\n"
        "  probes: no, it looks at the values of the launch\n"
        "  can be allowed: yes, `--allow RL203` turns its errors into warnings\n"
        "\n"
        "Said where the plan fits, but leaves less than 5 % of a limit free at its fullest step.\n"
        "\n"
        "`docs/accuracy.md` shows how near such plans came to what others measured.\n"
    )


def test_a_rule_that_cannot_be_allowed_says_so_and_any_case_finds_it(rllaunch: Any):
    assert rllaunch("doctor", "--explain", "rl301").out == (
        "RL301: gpu order needs both offloads\n"
        "  why: a side that is never offloaded leaves the other no room to wake in (radixark/miles#2781)\n"
        "  probes: no, it looks at the values of the launch\n"
        "  can be allowed: no\n"
    )


@pytest.mark.parametrize(
    ("code", "probes"),
    [
        ("RL501", "yes, it reads this machine; not with `--no-probe`"),
        ("RL408", "yes, it runs a program on the GPU; only with `--gpu-test`"),
    ],
)
def test_a_rule_that_probes_says_with_which_flag_it_does(rllaunch: Any, code: str, probes: str):
    assert f"  probes: {probes}\n" in rllaunch("doctor", "--explain", code).out


def test_a_finding_without_a_rule_is_explained_too(rllaunch: Any):
    assert rllaunch("doctor", "--explain", "RL010").out == (
        "RL010: a plugin or a profile cannot be used\n"
        "  why: what it would have brought is missing, and the launch would be judged without it\n"
        "  found by: rllaunch itself, without a rule\n"
        "  can be allowed: no\n"
        "\n"
        "A warning where a guest is broken, for most launches do not need it; an error where rllaunch's own is.\n"
        "\n"
        "`rllaunch plugins` shows what each brings, `rllaunch profiles check` what is wrong with a profile.\n"
    )


def test_a_model_that_is_not_trained_is_explained_by_those_that_are(rllaunch: Any):
    out = rllaunch("doctor", "--explain", "RL512").out
    refused = rllaunch("doctor", "--no-probe", "--model", "glm-5", "--hardware", "GB300").out
    (types,) = re.findall(r"it builds ([\w, ]+);", refused)
    assert f"Model types that it builds: {types}." in out
    assert "qwen3_moe" in types


def test_weights_that_an_update_would_spoil_are_explained_by_those_it_brings(rllaunch: Any):
    out = rllaunch("doctor", "--explain", "RL513").out
    for allowed in ("--rollout-dtype fp8", "128 × 128", "8.9 and more, below 10.0"):
        assert allowed in out


def test_every_code_has_a_reason():
    empty = [code for code, told in explanations(builtin_rules()).items() if len(told.reason) < 20]
    assert empty == []


def test_json_has_the_same(rllaunch: Any):
    assert rllaunch("doctor", "--explain", "RL410", "--json").json() | {"plugin": ""} == {
        "code": "RL410",
        "name": "InfiniBand may lock memory",
        "reason": "with 8 MiB, which containers start with, NCCL cannot register memory (NVIDIA/nccl-tests#206)",
        "probes": True,
        "tests_gpu": False,
        "overridable": False,
        "plugin": "",
        "text": "Pinned host copies are no matter of this limit: what CUDA pins is not counted as locked.",
    }


def test_an_unknown_code_is_one_error_with_the_nearest(rllaunch: Any):
    result = rllaunch("doctor", "--explain", "RL299")
    assert result.code == 2
    assert result.out == ""
    assert result.err == "error: no rule has the code 'RL299'\n  --explain\nhint: did you mean 'RL209'?\n"


@pytest.mark.parametrize("words", [("--lora-rank", "4"), ("--gpu-test",), ("--no-probe",), ("--config", "run.toml")])
def test_explaining_takes_no_launch(rllaunch: Any, words: tuple[str, ...]):
    result = rllaunch("doctor", "--explain", "RL203", *words)
    assert result.code == 2
    assert result.err.startswith("error: --explain looks at no launch\n")


def test_every_code_that_the_package_names_is_explained():
    named = {
        c for file in (ROOT / "rllaunch").rglob("*.py") for c in re.findall(r'"(RL\d{3})"', file.read_text("utf-8"))
    }
    assert len(named) > 70
    # RL000 is an error without a code, RL9xx are those of plugins.
    assert {c for c in named if c < "RL9"} - {"RL000"} == set(explanations(builtin_rules()))


def test_a_plugins_rule_names_its_plugin_and_leaves_out_what_its_check_tells_callers():
    def check(resolved: Any) -> Iterator[Finding]:
        """Nodes are counted.

        Args:
            resolved: the launch.
        """
        return iter(())

    rule = Rule("RL942", "Acme lends 16 nodes", "Acme's scheduler refuses more", check, plugin="acme 1.0.0")
    assert explanations([rule])["RL942"] == Explanation(
        "RL942", "Acme lends 16 nodes", rule, "Nodes are counted.", "Acme's scheduler refuses more"
    )
    assert explanations([rule])["RL942"].text() == (
        "RL942: Acme lends 16 nodes\n"
        "  why: Acme's scheduler refuses more\n"
        "  probes: no, it looks at the values of the launch\n"
        "  can be allowed: no\n"
        "  from: acme 1.0.0\n"
        "\n"
        "Nodes are counted."
    )
