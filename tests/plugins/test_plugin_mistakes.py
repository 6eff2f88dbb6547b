"""What a plugin gets wrong is a finding with its name and version, and nothing else stops working."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rllaunch.plugins import load_plugins
from rllaunch.resolve.detect import MachineFacts
from rllaunch.resolve.schema import LaunchConfig

LAUNCH = ("--model", "tiny", "--hardware", "cpu")


@dataclass(frozen=True)
class Mistake:
    """A plugin's module, and what is said of it.

    Args:
        says: part of the finding.
        code: of the finding `rllaunch doctor` has.
    """

    name: str
    source: str | None
    says: str
    code: str = "RL010"


MISTAKES = [
    Mistake(
        "its module is missing",
        None,
        "plugin guest 1.2.3 cannot be used: ModuleNotFoundError: No module named 'guest_module'",
    ),
    Mistake(
        "it raises when imported",
        "raise ValueError('no such luck')",
        "plugin guest 1.2.3 cannot be used: ValueError: no such luck",
    ),
    Mistake(
        "it ends the process when imported",
        "import sys\nsys.exit(7)",
        "plugin guest 1.2.3 cannot be used: SystemExit: 7",
    ),
    Mistake(
        "it is no Python",
        "def rllaunch_rules(:\n",
        "plugin guest 1.2.3 cannot be used: SyntaxError",
    ),
    Mistake(
        "it implements a hook that does not exist",
        """
        @hookimpl
        def rllaunch_profile_dir():
            return []
        """,
        "plugin guest 1.2.3 cannot be used: there is no hook rllaunch_profile_dir: did you mean 'rllaunch_profile_dirs'",
    ),
    Mistake(
        "a hook takes an argument that does not exist",
        """
        @hookimpl
        def rllaunch_layers(model, gpu):
            return {}
        """,
        "plugin guest 1.2.3 cannot be used: PluginValidationError",
    ),
    Mistake(
        "it implements no hook",
        """
        def rllaunch_rules():
            return []
        """,
        "plugin guest 1.2.3 cannot be used: it implements no hook",
    ),
    Mistake(
        "it wraps a hook",
        """
        @hookimpl(wrapper=True)
        def rllaunch_rules():
            return (yield)
        """,
        "plugin guest 1.2.3 cannot be used: rllaunch_rules is a wrapper",
    ),
    Mistake(
        "a hook raises",
        """
        @hookimpl
        def rllaunch_rules():
            raise KeyError("nowhere")
        """,
        "plugin guest 1.2.3 failed in rllaunch_rules: KeyError: 'nowhere'",
    ),
    Mistake(
        "a hook ends the process",
        """
        @hookimpl
        def rllaunch_profiles():
            raise SystemExit("enough")
        """,
        "plugin guest 1.2.3 failed in rllaunch_profiles: SystemExit: enough",
    ),
    Mistake(
        "a text for a list",
        """
        @hookimpl
        def rllaunch_profile_dirs():
            return "profiles"
        """,
        "plugin guest 1.2.3 answered rllaunch_profile_dirs with 'profiles'",
    ),
    Mistake(
        "nothing for a list",
        """
        @hookimpl
        def rllaunch_profiles():
            pass
        """,
        "plugin guest 1.2.3 answered rllaunch_profiles with None",
    ),
    Mistake(
        "a generator for a list",
        """
        @hookimpl
        def rllaunch_rules():
            yield 1
        """,
        "plugin guest 1.2.3 answered rllaunch_rules with <generator",
    ),
    Mistake(
        "a list of something else",
        """
        @hookimpl
        def rllaunch_rules():
            return [3]
        """,
        "plugin guest 1.2.3 answered rllaunch_rules with [3]",
    ),
    Mistake(
        "a directory that is not there",
        """
        from pathlib import Path
        @hookimpl
        def rllaunch_profile_dirs():
            return [Path(__file__).parent / "nowhere"]
        """,
        "profile directory does not exist: nowhere",
    ),
    Mistake(
        "a profile file that is malformed",
        """
        from pathlib import Path
        @hookimpl
        def rllaunch_profile_dirs():
            directory = Path(__file__).parent / "profiles"
            directory.mkdir(exist_ok=True)
            (directory / "bad.toml").write_text("[profile]\\nname = \\n")
            return [directory]
        """,
        "malformed TOML: Invalid value",
    ),
    Mistake(
        "a profile's name that is taken",
        """
        from rllaunch.resolve.profiles import Profile
        @hookimpl
        def rllaunch_profiles():
            return [Profile("hardware", "DGX-H100", "rllaunch 0.1.0", "mine.py", {})]
        """,
        "hardware profile name 'DGX-H100' is taken as an alias of 'H100'",
    ),
    Mistake(
        "a profile with a fact without source",
        """
        from rllaunch.resolve.profiles import Profile, Value
        @hookimpl
        def rllaunch_profiles():
            return [Profile("hardware", "mine", "", "mine.py", {"hardware.gpus_per_node": Value(4, "mine.py")})]
        """,
        "a profile cannot be used: fact 'hardware.gpus_per_node' of 'mine' has no fact_source",
    ),
    Mistake(
        "a rule's code that is taken",
        """
        from rllaunch.doctor.finding import Rule
        @hookimpl
        def rllaunch_rules():
            return [Rule("RL301", "mine", "", lambda resolved: [])]
        """,
        "rule RL301 (mine) of plugin guest 1.2.3 does not run",
        code="RL002",
    ),
    Mistake(
        "a trainer backend's name that is taken",
        """
        from rllaunch.backends.base import BackendSpec
        @hookimpl
        def rllaunch_trainer_backends():
            return [BackendSpec("embedded", "mine:Trainer")]
        """,
        "trainer backend name 'embedded' is taken by rllaunch",
    ),
    Mistake(
        "a rollout backend's name that is taken",
        """
        from rllaunch.backends.base import BackendSpec
        @hookimpl
        def rllaunch_rollout_backends():
            return [BackendSpec("sglang", "mine:Engine")]
        """,
        "rollout backend name 'sglang' is taken by rllaunch",
    ),
    Mistake(
        "a layer that is none",
        """
        @hookimpl
        def rllaunch_layers(model, hardware):
            return {"lr": 1e-3}
        """,
        "plugin guest 1.2.3 answered rllaunch_layers with {'lr': 0.001}",
    ),
    Mistake(
        "a layer with an unknown key",
        """
        @hookimpl
        def rllaunch_layers(model, hardware):
            return {"trainer": {"learning_rate": 1e-3}}
        """,
        "plugin guest 1.2.3 answered rllaunch_layers with {'trainer': {'learning_rate': 0.001}}",
    ),
    Mistake(
        "a layer with a value of the wrong type",
        """
        @hookimpl
        def rllaunch_layers(model, hardware):
            return {"run": {"num_rollout": "many"}}
        """,
        "plugin guest 1.2.3 answered rllaunch_layers with {'run': {'num_rollout': 'many'}}",
    ),
    Mistake(
        "a layer that chooses the task",
        """
        @hookimpl
        def rllaunch_layers(model, hardware):
            return {"task": {"name": "sort"}}
        """,
        "plugin guest 1.2.3 answered rllaunch_layers with {'task': {'name': 'sort'}}",
    ),
]
# What `rllaunch plugins` does not ask for: a layer needs a launch, backends are asked for with `check`.
NOT_LISTED = "a layer", "a trainer backend", "a rollout backend"
every_mistake = pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
NEIGHBOUR = """
    from rllaunch.doctor.finding import Finding, Rule
    @hookimpl
    def rllaunch_rules():
        return [Rule("RL990", "neighbour", "", lambda resolved: [Finding("RL990", "info", "the neighbour is well")])]
