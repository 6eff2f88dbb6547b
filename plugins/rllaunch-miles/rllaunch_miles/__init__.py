"""`rllaunch export --to miles`: a launch as the arguments of miles' `train.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rllaunch.hooks import hookimpl

if TYPE_CHECKING:
    from rllaunch.export import Exporter


@hookimpl
def rllaunch_exporters() -> Sequence[Exporter]:
    from rllaunch.export import Exporter
    from rllaunch_miles.translate import translate

    return [Exporter("miles", "train.py of radixark/miles, with Megatron and SGLang, colocated", translate)]
