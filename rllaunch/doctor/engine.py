"""All rules over one resolved launch, and what comes of it: findings, an exit code, text.

Every rule runs, whatever the others found or however one of them failed, so that a launch's mistakes
show together and not one per attempt (NVIDIA-NeMo/RL#2783).
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from rllaunch.doctor.finding import Finding, Level, Rule
from rllaunch.errors import EXIT_CONFIG, EXIT_DOES_NOT_FIT, EXIT_ENVIRONMENT, EXIT_OK, did_you_mean, own_frame
from rllaunch.resolve.origins import Resolved

RANK: dict[Level, int] = {"error": 0, "warning": 1, "info": 2}

# What the engine itself has to say about rules; no rule may take these codes.
ENGINE_CODES = {
    "RL001": "a rule failed",
    "RL002": "two rules have one code",
    "RL390": "run.allow names a finding that cannot be allowed",
}


def builtin_rules() -> list[Rule]:
    """The rules that ship with rllaunch, by code."""
    from rllaunch.doctor.rules import FAMILIES

    return sorted(chain.from_iterable(family.RULES for family in FAMILIES), key=lambda rule: rule.code)


def diagnose(resolved: Resolved, rules: Sequence[Rule], *, probe: bool, gpu_test: bool = False) -> list[Finding]:
    """Every finding about a launch: errors, warnings, infos, each by code.

    Args:
        probe: also run the rules that look at this machine.
        gpu_test: of these also the ones that run programs on its GPUs.
    """
    distinct, findings = _distinct(rules)
    allowed = set(resolved.config.run.allow)
    for rule in distinct:
        if (probe or not rule.probes) and (gpu_test or not rule.tests_gpu):
            found = _run(rule, resolved)
            findings += _demoted(found, resolved) if rule.overridable and rule.code in allowed else found
    findings += _misused_allow(resolved, distinct)
    return sorted(findings, key=lambda finding: (RANK[finding.level], finding.code))


def exit_code(findings: Iterable[Finding]) -> int:
    """0 without errors; else an invalid configuration before what does not fit before the environment."""
    codes = {finding.exit_code for finding in findings}
    return next((c for c in (EXIT_CONFIG, EXIT_DOES_NOT_FIT, EXIT_ENVIRONMENT) if c in codes), EXIT_OK)


def render(findings: Iterable[Finding]) -> str:
    """Findings as plain text: what is wrong, where each value came from, what to do."""
    return "\n\n".join(_rendered(finding) for finding in findings)


def _rendered(finding: Finding) -> str:
    first, *more = finding.message.splitlines() or [""]
    lines = [f"{finding.level}[{finding.code}]: {first}"]
    lines += [f"  {line}" for line in (*more, *finding.origins)]
    if finding.fix:
        lines.append(f"  hint: {finding.fix}")
    return "\n".join(lines)


def _distinct(rules: Sequence[Rule]) -> tuple[list[Rule], list[Finding]]:
    """The first rule of each code, and a warning for every further one."""
    owners: dict[str, Rule | None] = dict.fromkeys(ENGINE_CODES)
    distinct: list[Rule] = []
    findings: list[Finding] = []
    for rule in rules:
        if rule.code not in owners:
            owners[rule.code] = rule
            distinct.append(rule)
            continue
        owner = owners[rule.code]
        holder = f"{owner.plugin} ({owner.name})" if owner else f"rllaunch ({ENGINE_CODES[rule.code]})"
        findings.append(
            Finding(
                "RL002",
                "warning",
                f"rule {rule.code} ({rule.name}) of plugin {rule.plugin} does not run: {holder} has that code already",
                fix=f"give the rule another code, or uninstall {rule.plugin}",
            )
        )
    return distinct, findings


def _run(rule: Rule, resolved: Resolved) -> list[Finding]:
    """What a rule finds, up to where it failed if it does."""
    found: list[Finding] = []
    try:
        for finding in rule.check(resolved):
            if not isinstance(finding, Finding):
                raise TypeError(f"a rule yields findings, not {finding!r}")
            found.append(finding)
    except Exception as err:
        found.append(_failed(rule, err))
    return found


def _failed(rule: Rule, error: Exception) -> Finding:
    frames = traceback.extract_tb(error.__traceback__)
    home = Path(rule.check.__code__.co_filename).parent if inspect.isfunction(rule.check) else Path("/")
    last = own_frame(frames, home)
    built_in = rule.plugin.split()[0] == "rllaunch"
    return Finding(
        "RL001",
        "error",
        f"rule {rule.code} ({rule.name}) of plugin {rule.plugin} failed: {type(error).__name__}: {error}",
        (f"{last.filename}:{last.lineno} in {last.name}",),
        "report this bug of rllaunch, with what `rllaunch resolve --json` prints"
        if built_in
        else f"correct it if it is yours; else update or uninstall {rule.plugin}, "
        "or leave it out with RLLAUNCH_DISABLE_PLUGINS",
    )


def _demoted(found: Iterable[Finding], resolved: Resolved) -> list[Finding]:
    origin = resolved.origin("run.allow")
    demoted = []
    for finding in found:
        if finding.level == "error" and finding.code not in ENGINE_CODES:
            first, *more = finding.message.splitlines()
            message = "\n".join([f"{first} (allowed, {origin.layer}: {origin.source})", *more])
            finding = replace(finding, level="warning", message=message)
        demoted.append(finding)
    return demoted


def _misused_allow(resolved: Resolved, rules: Sequence[Rule]) -> list[Finding]:
    """What `run.allow` names in vain: allowing nothing, silently, would look like having allowed it."""
    by_code = {rule.code: rule for rule in rules}
    overridable = [rule.code for rule in rules if rule.overridable]
    findings = []
    for code in dict.fromkeys(resolved.config.run.allow):
        rule = by_code.get(code)
        if rule and rule.overridable:
            continue
        if rule or code in ENGINE_CODES:
            name = rule.name if rule else ENGINE_CODES[code]
            message, fix = (
                f"{code} cannot be allowed: {name}",
                f"take {code} out of run.allow, mend its cause",
            )
        else:
            message = f"run.allow names {code}, which is no rule's code"
            fix = did_you_mean(code, overridable, "can be allowed")
        findings.append(Finding("RL390", "error", message, (resolved.describe("run.allow"),), fix))
    return findings
