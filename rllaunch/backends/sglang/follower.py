"""An SGLang engine's part on a further node: started and watched, never asked. SGLang's ranks take their orders from
those of the first node."""

from __future__ import annotations

from collections.abc import Sequence

from rllaunch.backends.sglang.part import NodePart
from rllaunch.plan.handoff import Region


class SglangFollower(NodePart):
    """See `rllaunch.backends.base.EngineFollower` for the promises."""

    def start(self, meeting_point: str) -> None:
        ranks = self._start_process("follow", self._model_path(), meeting_point)
        assert self._process is not None, "just started"
        self._process.watch(ranks)
        self._open_books()
        self._drop_weight_files()

    def check_release(self, tags: Sequence[Region]) -> None:
        if "weights" in tags:
            self._require_mirror()

    def wait(self) -> str:
        assert self._process is not None, "what is waited for was started"
        return self._process.wait()

    def shutdown(self) -> None:
        self._end()
