"""The sglang engine with `fake_host` in the place of SGLang, also on GPUs that are not there, with a journal."""

from __future__ import annotations

from rllaunch.backends.base import BackendSpec, MemoryReading
from rllaunch.backends.sglang.engine import SglangEngine
from rllaunch.backends.sglang.follower import SglangFollower
from rllaunch.backends.sglang.part import NodePart


class FakePart(NodePart):
    host_module = "fake_host"

    def _environment(self) -> dict[str, str]:
        return {**super()._environment(), "FAKE_JOURNAL": self.slot.ledger_dir, "FAKE_PART": self.name}

    def _open_books(self) -> None:
        if self.slot.device == "cpu":
            super()._open_books()

    def memory(self) -> MemoryReading:
        """On a GPU more with each slot."""
        return super().memory() if self.slot.device == "cpu" else MemoryReading(self.slot.index, 0, 0, 0)


class FakeEngine(FakePart, SglangEngine): ...


class FakeFollower(FakePart, SglangFollower): ...


SPEC = BackendSpec("sglang", f"{__name__}:FakeEngine", own_process=True, follower=f"{__name__}:FakeFollower")
