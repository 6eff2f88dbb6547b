"""The chosen backends are installed; nothing is imported to find out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rllaunch.doctor.finding import Finding, Rule
from rllaunch.resolve.origins import Resolved


def is_installed(module: str) -> bool:
    """Whether a dotted module can be found. Only its parent packages are imported, never itself."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def torch_lacks(platform: str) -> str:
    """What is wrong with the installed torch for `cuda` or `hip`; empty if nothing is."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return "torch is not installed"
    try:
        return build_lacks((Path(spec.origin).parent / "version.py").read_text(encoding="utf-8"), platform)
    except OSError:
        return ""  # a torch of another make; what it can do shows when it runs


def build_lacks(version_file: str, platform: str) -> str:
    """What a build of torch lacks for `cuda` or `hip`, from the text of its `torch/version.py`."""
    built_for = re.search(rf"^{platform}\b[^=\n]*= *(\S+)", version_file, re.MULTILINE)
    version = re.search(r"^__version__ *= *['\"]([^'\"]+)", version_file, re.MULTILINE)
    if built_for is None or built_for[1] != "None":
        return ""
    name = {"cuda": "CUDA", "hip": "ROCm"}[platform]
    return f"torch {version[1] if version else '?'} is a build without {name}"


def _check(resolved: Resolved) -> Iterator[Finding]:
    config = resolved.config
    if config.trainer.backend == "megatron":
        missing = [] if is_installed("megatron.core") else ["megatron.core is not installed"]
        lacks = torch_lacks("hip" if config.hardware.accelerator == "rocm" else "cuda")
        missing += [lacks] if lacks else []
        if missing:
            yield RULE.error(
                resolved,
                f"the megatron trainer cannot run here: {' and '.join(missing)}",
                ["trainer.backend"],
                "pip install 'rllaunch[megatron]'" + (" and a torch built for these GPUs" if lacks else ""),
            )
    if config.rollout.backend == "sglang" and not is_installed("sglang"):
        yield RULE.error(
            resolved,
            "the sglang engines cannot run here: sglang is not installed",
            ["rollout.backend"],
            "pip install 'rllaunch[sglang]'",
        )


RULE = Rule(
    code="RL501",
    name="the backends are installed",
    reason="an import that fails in a worker shows after the cluster is up (Human-Agent-Society/reef#337)",
    check=_check,
    probes=True,
    overridable=True,
)
RULES = (RULE,)
