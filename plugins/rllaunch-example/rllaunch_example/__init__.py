"""A plugin of rllaunch that uses every hook once.

Each command of rllaunch imports this module, so it stays light: what a hook needs, it imports itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rllaunch.hooks import RunObserver, hookimpl

if TYPE_CHECKING:
    import typer

    from rllaunch.backends.base import BackendSpec
    from rllaunch.doctor.finding import Rule
    from rllaunch.export import Exporter
    from rllaunch.resolve.detect import MachineFacts
    from rllaunch.resolve.profiles import Profile
    from rllaunch.resolve.schema import LaunchConfig

WORKSTATION = "example-workstation-2x24"


@hookimpl
def rllaunch_profile_dirs() -> Sequence[Traversable]:
    return [files(__name__) / "profiles"]


@hookimpl
def rllaunch_profiles() -> Sequence[Profile]:
    from rllaunch_example.computed import narrow_links

    return narrow_links()


@hookimpl
def rllaunch_layers(model: str, hardware: str) -> Mapping[str, Any]:
    if (model, hardware) != ("tiny", WORKSTATION):
        return {}
    return {"trainer": {"backend": "example-embedded"}, "rollout": {"backend": "example-embedded"}}


@hookimpl
def rllaunch_rules() -> Sequence[Rule]:
    from rllaunch_example.rules import RULES

    return RULES


@hookimpl
def rllaunch_trainer_backends() -> Sequence[BackendSpec]:
    from rllaunch.backends.base import BackendSpec

    return [BackendSpec("example-embedded", "rllaunch.backends.embedded.trainer:EmbeddedTrainer")]


@hookimpl
def rllaunch_rollout_backends() -> Sequence[BackendSpec]:
    from rllaunch.backends.base import BackendSpec

    return [BackendSpec("example-embedded", "rllaunch.backends.embedded.engine:EmbeddedEngine")]


@hookimpl
def rllaunch_run_observers(config: LaunchConfig, run_dir: Path) -> Sequence[RunObserver]:
    from rllaunch_example.csv_metrics import CsvMetrics

    return [CsvMetrics(run_dir / "example_metrics.csv")]


@hookimpl
def rllaunch_commands(app: typer.Typer) -> None:
    from rllaunch_example.commands import example_tail

    app.command("example-tail")(example_tail)


@hookimpl
def rllaunch_exporters() -> Sequence[Exporter]:
    from rllaunch.export import Exporter
    from rllaunch_example.variables import as_variables

    return [Exporter("example-variables", "rllaunch train without a flag: every setting as a variable", as_variables)]


@hookimpl
def rllaunch_detect_hardware(machine: MachineFacts) -> str | None:
    return WORKSTATION if os.environ.get("EXAMPLE_HARDWARE") else None
