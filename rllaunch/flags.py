"""The launch's flags: every key of the schema that has a name on the command line, declared once there.

`take_flags` reads them out of an argument list in the order given, so that the last of a repeated flag
wins and an error can show the flag as it was typed. What it does not know it leaves to the command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rllaunch.errors import UsageError, did_you_mean
from rllaunch.resolve.resolve import Request, Setting, field_of, free_value, is_bool, is_list, known_keys, typed
from rllaunch.resolve.schema import Flag, descriptions, unit_of
from rllaunch.resolve.user_dirs import FLAG

# Options of Megatron and SGLang that no key of ours names go to their section as they are.
PASS_THROUGH = ("megatron", "sglang")


@dataclass(frozen=True)
class LaunchFlag:
    name: str
    key: str
    is_bool: bool
    is_list: bool
    metavar: str
    aliases: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        return descriptions().get(self.key, "")


@cache
def launch_flags() -> dict[str, LaunchFlag]:
    """Canonical flag → what it sets, in the schema's order."""
    flags = {}
    for key in known_keys():
        info = field_of(key)
        assert info is not None, "known keys have a field"
        for mark in info.metadata:
            if isinstance(mark, Flag):
                kind = "" if is_bool(info) else "BYTES" if unit_of(info) else _metavar(info.annotation)
                flags[mark.name] = LaunchFlag(mark.name, key, is_bool(info), is_list(info), kind, mark.aliases)
    return flags


def _metavar(annotation: Any) -> str:
    text = str(annotation)
    if "Literal[" in text:
        choices = text[text.index("[") + 1 : text.index("]")]
        return "|".join(c.strip("' ") for c in choices.split(","))
    for name, metavar in (("tuple", "NAME…"), ("int", "INT"), ("float", "FLOAT")):
        if name in text:
            return metavar
    return "TEXT"


@cache
def _by_name() -> dict[str, LaunchFlag]:
    return {name: flag for flag in launch_flags().values() for name in (flag.name, *flag.aliases)}


def take_flags(args: Sequence[str]) -> tuple[list[Setting], list[Path], list[str]]:
    """Settings of the launch flags, files of `--config`, and the arguments that are neither.

    Raises:
        UsageError: a flag without its value, or a malformed `--set`.
    """
    settings: list[Setting] = []
    files: list[Path] = []
    rest: list[str] = []
    queue = list(args)
    while queue:
        token = queue.pop(0)
        if token == "--":
            rest += [token, *queue]
            break
        if not token.startswith("--"):
            rest.append(token)
            continue
        name, equals, inline = token.partition("=")
        given = [inline] if equals else []
        if name == "--config":
            files.append(Path(_value(name, given, queue)))
        elif name == "--set":
            settings.append(_set(_value(name, given, queue)))
        elif (setting := _launch_flag(name, given, queue)) or (setting := _pass_through(name, given, queue)):
            settings.append(setting)
        else:
            rest.append(token)
    return settings, files, rest


def take_profile_dirs(args: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Folders of `--profile-dir`, and the other arguments.

    Raises:
        UsageError: the flag without its value.
    """
    dirs: list[Path] = []
    rest: list[str] = []
    queue = list(args)
    while queue:
        token = queue.pop(0)
        if token == "--":
            return dirs, [*rest, token, *queue]
        name, equals, inline = token.partition("=")
        if name == FLAG:
            dirs.append(Path(_value(name, [inline] if equals else [], queue, "a folder of profiles")))
        else:
            rest.append(token)
    return dirs, rest


def _launch_flag(name: str, given: list[str], queue: list[str]) -> Setting | None:
    flag = _by_name().get(name)
    if flag is None:
        positive = _by_name().get("--" + name.removeprefix("--no-")) if name.startswith("--no-") else None
        if positive is None or not positive.is_bool:
            return None
        if given:
            raise UsageError(f"{name} takes no value", f"{name}={given[0]}", f"{name}, or {positive.name}=false")
        return Setting(positive.key, False, name)
    if flag.is_bool:
        if not given:
            return Setting(flag.key, True, name)
        return Setting(flag.key, given[0], f"{name}={given[0]}", text=True)
    if flag.is_list:
        values = list(given)
        while not given and queue and not queue[0].startswith("-"):
            values.append(queue.pop(0))
        if not values:
            raise UsageError(f"{name} needs at least one value", name, flag.help)
        return typed(Setting(flag.key, ",".join(values), f"{name} {' '.join(values)}", text=True))
    value = _value(name, given, queue, flag.help)
    return typed(Setting(flag.key, value, f"{name} {value}", text=True))


def _pass_through(name: str, given: list[str], queue: list[str]) -> Setting | None:
    for section in PASS_THROUGH:
        if name.startswith(f"--{section}-"):
            key = f"{section}.{name.removeprefix(f'--{section}-').replace('-', '_')}"
            if not given and queue and not queue[0].startswith("--"):
                given = [queue.pop(0)]
            value: Any = free_value(given[0]) if given else True
            return Setting(key, value, f"{name} {given[0]}" if given else name)
    return None


def _set(text: str) -> Setting:
    key, equals, value = text.partition("=")
    if not equals or "." not in key:
        hint = "write --set section.key=value"
        if equals and (homes := [k for k in known_keys() if k.partition(".")[2] == key.strip()]):
            hint = f"write --set {homes[0]}={value}"
        raise UsageError(f"--set {text!r} is not section.key=value", f"--set {text}", hint)
    return typed(Setting(key.strip(), value.strip(), f"--set {text}", text=True))


def _value(name: str, given: list[str], queue: list[str], help: str = "") -> str:
    if given:
        return given[0]
    if not queue or (queue[0].startswith("--") and len(queue[0]) > 2):
        raise UsageError(f"{name} needs a value", name, help or "see --help")
    return queue.pop(0)


def unknown_flag(name: str, own: Sequence[str]) -> UsageError:
    """The error for a flag nobody knows, with the nearest of all that exist."""
    negative = [f"--no-{f.name[2:]}" for f in launch_flags().values() if f.is_bool]
    known = [*_by_name(), *negative, *own, "--config", "--set", FLAG]
    hint = did_you_mean(name, known)
    return UsageError(f"unknown flag {name}", "", hint if hint.startswith("did") else "see --help")


def command_of(values: Mapping[str, Any]) -> list[str]:
    """The flags that give these `section.key` → value, in the schema's order."""
    by_key = {flag.key: flag for flag in launch_flags().values()}
    words: list[str] = []
    for key, value in values.items():
        flag = by_key.get(key)
        section, _, name = key.partition(".")
        if value is None and (flag is not None or section not in PASS_THROUGH):
            words += ["--set", f"{key}=unset"]
        elif flag is None and section in PASS_THROUGH and not isinstance(value, (list, dict)):
            dashed = f"--{section}-{name.replace('_', '-')}"
            words += [dashed] if value is True else [dashed, _text(value)]
        elif flag is None:
            words += ["--set", f"{key}={_text(value)}"]
        elif flag.is_bool:
            words.append(flag.name if value else f"--no-{flag.name[2:]}")
        elif flag.is_list:
            words += [flag.name, *(str(v) for v in value)] if value else ["--set", f"{key}=[]"]
        else:
            words += [flag.name, _text(value)]
    return words


def _text(value: Any) -> str:
    import json

    return value if isinstance(value, str) else json.dumps(value)


__all__ = [
    "LaunchFlag",
    "Request",
    "command_of",
    "launch_flags",
    "take_flags",
    "take_profile_dirs",
    "unknown_flag",
]
