"""Profile files: what is read, what is refused and where it says so; variants; what two profiles both claim."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rllaunch.errors import ConfigError
from rllaunch.plugins import load_plugins
from rllaunch.resolve.profiles import Profile, ProfileStore, Value, read_profile

PLUGIN = "guest 1.2.3"
GOOD = """\
[profile]
kind = "hardware"
name = "mine"
aliases = ["my-box"]
description = "A box"
source = "its label"

[facts]
gpus_per_node = 2
gpu_memory_bytes = { value = 24, source = "its manual" }

[choices.handoff]
colocate_memory_peak_device = "gpu"

[choices.env]
"NAME.WITH.DOTS" = "1"

[detect]
gpu_names = ["My GPU"]

[[verified]]
mode = "gpu"
"""
CELL = '[profile]\nkind = "cell"\nname = "{name}"\nmodel = "{model}"\nhardware = "{hardware}"\n'


def parse(text: str, directory: Path | None = None, place: str = "mine.toml") -> Profile:
    profile, mistakes = read_profile(text, place, PLUGIN, directory)
    for mistake in mistakes:
        raise mistake
    assert profile is not None
    return profile


def stored(*texts: str) -> ProfileStore:
    store = ProfileStore()
    for number, text in enumerate(texts):
        store.add(parse(text, place=f"{number}.toml"))
    return store


def hardware(name: str, extends: str = "", more: str = "") -> str:
    line = f'extends = "{extends}"\n' if extends else ""
    return f'[profile]\nkind = "hardware"\nname = "{name}"\nsource = "s"\n{line}{more}'


def test_a_profile_holds_facts_with_their_source_and_choices_each_with_its_line():
    profile = parse(GOOD)
    assert profile.origin == "mine (guest 1.2.3) mine.toml"
    assert profile.values == {
        "hardware.gpus_per_node": Value(2, "mine.toml:9", "its label"),
        "hardware.gpu_memory_bytes": Value(24, "mine.toml:10", "its manual"),
        "handoff.colocate_memory_peak_device": Value("gpu", "mine.toml:13"),
        "env.NAME.WITH.DOTS": Value("1", "mine.toml:16"),
    }
    assert profile.aliases == ("my-box",)
    assert profile.gpu_names == ("My GPU",)
    assert profile.verified == ({"mode": "gpu"},)


def test_facts_of_an_architecture_are_flat_and_may_be_tables():
    profile = parse(
        '[profile]\nkind = "model"\nname = "m"\nsource = "s"\n'
        "[facts.architecture]\nhidden_size = 4\nrope = { type = 'yarn', factor = 2 }\n"
        'layers = { value = 3, source = "t" }\n'
    )
    assert profile.values == {
        "model.architecture.hidden_size": Value(4, "mine.toml:6", "s"),
        "model.architecture.rope": Value({"type": "yarn", "factor": 2}, "mine.toml:7", "s"),
        "model.architecture.layers": Value(3, "mine.toml:8", "t"),
    }


REFUSED = [
    # (what replaces what in GOOD, line of the message, its text, its hint)
    ("[detect]", "[detects]", 18, "unknown table [detects] in a profile", "did you mean 'detect'?"),
    ("description =", "descripton =", 5, "unknown key 'descripton' in [profile]", "did you mean 'description'?"),
    ('kind = "hardware"', 'kind = "hardwear"', 2, "profile kind 'hardwear' is none of", "set [profile] kind"),
    ('kind = "hardware"\n', "", 1, "a profile needs a kind: hardware, model, task, cell", "set [profile] kind"),
    ('name = "mine"\n', "", 1, "a profile needs a name", "set [profile] name"),
    ('name = "mine"', 'name = ""', 3, "a profile needs a name", "set [profile] name"),
    ('name = "mine"', "name = 3", 3, "'name' in [profile] is a text, not 3", "quotes"),
    ('["my-box"]', '"my-box"', 4, "'aliases' in [profile] is a list of texts, not 'my-box'", 'aliases = ["…"]'),
    ('["my-box"]', '["my-box", ""]', 4, "'aliases' in [profile] is a list of texts", "aliases"),
    ('source = "its label"\n', "", 8, "fact 'gpus_per_node' has no source", "[profile] source"),
    (', source = "its manual"', ', source = ""', 10, "fact 'gpu_memory_bytes' has no source", "source"),
    ('"its manual"', "4", 10, "fact 'gpu_memory_bytes' has no source", "source"),
    ('["My GPU"]', '"My GPU"', 19, "'gpu_names' in [detect] is a list of texts, not 'My GPU'", "gpu_names"),
    ("gpu_names", "gpu_name", 19, "unknown key 'gpu_name' in [detect]", "did you mean 'gpu_names'?"),
    ("[[verified]]", "[verified]", 21, "what was verified is a list of tables", "[[verified]]"),
    ('kind = "hardware"', 'kind = "task"', 18, "a task profile detects nothing", "move [detect]"),
    ('kind = "hardware"', 'kind = "cell"', 1, "a cell names its model and its hardware", "set [profile] model and"),
    ('source = "its', 'model = "tiny"\nsource = "its', 6, "only a cell names its model", "take 'model' out"),
    (
        "[choices.handoff]",
        "[choices]",
        13,
        "choice 'colocate_memory_peak_device' stands outside a section",
        "[choices.",
    ),
    ("[profile]", "[[profile]]", 1, "[profile] is a table, not [{", "write [profile]"),
    ("gpus_per_node = 2", "gpus_per_node = ", 9, "malformed TOML: Invalid value", "correct that line"),
    ('mode = "gpu"', 'mode = "gpu', 22, "malformed TOML", "correct that line"),
    ("gpus_per_node = 2", "gpus_per_node = 2\ngpus_per_node = 2", 10, "malformed TOML: Cannot overwrite", "correct"),
    ("gpus_per_node = 2", f"gpus_per_node = {'[' * 2000}", None, "malformed TOML: nested too deeply", "brackets"),
]


@pytest.mark.parametrize(("old", "new", "line", "what", "hint"), REFUSED)
def test_what_a_profile_gets_wrong_is_named_with_its_line(old: str, new: str, line: int | None, what: str, hint: str):
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    mistakes = read_profile(text, "mine.toml", PLUGIN)[1]
    assert what in " ".join(mistake.what for mistake in mistakes)
    told = next(mistake for mistake in mistakes if what in mistake.what)
    assert hint in told.fix
    assert told.where == ((f"mine.toml:{line}" if line else "mine.toml") + " (guest 1.2.3)",)


@pytest.mark.parametrize("kind", ["task", "cell"])
def test_only_hardware_and_models_have_facts(kind: str):
    names = 'model = "m"\nhardware = "h"\n' if kind == "cell" else ""
    with pytest.raises(ConfigError, match=f"a {kind} profile has no facts"):
        parse(f'[profile]\nkind = "{kind}"\nname = "x"\nsource = "s"\n{names}[facts]\na = 1\n')


@pytest.mark.parametrize("missing", ["model", "hardware"])
def test_a_cell_names_both_its_model_and_its_hardware(missing: str):
    text = CELL.format(name="c", model="m", hardware="h")
    with pytest.raises(ConfigError, match="a cell names its model and its hardware"):
        parse("".join(line for line in text.splitlines(keepends=True) if not line.startswith(missing)))


# --- variants ------------------------------------------------------------------------------------------------


def test_a_variant_has_the_values_of_what_it_extends_under_its_own():
    store = stored(
        hardware("a", more="[facts]\ngpus_per_node = 1\nhost_link = 'x'\n[choices.run]\nseed = 1\n"),
        hardware("b", "A", more="[facts]\ngpus_per_node = 2\n"),
        hardware("c", "b", more="[choices.run]\nseed = 3\n"),
    )
    values = store.get("hardware", "c", "").values
    assert {key: (v.value, v.place) for key, v in values.items()} == {
        "hardware.gpus_per_node": (2, "1.toml:7"),
        "hardware.host_link": ("x", "0.toml:7"),
        "run.seed": (3, "2.toml:7"),
    }
    assert store.get("hardware", "a", "").values["run.seed"].value == 1


def test_a_variant_of_another_plugins_profile_says_whose_value_it_is():
    store = stored(hardware("a", more="[facts]\ngpus_per_node = 1\n"), hardware("c", "b"))
    store.add(replace(parse(hardware("b", "a")), plugin="other 2.0"))
    value = store.get("hardware", "c", "").values["hardware.gpus_per_node"]
    assert value.place == "extends b (other 2.0) extends a (guest 1.2.3) 0.toml:6"


def test_a_task_that_extends_another_keeps_the_others_files(tmp_path: Path):
    store = ProfileStore()
    base = '[profile]\nkind = "task"\nname = "base"\n[choices.task]\nprompt_data = "p.jsonl"\n'
    store.add(parse(base + 'eval_prompt_data = "/data/e.jsonl"\n', tmp_path / "one"))
    store.add(parse('[profile]\nkind = "task"\nname = "longer"\nextends = "base"\n', tmp_path / "two"))
    values = store.get("task", "longer", "").values
    assert values["task.prompt_data"].value == str(tmp_path / "one" / "p.jsonl")
    assert values["task.eval_prompt_data"].value == "/data/e.jsonl"


@pytest.mark.parametrize(
    ("extends", "circle"),
    [({"a": "a"}, "a → a"), ({"a": "b", "b": "a"}, "a → b → a"), ({"a": "b", "b": "c", "c": "b"}, "a → b → c → b")],
)
def test_a_circle_of_variants_is_refused_where_it_is_used(extends: dict[str, str], circle: str):
    store = stored(hardware("fine"), *(hardware(name, base) for name, base in extends.items()))
    assert store.problems == []
    assert store.get("hardware", "fine", "").name == "fine"
    with pytest.raises(ConfigError) as raised:
        store.get("hardware", "a", "--hardware a")
    assert raised.value.what.endswith(f"extends itself: {circle}")
    assert "(guest 1.2.3)" in raised.value.where[0]


def test_a_variant_of_nothing_is_refused_with_the_nearest_name():
    store = stored(hardware("H100"), hardware("b", "H10"))
    with pytest.raises(ConfigError) as raised:
        store.get("hardware", "b", "")
    assert raised.value.what == "profile 'b' extends unknown hardware profile 'H10'"
    assert raised.value.fix == "did you mean 'H100'?"


# --- names ---------------------------------------------------------------------------------------------------


def test_the_first_of_two_profiles_with_a_name_stays():
    store = stored(GOOD, hardware("MY-BOX", more="aliases = ['other']\n"), hardware("other"))
    assert [p.name for p in store.profiles] == ["mine", "other"]
    (problem,) = store.problems
    assert problem.what == "hardware profile name 'MY-BOX' is taken as an alias of 'mine'"
    assert problem.where == ("1.toml (guest 1.2.3)", "already: 0.toml (guest 1.2.3)")


def test_an_alias_that_is_taken_names_the_profile_that_is_left_out():
    store = stored(GOOD, hardware("big", more="aliases = ['MY-box']\n"))
    assert [p.name for p in store.profiles] == ["mine"]
    (problem,) = store.problems
    assert problem.what == "hardware profile 'big' is left out: its alias 'MY-box' is taken by 'mine'"
    assert problem.fix == "take 'MY-box' out of its aliases, or uninstall one of the two plugins"


def test_profiles_of_different_kinds_may_share_a_name():
    store = stored(hardware("x"), '[profile]\nkind = "model"\nname = "x"\n')
    assert store.problems == []
    assert store.get("model", "X", "").kind == "model"


def test_a_second_cell_for_a_pair_is_a_problem():
    store = stored(CELL.format(name="one", model="m", hardware="h"), CELL.format(name="two", model="M", hardware="h"))
    (problem,) = store.problems
    assert problem.what == "cell profile 'two' is left out: (M, h) is that of 'one'"
    assert store.cell("m", "H") is store.profiles[0]


def test_a_cell_may_name_its_model_and_hardware_by_an_alias():
    store = stored(GOOD, CELL.format(name="c", model="tiny", hardware="My-Box"))
    cell = store.cell("tiny", "mine")
    assert cell is not None
    assert cell.name == "c"
    assert store.cell("tiny", "H100") is None


# --- directories ---------------------------------------------------------------------------------------------


def test_a_bad_file_in_a_directory_leaves_the_others(tmp_path: Path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "good.toml").write_text(GOOD, encoding="utf-8")
    (tmp_path / "bad.toml").write_text("x = \n", encoding="utf-8")
    (tmp_path / "latin.toml").write_bytes('[profile]\ndescription = "é"\n'.encode("latin-1"))
    (tmp_path / "notes.txt").write_text("no profile", encoding="utf-8")
    store = ProfileStore()
    store.add_directory(tmp_path, PLUGIN)
    assert [(p.name, p.place, p.directory) for p in store.profiles] == [
        ("mine", "deep/er/good.toml", tmp_path / "deep" / "er")
    ]
    assert [p.where for p in store.problems] == [("bad.toml:1 (guest 1.2.3)",), ("latin.toml (guest 1.2.3)",)]


def test_a_directory_of_a_package_without_init_is_read_too(guest, tmp_path: Path):
    """`importlib.resources.files` gives no path for it, but something like one."""
    guest(
        """
        from importlib.resources import files
        @hookimpl
        def rllaunch_profile_dirs():
            return [files("guest_profiles")]
        """
    )
    (tmp_path / "site" / "guest_profiles").mkdir()
    (tmp_path / "site" / "guest_profiles" / "good.toml").write_text(GOOD, encoding="utf-8")
    plugins = load_plugins()
    profile = plugins.profiles().get("hardware", "my-box", "")
    assert (profile.plugin, profile.place) == (PLUGIN, "good.toml")
    assert profile.directory == tmp_path / "site" / "guest_profiles"
    assert plugins.problems == []


# --- profiles built in Python --------------------------------------------------------------------------------

BUILT = Profile("hardware", "built", PLUGIN, "built.py", {"hardware.gpus_per_node": Value(2, "built.py:1", "a table")})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"kind": "machine"}, "kind 'machine' is none of hardware, model, task, cell"),
        ({"name": ""}, "'' is no name"),
        ({"aliases": "box"}, "aliases and gpu_names of 'built' are tuples of texts"),
        ({"gpu_names": ["GPU"]}, "aliases and gpu_names of 'built' are tuples of texts"),
        ({"kind": "cell", "values": {}}, "cell 'built' names its model and its hardware"),
        ({"values": None}, "values of 'built' are a mapping, not NoneType"),
        ({"values": {"run.seed": 3}}, "'run.seed' of 'built' is a Value, not 3"),
        ({"values": {"seed": Value(3, "")}}, "'seed' of 'built' is no section.key"),
        ({"values": {"hardware.gpus_per_node": Value(2, "")}}, "fact 'hardware.gpus_per_node' of 'built' has no"),
        (
            {"kind": "model", "values": {"model.architecture.hidden_size": Value(2, "")}},
            "fact 'model.architecture.hidden_size' of 'built' has no fact_source",
        ),
    ],
)
def test_a_malformed_profile_from_python_is_a_problem(change: dict[str, object], says: str):
    store = ProfileStore()
    store.add(replace(BUILT, **change))  # type: ignore[arg-type]
    assert store.profiles == []
    (problem,) = store.problems
    assert problem.what.startswith(f"a profile cannot be used: {says}")
    assert problem.where == ("built.py (guest 1.2.3)",)


def test_a_good_profile_from_python_is_found_like_a_file():
    store = ProfileStore()
    store.add(BUILT)
    store.add(replace(BUILT, name="chosen", values={"model.hf_checkpoint": Value("/x", "")}, kind="model"))
    assert store.problems == []
    assert store.get("hardware", "BUILT", "") is BUILT
