"""The megatron trainer on one GPU: it trains as on the CPU, sleeps and wakes with every bit, at the speed of the link.

python -m pytest -m gpu tests/gpu/test_megatron_cuda.py -s        (megatron-core installed; 16 GiB free; -s shows the speeds)
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import QWEN3, make_batch, make_context, sent_by

from rllaunch.backends.base import RankInfo, Slot
from rllaunch.plan.handoff import HandoffOptions

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# 0.4 B parameters: in bf16 with float32 gradients, masters and moments 7 GiB of trainer, of which 5.3 are backed up.
LARGE = {
    "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def started(shm: Path) -> Iterator[Any]:
    from rllaunch.backends.megatron.trainer import MegatronTrainer

    running: list[Any] = []

    def start(context: Any) -> Any:
        trainer = MegatronTrainer(context, Slot(0, 0, "cuda", str(shm)))
        running.append(trainer)
        trainer.init(RankInfo(0, 1, "127.0.0.1", 29511))
        return trainer

    yield start
    for trainer in running:
        trainer.shutdown()


def digest(trainer: Any) -> str:
    """Of all that an update sends."""
    made = hashlib.sha256()
    for name, tensor in sorted(sent_by(trainer).items()):
        made.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


@pytest.mark.parametrize("buffers", ["retained", "shared"])
def test_it_sleeps_and_wakes_at_the_speed_of_the_link(started: Any, buffers: str):
    options = HandoffOptions("cpu", engine_weights="discard", buffers=buffers)  # type: ignore[arg-type]
    context = make_context("grpo", options, architecture=LARGE, model={"dtype": "bfloat16"}, trainer={"lr": 1e-4})
    trainer = started(context)
    before = {"loss": trainer.train(make_batch(context, 0)).values["loss"]}
    weights = digest(trainer)
    free_awake = torch.cuda.mem_get_info()[0]
    sizes = trainer.region_bytes()
    moved = sizes["params"] + sizes["optimizer"]
    for turn in range(3):
        times = []
        for step in (trainer.offload, trainer.onload):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
            if step == trainer.offload:
                freed = torch.cuda.mem_get_info()[0] - free_awake
        rates = [moved / seconds / 2**30 for seconds in times]
        print(
            f"{buffers:9} turn {turn}: {moved / 2**30:.2f} GiB out {times[0]:.3f} s = {rates[0]:.1f} GiB/s, "
            f"in {times[1]:.3f} s = {rates[1]:.1f} GiB/s, freed {freed / 2**30:.2f} GiB"
        )
    assert freed > 0.9 * (moved + sizes["grads"]), "the driver has it back"
    assert digest(trainer) == weights, "every bit of the weights is as it was"
    assert rates[0] > 10
    after = trainer.train(make_batch(context, 1)).values["loss"]
    print(f"{buffers:9} loss {before['loss']:.4f}, then {after:.4f}; optimizer and views survived")
    assert math.isfinite(after)


def test_it_trains_on_the_gpu_as_the_embedded_trainer_does_on_the_cpu(started: Any, shm: Path):
    from rllaunch.backends.embedded.trainer import EmbeddedTrainer

    context = make_context("grpo", architecture=QWEN3, trainer={"adam_eps": 1e-3, "micro_batch_size": 3})
    ours = started(context)
    theirs = EmbeddedTrainer(context, Slot(0, 0, "cpu", str(shm / "cpu")))
    theirs.init(RankInfo(0, 1, "", 0))
    for rollout in range(2):
        batch = make_batch(context, rollout)
        got, want = ours.train(batch).values, theirs.train(batch).values
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=2e-2, abs=2e-3), (rollout, name)
    theirs.shutdown()