"""


@every_mistake
def test_a_mistake_is_a_warning_and_the_launch_goes_on(mistake: Mistake, guest, rllaunch):
    guest(mistake.source)
    guest(NEIGHBOUR, "neighbour")
    result = rllaunch("doctor", *LAUNCH, "--no-probe", "--json")
    assert result.code == 0, result.err
    findings = result.json()["findings"]
    (found,) = [f for f in findings if f["level"] != "info"]
    assert found["level"] == "warning"
    assert found["code"] == mistake.code
    assert mistake.says in found["message"]
    assert "guest 1.2.3" in " ".join([found["message"], *found["origins"]])
    assert found["fix"]
    assert "the neighbour is well" in [f["message"] for f in findings]


@every_mistake
def test_a_plugin_with_a_mistake_is_listed_as_broken(mistake: Mistake, guest, rllaunch):
    guest(mistake.source)
    guest(NEIGHBOUR, "neighbour")
    result = rllaunch("plugins", "--json")
    assert result.code == 0
    rows = {row["name"]: row for row in result.json()["plugins"]}
    assert list(rows) == ["rllaunch", "rllaunch:profiles", "guest", "neighbour"]
    assert rows["guest"]["version"] == "1.2.3"
    if not mistake.name.startswith(NOT_LISTED):
        assert rows["guest"]["error"]
    assert [rows[name]["error"] for name in ("rllaunch", "rllaunch:profiles", "neighbour")] == ["", "", ""]
    assert rows["neighbour"]["rules"] == ["RL990"]
    assert len(rows["rllaunch:profiles"]["profiles"]) >= 15


def test_the_list_for_people_says_broken_and_what_to_do(guest, rllaunch):
    guest(None)
    result = rllaunch("plugins")
    assert result.code == 0
    assert "broken: ModuleNotFoundError: No module named 'guest_module'" in result.out
    assert result.err == (
        "warning[RL010]: plugin guest 1.2.3 cannot be used: ModuleNotFoundError: No module named 'guest_module'\n"
        "  entry point guest_module\n"
        "  hint: correct it if it is yours; else update or uninstall it, or leave it out with "
        "RLLAUNCH_DISABLE_PLUGINS=guest\n"
    )


def test_a_broken_plugin_is_told_with_file_and_line(guest, rllaunch, tmp_path: Path):
    guest("import json\n\ndef (:\n")
    (finding,) = rllaunch("plugins", "--json").json()["findings"]
    assert finding["message"] == "plugin guest 1.2.3 cannot be used: SyntaxError: invalid syntax"
    assert finding["origins"] == ["entry point guest_module", f"{tmp_path}/site/guest_module.py:4"]


def test_a_hook_that_raises_is_told_with_the_plugins_own_line(guest, rllaunch, tmp_path: Path):
    guest("""
        import json
        @hookimpl
        def rllaunch_rules():
            return rules()

        def rules():
            return json.loads("{")
    """)
    (finding,) = rllaunch("plugins", "--json").json()["findings"]
    assert finding["message"].startswith("plugin guest 1.2.3 failed in rllaunch_rules: JSONDecodeError: ")
    assert finding["origins"] == ["guest_module", f"{tmp_path}/site/guest_module.py:9"]


def test_a_profile_that_a_broken_plugin_would_bring_is_missed_with_the_reason(guest, rllaunch, tmp_path: Path):
    guest("def (:\n")
    result = rllaunch("doctor", "--model", "tiny", "--hardware", "guest-H200", "--no-probe")
    assert result.code == 3
    assert result.err.startswith(
        "error: unknown hardware profile 'guest-H200'\n"
        "  --hardware guest-H200\n"
        "  plugin guest 1.2.3 cannot be used: SyntaxError: invalid syntax   "
        f"{tmp_path}/site/guest_module.py:2\n"
    )


def test_what_a_plugin_prints_is_no_data(guest, rllaunch):
    guest("""
        print("loaded")
        @hookimpl
        def rllaunch_rules():
            print("asked")
            return []
    """)
    result = rllaunch("doctor", *LAUNCH, "--no-probe", "--json")
    assert result.json()["ok"] is True
    assert result.err == "loaded\nasked\n"


def test_an_unknown_fact_of_a_plugins_profile_is_listed(guest, rllaunch):
    guest("""
        from rllaunch.resolve.profiles import Profile, Value
        @hookimpl
        def rllaunch_profiles():
            return [Profile("hardware", "mine", "", "mine.py", {"hardware.nics": Value(4, "mine.py:3", "label")})]
    """)
    answer = rllaunch("plugins", "--json").json()
    (finding,) = answer["findings"]
    assert finding["message"] == (
        "hardware profile 'mine' of plugin guest 1.2.3 cannot be used: unknown key 'nics' in [hardware]"
    )
    assert finding["origins"] == ["hardware.nics = 4   mine.py:3"]
    assert next(row["error"] for row in answer["plugins"] if row["name"] == "guest")


def test_a_profile_whose_name_is_taken_names_both_plugins(guest, rllaunch):
    guest(next(m.source for m in MISTAKES if m.name == "a profile's name that is taken"))
    (finding,) = rllaunch("plugins", "--json").json()["findings"]
    assert finding["origins"] == ["mine.py (guest 1.2.3)", "already: hardware/H100.toml (rllaunch 0.1.0)"]


def test_check_finds_what_a_list_of_profiles_and_rules_does_not(guest):
    guest(next(m.source for m in MISTAKES if m.name == "a trainer backend's name that is taken"))
    plugins = load_plugins()
    plugins.check()
    assert plugins.infos["guest"].error == "trainer backend name 'embedded' is taken by rllaunch 0.1.0"


# --- leaving plugins out -------------------------------------------------------------------------------------


def test_a_broken_plugin_can_be_left_out(guest, rllaunch, leave_out):
    guest(None)
    leave_out("guest")
    result = rllaunch("plugins", "--json")
    assert [row["name"] for row in result.json()["plugins"]] == ["rllaunch", "rllaunch:profiles"]
    assert result.json()["findings"] == []


def test_the_hint_about_leaving_out_works_for_rllaunchs_own_profiles_too(rllaunch, leave_out):
    leave_out("rllaunch:profiles")
    assert [row["name"] for row in rllaunch("plugins", "--json").json()["plugins"]] == ["rllaunch"]


def test_a_guest_named_like_one_of_rllaunchs_is_left_out_alone(guest, leave_out):
    guest(NEIGHBOUR, "profiles")
    leave_out("profiles")
    assert list(load_plugins().infos) == ["rllaunch", "rllaunch:profiles"]


def test_leaving_out_what_is_not_there_is_a_finding(guest, rllaunch, leave_out):
    guest(NEIGHBOUR, "neighbour")
    leave_out("neighbor, ")
    (finding,) = rllaunch("plugins", "--json").json()["findings"]
    assert finding["message"] == "RLLAUNCH_DISABLE_PLUGINS names 'neighbor', which is no plugin"
    assert finding["fix"] == "did you mean 'neighbour'?"


# --- names of plugins ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rllaunch", "profiles"])
def test_a_guest_cannot_take_the_place_of_rllaunch(name: str, guest, rllaunch):
    guest(NEIGHBOUR, name, distribution="cuckoo")
    rows = {row["name"]: row for row in rllaunch("plugins", "--json").json()["plugins"]}
    assert rows["rllaunch"]["module"] == "rllaunch.builtin"
    assert rows["rllaunch"]["error"] == ""
    assert rows["rllaunch:profiles"]["module"] == "rllaunch_profiles"
    assert rows["cuckoo:rllaunch" if name == "rllaunch" else "profiles"]["rules"] == ["RL990"]


def test_of_two_plugins_with_one_name_both_work(guest, rllaunch):
    guest(NEIGHBOUR, "same", distribution="first")
    guest(NEIGHBOUR.replace("RL990", "RL991"), "same", distribution="second")
    rows = {row["name"]: row for row in rllaunch("plugins", "--json").json()["plugins"]}
    assert rows["same"]["rules"] == ["RL990"]
    assert rows["second:same"]["rules"] == ["RL991"]


def test_a_distribution_without_metadata_is_no_end(guest, tmp_path: Path, rllaunch):
    guest(NEIGHBOUR)
    (tmp_path / "site" / "guest-1.2.3.dist-info" / "METADATA").unlink()
    result = rllaunch("plugins", "--json")
    assert result.code == 0
    assert {row["name"]: row["version"] for row in result.json()["plugins"]}["guest"] == "?"


# --- commands ------------------------------------------------------------------------------------------------

GREET = """
    @hookimpl
    def rllaunch_commands(app):
        @app.command()
        def greet(name: str = "you"):
            "Say hello."
            print("hello", name)
