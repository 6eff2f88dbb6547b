"""Where a user's own profiles lie, first to last: folders that are named, `./profiles`, the platform's config folder.

What ships and what plugins bring comes before all of them, so that no file lying about changes a launch silently.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rllaunch.errors import ConfigError

FLAG = "--profile-dir"
VARIABLE = "RLLAUNCH_PROFILE_DIR"
LOCAL = Path("profiles")


@dataclass(frozen=True)
class ProfileDir:
    """A folder of profiles.

    Args:
        origin: what stands where a plugin's label would: the flag, the variable, or which of the usual folders.
        is_deep: files further down count too. Not in `./profiles`: other things may lie in a folder of that name.
    """

    path: Path
    origin: str
    is_deep: bool = True


def config_dir() -> Path:
    """The folder for profiles in the platform's config folder; it need not exist."""
    import typer

    return Path(typer.get_app_dir("rllaunch")) / "profiles"


def is_found(file: Path, environ: Mapping[str, str]) -> bool:
    """Whether a profile's file lies where it is looked for without `--profile-dir`."""
    folder = file.resolve().parent
    return any(
        folder == (found := each.path.resolve()) or (each.is_deep and folder.is_relative_to(found))
        for each in _all((), environ)
    )


def profile_dirs(given: Sequence[Path], environ: Mapping[str, str]) -> tuple[ProfileDir, ...]:
    """The folders there are, each once.

    Args:
        given: of `--profile-dir`, in the order given.
    Raises:
        ConfigError: one that was named is missing or no folder.
    """
    found: dict[Path, ProfileDir] = {}
    for directory in _all(given, environ):
        found.setdefault(directory.path.resolve(), directory)
    return tuple(found.values())


def _all(given: Sequence[Path], environ: Mapping[str, str]) -> Iterator[ProfileDir]:
    for path in given:
        yield _named(path, FLAG, f"{FLAG} {path}")
    for part in environ.get(VARIABLE, "").split(os.pathsep):
        if part.strip():
            yield _named(Path(part.strip()), VARIABLE, f"{VARIABLE} in the environment")
    if LOCAL.is_dir():
        yield ProfileDir(LOCAL, "./profiles", is_deep=False)
    if config_dir().is_dir():
        yield ProfileDir(config_dir(), "config folder")


def _named(path: Path, origin: str, where: str) -> ProfileDir:
    path = path.expanduser()
    if not path.exists():
        raise ConfigError(f"profile directory does not exist: {path}", where, "make it, or correct the path")
    if not path.is_dir():
        raise ConfigError(f"no profile directory but a file: {path}", where, f"name its folder: {path.parent}")
    return ProfileDir(path, origin)
