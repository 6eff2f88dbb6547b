"""What `rllaunch profiles detect --measure` times on a GPU.

python -m pytest -m gpu tests/gpu/test_measure_cuda.py     (any CUDA GPU with 1 GiB free, and as much host memory)
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_every_way_has_a_rate_and_pinned_memory_is_not_the_slowest():
    from rllaunch.backends.measure import measure_gpu

    measured = measure_gpu(0, 512 * 2**20)
    rates = {k: v for k, v in measured.items() if k not in ("index", "bytes")}
    assert set(rates) == {
        "to_gpu",
        "to_host",
        "pinning",
        "fresh_to_host",
        "pageable_to_gpu",
        "pageable_to_host",
    }
    assert all(rate > 1e8 for rate in rates.values())
    assert rates["to_host"] > rates["fresh_to_host"]
