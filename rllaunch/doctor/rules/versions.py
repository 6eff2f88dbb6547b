"""The installed packages, torch's CUDA and the driver fit together, by what each of them says itself."""

from __future__ import annotations

from collections.abc import Iterator

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.gpus import GpuNode, read_node
from rllaunch.doctor.packages import Demand, demands_of, install_line, torch_cuda, version_of
from rllaunch.doctor.rules.host_memory import runs_here
from rllaunch.resolve.origins import Resolved

# Compiled against each other, or known to break by a version. What else SGLang asks for shows when it is imported.
STACK = ("torch", "sglang", "sglang-kernel", "sgl-kernel", "megatron-core", "torch-memory-saver", "transformers")
# RL501 and RL402 say where these are missing.
OTHERS_RULE = ("torch", "sglang", "megatron-core", "torch-memory-saver")


def _users(resolved: Resolved) -> dict[str, list[str]]:
    """Packages whose demands count for this launch, each with the extras that it uses of it."""
    config = resolved.config
    users: dict[str, list[str]] = {"rllaunch": []}
    if config.trainer.backend == "megatron":
        users["rllaunch"].append("megatron")
        users["megatron-core"] = []
    if config.rollout.backend == "sglang":
        users["rllaunch"].append("sglang")
        users["sglang"] = []
    return users


def _check_packages(resolved: Resolved) -> Iterator[Finding]:
    users = _users(resolved)
    if resolved.config.hardware.accelerator != "cuda" or len(users) == 1:
        return
    asked: dict[str, list[Demand]] = {package: [] for package in STACK}
    for user, extras in users.items():
        for demand in demands_of(user, extras, STACK):
            asked[demand.package].append(demand)
    for package, demands in asked.items():
        there = version_of(package)
        if there is None:
            if demands and package not in OTHERS_RULE:
                yield _finding(f"{demands[0].name} is not installed", demands, demands)
        elif unmet := [demand for demand in demands if not demand.is_met_by(there)]:
            yield _finding(f"{unmet[0].name} {there} is installed", unmet, demands)


def _finding(what: str, unmet: list[Demand], demands: list[Demand]) -> Finding:
    line = install_line(demands)
    fix = line or f"no {demands[0].name} is what both ask for: other versions of those that ask"
    return Finding(RULE.code, "error", f"{what}, {unmet[0]}", tuple(str(d) for d in demands), fix)


def check_driver(resolved: Resolved, node: GpuNode, cuda: tuple[int, int] | None) -> Iterator[Finding]:
    """Whether the driver runs the CUDA that torch is built for.

    Args:
        cuda: what torch is built for; None if unknown.
    """
    if resolved.config.hardware.accelerator != "cuda" or not node.cuda or not cuda or cuda <= node.cuda:
        return
    built, most = ("{}.{}".format(*version) for version in (cuda, node.cuda))
    torch = f"torch {version_of('torch') or ''} is built for CUDA {built}"
    where = (f"CUDA {built}   torch/version.py", f"CUDA {most}   NVML: nvmlSystemGetCudaDriverVersion")
    fix = f"a newer NVIDIA driver, or a torch built for CUDA {most} or older"
    if cuda[0] > node.cuda[0]:
        text = f"{torch}, the driver runs CUDA {most} at most: torch cannot see the GPUs"
        yield Finding(RULE.code, "error", text, where, fix)
    else:
        text = f"{torch}, the driver knows CUDA {most}: what is compiled at run time, as Triton's kernels are, can fail"
        yield Finding(RULE.code, "warning", text, where, fix)


def _check(resolved: Resolved) -> Iterator[Finding]:
    yield from _check_packages(resolved)
    node = read_node()
    if runs_here(resolved, node.facts):
        yield from check_driver(resolved, node, torch_cuda())


RULE = Rule(
    code="RL401",
    name="packages, torch's CUDA and the driver fit together",
    reason="kernels are built for one torch and one SGLang, an older memory saver ends a process that frees what is "
    "paused (fzyzcjy/torch_memory_saver#92, radixark/miles#3192), a driver starts no newer major version of CUDA",
    check=_check,
    probes=True,
    overridable=True,
)
RULES = (RULE,)
