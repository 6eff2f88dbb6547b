"""The gated delta rule over samples in one row, against that of transformers over each by itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from transformers.models.qwen3_next.modeling_qwen3_next import causal_conv1d_fn, torch_recurrent_gated_delta_rule

from rllaunch.backends.megatron.delta_net import causal_convolution, gated_delta_rule

pytestmark = pytest.mark.stack

# Of one chunk, of several, of whole ones only, of a single position; not in the order of their lengths.
LENS = (7, 150, 1, 64, 65)


def drawn() -> list[torch.Tensor]:
    """Queries, keys, values, decays and betas of a row: 2 key heads of 8, 4 value heads of 6."""
    generator = torch.Generator().manual_seed(2)
    R = sum(LENS)
    q, k, v = (torch.randn(R, heads, width, generator=generator) for heads, width in ((2, 8), (2, 8), (4, 6)))
    decay = -torch.rand(R, 4, generator=generator) * 0.2
    beta = torch.rand(R, 4, generator=generator)
    return [t.requires_grad_() for t in (q, k, v, decay, beta)]


def position_by_position(inputs: list[torch.Tensor]) -> torch.Tensor:
    """What transformers computes while it generates, one sample after the other."""
    said = []
    for q, k, v, decay, beta in zip(*(t.split(LENS) for t in inputs), strict=True):
        out, _ = torch_recurrent_gated_delta_rule(
            q[None].repeat_interleave(2, dim=2),
            k[None].repeat_interleave(2, dim=2),
            v[None],
            g=decay[None],
            beta=beta[None],
            initial_state=None,
            output_final_state=False,
            use_qk_l2norm_in_kernel=True,
        )
        said.append(out[0])
    return torch.cat(said)


def test_each_sample_has_a_state_of_its_own_and_gradients_are_those_of_single_steps() -> None:
    inputs = drawn()
    q, k, v, decay, beta = inputs
    got, want = gated_delta_rule(q, k, v, decay, beta, LENS), position_by_position(inputs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weight = torch.linspace(-1, 1, got.numel()).view(got.shape)
    mine, theirs = (torch.autograd.grad((out * weight).sum(), inputs) for out in (got, want))
    for own, single in zip(mine, theirs, strict=True):
        torch.testing.assert_close(own, single, rtol=1e-3, atol=1e-4)


def test_states_are_float32_whatever_they_are_made_of() -> None:
    q, k, v, decay, beta = (t.detach() for t in drawn())
    rounded = [t.bfloat16() for t in (q, k, v)]
    got = gated_delta_rule(*rounded, decay, beta, LENS)
    assert got.dtype == torch.float32
    want = gated_delta_rule(*(t.float() for t in rounded), decay, beta, LENS)
    assert torch.equal(got, want)


@pytest.mark.parametrize(("times", "tolerance"), [(50.0, 1e-4), (1e4, 1e-2)])
def test_strong_decay_is_no_overflow(times: float, tolerance: float) -> None:
    """Decays are summed over a chunk, so that where they are thousands little is left of small ones among them."""
    inputs: list[Any] = [t.detach() for t in drawn()]
    inputs[3] = inputs[3] * times
    q, k, v, decay, beta = (t.requires_grad_() for t in inputs)
    got = gated_delta_rule(q, k, v, decay, beta, LENS)
    torch.testing.assert_close(got, position_by_position(inputs), rtol=tolerance, atol=tolerance)
    assert all(t.isfinite().all() for t in torch.autograd.grad(got.sum(), inputs))


@pytest.mark.parametrize("kernel", [1, 2, 4])
def test_a_convolution_reaches_into_no_other_sample(kernel: int) -> None:
    x_RA, weight_AW = torch.randn(sum(LENS), 5), torch.randn(5, kernel)
    got = causal_convolution(x_RA, weight_AW, LENS)
    want = torch.cat([causal_conv1d_fn(x.t()[None], weight_AW)[0].t() for x in x_RA.split(LENS)])
    torch.testing.assert_close(got, want)
