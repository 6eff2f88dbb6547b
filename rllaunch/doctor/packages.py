"""Installed packages and what they ask of each other, from their own metadata; nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # Imported where it is used: 25 ms, and most commands ask for no version.
    from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Demand:
    """One line of a package's requirements that holds on this machine.

    Args:
        by: who asks, with its version.
        package: canonical name, with dashes.
        name: the name as it is asked for.
    """

    by: str
    package: str
    name: str
    specifier: SpecifierSet

    def __str__(self) -> str:
        return f"{self.by} asks for {self.name}{self.specifier}"

    def is_met_by(self, version: str) -> bool:
        """A local part (`+cu130`) counts for nothing, a pre-release counts as it is."""
        from packaging.version import InvalidVersion, Version

        try:
            return self.specifier.contains(Version(version), prereleases=True)
        except InvalidVersion:
            return True  # a version of another make; what it can do shows when it runs


def version_of(name: str) -> str | None:
    """The version of an installed package; None if it is not there."""
    try:
        return distribution(name).version
    except PackageNotFoundError:
        return None


def demands_of(name: str, extras: Iterable[str], packages: Collection[str]) -> Iterator[Demand]:
    """What an installed package asks, on this machine, of `packages` (canonical names); nothing if it is not there."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        asking = distribution(name)
    except PackageNotFoundError:
        return
    version, extras = asking.version, tuple(extras)
    for line in asking.requires or ():
        package = canonical(line)
        if package not in packages:
            continue
        try:
            asked = Requirement(line)
        except InvalidRequirement:
            continue
        for extra in ("", *extras):
            if asked.marker is None or asked.marker.evaluate({"extra": extra}):
                by = f"{name}[{extra}]" if extra and "extra" in str(asked.marker) else name
                yield Demand(f"{by} {version}", package, asked.name, asked.specifier)
                break


def canonical(line: str) -> str:
    """The name that a line of requirements begins with, with dashes and in lower case."""
    found = re.match(r"[\w.-]+", line)
    return re.sub(r"[-_.]+", "-", found[0]).lower() if found else ""


def install_line(demands: Iterable[Demand]) -> str:
    """The `pip install` that meets what is asked of one package; empty if no version can meet it all."""
    asked = list(demands)
    specifiers = {str(s): s.operator for demand in asked for s in demand.specifier}
    pins = [text for text, operator in specifiers.items() if operator in ("==", "===") and "*" not in text]
    if not pins:
        return f"pip install '{asked[0].name}{','.join(sorted(specifiers))}'"
    pin, *others = pins
    if others or not all(demand.is_met_by(pin.lstrip("=")) for demand in asked):
        return ""
    return f"pip install '{asked[0].name}{pin}'"


def torch_version_file() -> str:
    """The text of the installed `torch/version.py`; empty if there is none."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        return (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return ""


def built_for(version_file: str, platform: str) -> str | None:
    """The version of `cuda` or `hip` that a torch is built for: empty if for none, None if the file does not say."""
    found = re.search(rf"^{platform}\b[^=\n]*= *(\S+)", version_file, re.MULTILINE)
    if found is None:
        return None
    return "" if found[1] == "None" else found[1].strip("'\"")


def torch_cuda() -> tuple[int, int] | None:
    """The CUDA version that the installed torch is built for, such as (13, 0); None if for none, or unknown."""
    found = re.fullmatch(r"(\d+)\.(\d+).*", built_for(torch_version_file(), "cuda") or "")
    return (int(found[1]), int(found[2])) if found else None
