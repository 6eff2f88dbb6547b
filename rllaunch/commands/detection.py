"""What `rllaunch profiles detect` does: this machine, and what was measured on it, as the text of a profile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rllaunch.plugins import Plugins
from rllaunch.resolve.links import reached_bytes_per_second
from rllaunch.resolve.machine import Machine, facts_of, measured_facts, measured_remarks, read_machine, remarks_of
from rllaunch.resolve.profiles import Profile, Value
from rllaunch.resolve.template import profile_text

PROGRAM = "rllaunch.backends.measure"
TIMEOUT_SECONDS = 900.0
MOST_BYTES, LEAST_BYTES = 4 * 2**30, 16 * 2**20


@dataclass(frozen=True)
class Detected:
    """A machine, what was measured on it, and the profile that says both."""

    machine: Machine
    measured: Mapping[str, Any]
    facts: Mapping[str, Value]
    text: str

    @property
    def missing(self) -> tuple[str, ...]:
        return (*self.machine.missing, *self.measured.get("missing", ()))

    def to_json(self) -> dict[str, Any]:
        facts = {key: {"value": v.value, "source": v.fact_source} for key, v in self.facts.items()}
        machine = self.machine.to_json() | {"missing": list(self.missing)}
        return {"facts": facts, "machine": machine, "measured": dict(self.measured), "profile": self.text}


def detected(name: str, base: str, plugins: Plugins, *, measures: bool, mib: int | None) -> Detected:
    """
    Args:
        name: of the profile.
        base: the hardware profile it extends; empty: the one that fits the machine, if one does.
        mib: how much each measurement moves; None: what there is room for.
    """
    folder, date = Path.cwd(), f"{datetime.now():%Y-%m-%d}"
    machine = read_machine(folder)
    measured = measure(folder, _measure_bytes(machine, mib)) if measures else {}
    fitting = plugins.detect_hardware(machine.facts)
    if fitting == name:  # by the file that is to be written anew
        fitting = None
    chosen = base or fitting
    extended = plugins.profiles().get("hardware", chosen, "detected") if chosen else None
    facts = facts_of(machine, date) | measured_facts(measured, machine, date)
    if extended:
        facts = _without_stale_link(facts, extended)
    text = profile_text(
        name,
        description=_description(machine),
        source=f"detected on {machine.host}, {date}",
        base=extended,
        facts=facts,
        # Where a profile knows these GPUs already, two that know them would be none for --hardware auto.
        gpu_names=() if fitting else sorted(set(machine.facts.gpu_names)),
        remarks=[*remarks_of(machine), *measured_remarks(measured)],
    )
    return Detected(machine, measured, facts, text)


def measure(folder: Path, nbytes: int) -> Mapping[str, Any]:
    """What `rllaunch.backends.measure` says, run as a process of its own; what went wrong is `missing`."""
    command = [sys.executable, "-m", PROGRAM, str(folder), str(nbytes)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
        answer: Mapping[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer
    except subprocess.TimeoutExpired:
        return {"missing": [f"nothing: it took more than {TIMEOUT_SECONDS:g} s"]}
    except (IndexError, ValueError):
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "it said nothing")
        return {"missing": [f"nothing: the measurement ended with {done.returncode}: {last.strip()}"]}


def _measure_bytes(machine: Machine, mib: int | None) -> int:
    """A size at which start-up costs vanish, and which memory and disk have room for."""
    if mib:
        return mib * 2**20
    room = [MOST_BYTES]
    if machine.facts.host_memory_bytes:
        room.append(machine.facts.host_memory_bytes // 16)
    if machine.disk:
        room.append(machine.disk.free_bytes // 8)
    room += [nbytes // 4 for nbytes in machine.facts.gpu_memory_bytes if nbytes]
    return max(LEAST_BYTES, min(room))


def _without_stale_link(facts: dict[str, Value], base: Profile) -> dict[str, Value]:
    """The speed of another link than the base's, where it was not measured: the base's would be taken for it."""
    link, theirs = facts.get("host_link"), base.values.get("hardware.host_link")
    stated = "hardware.host_link_bytes_per_second" in base.values
    if not link or not theirs or link.value == theirs.value or "host_link_bytes_per_second" in facts or not stated:
        return facts
    reached = reached_bytes_per_second(link.value)
    return facts | {"host_link_bytes_per_second": Value(reached[0], "", reached[1])} if reached else facts


def _description(machine: Machine) -> str:
    names = machine.facts.gpu_names
    what = f"{len(names)} × {names[0]}" if names else f"{os.cpu_count() or 1} CPUs, no GPU"
    return f"{machine.host}: {what}"
