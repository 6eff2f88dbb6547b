"""Whether a profile's keys exist and its values are what their types take; the file's form was looked at before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from rllaunch.errors import ConfigError
from rllaunch.resolve.origins import show_value
from rllaunch.resolve.profiles import Profile
from rllaunch.resolve.resolve import Setting, check_key, field_of
from rllaunch.resolve.schema import LaunchConfig, unit_of

EXAMPLES = {"B": 'bytes, or with its unit: "180 GiB"', "B/s": 'bytes a second, or with its unit: "55.3 GB/s"'}


def mistaken_keys(profile: Profile) -> Iterator[ConfigError]:
    """Keys that do not exist, and values that their types refuse."""
    nested: dict[str, Any] = {}
    for key, value in profile.values.items():
        try:
            check_key(Setting(key, value.value, value.place))
        except ConfigError as err:
            is_fact = value.fact_source and not err.fix.startswith("did you mean")
            fix = f"write what no key takes as a comment; {err.fix}" if is_fact else err.fix
            yield ConfigError(err.what, f"{key} = {show_value(value.value)}   {value.place}", fix)
            continue
        *parents, leaf = key.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = value.value
    try:
        config = LaunchConfig.model_validate(nested)
    except ValidationError as err:
        for problem in err.errors():
            key = ".".join(str(part) for part in problem["loc"][:2])
            stated = profile.values.get(key)
            shown = show_value(problem["input"])
            message = problem["msg"][0].lower() + problem["msg"][1:]
            unit = unit_of(field_of(key))
            yield ConfigError(
                f"{key} cannot be {shown}: {message}",
                f"{key} = {shown}   {stated.place if stated else profile.place}",
                f"a number of {EXAMPLES[unit]}" if unit else f"`rllaunch schema` has the type of {key}",
            )
            section, _, name = key.partition(".")
            nested.get(section, {}).pop(name, None)
        config = LaunchConfig.model_validate(nested)
    for key, value in profile.values.items():
        # A launch would read "8" and true as numbers; an editor that knows the schema, and the doctor, do not.
        section, _, name = key.partition(".")
        taken = getattr(getattr(config, section, None), name, None)
        if isinstance(value.value, (str, bool)) and isinstance(taken, (int, float)) and not isinstance(taken, bool):
            what = f"{key} is a number, not {show_value(value.value)}"
            yield ConfigError(what, f"{key}   {value.place}", "write it without quotes, in its unit")
