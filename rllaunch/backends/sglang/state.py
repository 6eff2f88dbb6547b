"""What an engine may be asked for now; what it may not is refused here and never reaches the library.

SGLang takes no misuse well: a second release of a tag makes torch_memory_saver end the scheduler, and SGLang then
kills every process of the engine; resuming what is resident is a `KeyError` in the scheduler, with the same end; a call
with an empty list of tags means all of them (sglang 0.5.23 `managers/scheduler_components/weight_updater.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rllaunch.errors import RunError
from rllaunch.plan.handoff import ENGINE_REGIONS, Region

Phase = Literal["new", "up", "broken", "down"]


class EngineState:
    """Phase, resident regions, weight version and a pending update of one engine.

    A call into the library that raises leaves nobody knowing what is resident, so it breaks the engine: whatever
    follows but the end is refused, with the first error named.

    Args:
        owner: how errors name the engine.
        keeps_weights: released weights come back with their content (a mirror); else they come back as garbage,
            without a version.
    """

    def __init__(self, owner: str, *, keeps_weights: bool) -> None:
        self.owner = owner
        self.keeps_weights = keeps_weights
        self.phase: Phase = "new"
        self.resident: frozenset[Region] = frozenset()
        self.version: int | None = None
        self.updating: int | None = None
        self.has_lost_weights = False
        """Whether the weights are garbage that the next update must rewrite as a whole."""
        self._first_error = ""

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Around the load: everything is resident after it."""
        if self.phase != "new":
            raise RunError(f"{self.owner} is started a second time")
        with self._breaking("start"):
            yield
        self.phase = "up"
        self.resident = frozenset(ENGINE_REGIONS)

    @contextmanager
    def releasing(self, tags: Sequence[Region]) -> Iterator[tuple[Region, ...]]:
        """Around a release: the tags to ask the library for, each once; with none of them it must not be asked.

        Raises:
            RunError: a tag is unknown or released already, or the weights are in the middle of an update.
        """
        wanted = self._known("release", tags)
        if gone := [t for t in wanted if t not in self.resident]:
            raise RunError(f"{self.owner}: {', '.join(gone)} is released already", "", "onload it first")
        if "weights" in wanted and self.updating is not None:
            raise RunError(f"{self.owner}: its weights are released during the update to version {self.updating}")
        with self._breaking("release"):
            yield wanted
        self.resident -= set(wanted)

    @contextmanager
    def resuming(self, tags: Sequence[Region]) -> Iterator[tuple[Region, ...]]:
        """Around a resume, like `releasing`; the version goes with weights that come back without content."""
        wanted = self._known("resume", tags)
        if present := [t for t in wanted if t in self.resident]:
            raise RunError(f"{self.owner}: {', '.join(present)} is resident already", "", "offload it first")
        with self._breaking("resume"):
            yield wanted
        self.resident |= set(wanted)
        if "weights" in wanted and not self.keeps_weights:
            self.version = None
            self.has_lost_weights = True

    @contextmanager
    def generating(self, version: int) -> Iterator[None]:
        """Around a request.

        Raises:
            RunError: something is released, an update is under way, or the weights are of another version.
        """
        self._up("generate")
        if absent := [r for r in ENGINE_REGIONS if r not in self.resident]:
            raise RunError(f"{self.owner}: generate while {', '.join(absent)} is offloaded", "", "onload it first")
        if self.updating is not None:
            raise RunError(f"{self.owner}: generate during the update to version {self.updating}")
        if version != self.version:
            raise RunError(
                f"{self.owner} holds weights of version {self.version}, version {version} is asked for",
                "",
                "the weight update before this step did not reach the engine",
            )
        with self._breaking("generate"):
            yield

    @contextmanager
    def beginning(self, version: int) -> Iterator[None]:
        """Around the opening of an update; from here on the old version is gone."""
        self.need_weights("a weight update")
        if self.updating is not None:
            raise RunError(f"{self.owner}: an update to version {self.updating} is under way already")
        with self._breaking(f"the update to version {version}"):
            yield
        self.version = None
        self.updating = version

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Around one bucket."""
        self._up("load_bucket")
        if self.updating is None:
            raise RunError(f"{self.owner}: a bucket arrived outside a weight update")
        with self._breaking(f"the update to version {self.updating}"):
            yield

    @contextmanager
    def ending(self, version: int) -> Iterator[None]:
        """Around the close of an update; after it the engine holds `version`."""
        self._up("end_weight_update")
        if self.updating != version:
            raise RunError(f"{self.owner}: the update to {self.updating} was ended as one to {version}")
        with self._breaking(f"the update to version {version}"):
            yield
        self.updating = None
        self.version = version
        self.has_lost_weights = False

    def need_weights(self, what: str) -> None:
        """
        Raises:
            RunError: the weights are released.
        """
        self._up(what)
        if "weights" not in self.resident:
            raise RunError(f"{self.owner}: {what} while weights is offloaded", "", "onload it first")

    def end(self) -> bool:
        """The engine is going down; whether there is one to end."""
        was_started = self.phase in ("up", "broken")
        self.phase = "down"
        self.resident = frozenset()
        self.version = self.updating = None
        return was_started

    def _known(self, what: str, tags: Sequence[Region]) -> tuple[Region, ...]:
        self._up(what)
        if unknown := [t for t in tags if t not in ENGINE_REGIONS]:
            raise RunError(f"{self.owner} has no region {unknown[0]!r}", "", f"regions: {', '.join(ENGINE_REGIONS)}")
        return tuple(dict.fromkeys(tags))

    def _up(self, what: str) -> None:
        if self.phase == "up":
            return
        why = {"new": "has not been started", "down": "has been shut down"}.get(self.phase, self._first_error)
        raise RunError(f"{self.owner}: {what} cannot be done, it {why}")

    @contextmanager
    def _breaking(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException as err:
            self.phase = "broken"
            self.version = None
            self._first_error = f"failed in {what}: {getattr(err, 'what', err)}"
            raise
