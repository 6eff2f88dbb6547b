"""Every rule about the configuration, on its cases: data in `cases/RL3xx.toml`, bad ones beside good ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from doctor_cases import Case, load_cases, resolved_of

from rllaunch.doctor.engine import builtin_rules, diagnose
from rllaunch.doctor.finding import Finding
from rllaunch.flags import take_flags

ALL = load_cases()
BAD = [case for case in ALL if case.findings]


@pytest.mark.parametrize("derive", [True, False], ids=["derived", "bare"])
@pytest.mark.parametrize("case", ALL, ids=str)
def test_a_case_is_found_with_its_whole_text_and_nothing_else_is(
    case: Case, derive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    found = diagnose(resolved_of(case.set, derive=derive), builtin_rules(), probe=False)
    own = [finding for finding in found if finding.code == case.code]
    assert [finding.message for finding in own] == list(case.findings)
    assert sorted({finding.code for finding in found} - {case.code}) == sorted(case.also)
    assert {finding.level for finding in own} <= {case.level}
    assert all(finding.origins and finding.fix for finding in own), "a finding says where from and what to do"
    if case.fix is not None:
        assert own[0].fix == case.fix
    if case.origins is not None:
        assert own[0].origins == case.origins


def test_every_configuration_rule_has_a_bad_case_and_a_good_one() -> None:
    # Those about memory need a whole launch: tests/doctor/test_fits.py.
    codes = {rule.code for rule in builtin_rules() if not rule.probes and rule.code >= "RL3"}
    bad = {case.code for case in BAD}
    good = {case.code for case in ALL if not case.findings}
    assert len(codes) >= 26
    assert bad == codes
    assert good == codes


def test_every_rule_says_why_and_where_that_is_known_from() -> None:
    for rule in builtin_rules():
        assert rule.name, rule.code
        assert len(rule.reason) > 30, rule.code
        assert re.fullmatch(r"RL[2345]\d\d", rule.code)
        # The checkpoint, its weights and the prompt files, whose paths are the configuration's.
        assert rule.probes == rule.code.startswith(("RL4", "RL5", "RL346", "RL347", "RL349"))
        assert rule.probes or not rule.tests_gpu


def remedies(fix: str, set_: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each alternative of a fix that consists of flags, with the values it leads to."""
    for alternative in fix.split(", or "):
        if alternative.startswith("remove "):
            removed = re.findall(r"--set ([\w.]+)=", alternative)
            assert removed, alternative
            yield alternative, {key: value for key, value in set_.items() if key not in removed}
            continue
        text = re.sub(r"\(.*?\)|, (unless|such as) .*|^[^-]*(?=--)", "", alternative)
        if "--" not in text or re.search(r"\b[A-Z]{3,}\b(?!_)", text):
            continue  # words, or a placeholder for what only the user knows
        choices = re.findall(r"(\S+) or (\S+)", text)
        for pick in ("\\1", "\\2") if choices else ("",):
            words = re.sub(r"(\S+) or (\S+)", pick, text) if choices else text
            settings, files, rest = take_flags(words.split())
            assert settings, words
            assert (files, rest) == ([], []), words
            yield words, {**set_, **{setting.key: setting.value for setting in settings}}


def errors(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings if finding.level == "error"}


@pytest.mark.parametrize("case", BAD, ids=str)
def test_each_remedy_of_a_fix_works(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hint says to type ends the finding, and makes no new error."""
    for name, value in case.environ.items():
        monkeypatch.setenv(name, value)
    before = diagnose(resolved_of(case.set), builtin_rules(), probe=False)
    for finding in before:
        for words, values in remedies(finding.fix, dict(case.set)):
            after = diagnose(resolved_of(values), builtin_rules(), probe=False)
            assert finding.message not in [f.message for f in after], words
            assert errors(after) <= errors(before), words


def test_most_fixes_are_words_that_can_be_typed() -> None:
    tried = [list(remedies(case.fix or "", dict(case.set))) for case in BAD if case.fix]
    assert sum(bool(found) for found in tried) >= 0.85 * len(tried)
    assert sum(map(len, tried)) >= 80
