"""Every hook: documented, with a user, and the door through which rllaunch's own things come too."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

from rllaunch.doctor.engine import builtin_rules
from rllaunch.hooks import RunObserver, Specs
from rllaunch.plugins import load_plugins

HOOKS = [name for name in vars(Specs) if name.startswith("rllaunch_")]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "plugins.md"
every_hook = pytest.mark.parametrize("hook", HOOKS)


def arguments(hook: str) -> list[str]:
    return [name for name in inspect.signature(getattr(Specs, hook)).parameters if name != "self"]


def document(hook: str) -> str:
    return inspect.getdoc(getattr(Specs, hook)) or ""


def test_there_are_ten_hooks():
    assert len(HOOKS) == 10
    public = [name for name, value in vars(Specs).items() if callable(value) and not name.startswith("_")]
    assert public == HOOKS
    assert all(hasattr(getattr(Specs, hook), "rllaunch_spec") for hook in HOOKS)


@every_hook
def test_a_hook_says_its_moment_and_who_uses_it(hook: str):
    assert re.search(r"^Moment: \w.*", document(hook), re.MULTILINE)
    assert re.search(r"^Used by: (`rllaunch-example`|the )", document(hook), re.MULTILINE)


@every_hook
def test_a_hook_says_what_its_arguments_are(hook: str):
    if hook == "rllaunch_commands":
        assert arguments(hook) == ["app"]
    for name in arguments(hook):
        assert re.search(rf"^    {name}: \w", document(hook), re.MULTILINE), name


@every_hook
def test_who_is_said_to_use_a_hook_does(hook: str, example: ModuleType):
    infos = load_plugins(extra=[("example", example)]).infos
    short = hook.removeprefix("rllaunch_")
    users = {name for name, info in infos.items() if short in info.hooks}
    if "Used by: `rllaunch-example`" not in document(hook):
        assert users & {"rllaunch", "rllaunch:profiles"}
    assert "example" in users, "the example shows every hook"


def test_rllaunchs_own_rules_come_through_the_hook():
    rules = load_plugins().rules()
    assert [rule.code for rule in rules] == [rule.code for rule in builtin_rules()]
    assert {rule.plugin for rule in rules} == {load_plugins().infos["rllaunch"].label}
    assert len(rules) > 20


def test_rllaunchs_own_backends_come_through_the_hooks():
    plugins = load_plugins()
    assert set(plugins.backends("trainer")) == {"embedded", "megatron"}
    assert set(plugins.backends("rollout")) == {"embedded", "sglang"}


def test_rllaunchs_own_profiles_come_through_the_hook_of_an_entry_point():
    plugins = load_plugins()
    assert plugins.infos["rllaunch:profiles"].hooks == ("profile_dirs",)
    profiles = plugins.profiles().profiles
    assert len(profiles) >= 15
    assert {p.plugin for p in profiles} == {plugins.infos["rllaunch"].label}


def test_nothing_is_wrong_with_rllaunchs_own_plugins(rllaunch):
    plugins = load_plugins()
    plugins.check()
    assert plugins.problems == []
    assert plugins.profiles().problems == []
    assert [info.error for info in plugins.infos.values()] == ["", ""]
    assert rllaunch("plugins").err == ""


def test_plugins_answer_in_the_order_of_their_names_and_rllaunch_first(guest):
    for name in ("beta", "alpha"):
        guest(
            f"""
            @hookimpl(trylast={name == "beta"}, tryfirst={name == "alpha"})
            def rllaunch_layers(model, hardware):
                return {{"run": {{"seed": 1 if "{name}" == "alpha" else 2}}}}
            """,
            name,
        )
    plugins = load_plugins()
    assert list(plugins.infos) == ["rllaunch", "rllaunch:profiles", "alpha", "beta"]
    assert [info.name for info, _ in plugins.layers("tiny", "cpu")] == ["alpha", "beta"]


@every_hook
def test_the_page_has_a_row_for_every_hook_with_its_arguments(hook: str):
    (row,) = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{hook}`")]
    hook_column, moment, given, returned, _ = row.split("|")[1:6]
    assert re.findall(r"`(\w+)`", given) == arguments(hook)
    assert moment.strip()
    assert returned.strip()
    assert hook_column.strip() == f"`{hook}`"


def test_the_page_names_no_hook_that_does_not_exist():
    named = set(re.findall(r"\brllaunch_\w+", PAGE.read_text(encoding="utf-8")))
    assert {name for name in named if hasattr(Specs, name)} == set(HOOKS)
    assert {name for name in named if not hasattr(Specs, name)} == {"rllaunch_acme", "rllaunch_project"}


def test_the_page_names_every_moment_of_an_observer():
    moments = [name for name in vars(RunObserver) if name.startswith("on_")]
    assert len(moments) == 3
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in text for name in moments)
