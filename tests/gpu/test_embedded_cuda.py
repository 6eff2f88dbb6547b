"""The embedded backend on one GPU: the same bytes, nearly the same numbers, memory that really goes.

python -m pytest -m gpu tests/gpu -s        (any CUDA GPU with 8 GiB free; -s shows the speeds)
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, make_context

from rllaunch.plan.handoff import HandoffOptions
from rllaunch.plan.memory import Ledger
from rllaunch.run.rehearsal import shrink

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

OPTIONS = [
    HandoffOptions("cpu", engine_weights="discard", buffers="retained"),
    HandoffOptions("cpu", engine_weights="mirror", buffers="fresh"),
    HandoffOptions("gpu", engine_weights="mirror", buffers="fresh"),
    HandoffOptions("gpu", engine_weights="mirror", buffers="shared"),
]
# 0.2 B parameters: 0.8 GiB of weights, 2.4 GiB of trainer state to move.
LARGE = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def lived(
    options: HandoffOptions, directory: Path, device: str, architecture: dict[str, Any] | None = None
) -> tuple[list[dict[str, float]], str]:
    """Start-up and two cycles with the books held against the plan; metrics and the weights' checksum."""
    rig = Rig(make_context("grpo", options, architecture=architecture), directory, device)
    plan = Ledger(rig.schedule, rig.sizes)
    for phase, step, reading in rig.run():
        planned = plan.apply(phase, step)
        assert (reading.gpu_bytes, reading.host_bytes) == (planned.gpu_total, planned.host_total), step.name
        assert (reading.gpu_peak_bytes, reading.host_peak_bytes) == (planned.gpu_peak, planned.host_peak), step.name
    return rig.metrics, rig.engine.weights_checksum()


def test_every_order_books_what_was_planned_and_gives_the_same_weights(shm: Path):
    made = [lived(options, shm / str(i), "cuda") for i, options in enumerate(OPTIONS)]
    assert len({checksum for _, checksum in made}) == 1
    on_cpu, _ = lived(OPTIONS[0], shm / "cpu", "cpu")
    for figures, expected in zip(made[0][0], on_cpu, strict=True):
        assert figures["loss"] == pytest.approx(expected["loss"], abs=1e-3)


@pytest.mark.parametrize("options", OPTIONS[1:], ids=lambda o: f"{o.order} {o.buffers}")
def test_deepseek_v4_in_small_lives_through_every_order(shm: Path, options: HandoffOptions):
    facts = {"model_type": "deepseek_v4", "num_hidden_layers": 4, "num_hash_layers": 2}
    small = shrink({**facts, "compress_ratios": [0, 4, 128, 4]}, 13)
    metrics, checksum = lived(options, shm / "cuda", "cuda", architecture=small)
    on_cpu, _ = lived(options, shm / "cpu", "cpu", architecture=small)
    assert checksum
    for figures, expected in zip(metrics, on_cpu, strict=True):
        assert figures["loss"] == pytest.approx(expected["loss"], abs=1e-2)


@pytest.mark.parametrize("buffers", ["retained", "shared"])
def test_a_handoff_frees_the_gpu_for_real_at_the_speed_of_the_link(shm: Path, buffers: str):
    options = HandoffOptions("gpu", engine_weights="mirror", buffers=buffers)  # type: ignore[arg-type]
    rig = Rig(make_context("grpo", options, architecture=LARGE), shm, "cuda")
    steps = []
    free_after: dict[str, int] = {}
    last = time.perf_counter()
    for phase, step, reading in rig.run(cycles=3):
        torch.cuda.synchronize()
        now = time.perf_counter()
        steps.append((phase, step.name, now - last, reading.moved_bytes))
        last = now
        free_after[step.name] = torch.cuda.mem_get_info()[0]
        last = time.perf_counter()
    sizes = rig.sizes
    trainer_bytes = sizes["params"] + sizes["optimizer"]
    assert free_after["trainer.offload"] - free_after["trainer.onload"] > 0.9 * trainer_bytes, "the driver has it back"
    for phase, name, seconds, moved in steps:
        if phase == "cycle 2" and moved:
            print(
                f"{buffers:9} {name:24} {moved / 2**30:6.2f} GiB in {seconds:6.3f} s = {moved / seconds / 2**30:5.1f} GiB/s"
            )
            # The mirror beside a retained backup is pinned anew each time, at the speed of page pinning.
            if buffers == "shared" or name.startswith("trainer."):
                assert moved / seconds > 10 * 2**30, name
