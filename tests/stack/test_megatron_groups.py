"""Communicators of the megatron trainer that are destroyed while it sleeps and made anew when it wakes, over gloo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from group_process import calls_rank, rollouts_rank
from rig import LLAMA, QWEN3_MOE
from stack_process import run_ranks
from stack_rig import free_port

pytestmark = pytest.mark.stack

TWO_GROUPS = {**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYOUTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tensor": ("cpu", TWO_GROUPS, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "data": ("gpu", TWO_GROUPS, {}),
    "pipeline": ("gpu", TWO_GROUPS, {"pipeline_model_parallel_size": 2}),
    "experts": ("cpu", {**QWEN3_MOE, "norm_topk_prob": True}, {"expert_model_parallel_size": 2}),
}
DOWN = {"cpu": "trainer.offload", "gpu": "trainer.clear_memory"}


def test_training_is_the_same_to_the_bit_and_communicators_are_gone_in_between(tmp_path: Path) -> None:
    """Each layout in the same two processes, with the flag and without."""
    launches = {
        f"{layout}, {flag}": {
            "architecture": architecture,
            "trainer": {"backend": "megatron", **trainer},
            "megatron": {"moe_token_dispatcher_type": "allgather"},
            "handoff": {"colocate_memory_peak_device": order, "offload_train_process_groups": flag},
        }
        for layout, (order, architecture, trainer) in LAYOUTS.items()
        for flag in (False, True)
    }
    run_ranks(2, rollouts_rank, [free_port() for _ in launches], str(tmp_path), launches)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    for layout, (order, *_) in LAYOUTS.items():
        for rank in ranks:
            (plain, plain_sent, kept), (figures, sent, seen) = rank[f"{layout}, False"], rank[f"{layout}, True"]
            assert figures == plain, layout
            assert sent.keys() == plain_sent.keys()
            assert all(torch.equal(sent[name], tensor) for name, tensor in plain_sent.items()), layout
            for at in kept:
                assert (at["said"], at["seconds"]) == ("", None), "without the flag nothing goes"
            assert [s["step"] for s in seen] == [s["step"] for s in kept]
            awake = True
            for at in seen:
                goes = awake and at["step"] in ("trainer.offload", DOWN[order])
                comes = at["step"] == "trainer.onload"
                awake = comes or (awake and not goes)
                assert ("while their communicator is torn down" in at["said"]) is not awake, (layout, at)
                assert (at["seconds"] is not None) is (goes or comes), (layout, at)
                assert at["bytes"] is None, "nothing reads a GPU here"
                if goes:
                    assert at["closed"] > 0, "connections end with the communicators"
            assert [s["step"] for s in seen].count("trainer.onload") == 3
        assert ranks[0][f"{layout}, True"][1], "rank 0 has sent weights"


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Of both ranks: answers before and after reloads, and what was said where one cannot be."""
    directory = tmp_path_factory.mktemp("calls")
    run_ranks(2, calls_rank, [free_port(), free_port()], str(directory))
    return [torch.load(directory / f"calls-{rank}.pt", weights_only=False) for rank in range(2)]


def test_every_call_gives_the_same_before_and_after(calls: list[Any]) -> None:
    for rank in range(2):
        first, *later = calls[rank][0]
        assert first["all_reduce"].tolist() == [3.0, 3.0]
        assert first["async"].tolist() == [2.0, 2.0]
        assert first["broadcast"].tolist() == [2.0, 2.0]
        assert first["all_gather_into_tensor"].tolist() == [1.0, 1.0, 2.0, 2.0]
        assert [t.tolist() for t in first["all_gather"]] == [[1.0, 1.0], [2.0, 2.0]]
        assert first["reduce_scatter_tensor"].tolist() == [[0.0, 3.0], [6.0, 9.0]][rank]
        assert first["all_to_all_single"].tolist() == [[0.0, 1.0, 0.0, 2.0], [2.0, 3.0, 4.0, 6.0]][rank]
        assert first["objects"] == [{"rank": 0}, {"rank": 1}]
        assert first["received"].tolist() == [2.0 - rank] * 2
        assert [t.tolist() for t in first["coalesced"]] == [[3.0, 3.0], [0.0, 3.0, 6.0, 9.0]]
        assert first["place"] == (rank, 2, "gloo", [0, 1], "PAIR", True, 1)
        for again in (first, *later):
            assert repr(again | {"closed": 0}) == repr(first | {"closed": 0})
            assert again["closed"] > 0, "connections end with the communicator"


def test_what_cannot_be_says_so(calls: list[Any]) -> None:
    _, said = calls[0]
    assert "a collective of ranks 0, 1 (PAIR) while their communicator is torn down" in said["asleep"]
    assert "onload the trainer first" in said["asleep"]
    assert "cannot be made anew" in said["alone"]
    assert "every rank must be there" in said["alone"]


def test_the_benchmark_prints_its_table(tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "process_groups.py"
    command = [sys.executable, str(script), "--cpu", "--layout", "tp=2", "--cycles", "2", "--json", "rows.json"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=240, check=False)
    assert run.returncode == 0, run.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["cycle"] for row in rows] == [0, 1]
    for row in rows:
        assert row["groups"] > row["connected"] > 5
        assert row["alive_bytes"] is None
        assert row["making_seconds"] > 0
    assert len(run.stdout.splitlines()) == 1 + len(rows)
