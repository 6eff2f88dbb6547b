"""The books of a pool are exact, from any number of processes; buffers are charged to them and refuse misuse."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pool_user import charge_many
from rig import make_context

from rllaunch.backends.base import Slot
from rllaunch.backends.embedded.host_copies import Arena, ArenaCopies, OwnCopies
from rllaunch.backends.embedded.pool import FlatBuffer, Pool, open_pools
from rllaunch.errors import FitError, RunError

OWNERS = st.sampled_from(["engine-0", "trainer-0", "trainer-1"])
REGIONS = st.sampled_from(["weights", "params", "optimizer"])


class Books(RuleBasedStateMachine):
    """A pool beside a dict; half of the calls come through a second handle, as from another process."""

    @initialize(capacity=st.none() | st.integers(0, 300))
    def start(self, capacity: int | None) -> None:
        self.directory = tempfile.TemporaryDirectory()
        path = Path(self.directory.name) / "pool"
        self.pools = [Pool.create(path, "device-0", capacity), Pool.open(path)]
        self.capacity = capacity
        self.model: dict[tuple[str, str], int] = {}
        self.peak = 0

    @rule(owner=OWNERS, region=REGIONS, nbytes=st.integers(0, 120), handle=st.integers(0, 1))
    def charge(self, owner: str, region: str, nbytes: int, handle: int) -> None:
        pool = self.pools[handle]
        if (owner, region) in self.model:
            with pytest.raises(RunError, match=f"{owner} asks for {region} twice"):
                pool.charge(owner, region, nbytes)
        elif self.capacity is not None and sum(self.model.values()) + nbytes > self.capacity:
            with pytest.raises(FitError, match="too small"):
                pool.charge(owner, region, nbytes)
        else:
            pool.charge(owner, region, nbytes)
            self.model[owner, region] = nbytes
            self.peak = max(self.peak, sum(self.model.values()))

    @rule(owner=OWNERS, region=REGIONS, handle=st.integers(0, 1))
    def release(self, owner: str, region: str, handle: int) -> None:
        if self.model.pop((owner, region), None) is None:
            with pytest.raises(RunError, match=f"{owner} releases {region}, which it does not hold"):
                self.pools[handle].release(owner, region)
        else:
            self.pools[handle].release(owner, region)

    @rule(handle=st.integers(0, 1))
    def reset_peak(self, handle: int) -> None:
        self.pools[handle].reset_peak()
        self.peak = sum(self.model.values())

    @invariant()
    def both_handles_read_what_the_model_says(self) -> None:
        for pool in getattr(self, "pools", []):
            assert pool.entries() == self.model
            assert pool.used() == sum(self.model.values())
            assert pool.peak() == self.peak
            assert sum(pool.by_region().values()) == pool.used()

    def teardown(self) -> None:
        for pool in getattr(self, "pools", []):
            pool.close()
        if hasattr(self, "directory"):
            self.directory.cleanup()


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_two_processes_at_once_leave_exact_books(tmp_path: Path):
    pool = Pool.create(tmp_path / "pool", "host-0", None)
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(2)
    others = [spawn.Process(target=charge_many, args=(str(pool.path), f"trainer-{i}", 1000, start)) for i in range(2)]
    for process in others:
        process.start()
    for process in others:
        process.join(60)
    assert [p.exitcode for p in others] == [0, 0]
    assert pool.entries() == {("trainer-0", "optimizer"): 100, ("trainer-1", "optimizer"): 100}
    # At least both kept regions at the end; at most each process's most at the same moment.
    assert 200 <= pool.peak() <= 200 + 11


def test_what_does_not_fit_is_told_with_everything_that_is_in_the_pool(tmp_path: Path):
    pool = Pool.create(tmp_path / "pool", "device-3", 10_000)
    pool.charge("engine-3", "weights", 2_000)
    pool.charge("trainer-3", "optimizer", 5_000)
    with pytest.raises(FitError) as caught:
        pool.charge("trainer-3", "grads", 3_001)
    assert str(caught.value) == (
        "error: pool device-3 is too small: trainer-3 asks for 3,001 bytes of grads, 3,000 are free\n"
        "  capacity 10,000 bytes (pools.device_capacity_bytes), in use 7,000\n"
        "  in use: trainer-3 optimizer 5,000 bytes\n"
        "  in use: engine-3 weights 2,000 bytes\n"
        "hint: hold less at once (--colocate-memory-peak-device, --engine-weights, --offload-train-buffers), or raise the capacity"
    )
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    pool.charge("trainer-3", "grads", 3_000)
    assert pool.used() == pool.peak() == 10_000


def test_a_pool_of_no_known_kind_names_no_setting(tmp_path: Path):
    pool = Pool.create(tmp_path / "pool", "test", 1)
    with pytest.raises(FitError) as caught:
        pool.charge("engine-0", "weights", 2)
    assert caught.value.where == ("capacity 1 bytes, in use 0",)


def test_books_are_created_once_and_opened_with_the_same_capacity_only(tmp_path: Path):
    Pool.open_or_create(tmp_path / "pool", "host-0", 10).charge("engine-0", "weights", 4)
    assert Pool.open_or_create(tmp_path / "pool", "host-0", 10).used() == 4
    with pytest.raises(RunError, match="capacity of 10 bytes, but no limit is expected of it"):
        Pool.open_or_create(tmp_path / "pool", "host-0", None)
    with pytest.raises(RunError, match="exists already"):
        Pool.create(tmp_path / "pool", "host-0", 10)
    with pytest.raises(RunError, match="no pool ledger at"):
        Pool.open(tmp_path / "other")
    assert [p.name for p in tmp_path.iterdir()] == ["pool"]


def test_a_file_that_is_no_ledger_is_refused(tmp_path: Path):
    (tmp_path / "pool").write_bytes(b"x" * 100_000)
    with pytest.raises(RunError, match="is no pool ledger"):
        Pool.open(tmp_path / "pool")


def test_what_two_processes_share_is_charged_once(tmp_path: Path):
    pool = Pool.create(tmp_path / "pool", "host-0", None)
    assert pool.charge_once("slot0", "arena", 10) is True
    assert pool.charge_once("slot0", "arena", 10) is False
    assert pool.used() == 10
    with pytest.raises(RunError, match="twice"):
        pool.charge_once("slot0", "arena", 11)


def test_names_too_long_for_a_row_and_negative_bytes_are_refused(tmp_path: Path):
    pool = Pool.create(tmp_path / "pool", "host-0", None)
    with pytest.raises(RunError, match="does not fit into a ledger's field of 48 bytes"):
        pool.charge("x" * 49, "weights", 1)
    with pytest.raises(RunError, match="asks for -1 bytes"):
        pool.charge("engine-0", "weights", -1)
    assert pool.entries() == {}


def test_a_full_table_is_an_error_and_a_freed_row_is_used_again(tmp_path: Path):
    pool = Pool.create(tmp_path / "pool", "host-0", None)
    for n in range(256):
        pool.charge(f"trainer-{n}", "params", 1)
    with pytest.raises(RunError, match="all 256 rows of its ledger are taken"):
        pool.charge("trainer-256", "params", 1)
    pool.release("trainer-100", "params")
    pool.charge("trainer-256", "params", 1)
    assert pool.used() == 256


def test_the_pools_of_a_slot_have_the_capacities_of_the_config(tmp_path: Path):
    context = make_context(pools={"device_capacity_bytes": 100, "host_capacity_bytes": 200})
    device, host = open_pools(context, Slot(5, 2, "cpu", str(tmp_path / "new" / "ledgers")))
    assert (device.name, device.capacity_bytes) == ("device-5", 100)
    assert (host.name, host.capacity_bytes) == ("host-2", 200)


# -- buffers -------------------------------------------------------------------------------------------


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    return Pool.create(tmp_path / "pool", "device-0", 1_000)


def test_views_made_before_a_release_are_whole_again_after_it(pool: Pool):
    buffer = FlatBuffer(pool, "trainer-0", "params", 64)
    buffer.allocate()
    view = buffer.view(torch.float32, 16, (2, 3))
    parameter = torch.nn.Parameter(view)
    for value in (1.0, 2.0):
        buffer.free()
        assert view.untyped_storage().nbytes() == 0
        buffer.allocate()
        buffer.bytes.zero_()
        buffer.view(torch.float32, 16, (6,)).fill_(value)
        assert view.tolist() == [[value] * 3] * 2
        assert parameter.sum().item() == 6 * value
        assert buffer.bytes.count_nonzero() == buffer.bytes[16:40].count_nonzero()


def test_use_of_a_released_buffer_is_an_error_and_not_a_crash(pool: Pool):
    buffer = FlatBuffer(pool, "trainer-0", "params", 64)
    for _ in range(2):  # never allocated, then allocated and freed
        for use in (lambda: buffer.bytes, lambda: buffer.view(torch.float32, 0, (4,)), buffer.free):
            with pytest.raises(RunError) as caught:
                use()
            assert str(caught.value) == (
                "error: trainer-0: params is used while it is offloaded\n"
                "hint: bring it back first (onload, resume_memory_occupation)"
            )
        buffer.allocate()
        buffer.free()


def test_a_buffer_is_booked_exactly_while_it_is_allocated(pool: Pool):
    buffer = FlatBuffer(pool, "trainer-0", "params", 64)
    assert pool.used() == 0
    buffer.allocate()
    with pytest.raises(RunError, match="trainer-0: params is allocated twice"):
        buffer.allocate()
    assert pool.entries() == {("trainer-0", "params"): 64}
    buffer.free()
    assert pool.entries() == {}


def test_a_buffer_that_does_not_fit_stays_free(pool: Pool):
    buffer = FlatBuffer(pool, "trainer-0", "params", 1_001)
    with pytest.raises(FitError):
        buffer.allocate()
    assert not buffer.is_resident
    assert pool.used() == 0


def test_memory_the_machine_refuses_is_not_booked(tmp_path: Path):
    pool = Pool.create(tmp_path / "unlimited", "device-0", None)
    buffer = FlatBuffer(pool, "trainer-0", "params", 2**60)
    with pytest.raises(RunError, match="the machine refuses 1,152,921,504,606,846,976 bytes for params"):
        buffer.allocate()
    assert pool.used() == 0


# -- host copies ---------------------------------------------------------------------------------------


def filled(nbytes: int, value: int) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


@pytest.mark.parametrize(("is_retained", "bytes_after"), [(True, 10), (False, 0)])
def test_a_host_copy_comes_back_once_and_is_kept_only_if_retained(pool: Pool, is_retained: bool, bytes_after: int):
    copies = OwnCopies(pool, "trainer-0", {"params": 10}, is_retained=is_retained)
    target = filled(10, 0)
    for value in (7, 8):
        copies.store("params", filled(10, value))
        assert pool.used() == 10
        copies.restore("params", target)
        assert target.tolist() == [value] * 10
        assert pool.used() == bytes_after
        with pytest.raises(RunError, match="the host holds no current copy of params"):
            copies.read("params")
    copies.shutdown()
    assert pool.used() == 0


@pytest.fixture
def arena_copies(pool: Pool, tmp_path: Path) -> tuple[ArenaCopies, ArenaCopies]:
    """Of a trainer and of an engine, each with a mapping of its own, as in two processes."""
    slot = Slot(0, 0, "cpu", str(tmp_path))
    trainer = ArenaCopies(Arena(slot, pool, 30), "trainer-0", {"params": 10, "optimizer": 20})
    return trainer, ArenaCopies(Arena(slot, pool, 30), "engine-0", {"weights": 15})


def test_trainer_and_engine_take_turns_in_one_arena(pool: Pool, arena_copies: tuple[ArenaCopies, ArenaCopies]):
    trainer, engine = arena_copies
    for value in (1, 2):
        trainer.store("params", filled(10, value))
        trainer.store("optimizer", filled(20, value + 10))
        params, optimizer, weights = filled(10, 0), filled(20, 0), filled(15, 0)
        trainer.restore("params", params)
        trainer.restore("optimizer", optimizer)
        engine.store("weights", filled(15, value + 20))
        engine.restore("weights", weights)
        assert [t.unique().tolist() for t in (params, optimizer, weights)] == [[value], [value + 10], [value + 20]]
        assert pool.entries() == {("slot0", "arena"): 30}
    trainer.shutdown()
    engine.shutdown()
    assert pool.used() == 0


def test_an_arena_in_use_is_not_overwritten_by_the_other_owner(arena_copies: tuple[ArenaCopies, ArenaCopies]):
    trainer, engine = arena_copies
    trainer.store("params", filled(10, 1))
    with pytest.raises(RunError) as caught:
        engine.store("weights", filled(15, 2))
    assert str(caught.value) == (
        "error: the arena of slot0 holds params of trainer-0; weights of engine-0 would overwrite it\n"
        "hint: offload and onload in the order of the schedule"
    )
    assert trainer.read("params").tolist() == [1] * 10


def test_an_arena_gives_back_only_what_it_holds(arena_copies: tuple[ArenaCopies, ArenaCopies]):
    trainer, engine = arena_copies
    with pytest.raises(RunError, match="does not hold params of trainer-0; it holds nothing whole of nobody"):
        trainer.read("params")
    trainer.store("params", filled(10, 1))
    with pytest.raises(RunError, match="does not hold weights of engine-0; it holds params of trainer-0"):
        engine.read("weights")