"""


def test_a_command_of_a_plugin_is_in_the_help_and_runs(guest, rllaunch):
    guest(GREET)
    assert "greet     Say hello." in rllaunch("--help").out
    assert rllaunch("greet", "--name", "world").out == "hello world\n"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (GREET + '        raise RuntimeError("half way")\n', "failed in rllaunch_commands: RuntimeError: half way"),
        (GREET.replace("str =", "list[list[int]] ="), "failed in rllaunch_commands: AssertionError: List types with"),
        (GREET.replace("command()", "command('train')"), "command 'train' of plugin guest 1.2.3 is taken by rllaunch"),
    ],
    ids=["it raises half way", "it has a type no option can have", "its name is taken"],
)
def test_a_plugin_whose_commands_cannot_be_used_adds_none(source: str, says: str, guest, rllaunch):
    guest(source)
    guest(GREET.replace("greet", "wave"), "neighbour")
    result = rllaunch("--help")
    assert result.code == 0
    assert "greet" not in result.out
    assert rllaunch("wave").out == "hello you\n"
    plugins = load_plugins()
    plugins.check(commands=["train"])
    (problem,) = plugins.problems
    assert says in problem.what
    assert "guest 1.2.3" in problem.what
    assert says in f"plugin guest 1.2.3 {plugins.infos['guest'].error}"


def test_a_command_that_two_plugins_add_is_the_firsts(guest, rllaunch):
    guest(GREET, "alpha")
    guest(GREET.replace("hello", "goodbye"), "beta")
    assert rllaunch("greet").out == "hello you\n"
    plugins = load_plugins()
    plugins.check()
    assert [p.what for p in plugins.problems] == ["command 'greet' of plugin beta 1.2.3 is taken by alpha 1.2.3"]


def test_what_a_plugin_does_to_the_app_it_is_given_changes_nothing_else(guest, rllaunch):
    guest(GREET + '        app.callback()(lambda: print("called back"))\n')
    assert rllaunch("greet").out == "hello you\n"


# --- hooks with moments of their own -------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["42", "'H1000'", "['H100']"])
def test_hardware_that_no_profile_describes_is_passed_over(answer: str, guest):
    guest(f"@hookimpl\ndef rllaunch_detect_hardware(machine):\n    return {answer}\n", "alpha")
    guest("@hookimpl\ndef rllaunch_detect_hardware(machine):\n    return 'h100'\n", "beta")
    plugins = load_plugins()
    assert plugins.detect_hardware(MachineFacts()) == "h100"
    (problem,) = plugins.problems
    assert problem.what == f"plugin alpha 1.2.3 answered rllaunch_detect_hardware with {answer}"


def test_the_profiles_decide_where_no_plugin_knows_the_machine(guest):
    guest("@hookimpl\ndef rllaunch_detect_hardware(machine):\n    return None\n")
    plugins = load_plugins()
    assert plugins.detect_hardware(MachineFacts()) == "cpu"
    assert plugins.detect_hardware(MachineFacts(gpu_names=("NVIDIA GB300",) * 4)) == "GB300"
    assert plugins.problems == []


@pytest.mark.parametrize("answer", ["3", "Sink", "object()"])
def test_an_observer_that_observes_nothing_is_a_problem(answer: str, guest, tmp_path: Path):
    guest(
        f"""
        class Sink:
            def on_metrics(self, metrics):
                pass
        @hookimpl
        def rllaunch_run_observers(config, run_dir):
            return [Sink(), {answer}]
        """
    )
    plugins = load_plugins()
    observers = plugins.observers(LaunchConfig(), tmp_path)
    assert [(info.name, type(observer).__name__) for info, observer in observers] == [("guest", "Sink")]
    (problem,) = plugins.problems
    assert problem.what.startswith("plugin guest 1.2.3 answered rllaunch_run_observers with [<")


def test_a_layer_of_a_plugin_stands_above_the_profiles_and_below_the_task_with_its_origin(guest, rllaunch):
    guest(
        """
        @hookimpl
        def rllaunch_layers(model, hardware):
            if (model, hardware) == ("tiny", "cpu"):
                return {"run": {"num_rollout": 7}, "rollout": {"rollout_max_response_len": 9}}
            return {}
        """
    )
    origins = rllaunch("resolve", *LAUNCH, "--task", "sort", "--json").json()["origins"]
    assert origins["run.num_rollout"][-1] == {"value": 7, "layer": "cell", "source": "plugin guest 1.2.3"}
    assert [o["layer"] for o in origins["rollout.rollout_max_response_len"]][-2:] == ["cell", "task"]


def test_plugins_given_for_a_test_are_asked_like_installed_ones():
    from rllaunch.hooks import hookimpl

    class Extra:
        @hookimpl
        def rllaunch_layers(self, model: str, hardware: str) -> dict[str, dict[str, int]]:
            return {"run": {"seed": len(model)}}

    plugins = load_plugins(extra=[("extra", Extra())])
    assert plugins.infos["extra"].label == "extra test"
    assert [values for _, values in plugins.layers("tiny", "cpu")] == [{"run": {"seed": 4}}]
