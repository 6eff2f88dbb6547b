"""The rollout manager: idempotent over strict engines, whatever order the calls come in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rllaunch.backends.base import Bucket, GenerateRequest, GenerateResult, LaunchContext, MemoryReading
from rllaunch.errors import RunError
from rllaunch.plan.handoff import ENGINE_REGIONS, HandoffOptions, Region, build_schedule
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.data import Prompt
from rllaunch.run.rollout_manager import HealthMonitor, RolloutManager

LEVELS = st.sets(st.sampled_from(["kv_cache", "weight"])).map(frozenset)


class CharTokenizer:
    pad_id = 0

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(i) for i in ids)


class StrictEngine:
    """Answers with the prompt itself; dies of a double release as an SGLang process does."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.resident: set[Region] = set(ENGINE_REGIONS)
        self.calls: list[tuple[str, tuple[Region, ...]]] = []

    def start(self) -> None: ...

    def release_memory_occupation(self, tags: Sequence[Region]) -> None:
        assert set(tags) <= self.resident, f"double release of {set(tags) - self.resident}"
        self.resident -= set(tags)
        self.calls.append(("release", tuple(tags)))

    def resume_memory_occupation(self, tags: Sequence[Region]) -> None:
        assert not set(tags) & self.resident, f"double resume of {set(tags) & self.resident}"
        self.resident |= set(tags)
        self.calls.append(("resume", tuple(tags)))

    def generate(self, request: GenerateRequest) -> GenerateResult:
        assert self.resident == set(ENGINE_REGIONS)
        assert request.version == self.version
        ids = request.prompt_ids_BP[:, 1:]  # prompts of three characters in a width of four
        return GenerateResult(ids, np.zeros(ids.shape, np.float32), (ids != 0).astype(np.float32))

    def check_health(self) -> bool:
        return True

    def weights_checksum(self) -> str:
        return ""

    def region_bytes(self) -> Mapping[Region, int]:
        return dict.fromkeys(ENGINE_REGIONS, 1)

    def memory(self) -> MemoryReading:
        return MemoryReading(0, 0, 0, 0)

    def begin_weight_update(self, version: int) -> None: ...

    def load_bucket(self, bucket: Bucket) -> None: ...

    def end_weight_update(self, version: int) -> None:
        self.version = version

    def shutdown(self) -> None: ...


def reward(prompt: str, response: str, label: str) -> float:
    return float(response == label)


