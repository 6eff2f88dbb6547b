"""Every hook a plugin can implement, with its moment, its arguments and its return.

A plugin is a module (or an object) registered under the entry-point group `rllaunch`, whose functions
carry `@rllaunch.hooks.hookimpl`. What ships with rllaunch comes through the same hooks. A hook that
raises or returns nonsense is a finding naming plugin and version, never a crash. Each plugin answers for
itself, rllaunch first and then in the order of their names: `tryfirst` changes nothing, wrappers are refused.

    # my_plugin.py
    from rllaunch.hooks import hookimpl

    @hookimpl
    def rllaunch_profile_dirs():
        return [importlib.resources.files("my_plugin") / "profiles"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pluggy

if TYPE_CHECKING:
    import typer

    from rllaunch.backends.base import BackendSpec
    from rllaunch.doctor.finding import Rule
    from rllaunch.export import Exporter
    from rllaunch.resolve.detect import MachineFacts
    from rllaunch.resolve.profiles import Profile
    from rllaunch.resolve.schema import LaunchConfig

PROJECT = "rllaunch"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class RunObserver(Protocol):
    """What a plugin may return from `rllaunch_run_observers`; it runs in the driver process.

    An observer that raises is reported once and then left out: telemetry never stops training.
    """

    def on_metrics(self, metrics: Mapping[str, Any]) -> None:
        """After each rollout, with the object that goes into `metrics.jsonl`."""
        ...

    def on_event(self, event: Mapping[str, Any]) -> None:
        """After each step of the schedule, with the object that goes into `events.jsonl`."""
        ...

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Once, when the run has ended, however it ended."""
        ...


class Specs:
    """The hook specifications. Each is called once per command unless it says otherwise."""

    @hookspec
    def rllaunch_profile_dirs(self) -> Sequence[Path | Traversable]:
        """Directories of profile files (`*.toml`, searched recursively).

        Moment: when profiles are first looked up.
        Used by: the profiles that ship with rllaunch.
        """
        raise NotImplementedError

    @hookspec
    def rllaunch_profiles(self) -> Sequence[Profile]:
        """Profiles built in Python, for facts that live in a database or are computed.

        Every fact needs its `fact_source`. A name that is taken is a finding, here and in the directories.
        Moment: after the profile directories were read.
        Used by: `rllaunch-example`.
        """
        raise NotImplementedError

    @hookspec
    def rllaunch_layers(self, model: str, hardware: str) -> Mapping[str, Any]:
        """Values for a (model, hardware) pair as nested `{section: {key: value}}`; `{}` for none.

        Not for `model.name`, `hardware.name` and `task.name`, which are chosen before.

        Args:
            model: name of the model profile that was chosen, not the alias it was asked for by.
            hardware: name of the hardware profile that was chosen.

        Moment: while resolving; the values stand above the cell's profile and below the task.
        Used by: `rllaunch-example`.
        """
        raise NotImplementedError

    @hookspec
    def rllaunch_rules(self) -> Sequence[Rule]:
        """Rules of the doctor.

        A code that is taken is a finding; `RL9xx` is for plugins.
        Moment: before a diagnosis.
        Used by: the built-in rules.
        """
        raise NotImplementedError

    @hookspec
    def rllaunch_trainer_backends(self) -> Sequence[BackendSpec]:
        """Trainer backends, each a name and an import path of a `TrainerBackend`.

        Moment: before a diagnosis; the path is imported in the trainer's processes only.
        Used by: the embedded trainer.
        """
        raise NotImplementedError

    @hookspec
    def rllaunch_rollout_backends(self) -> Sequence[BackendSpec]:
        """Rollout backends, each a name and an import path of a `RolloutEngine`.

        Moment: before a diagnosis; the path is imported in the rollout manager's process only, or with `own_process` in
            an actor of each engine.
        Used by: the embedded and the sglang engine.
        """
        raise NotImplementedError

    @hookspec
    def rllaunch_run_observers(self, config: LaunchConfig, run_dir: Path) -> Sequence[RunObserver]:
        """Sinks for metrics and events of a run.

        Args:
            config: the launch as resolved; frozen.
            run_dir: the run's directory, which exists; a sink may write a file of its own into it.

        Moment: in the driver, after the run directory exists and before the first step.
        Used by: `rllaunch-example` (a CSV file).
        """
        raise NotImplementedError

    @hookspec
    def rllaunch_commands(self, app: typer.Typer) -> None:
        """Add commands to the command line with `@app.command()`; what it returns is not looked at.

        All commands of a plugin or, where it raises or one has a name that is taken, none.

        Args:
            app: an app of the plugin's own, whose commands then join rllaunch's.

        Moment: when a command is not one of the built-in ones, and for `rllaunch --help`.
        Used by: `rllaunch-example`.
        """
        raise NotImplementedError

    @hookspec
    def rllaunch_exporters(self) -> Sequence[Exporter]:
        """Programs whose command line a launch can be written as, each a name and a function.

        Moment: for `rllaunch export` only.
        Used by: `rllaunch-example` (environment variables), `rllaunch-miles`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def rllaunch_detect_hardware(self, machine: MachineFacts) -> str | None:
        """The hardware profile of this machine, or None if unknown.

        Args:
            machine: its GPUs as NVML names them, its processor and its host memory.

        Moment: only with `--hardware auto`. The first plugin that knows the machine wins; where none does,
        the GPU names under `[detect]` in the hardware profiles decide.
        Used by: `rllaunch-example`.
        """
        raise NotImplementedError
