"""The profiles that ship with rllaunch: hardware, models, tasks and cells (model × hardware) as TOML files.

They are found through the hook a guest's profiles use; see `rllaunch.hooks` for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable

import pluggy

hookimpl = pluggy.HookimplMarker("rllaunch")


@hookimpl
def rllaunch_profile_dirs() -> Sequence[Traversable]:
    return [files(__name__)]
