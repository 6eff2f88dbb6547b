"""Whole runs under Ray: the megatron trainer with embedded engines, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from launching import Run, a_run_of, finish, small_checkpoint, start

pytestmark = [pytest.mark.stack, pytest.mark.slow]


TENSOR, CONTEXT = ("--tensor-model-parallel-size", "2"), ("--context-parallel-size", "2")


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (TENSOR, ()),
        (CONTEXT, ("--colocate-memory-peak-device", "gpu")),
        (TENSOR, ("--lora-rank", "4")),
        (TENSOR, ("--advantage-estimator", "ppo")),
    ],
    ids=["cpu order", "gpu order, context", "lora", "ppo"],
)
def test_two_ranks_that_share_a_model_train_the_run_that_the_embedded_trainer_trains(
    layout: tuple[str, ...], more: tuple[str, ...], cpu_guest: dict[str, str], tmp_path: Path
) -> None:
    def run(name: str, *words: str) -> Run:
        path = tmp_path / name
        common = ("--num-gpus-per-node", "2", "--num-rollout", "3")
        return finish(start(path, *common, *more, *words, cwd=tmp_path, env=cpu_guest), path, timeout=300)

    ours = run("ours", "--trainer-backend", "megatron-cpu", *layout)
    theirs = run("theirs")
    assert (ours.code, theirs.code) == (0, 0), ours.err + theirs.err
    for got, want in zip(ours.metrics, theirs.metrics, strict=True):
        assert got["reward_mean"] == want["reward_mean"]
        assert got.keys() == want.keys()
        for name in ("loss", "entropy", "kl", "grad_norm"):
            assert got[name] == pytest.approx(want[name], rel=1e-2, abs=1e-3), name
    for event in ours.events:
        assert event["gpu_bytes"] <= 1.02 * event["planned_gpu_bytes"], event["step"]
    assert [e["step"] for e in ours.events] == [e["step"] for e in theirs.events]
    assert any((ours.path / "checkpoints").iterdir())


def test_an_export_has_the_tokenizer_of_the_checkpoint_that_training_started_from(
    cpu_guest: dict[str, str], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    small_checkpoint(tmp_path / "model")
    words = (*a_run_of(tmp_path / "model"), "--trainer-backend", "megatron-cpu", "--num-gpus-per-node", "2", *TENSOR)
    run = finish(start(tmp_path / "run", *words, cwd=tmp_path, env=cpu_guest), tmp_path / "run", timeout=300)
    assert run.code == 0, run.err
    exported = AutoTokenizer.from_pretrained(run.path / "checkpoints" / "rollout_000000" / "hf")
    assert exported("abc=")["input_ids"] == [3, 4, 5, 2]


def test_a_run_resumes_on_another_layout(cpu_guest: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "run"
    common = ("--trainer-backend", "megatron-cpu", "--save-interval", "1")

    def go(*words: str) -> Run:
        return finish(start(path, *common, *words, cwd=tmp_path, env=cpu_guest), path, timeout=300)

    alone = go("--num-gpus-per-node", "1", "--num-rollout", "1")
    assert alone.code == 0, alone.err
    pair = go("--resume", "--num-gpus-per-node", "2", *TENSOR, "--num-rollout", "3")
    assert pair.code == 0, pair.err
    assert "note: resumed on another layout, so not to the bit:\n  cluster.num_gpus_per_node was 1, is 2" in pair.err
    straight = tmp_path / "straight"
    whole = finish(
        start(straight, *common, "--num-gpus-per-node", "1", "--num-rollout", "3", cwd=tmp_path, env=cpu_guest),
        straight,
        timeout=300,
    )
    assert whole.code == 0, whole.err
    assert [row["rollout_id"] for row in pair.metrics] == [0, 1, 2]
    # The last one's figures are those of a step that the moments of the checkpoint decided.
    for got, want in zip(pair.metrics, whole.metrics, strict=True):
        for name in ("loss", "entropy", "kl", "grad_norm"):
            assert got[name] == pytest.approx(want[name], rel=1e-2, abs=1e-3), name
