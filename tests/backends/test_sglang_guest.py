"""Our guest in SGLang's processes: the engine's weights go into the arena before they are released, and come back after."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rllaunch.backends.base import Slot
from rllaunch.backends.embedded.host_copies import Arena, ArenaCopies, lies_in_arena
from rllaunch.backends.embedded.pool import Pool, host_pool_path
from rllaunch.backends.sglang import guest
from rllaunch.errors import RunError

BACKUP_BYTES = 8192


class Hooks:
    """SGLang's registry, as far as a plugin sees it."""

    def __init__(self) -> None:
        self.around: dict[str, Any] = {}

    def register(self, target: str, hook: Any, kind: str) -> None:
        assert kind == "around"
        self.around[target.rpartition(".")[2]] = hook


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Hooks:
    found = Hooks()
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.HookRegistry, module.HookType = found, SimpleNamespace(AROUND="around")  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


@pytest.fixture
def arena(tmp_path: Path) -> ArenaCopies:
    """The trainer's, with its backup in it."""
    slot = Slot(3, 0, "cpu", str(tmp_path))
    pool = Pool.create(host_pool_path(slot), "host-0", None)
    copies = ArenaCopies(Arena(slot, pool, BACKUP_BYTES), "trainer-3", {"params": BACKUP_BYTES})
    copies.store("params", torch.full((BACKUP_BYTES,), 7, dtype=torch.uint8))
    return copies


def started(hooks: Hooks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: list[torch.Tensor]) -> Slot:
    slot = Slot(3, 0, "cuda", str(tmp_path))
    for name, value in guest.environment_of([slot]).items():
        monkeypatch.setenv(name, value)
    offsets = [512 * index for index in range(len(weights))]
    monkeypatch.setattr(guest, "_pieces_of", lambda tag: list(zip(offsets, weights, strict=True)))
    guest.register()
    return slot


def test_without_our_variable_it_leaves_sglang_alone(hooks: Hooks, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(guest.VARIABLE, raising=False)
    guest.register()
    assert hooks.around == {}


def test_weights_trade_places_with_the_trainers_backup_in_one_arena(
    hooks: Hooks, arena: ArenaCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    weights = [torch.arange(200, dtype=torch.uint8), torch.full((50,), 9, dtype=torch.uint8)]
    before = [tensor.clone() for tensor in weights]
    slot = started(hooks, tmp_path, monkeypatch, weights)
    calls: list[str] = []

    def library(what: str) -> Any:
        """What torch_memory_saver does: released memory has lost its content."""

        def call(adapter: Any, tag: str) -> str:
            calls.append(f"{what} {tag}")
            for tensor in weights if tag == "weights" else []:
                tensor.zero_()
            return what

        return call

    pause, resume = library("pause"), library("resume")
    assert hooks.around["pause"](pause, None, "kv_cache") == "pause"
    assert not lies_in_arena(slot, guest.owner_of(slot), "weights")

    # gpu order: the trainer is awake again, so its backup is no longer needed.
    arena.restore("params", torch.zeros(BACKUP_BYTES, dtype=torch.uint8))
    hooks.around["pause"](pause, None, "weights")
    assert lies_in_arena(slot, guest.owner_of(slot), "weights")
    assert not any(tensor.any() for tensor in weights)
    with pytest.raises(RunError, match="would overwrite it"):
        arena.store("params", torch.zeros(BACKUP_BYTES, dtype=torch.uint8))

    hooks.around["resume"](resume, None, "weights")
    assert all(torch.equal(now, then) for now, then in zip(weights, before, strict=True))
    arena.store("params", torch.full((BACKUP_BYTES,), 8, dtype=torch.uint8))
    assert calls == ["pause kv_cache", "pause weights", "resume weights"]
    assert Pool.open(host_pool_path(slot)).used() == BACKUP_BYTES, "one arena, booked once"


def test_weights_never_overwrite_a_backup_that_is_needed(
    hooks: Hooks, arena: ArenaCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    started(hooks, tmp_path, monkeypatch, [torch.ones(100, dtype=torch.uint8)])
    with pytest.raises(RunError, match="holds params of trainer-3; weights of engine-rank-3 would overwrite it"):
        hooks.around["pause"](lambda adapter, tag: pytest.fail("released without a copy"), None, "weights")


def test_an_arena_too_small_for_the_weights_is_refused(
    hooks: Hooks, arena: ArenaCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    arena.restore("params", torch.zeros(BACKUP_BYTES, dtype=torch.uint8))
    started(hooks, tmp_path, monkeypatch, [torch.ones(BACKUP_BYTES, dtype=torch.uint8)])
    with pytest.raises(RunError, match="the arena of slot 3 has 8,192 bytes, the engine's weights take 8,704"):
        hooks.around["pause"](lambda adapter, tag: None, None, "weights")


def test_a_list_of_sglang_plugins_that_was_chosen_has_ours_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert guest.environment_of([Slot(0, 0, "cuda", str(tmp_path))])["SGLANG_PLUGINS"] == "other,rllaunch"
