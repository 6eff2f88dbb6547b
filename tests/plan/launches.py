"""Launches as a user writes them, resolved and planned in this process."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from rllaunch.flags import take_flags
from rllaunch.plan.architecture import read_architecture
from rllaunch.plan.choose import Choice, architecture_of, plan_launch
from rllaunch.plan.sizes import LaunchSizes, sizes_of
from rllaunch.plugins import Plugins, load_plugins
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.resolve import Request, resolve
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.resolve.user_dirs import ProfileDir

GIB = 2**30


def plugins_without_other_cells(profile_dirs: Sequence[ProfileDir] = ()) -> Plugins:
    """What these tests compute by hand follows from their own flags; of the cells only DeepSeek-V4's is asked for."""
    plugins = load_plugins(profile_dirs=profile_dirs)
    store = plugins.profiles()
    store.profiles[:] = [p for p in store.profiles if p.kind != "cell" or p.model == "dsv4"]
    return plugins


def resolved(words: str) -> Resolved:
    """The launch that a command line's launch flags describe."""
    settings, files, rest = take_flags(shlex.split(words))
    assert rest == [], rest
    return resolve(Request(tuple(files), tuple(settings), environ={}), plugins_without_other_cells())


def sizes(words: str) -> LaunchSizes:
    launch = resolved(words)
    return sizes_of(launch.config, architecture_of(launch))


def chosen(words: str) -> Choice:
    choice = plan_launch(resolved(words))
    assert isinstance(choice, Choice), choice
    return choice


def config_of(facts: Mapping[str, Any], gpus: int, **trainer: int | bool | None) -> LaunchConfig:
    """A launch of these facts on so many GPUs of one node, everything else the schema's default."""
    plain = LaunchConfig()
    return plain.model_copy(
        update={
            "model": plain.model.model_copy(update={"architecture": dict(facts)}),
            "cluster": plain.cluster.model_copy(update={"num_gpus_per_node": gpus}),
            "trainer": plain.trainer.model_copy(update=trainer),
        }
    )


def sizes_from(facts: Mapping[str, Any], gpus: int, **trainer: int | bool | None) -> LaunchSizes:
    return sizes_of(config_of(facts, gpus, **trainer), read_architecture(facts))
