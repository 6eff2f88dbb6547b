"""The bytes of a schedule: what each order promises, in numbers."""

from __future__ import annotations

import pytest
from test_handoff import LEGAL

from rllaunch.plan.handoff import HandoffOptions, build_schedule
from rllaunch.plan.memory import price

GIB = 2**30
# One H200, a 2.586 B model: bf16 engine weights, KV pool; fp32 masters and Adam moments beside bf16
# parameters, fp32 gradients. Rounded to what makes the sums readable.
SIZES = {
    "weights": 5 * GIB, "kv_cache": 18 * GIB, "cuda_graph": 1 * GIB, "params": 5 * GIB,
    "optimizer": 30 * GIB, "grads": 10 * GIB, "activations": 14 * GIB, "update_bucket": 1 * GIB,
}  # fmt: skip


def peaks(options: HandoffOptions) -> tuple[int, int]:
    steps = price(build_schedule(options), SIZES)
    return max(s.gpu_peak for s in steps) // GIB, max(s.host_peak for s in steps) // GIB


@pytest.mark.parametrize(
    ("order", "weights", "buffers", "host"),
    [
        ("cpu", "mirror", "fresh", 40),
        ("cpu", "mirror", "retained", 40),
        ("gpu", "mirror", "fresh", 35),
        ("gpu", "mirror", "shared", 35),
        ("gpu", "mirror", "retained", 40),
        ("cpu", "discard", "retained", 35),
        ("gpu", "discard", "retained", 35),
    ],
)
def test_host_peak_by_order_and_buffers(order: str, weights: str, buffers: str, host: int):
    """The pattern measured on one H200: mirror and backup add up in cpu order and with retained buffers."""
    assert peaks(HandoffOptions(order, engine_weights=weights, buffers=buffers))[1] == host


def test_gpu_order_moves_the_overlap_to_the_gpu():
    gpu_in_cpu_order, _ = peaks(HandoffOptions("cpu", engine_weights="mirror", buffers="fresh"))
    gpu_in_gpu_order, _ = peaks(HandoffOptions("gpu", engine_weights="mirror", buffers="fresh"))
    # The training step (params + optimizer + grads + activations) is the peak of both: the engine's
    # weights have left by then.
    assert gpu_in_cpu_order == gpu_in_gpu_order == 59
    without_activations = {**SIZES, "activations": 0}
    handoff_peak = [
        max(
            s.gpu_peak
            for s in price(
                build_schedule(HandoffOptions(o, engine_weights="mirror", buffers="fresh")), without_activations
            )
        )
        for o in ("cpu", "gpu")
    ]
    assert handoff_peak == [45 * GIB, 50 * GIB]


def test_gpu_order_holds_at_most_the_larger_of_mirror_and_backup_on_the_host():
    for options in LEGAL:
        if options.order != "gpu" or options.buffers == "retained":
            continue
        backup = SIZES["params"] + SIZES["optimizer"]
        mirror = SIZES["weights"] if options.has_mirror else 0
        for step in price(build_schedule(options), SIZES):
            assert step.host_peak <= max(mirror, backup), (options, step.name)


def test_a_cycle_ends_with_the_bytes_it_began_with():
    for options in LEGAL:
        steps = price(build_schedule(options), SIZES)
        last_of_init = [s for s in steps if s.phase == "init"][-1]
        assert steps[-1].gpu == last_of_init.gpu, options
        # A retained mirror is there from the first release on, in gpu order within the first cycle.
        retained = {"weights"} if options.buffers == "retained" else set()
        assert {k: v for k, v in steps[-1].host.items() if k not in retained} == {
            k: v for k, v in last_of_init.host.items() if k not in retained
        }, options


def test_a_backup_is_allocated_before_its_source_is_freed():
    """The transient counts: while a region is copied out, both copies exist."""
    steps = price(build_schedule(HandoffOptions("cpu", engine_weights="discard", buffers="fresh")), SIZES)
    offload = next(s for s in steps if s.name == "trainer.offload")
    assert offload.host_peak == 35 * GIB
    assert offload.gpu_peak == 45 * GIB
    assert offload.gpu_total == 0
    assert offload.bytes_moved == 35 * GIB
