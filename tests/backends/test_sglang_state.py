"""Whatever is called in whatever order, the library sees only what it survives."""

from __future__ import annotations

from itertools import product

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rllaunch.backends.sglang.state import EngineState
from rllaunch.errors import RunError
from rllaunch.plan.handoff import ENGINE_REGIONS

TAG_SETS = [
    tuple(t for t, chosen in zip(ENGINE_REGIONS, mask, strict=True) if chosen) for mask in product([0, 1], repeat=3)
]


class Dead(Exception):
    """What the real one answers with a killed process tree."""


class Library:
    """SGLang's own rules (sglang 0.5.23 managers/scheduler_components/weight_updater.py): no list of tags means all."""

    def __init__(self) -> None:
        self.paused: set[str] = set()
        self.session = False
        self.content: int | None = None
        self.calls = 0

    def release(self, tags: tuple[str, ...]) -> None:
        self.calls += 1
        for tag in tags or ENGINE_REGIONS:
            if tag in self.paused:
                raise Dead(f"pause of {tag}, which is not active")
            self.paused.add(tag)

    def resume(self, tags: tuple[str, ...]) -> None:
        self.calls += 1
        for tag in tags or ENGINE_REGIONS:
            if tag not in self.paused:
                raise Dead(f"KeyError {tag}")
            self.paused.remove(tag)

    def generate(self) -> None:
        self.calls += 1
        if self.paused or self.session:
            raise Dead("a request without memory")

    def begin(self) -> None:
        self.calls += 1
        if self.session or "weights" in self.paused:
            raise Dead("a session")
        self.session = True

    def end(self, version: int) -> None:
        self.calls += 1
        if not self.session or "weights" in self.paused:
            raise Dead("no session")
        self.session, self.content = False, version


class Driver:
    """Calls state and library as the engine does."""

    def __init__(self, *, keeps_weights: bool = False) -> None:
        self.library = Library()
        self.state = EngineState("engine-0", keeps_weights=keeps_weights)
        with self.state.starting():
            pass

    def do(self, call: str, argument: object) -> bool:
        """Whether it was let through."""
        state, library = self.state, self.library
        before = library.calls
        try:
            match call, argument:
                case "release", tuple(tags):
                    with state.releasing(tags) as wanted:
                        if wanted:
                            library.release(wanted)
                case "resume", tuple(tags):
                    with state.resuming(tags) as wanted:
                        if wanted:
                            library.resume(wanted)
                case "generate", int(version):
                    with state.generating(version):
                        library.generate()
                case "begin", int(version):
                    with state.beginning(version):
                        library.begin()
                case "end", int(version):
                    with state.ending(version):
                        library.end(version)
        except RunError:
            assert library.calls == before, "what is refused never reaches the library"
            return False
        return True


CALLS = [
    *(("release", tags) for tags in TAG_SETS),
    *(("resume", tags) for tags in TAG_SETS),
    ("generate", 1),
    ("begin", 1),
    ("end", 1),
]


def test_no_sequence_of_calls_kills_the_library():
    through = 0
    for sequence in product(CALLS, repeat=3):
        driver = Driver()
        for call, argument in (("begin", 1), ("end", 1), *sequence):
            through += driver.do(call, argument)
            assert driver.library.paused == set(ENGINE_REGIONS) - driver.state.resident
    # A state that refuses everything would pass: half of all calls are legal, and let through.
    assert through > 10_000


class AnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(keeps_weights=False)
        self.version = 0

    @rule(tags=st.lists(st.sampled_from(ENGINE_REGIONS), max_size=4))
    def release(self, tags: list[str]) -> None:
        is_legal = not set(tags) & self.driver.library.paused and not (
            self.driver.library.session and "weights" in tags
        )
        assert self.driver.do("release", tuple(tags)) == is_legal

    @rule(tags=st.lists(st.sampled_from(ENGINE_REGIONS), max_size=4))
    def resume(self, tags: list[str]) -> None:
        is_legal = set(tags) <= self.driver.library.paused
        assert self.driver.do("resume", tuple(tags)) == is_legal
        if is_legal and "weights" in tags:
            self.driver.library.content = None

    @rule()
    def begin(self) -> None:
        library = self.driver.library
        is_legal = not library.session and "weights" not in library.paused
        assert self.driver.do("begin", self.version + 1) == is_legal

    @precondition(lambda self: self.driver.library.session)
    @rule()
    def end(self) -> None:
        assert self.driver.do("end", self.version + 1)
        self.version += 1

    @rule(stale=st.booleans())
    def generate(self, stale: bool) -> None:
        library = self.driver.library
        is_legal = not library.paused and not library.session and library.content == self.version and not stale
        assert self.driver.do("generate", self.version - stale) == (is_legal and self.version > 0)

    @invariant()
    def library_and_state_agree(self) -> None:
        assert self.driver.library.paused == set(ENGINE_REGIONS) - self.driver.state.resident


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


def test_discarded_weights_have_no_version_until_the_next_update():
    driver = Driver()
    assert driver.do("begin", 4)
    assert driver.do("end", 4)
    assert driver.do("release", ("weights",))
    assert driver.do("resume", ("weights",))
    assert driver.state.version is None
    assert driver.state.has_lost_weights
    assert not driver.do("generate", 4)
    assert driver.do("begin", 5)
    assert driver.do("end", 5)
    assert driver.do("generate", 5)


def test_mirrored_weights_keep_their_version():
    driver = Driver(keeps_weights=True)
    assert driver.do("begin", 4)
    assert driver.do("end", 4)
    assert driver.do("release", ("weights",))
    assert driver.do("resume", ("weights",))
    assert driver.do("generate", 4)


def test_after_a_call_that_failed_nothing_reaches_the_library_and_the_first_error_is_named():
    driver = Driver()

    def broken(tags: tuple[str, ...]) -> None:
        raise RunError("its process was killed by SIGKILL during release")

    driver.library.release = broken  # type: ignore[method-assign]
    with pytest.raises(RunError, match="killed by SIGKILL"), driver.state.releasing(["kv_cache"]) as wanted:
        driver.library.release(wanted)
    for call, argument in CALLS:
        assert not driver.do(call, argument)
    with (
        pytest.raises(RunError, match="it failed in release: its process was killed by SIGKILL"),
        driver.state.resuming(["kv_cache"]),
    ):
        pass


@pytest.mark.parametrize("phase", ["new", "down"])
def test_an_engine_that_is_not_up_does_nothing(phase: str):
    state = EngineState("engine-3", keeps_weights=False)
    if phase == "down":
        with state.starting():
            pass
        assert state.end()
    with pytest.raises(RunError, match="engine-3"), state.generating(0):
        raise AssertionError("not reached")


def test_unknown_regions_are_named():
    driver = Driver()
    with (
        pytest.raises(RunError, match="engine-0 has no region 'optimizer'") as caught,
        driver.state.releasing(["optimizer"]),
    ):
        raise AssertionError("not reached")
    assert "weights, kv_cache, cuda_graph" in caught.value.fix
