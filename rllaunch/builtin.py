"""The plugin that rllaunch itself is: its rules and backends.

Its profiles come from the package `rllaunch_profiles`, an entry point like anyone's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rllaunch.hooks import hookimpl

if TYPE_CHECKING:
    from rllaunch.backends.base import BackendSpec
    from rllaunch.doctor.finding import Rule


@hookimpl
def rllaunch_rules() -> Sequence[Rule]:
    from rllaunch.doctor.engine import builtin_rules

    return builtin_rules()


@hookimpl
def rllaunch_trainer_backends() -> Sequence[BackendSpec]:
    from rllaunch.backends.base import BackendSpec

    return [
        BackendSpec("embedded", "rllaunch.backends.embedded.trainer:EmbeddedTrainer"),
        BackendSpec(
            "megatron",
            "rllaunch.backends.megatron.trainer:MegatronTrainer",
            "rllaunch.backends.megatron.saver:environment_of",
            loads_any_layout=True,
        ),
    ]


@hookimpl
def rllaunch_rollout_backends() -> Sequence[BackendSpec]:
    from rllaunch.backends.base import BackendSpec

    return [
        BackendSpec("embedded", "rllaunch.backends.embedded.engine:EmbeddedEngine"),
        BackendSpec(
            "sglang",
            "rllaunch.backends.sglang.engine:SglangEngine",
            own_process=True,
            follower="rllaunch.backends.sglang.follower:SglangFollower",
        ),
    ]