def manager_of(options: HandoffOptions, engines: int = 1, **rollout: int) -> RolloutManager:
    config = LaunchConfig.model_validate({"rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2, **rollout}})
    context = LaunchContext(config, options, "", 4, engines)
    prompts = [Prompt(f"{n:03d}", f"{n:03d}") for n in range(10)]
    return RolloutManager(
        context, [StrictEngine() for _ in range(engines)], CharTokenizer(), prompts, prompts[:3], f"{__name__}:reward"
    )  # type: ignore[list-item, arg-type]


class Handoffs(RuleBasedStateMachine):
    """Any calls in any order against a small model: which regions are released."""

    @initialize(level=LEVELS, offload=st.booleans(), weights=st.sampled_from(["mirror", "discard"]))
    def start(self, level: frozenset[str], offload: bool, weights: str) -> None:
        self.options = HandoffOptions(offload_rollout=offload, level=level, engine_weights=weights)  # type: ignore[arg-type]
        self.manager = manager_of(self.options, engines=2)
        self.model: set[str] = set()
        self.releasable: set[str] = set()
        if offload:
            self.releasable = {"cuda_graph"}
            self.releasable |= {"kv_cache"} if "kv_cache" in level else set()
            self.releasable |= {"weights"} if "weight" in level else set()

    @rule(tags=st.sets(st.sampled_from(ENGINE_REGIONS)))
    def offload(self, tags: set[Region]) -> None:
        self.manager.offload(tags)
        self.model |= tags & self.releasable

    @rule(tags=st.sets(st.sampled_from(ENGINE_REGIONS)))
    def onload(self, tags: set[Region]) -> None:
        self.manager.onload(tags)
        self.model -= tags

    @rule()
    def offload_kv(self) -> None:
        self.manager.offload_kv()
        self.model |= {"kv_cache", "cuda_graph"} & self.releasable

    @rule()
    def onload_kv(self) -> None:
        self.manager.onload_kv()
        self.model -= {"kv_cache", "cuda_graph"}

    @rule()
    def offload_weights(self) -> None:
        self.manager.offload_weights()
        self.model |= {"weights"} & self.releasable

    @rule()
    def onload_weights(self) -> None:
        self.manager.onload_weights()
        self.model -= {"weights"}

    @rule()
    def update(self) -> None:
        if "weights" in self.model:
            with pytest.raises(RunError, match="offloaded"):
                self.manager.begin_weight_update(1)
            return
        self.manager.begin_weight_update(1)
        self.manager.end_weight_update(1)

    @rule()
    def generate(self) -> None:
        if self.model:
            with pytest.raises(RunError, match="is offloaded"):
                self.manager.generate(0, 1)
        elif [engine.version for engine in self.manager.engines] == [1, 1]:  # type: ignore[union-attr]
            self.manager.generate(0, 1)

    @invariant()
    def engines_hold_what_the_model_says(self) -> None:
        if not hasattr(self, "manager"):
            return
        assert self.manager.released == self.model
        for engine in self.manager.engines:
            assert engine.resident == set(ENGINE_REGIONS) - self.model  # type: ignore[attr-defined]

    @invariant()
    def health_checks_are_paused_while_anything_is_released(self) -> None:
        if hasattr(self, "manager") and self.model:
            assert self.manager.health.paused

    @invariant()
    def health_checks_run_again_once_all_is_back(self) -> None:
        if hasattr(self, "manager") and not self.model:
            assert not self.manager.health.paused


TestHandoffs = Handoffs.TestCase
TestHandoffs.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(
    "level", [frozenset(), frozenset({"kv_cache"}), frozenset({"weight"}), frozenset({"kv_cache", "weight"})]
)
@pytest.mark.parametrize("order", ["cpu", "gpu"])
def test_after_start_up_and_after_a_cycle_nothing_is_left_released(level: frozenset[str], order: str):
    """The known trap: a level without `weight` must not leave weights un-onloaded, in either order."""
    options = HandoffOptions(order, level=level, engine_weights="mirror")  # type: ignore[arg-type]
    manager = manager_of(options)
    schedule = build_schedule(options)
    for steps in (schedule.init, schedule.cycle, schedule.cycle):
        for step in steps:
            if step.name.startswith("engine."):
                getattr(manager, step.name.removeprefix("engine."))()
        assert manager.released == set()
        assert manager.engines[0].resident == set(ENGINE_REGIONS)  # type: ignore[attr-defined]


def test_a_cycle_of_cpu_order_releases_and_resumes_each_tag_once():
    manager = manager_of(HandoffOptions("cpu", engine_weights="mirror"))
    manager.offload()
    manager.offload()
    manager.onload_weights()
    manager.onload_kv()
    manager.onload()
    assert manager.engines[0].calls == [  # type: ignore[attr-defined]
        ("release", ("cuda_graph", "kv_cache", "weights")),
        ("resume", ("weights",)),
        ("resume", ("kv_cache", "cuda_graph")),
    ]


def test_an_unknown_region_is_refused():
    with pytest.raises(RunError, match="no region 'weight'"):
        manager_of(HandoffOptions()).offload(("weight",))  # type: ignore[arg-type]


def test_samples_do_not_depend_on_the_number_of_engines_or_on_what_ran_before():
    one, two = manager_of(HandoffOptions(), engines=1), manager_of(HandoffOptions(), engines=2)
    for manager in (one, two):
        manager.end_weight_update(0)
    two.generate(0, 0)
    a, _ = one.generate(3, 0)
    b, _ = two.generate(3, 0)
    np.testing.assert_array_equal(a.prompt_ids_BP, b.prompt_ids_BP)
    np.testing.assert_array_equal(a.response_ids_BL, b.response_ids_BL)


def test_every_prompt_comes_once_an_epoch():
    manager = manager_of(HandoffOptions())
    seen = [p.text for rollout_id in range(5) for p in manager._prompts_of(rollout_id)]
    assert sorted(seen[:10]) == sorted(seen[10:20]) == sorted(p.text for p in manager.prompts)
    assert seen[:10] != seen[10:20]


def test_a_verdict_in_flight_when_checks_pause_does_not_count():
    class Slow(StrictEngine):
        def check_health(self) -> bool:
            monitor.pause()  # the release arrives while the check is under way
            return False

    monitor = HealthMonitor([Slow()], interval_seconds=60)  # type: ignore[list-item]
    monitor.check_once()
    assert monitor.failed is None


def test_a_sick_engine_stops_the_next_rollout():
    manager = manager_of(HandoffOptions())
    manager.end_weight_update(0)
    manager.engines[0].check_health = lambda: False  # type: ignore[method-assign]
    manager.health.check_once()
    with pytest.raises(RunError, match="engine 0 failed its health check"):
        manager.generate(0, 0)


def test_rewards_and_exact_matches_are_counted():
    manager = manager_of(HandoffOptions())
    manager.end_weight_update(0)
    batch, stats = manager.generate(0, 0)
    assert batch.reward_B.tolist() == [1.0] * 8
    assert (stats.reward_mean, stats.exact_match) == (1.0, 1.0)
    assert stats.tokens == 8 * 3
