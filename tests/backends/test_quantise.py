"""FP8 in blocks: transformers' bits, and what comes back."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rllaunch.backends.quantise import dequantise, quantise
from rllaunch.plan.sizes import quantiser_bytes

finegrained = pytest.importorskip("transformers.integrations.finegrained_fp8")
QUANTIZER = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=[128, 128], scale_fmt="float"))


def weight_of(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Blocks of very different sizes, one of zeros."""
    torch.manual_seed(rows + columns)
    weight = torch.randn(rows, columns)
    weight[:128] *= 1e-3
    weight[-128:, -128:] *= 1e4
    weight[:128, :128] = 0
    return weight.to(dtype)


def theirs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """transformers', which takes whole blocks only."""
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
    made = finegrained.Fp8Quantize(QUANTIZER).convert({"x.weight": padded})
    return made["x.weight"][:rows, :columns], made["x.weight_scale_inv"]


# The last one has more rows than are worked on at a time.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (128, 128), (300, 200), (64, 520), (4096 + 131, 130)])
def test_a_weight_is_quantised_to_the_bits_of_transformers(shape: tuple[int, int], dtype: torch.dtype):
    weight = weight_of(*shape, dtype)
    quantised, scale_inv = quantise(weight)
    expected, expected_scale = theirs(weight)
    assert quantised.dtype == torch.float8_e4m3fn
    assert quantised.shape == weight.shape
    assert scale_inv.dtype == torch.float32
    assert scale_inv.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    assert torch.equal(quantised.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale_inv, expected_scale)


@pytest.mark.parametrize("shape", [(256, 384), (300, 200)])
def test_what_comes_back_is_what_transformers_makes_of_it_and_off_by_half_a_step_at_most(shape: tuple[int, int]):
    weight = weight_of(*shape, torch.float32)
    quantised, scale_inv = quantise(weight)
    back = dequantise(quantised, scale_inv)
    padded = torch.nn.functional.pad(quantised.float(), (0, -shape[1] % 128, 0, -shape[0] % 128)).to(quantised.dtype)
    expected = finegrained.Fp8Dequantize(QUANTIZER)._dequantize_one(padded, scale_inv, torch.float32)
    assert torch.equal(back, expected[: shape[0], : shape[1]])
    # Three bits of mantissa; what is small beside its block's largest has a fixed step, 2⁻⁹ of a scale.
    step = scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]] * 2**-9
    assert ((back - weight).abs() <= torch.maximum(weight.abs() * 2**-4, step / 2) * (1 + 1e-6)).all()


def test_a_block_too_small_for_a_scale_becomes_zero_not_a_number_that_is_none():
    quantised, scale_inv = quantise(torch.full((128, 256), 1e-38))
    back = dequantise(quantised, scale_inv)
    assert back.isfinite().all()
    assert back.abs().max() < 1e-30


def test_scales_of_another_weight_are_refused():
    quantised, scale_inv = quantise(weight_of(256, 256))
    with pytest.raises(ValueError, match=r"scales of \[2, 2\] for a weight of \[256, 128\], which has \[2, 1\]"):
        dequantise(quantised[:, :128], scale_inv)


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations made within and that are still there, and the most there were."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, Tensor)}
        for tensor in result if isinstance(result, tuple | list) else (result,):
            key = tensor.untyped_storage()._cdata
            if key not in given | self._seen:
                self._count(tensor.untyped_storage(), key)
        return result

    def _count(self, storage: Any, key: int) -> None:
        def gone() -> None:
            self.live -= nbytes
            self._seen.discard(key)

        nbytes = storage.nbytes()
        self.live += nbytes
        self.most = max(self.most, self.live)
        self._seen.add(key)
        weakref.finalize(storage, gone)


@pytest.mark.parametrize("shape", [(1024, 2048), (4096 * 3, 256), (4096 + 1024, 512)])
def test_it_holds_what_the_plan_counts(shape: tuple[int, int]):
    weight = weight_of(*shape)
    with LiveBytes() as books:
        made = quantise(weight)
    assert books.live >= sum(tensor.nbytes for tensor in made) > 0
    assert 0.95 < books.most / quantiser_bytes(*shape) < 1.05
