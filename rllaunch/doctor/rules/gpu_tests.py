"""What only shows on a GPU: programs that use it, each in a process with a time limit (`doctor --gpu-test`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.gpus import read_node
from rllaunch.doctor.rules.backends import is_installed
from rllaunch.doctor.rules.memory_saver import needs_memory_saver
from rllaunch.resolve.origins import Resolved

PROGRAMS = "rllaunch.backends.gpu_tests"
# An import of torch from a cold network disk takes a minute by itself.
TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True)
class Answer:
    """What a program said: whether it went as it should, what was seen or went wrong, and how long it took."""

    ok: bool
    text: str
    seconds: float


def run_program(command: Sequence[str], environ: Mapping[str, str], timeout_seconds: float = TIMEOUT_SECONDS) -> Answer:
    """Run a program to its end or its time limit, at which what it has started ends with it."""
    begin = time.monotonic()
    process = subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=timeout_seconds)
    except BaseException as stop:
        os.killpg(process.pid, signal.SIGKILL)  # nobody has waited for it yet, so the number is still its group's
        process.communicate()
        if not isinstance(stop, subprocess.TimeoutExpired):
            raise
        return Answer(False, f"no answer within {timeout_seconds:g} s", time.monotonic() - begin)
    seconds = time.monotonic() - begin
    for line in reversed(out.splitlines()):
        try:
            said = json.loads(line)
            return Answer(bool(said["ok"]), str(said["text"]), seconds)
        except (ValueError, KeyError, TypeError):
            continue
    last = next((line for line in reversed(err.splitlines()) if line.strip()), "it said nothing")
    return Answer(False, f"ended with {process.returncode}: {last.strip()}", seconds)


def _environment(resolved: Resolved) -> dict[str, str]:
    """As the processes of the run have it: what the launch sets, below what the user's shell has."""
    return {name: str(value) for name, value in (resolved.config.env.model_extra or {}).items()} | dict(os.environ)


def _test(resolved: Resolved, rule: Rule, program: str, needs: Sequence[str], keys: Sequence[str]) -> Iterator[Finding]:
    """One finding: what was seen, what went wrong, or why it was not tried."""
    missing = [module for module in needs if not is_installed(module)]
    lacks = "no GPU is visible" if not read_node().visible else f"{missing[0]} is not installed" if missing else ""
    if lacks:
        yield rule.finding("info", resolved, f"not run: {rule.name}: {lacks}", keys, "run it on a node of the launch")
        return
    answer = run_program([sys.executable, "-m", f"{PROGRAMS}.{program}"], _environment(resolved))
    if answer.ok:
        text = f"{rule.name}: {answer.text} ({answer.seconds:.1f} s)"
        yield rule.finding("info", resolved, text, keys, "")
    else:
        again = f"{sys.executable} -m {PROGRAMS}.{program}"
        yield rule.error(resolved, f"not so: {rule.name}: {answer.text}", keys, f"`{again}` shows all of it")


def _check_ipc(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if config.hardware.accelerator == "cuda" and config.handoff.colocate and config.rollout.backend == "sglang":
        yield from _test(resolved, IPC, "cuda_ipc", ["torch"], ["handoff.colocate", "rollout.backend"])


def _check_saver(resolved: Resolved) -> Iterator[Finding]:
    if keys := needs_memory_saver(resolved):
        yield from _test(resolved, SAVER, "memory_saver", ["torch", "torch_memory_saver"], keys)


IPC = Rule(
    code="RL408",
    name="processes share GPU memory (CUDA IPC)",
    reason="colocated engines are updated by it; where it fails, the first update is the first to tell "
    "(THUDM/slime#2311, OpenRLHF/OpenRLHF#957)",
    check=_check_ipc,
    probes=True,
    tests_gpu=True,
    overridable=True,
)
SAVER = Rule(
    code="RL409",
    name="paused GPU memory is free and comes back whole",
    reason="memory that the saver does not see stays where it is, and weights were reported to come back changed "
    "(fzyzcjy/torch_memory_saver#24, fzyzcjy/torch_memory_saver#71)",
    check=_check_saver,
    probes=True,
    tests_gpu=True,
    overridable=True,
)
RULES = (IPC, SAVER)
