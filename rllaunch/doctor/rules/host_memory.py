"""Host RAM that a job has on this machine: what the profile says, and what Ray believes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rllaunch.doctor.finding import Finding, Level, Rule
from rllaunch.doctor.rules.cluster import ray_address
from rllaunch.doctor.rules.fits import LESS_ON_A_CPU, needed_on_a_cpu
from rllaunch.resolve.limits import ROOT, HostLimit, describe, host_limits, ray_kill_threshold, ray_total
from rllaunch.resolve.origins import Resolved
from rllaunch.units import gib

if TYPE_CHECKING:
    from rllaunch.resolve.detect import MachineFacts

HOST_MEMORY = "hardware.host_memory_bytes"
# Firmware and kernel keep some of what a vendor counts: a node sold with 2 TB shows 1 to 3 % less.
KEPT_BY_THE_MACHINE = 0.05


def check_profile_memory(
    resolved: Resolved,
    *,
    machine: MachineFacts,
    root: Path = ROOT,
    environ: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Whether a job on this machine may use the host RAM that the launch counts on."""
    planned_bytes = resolved.config.hardware.host_memory_bytes
    limits = host_limits(root, environ)
    if not limits or not is_a_node(resolved, machine):
        return []
    limit = min(limits, key=lambda limit: limit.bytes)
    if planned_bytes is None:
        return _check_need(resolved, limit, limits)
    if limit.bytes >= planned_bytes:
        return []
    level: Level = "info" if limit.bytes >= planned_bytes * (1 - KEPT_BY_THE_MACHINE) else "warning"
    return [
        Finding(
            PROFILE.code,
            level,
            f"a job here may use {gib(limit.bytes)} of host RAM, the launch counts on {gib(planned_bytes)}",
            (resolved.describe(HOST_MEMORY), *describe(limits)),
            f"--set {HOST_MEMORY}={limit.bytes}, or a job with more memory",
        )
    ]


def _check_need(resolved: Resolved, limit: HostLimit, limits: Sequence[HostLimit]) -> list[Finding]:
    """A launch that computes on the CPU, on a machine of which the profile says nothing."""
    need = needed_on_a_cpu(resolved)
    if need is None or need[1] <= limit.bytes:
        return []
    return [
        Finding(
            PROFILE.code,
            "error",
            f"a job here may use {gib(limit.bytes)} of host RAM, this launch needs {gib(need[1])} in {need[0].name}",
            (resolved.describe("model.name"), *describe(limits)),
            LESS_ON_A_CPU,
        )
    ]


def check_ray_total(
    resolved: Resolved,
    *,
    machine: MachineFacts,
    root: Path = ROOT,
    environ: Mapping[str, str] | None = None,
) -> list[Finding]:
    """Whether the memory monitor of Ray acts on the limit that this job has."""
    environ = environ or {}
    limits, total = host_limits(root, environ), ray_total(root)
    if total is None or not limits or not is_a_node(resolved, machine):
        return []
    limit = min(limits, key=lambda limit: limit.bytes)
    threshold_bytes = ray_kill_threshold(environ, total.bytes)
    if total.bytes == limit.bytes or threshold_bytes is None:
        return []
    return [
        Finding(
            RAY.code,
            "warning",
            f"Ray takes the memory of this node for {gib(total.bytes)}, the job may use {gib(limit.bytes)}\n"
            f"Ray kills a worker at {threshold_bytes} bytes in use, the limit is {limit.bytes} bytes",
            (f"{total.bytes} bytes   Ray: {total.source}", *describe(limits)),
            _share_that_fits(limit, total),
        )
    ]


def _share_that_fits(limit: HostLimit, total: HostLimit) -> str:
    """The threshold at which Ray acts on 95 % of the job's limit; the monitor compares the whole node's use."""
    share = int(0.95 * limit.bytes / total.bytes * 1000) / 1000
    return f"RAY_memory_usage_threshold={share:g} where the job has the node to itself"


def is_a_node(resolved: Resolved, machine: MachineFacts) -> bool:
    """Whether this machine is one of those that the launch runs on, as far as can be seen.

    Its GPUs have the profile's name or size. Without GPUs: the cluster is a local one.
    """
    hardware = resolved.config.hardware
    if hardware.accelerator == "cpu":
        return ray_address(resolved)[0] in ("", "local")
    if not machine.gpu_names:
        return False
    from rllaunch.resolve.detect import match_hardware

    has_name = match_hardware(machine, {hardware.name: [hardware.name]}) == hardware.name
    return has_name or all(nbytes == hardware.gpu_memory_bytes for nbytes in machine.gpu_memory_bytes)


def runs_here(resolved: Resolved, machine: MachineFacts) -> bool:
    """Whether processes of the launch run on this machine, as far as can be seen."""
    return ray_address(resolved)[0] in ("", "local") or is_a_node(resolved, machine)


def _check_profile(resolved: Resolved) -> Iterator[Finding]:
    from rllaunch.resolve.detect import probe_machine

    yield from check_profile_memory(resolved, machine=probe_machine(), environ=os.environ)


def _check_ray(resolved: Resolved) -> Iterator[Finding]:
    from rllaunch.resolve.detect import probe_machine

    yield from check_ray_total(resolved, machine=probe_machine(), environ=os.environ)


PROFILE = Rule(
    code="RL509",
    name="the job has the host RAM that is planned with",
    reason="a Slurm limit below the node's RAM ends engines that offload at start-up (alibaba/ROLL#234)",
    check=_check_profile,
    probes=True,
)
RAY = Rule(
    code="RL510",
    name="Ray knows the memory limit of the job",
    reason="Ray's monitor compares the node's use with a total that need not be the job's limit "
    "(ray-project/ray#59796, ray-project/ray#33741)",
    check=_check_ray,
    probes=True,
)
RULES = (PROFILE, RAY)
