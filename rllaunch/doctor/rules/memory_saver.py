"""torch_memory_saver is there, with the library that is loaded before torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.packages import demands_of, install_line, torch_cuda, version_of
from rllaunch.doctor.variables import process_variable
from rllaunch.resolve.origins import Resolved

PACKAGE = "torch-memory-saver"
LIBRARY = "torch_memory_saver_hook_mode_preload"
TRAINER_BACKEND = "handoff.trainer_offload_backend"


def needs_memory_saver(resolved: Resolved) -> list[str]:
    """The keys because of which a process of this launch needs torch_memory_saver; empty if none does."""
    config = resolved.config
    keys: list[str] = []
    if config.hardware.accelerator != "cuda":
        return keys
    if config.rollout.backend == "sglang" and config.handoff.offload_rollout:
        keys += ["rollout.backend", "handoff.offload_rollout"]
    trainer = getattr(config.handoff, TRAINER_BACKEND.partition(".")[2], "")
    if config.trainer.backend == "megatron" and config.handoff.offload_train and trainer == "torch_memory_saver":
        keys += ["trainer.backend", TRAINER_BACKEND]
    return keys


def libraries() -> list[str] | None:
    """Names of the installed libraries for preloading; None without the package."""
    spec = find_spec("torch_memory_saver")
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    return sorted(file.name for folder in (package, package.parent) for file in folder.glob(f"{LIBRARY}*.so"))


def check_memory_saver(
    resolved: Resolved, installed: list[str] | None, cuda: tuple[int, int] | None
) -> Iterator[Finding]:
    """Whether the memory saver that this launch needs is whole.

    Args:
        installed: names of the libraries for preloading; None without the package.
        cuda: what torch is built for; None if unknown.
    """
    keys = needs_memory_saver(resolved)
    if not keys:
        return
    if installed is None:
        if "rollout.backend" in keys and version_of("sglang") is None:
            return  # RL501: installing SGLang brings it
        yield RULE.error(resolved, "memory cannot be released: torch_memory_saver is not installed", keys, _install())
        return
    # Older releases name no CUDA version; where some libraries do, the plain ones are not looked at.
    with_version = [name for name in installed if re.match(rf"{LIBRARY}_cu\d", name)]
    if not installed or (cuda and with_version and not any(f"_cu{cuda[0]}." in name for name in with_version)):
        has = ", ".join(with_version or installed) or "none"
        for_cuda = f" for CUDA {cuda[0]}" if cuda else ""
        yield RULE.error(
            resolved,
            f"memory cannot be released: torch_memory_saver {version_of(PACKAGE) or ''} has no library{for_cuda} "
            f"to preload (it has: {has})",
            keys,
            f"{_install()} --force-reinstall --no-deps"
            + (f", or a torch for CUDA {_cuda_of(has)}" if with_version else ""),
        )
    yield from _check_preload(resolved, keys)


def _install() -> str:
    asked = [d for user in ("rllaunch", "sglang") for d in demands_of(user, ["sglang"], [PACKAGE])]
    return (asked and install_line(asked)) or "pip install torch_memory_saver"


def _cuda_of(names: str) -> str:
    return " or ".join(sorted(set(re.findall(r"_cu(\d+)", names))))


def _check_preload(resolved: Resolved, keys: list[str]) -> Iterator[Finding]:
    """The saver counts the libraries of its name in LD_PRELOAD and stops unless there is one: the launch's own."""
    value, origin, is_users = process_variable(resolved, "LD_PRELOAD")
    preloaded = [path for path in re.split(r"[:\s]+", value) if "torch_memory_saver" in path]
    if preloaded:
        yield RULE.error(
            resolved,
            "LD_PRELOAD names torch_memory_saver already: the processes that release memory add their own, "
            "and it refuses to be there twice",
            keys,
            "unset LD_PRELOAD, or take torch_memory_saver out of it" if is_users else "take it out of env.LD_PRELOAD",
        ).with_origin(origin)


def _check(resolved: Resolved) -> Iterator[Finding]:
    """Asked where something releases memory through it: SGLang that offloads, or the trainer if it is told to."""
    yield from check_memory_saver(resolved, libraries(), torch_cuda())


RULE = Rule(
    code="RL402",
    name="torch_memory_saver can release memory",
    reason="SGLang stops at start-up without it, and it without a library for torch's CUDA or with two of them in "
    "LD_PRELOAD (torch_memory_saver 0.0.10, utils.py and hooks/mode_preload.py)",
    check=_check,
    probes=True,
    overridable=True,
)
RULES = (RULE,)
