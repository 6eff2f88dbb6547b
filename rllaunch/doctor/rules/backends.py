"""The chosen backends are installed; nothing is imported to find out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.doctor.packages import built_for, torch_version_file
from rllaunch.installing import extra
from rllaunch.resolve.origins import Resolved


def is_installed(module: str) -> bool:
    """Whether a dotted module can be found. Only its parent packages are imported, never itself."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def torch_lacks(platform: str) -> str:
    """What is wrong with the installed torch for `cuda` or `hip`; empty if nothing is."""
    return build_lacks(torch_version_file(), platform) if is_installed("torch") else "torch is not installed"


def build_lacks(version_file: str, platform: str) -> str:
    """What a build of torch lacks for `cuda` or `hip`, from the text of its `torch/version.py`.

    Nothing where the text does not say: a torch of another make; what it can do shows when it runs.
    """
    if built_for(version_file, platform) != "":
        return ""
    version = re.search(r"^__version__ *= *['\"]([^'\"]+)", version_file, re.MULTILINE)
    name = {"cuda": "CUDA", "hip": "ROCm"}[platform]
    return f"torch {version[1] if version else '?'} is a build without {name}"


def _check(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    lacks = torch_lacks("hip" if config.hardware.accelerator == "rocm" else "cuda")
    torch_fix = "a torch built for these GPUs"
    if config.trainer.backend == "megatron":
        missing = [] if is_installed("megatron.core") else ["megatron.core is not installed"]
        missing += [lacks] if lacks else []
        if missing:
            yield RULE.error(
                resolved,
                f"the megatron trainer cannot run here: {' and '.join(missing)}",
                ["trainer.backend"],
                extra("megatron") + (f" and {torch_fix}" if lacks else ""),
            )
    if config.rollout.backend != "sglang":
        return
    if not is_installed("sglang"):
        text, fix = "sglang is not installed", extra("sglang")
    elif lacks and config.trainer.backend != "megatron" and config.hardware.accelerator != "cpu":
        text, fix = lacks, torch_fix
    else:
        return
    yield RULE.error(resolved, f"the sglang engines cannot run here: {text}", ["rollout.backend"], fix)


RULE = Rule(
    code="RL501",
    name="the backends are installed",
    reason="an import that fails in a worker shows after the cluster is up (Human-Agent-Society/reef#337)",
    check=_check,
    probes=True,
    overridable=True,
)
RULES = (RULE,)
