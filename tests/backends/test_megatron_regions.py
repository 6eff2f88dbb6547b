"""The memory Megatron-core allocated, as regions: no Megatron-core is needed to hold it so."""

from __future__ import annotations

from pathlib import Path

import torch

from rllaunch.backends.embedded.pool import Pool
from rllaunch.backends.megatron.regions import StorageRegion


def test_a_tensor_is_found_again_where_it_was_located(tmp_path: Path):
    buffer = torch.arange(40, dtype=torch.float32)
    tensors = {
        "first": buffer[:6].view(2, 3),
        "second": buffer[10:14],
        "alone": torch.arange(7, dtype=torch.bfloat16),
        "last": torch.ones(3, 1, 2, dtype=torch.float64),
    }
    region = StorageRegion(Pool.create(tmp_path / "gpu", "gpu", None), "trainer-0", "params", tensors.values())
    for name, tensor in tensors.items():
        found = region.at(region.locate(name, tensor))
        assert found.data_ptr() == tensor.data_ptr(), name
        assert found.dtype == tensor.dtype
        assert torch.equal(found, tensor)


def test_a_region_that_came_back_elsewhere_still_ends_where_it_did(tmp_path: Path):
    """As under torch_memory_saver, before a reference is kept of the first part."""
    tensors = [torch.ones(2**20), torch.ones(2**18)]
    region = StorageRegion(Pool.create(tmp_path / "gpu", "gpu", None), "trainer-0", "params", tensors)
    before = [tensor.data_ptr() for tensor in tensors]
    region.free()
    others = [torch.ones(2**20), torch.ones(2**18)]
    region.allocate()
    assert [tensor.data_ptr() for tensor in tensors] != before, others
    assert region.end_of(tensors[:1]) == 4 * 2**20
    assert region.end_of(tensors) == 4 * (2**20 + 2**18)
