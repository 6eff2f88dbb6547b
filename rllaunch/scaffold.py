"""A package to start a plugin from: the templates of `templates/plugin`, filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from rllaunch import __version__
from rllaunch.errors import EnvironmentProblem, UsageError
from rllaunch.plugins import Plugins

PREFIX = "rllaunch-"
SUFFIX = ".tmpl"
# Where nobody chose one: far from RL901, with which people begin.
CODES = range(950, 1000)
_DISTRIBUTION = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CODE = re.compile(r"RL9\d\d")
_PLACE = re.compile(r"@(\w+)@")


@dataclass(frozen=True)
class NewPlugin:
    """
    Args:
        names: what was chosen: `distribution`, `module`, `entry`, `profile`, `extends`, `code`.
        files: relative path → text.
    """

    names: Mapping[str, str]
    files: Mapping[str, str]


def plan_plugin(plugins: Plugins, name: str, *, extends: str, profile: str = "", rule: str = "") -> NewPlugin:
    """The files of a new plugin; what is left empty is chosen so that no installed plugin has it.

    Raises:
        UsageError: a name that cannot be one, or that is taken.
        ConfigError: there is no hardware profile to extend.
    """
    if not _DISTRIBUTION.fullmatch(name) or name == PREFIX.rstrip("-"):
        fix = "use lower-case letters, digits and single dashes, such as rllaunch-acme"
        raise UsageError(f"{name!r} cannot be the name of a plugin", "NAME", fix)
    entry = name.removeprefix(PREFIX)
    base = plugins.profiles().get("hardware", extends, "--extends")
    names = {
        "distribution": name,
        "module": name.replace("-", "_"),
        "entry": entry,
        "extends": base.name,
        "profile": _free_profile(plugins, profile or f"{entry}-{base.name}"),
        "code": _free_code(plugins, rule),
    }
    gpus = base.values.get("hardware.gpus_per_node")
    filled = names | {"version": __version__, "gpus_per_node": str(gpus.value if gpus else 1)}
    return NewPlugin(names, {path: _filled(text, filled) for path, text in _templates(names)})


def write_new(directory: Path, texts: Mapping[str, str]) -> list[str]:
    """Write files into a directory that is not there yet or is empty; their names.

    Raises:
        UsageError: something is there.
    """
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            fix = "nothing was written; choose another place with --directory"
            raise UsageError(f"{directory} is there and not empty", "--directory", fix)
        for name, text in texts.items():
            file = directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            # `x`: what came into being meanwhile is not ours to replace.
            with file.open("x", encoding="utf-8") as stream:
                stream.write(text)
    except OSError as err:
        raise EnvironmentProblem(
            f"cannot write: {err.strerror}", str(err.filename), "choose another --directory"
        ) from None
    return list(texts)


def _free_profile(plugins: Plugins, name: str) -> str:
    if not _PROFILE.fullmatch(name):
        raise UsageError(f"{name!r} cannot be the name of a profile", "--profile", "letters, digits, dashes and dots")
    for known in plugins.profiles().of_kind("hardware"):
        if name.casefold() in {n.casefold() for n in (known.name, *known.aliases)}:
            raise UsageError(
                f"hardware profile {name!r} is taken by {known.plugin}", "--profile", "choose another name"
            )
    return name


def _free_code(plugins: Plugins, code: str) -> str:
    taken = {rule.code: rule.plugin for rule in plugins.rules()}
    if not code:
        return next(free for number in CODES if (free := f"RL{number}") not in taken)
    if not _CODE.fullmatch(code):
        raise UsageError(f"{code!r} is no code of a plugin's rule", "--rule", "RL900 to RL999 are for plugins")
    if code in taken:
        raise UsageError(f"rule code {code} is taken by {taken[code]}", "--rule", "choose another, or leave it out")
    return code


def _templates(names: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Path of the file that is to be → its template."""
    for path, text in _below(files("rllaunch").joinpath("templates", "plugin"), ""):
        # Hidden folders are easily left out of a package.
        path = path.removesuffix(SUFFIX).replace("dot-", ".")
        path = path.replace("package/", f"{names['module']}/", 1) if path.startswith("package/") else path
        path = path.replace("profiles/profile.toml", f"profiles/{names['profile']}.toml")
        yield path.replace("tests/test_plugin", f"tests/test_{names['entry'].replace('-', '_')}"), text


def _below(directory: Traversable, path: str) -> Iterator[tuple[str, str]]:
    for item in sorted(directory.iterdir(), key=lambda i: i.name):
        if item.is_dir():
            yield from _below(item, f"{path}{item.name}/")
        elif item.name.endswith(SUFFIX):
            yield f"{path}{item.name}", item.read_text(encoding="utf-8")


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _PLACE.sub(lambda match: values[match[1]], text)
