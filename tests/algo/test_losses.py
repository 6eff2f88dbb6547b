"""Losses against numbers worked out by hand, torch's own distributions, and gradients in closed form."""

from __future__ import annotations

import math
from typing import Literal, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.distributions import Categorical, kl_divergence

from rllaunch.algo.losses import (
    AggregationMode,
    KlKind,
    aggregate,
    aggregation_count,
    clipped_policy_loss,
    kl_estimate,
    kl_k3,
    token_logprobs,
    value_loss,
)

SEEDS = st.integers(min_value=0, max_value=2**31 - 1)
MODES: tuple[AggregationMode, ...] = get_args(AggregationMode)
KL_KINDS: tuple[KlKind, ...] = get_args(KlKind)


def randn(*shape: int, seed: int, requires_grad: bool = False) -> Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.requires_grad_(requires_grad)


def grad_of(scalar: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(scalar, leaf, retain_graph=True)[0]


# --- log-probabilities and entropy -------------------------------------------------------------------


def test_log_probability_and_entropy_of_a_known_distribution() -> None:
    # p = 1/2, 1/4, 1/4: entropy = 1/2 ln 2 + 2 * 1/4 * ln 4 = 1.5 ln 2
    logits_BTV = torch.tensor([[[0.5, 0.25, 0.25]]], dtype=torch.float64).log()
    logp_BT, entropy_BT = token_logprobs(logits_BTV, torch.tensor([[2]]))
    assert logp_BT.item() == pytest.approx(-2 * math.log(2), abs=1e-12)
    assert entropy_BT.item() == pytest.approx(1.5 * math.log(2), abs=1e-12)


def test_temperature_divides_the_logits() -> None:
    # logits 0 and 2 ln 3 at temperature 2: weights 1 and 3
    logits_BTV = torch.tensor([[[0.0, 2 * math.log(3)]]], dtype=torch.float64)
    logp_BT, entropy_BT = token_logprobs(logits_BTV, torch.tensor([[1]]), temperature=2.0)
    assert logp_BT.item() == pytest.approx(math.log(0.75), abs=1e-12)
    assert entropy_BT.item() == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probabilities_and_entropy_agree_with_torch(temperature: float) -> None:
    logits_BTV = randn(2, 3, 7, seed=0)
    token_BT = torch.tensor([[0, 6, 3], [2, 2, 5]])
    logp_BT, entropy_BT = token_logprobs(logits_BTV, token_BT, temperature)
    cross_entropy_BT = F.cross_entropy((logits_BTV / temperature).mT, token_BT, reduction="none")
    torch.testing.assert_close(logp_BT, -cross_entropy_BT)
    expected_entropy_BT = Categorical(logits=logits_BTV / temperature).entropy()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(entropy_BT, expected_entropy_BT)


def test_gradients_of_log_probability_and_entropy_agree_with_finite_differences() -> None:
    token_BT = torch.tensor([[0, 4, 2]])
    logits_BTV = randn(1, 3, 5, seed=1, requires_grad=True)
    assert gradcheck(lambda logits: token_logprobs(logits, token_BT, 0.7), (logits_BTV,))


def test_gradient_of_the_entropy_is_minus_p_times_log_p_plus_entropy() -> None:
    # dH / dlogit_i = -p_i (log p_i + H)
    logits_BTV = randn(2, 3, 5, seed=2, requires_grad=True)
    _, entropy_BT = token_logprobs(logits_BTV, torch.zeros(2, 3, dtype=torch.int64))
    p_BTV = torch.softmax(logits_BTV.detach(), dim=-1)
    expected_BTV = -p_BTV * (p_BTV.log() + entropy_BT.detach().unsqueeze(-1))
    torch.testing.assert_close(grad_of(entropy_BT.sum(), logits_BTV), expected_BTV)


def test_the_mean_log_probability_of_samples_would_be_no_entropy_bonus() -> None:
    # Expectations over every token the policy can draw, with its probability as a fixed weight, as
    # sampling does it. Same value as the entropy, but the gradient vanishes; the entropy's does not.
    logits_V = randn(6, seed=3, requires_grad=True)
    logits_BTV = logits_V.expand(1, 6, 6)
    logp_BT, entropy_BT = token_logprobs(logits_BTV, torch.arange(6).unsqueeze(0))
    p_BT = torch.softmax(logits_V.detach(), dim=-1).unsqueeze(0)
    imitation = -(p_BT * logp_BT).sum()
    assert imitation.item() == pytest.approx(entropy_BT[0, 0].item(), abs=1e-12)
    assert grad_of(imitation, logits_V).abs().max().item() < 1e-12
    assert grad_of(entropy_BT[0, 0], logits_V).abs().max().item() > 0.1


def test_an_impossible_token_leaves_entropy_and_gradients_finite() -> None:
    logits_BTV = torch.tensor([[[0.0, 0.0, -math.inf]]], requires_grad=True)
    logp_BT, entropy_BT = token_logprobs(logits_BTV, torch.tensor([[0]]))
    assert entropy_BT.item() == pytest.approx(math.log(2))
    assert grad_of((logp_BT + entropy_BT).sum(), logits_BTV).tolist() == [[[0.5, -0.5, 0.0]]]


def test_bf16_logits_are_normalized_in_float32() -> None:
    logits_BTV = (4 * randn(1, 4, 300, seed=4)).bfloat16()
    token_BT = torch.tensor([[0, 1, 2, 299]])
    logp_BT, entropy_BT = token_logprobs(logits_BTV, token_BT)
    assert (logp_BT.dtype, entropy_BT.dtype) == (torch.float32, torch.float32)
    exact_logp_BT, exact_entropy_BT = token_logprobs(logits_BTV.double(), token_BT)
    torch.testing.assert_close(logp_BT.double(), exact_logp_BT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_BT.double(), exact_entropy_BT, rtol=1e-5, atol=1e-5)


def test_a_temperature_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^temperature = 0: must be above 0"):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.int64), 0)


def test_logits_that_were_not_shifted_to_the_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^logits \[1, 4, 2\] and tokens \[1, 3\]"):
        token_logprobs(torch.zeros(1, 4, 2), torch.zeros(1, 3, dtype=torch.int64))


# --- KL ----------------------------------------------------------------------------------------------


def test_kl_estimates_of_known_log_probabilities() -> None:
    # policy gives the token 1/2, the reference 1/4: d = ref_logp - logp = -ln 2
    logp_BT, ref_logp_BT = torch.tensor([[0.5]]).double().log(), torch.tensor([[0.25]]).double().log()
    assert kl_estimate("k1", logp_BT, ref_logp_BT).item() == pytest.approx(math.log(2), abs=1e-12)
    assert kl_estimate("k2", logp_BT, ref_logp_BT).item() == pytest.approx(math.log(2) ** 2 / 2, abs=1e-12)
    assert kl_estimate("k3", logp_BT, ref_logp_BT).item() == pytest.approx(0.5 + math.log(2) - 1, abs=1e-12)
    # and the other way round, d = ln 2
    assert kl_k3(ref_logp_BT, logp_BT).item() == pytest.approx(2 - math.log(2) - 1, abs=1e-12)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_a_policy_equal_to_its_reference_has_no_kl(kind: KlKind) -> None:
    logp_BT = -randn(2, 3, seed=5).abs()
    assert kl_estimate(kind, logp_BT, logp_BT.clone()).eq(0).all()


@pytest.mark.parametrize("kind", KL_KINDS)
def test_kl_gradients_agree_with_finite_differences(kind: KlKind) -> None:
    logp_BT, ref_logp_BT = randn(2, 3, seed=6, requires_grad=True), randn(2, 3, seed=7)
    assert gradcheck(lambda logp: kl_estimate(kind, logp, ref_logp_BT), (logp_BT,))


@settings(max_examples=50, deadline=None)
@given(st.floats(min_value=-50, max_value=0), st.floats(min_value=-50, max_value=0))
def test_k3_is_never_negative(logp: float, ref_logp: float) -> None:
    for dtype in (torch.float32, torch.float64):
        assert kl_k3(torch.tensor([[logp]], dtype=dtype), torch.tensor([[ref_logp]], dtype=dtype)).item() >= 0


def test_k3_of_a_tiny_difference_is_half_its_square_and_not_rounding() -> None:
    # exp(d) - 1 - d in float32 gives 0 or 6e-8 here
    k3 = kl_k3(torch.tensor([[-1e-3]]), torch.tensor([[0.0]])).item()
    assert k3 == pytest.approx(0.5e-6, rel=1e-3)


def test_what_each_kl_estimate_and_its_gradient_are_on_average() -> None:
    # All tokens the policy can draw, weighted by its (fixed) probabilities: the limit of many samples.
    logits_V = randn(6, seed=8, requires_grad=True)
    ref_logp_V = torch.log_softmax(randn(6, seed=9), dim=-1)
    p_V = torch.softmax(logits_V.detach(), dim=-1)
    policy, reference = Categorical(logits=logits_V), Categorical(logits=ref_logp_V)
    forward, backward = kl_divergence(policy, reference), kl_divergence(reference, policy)
    forward_grad_V, backward_grad_V = grad_of(forward, logits_V), grad_of(backward, logits_V)

    value: dict[KlKind, float] = {}
    grad_V: dict[KlKind, Tensor] = {}
    for kind in KL_KINDS:
        logp_V = torch.log_softmax(logits_V, dim=-1)
        mean = (p_V * kl_estimate(kind, logp_V, ref_logp_V)).sum()
        value[kind], grad_V[kind] = mean.item(), grad_of(mean, logits_V)

    assert value["k1"] == pytest.approx(forward.item(), abs=1e-12)
    assert value["k3"] == pytest.approx(forward.item(), abs=1e-12)
    assert abs(value["k2"] - forward.item()) > 1e-2
    torch.testing.assert_close(grad_V["k1"], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(grad_V["k2"], forward_grad_V)
    torch.testing.assert_close(grad_V["k3"], backward_grad_V)


def test_an_unknown_kl_estimate_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^unknown KL estimate 'k4'; known: k1, k2, k3$"):
        kl_estimate("k4", torch.zeros(1, 1), torch.zeros(1, 1))  # type: ignore[arg-type]


# --- clipped policy loss -----------------------------------------------------------------------------


def test_the_policy_loss_is_clipped_only_where_the_ratio_moved_with_its_advantage() -> None:
    # bounds 0.8 and 1.3; ratios below, inside and above, for A = 2 and for A = -2
    ratio_BT = torch.tensor([[0.5, 1.1, 2.0], [0.5, 1.1, 2.0]], dtype=torch.float64)
    logp_BT = ratio_BT.log().requires_grad_()
    advantage_B = torch.tensor([2.0, -2.0], dtype=torch.float64)
    loss_BT, is_clipped_BT = clipped_policy_loss(logp_BT, torch.zeros_like(logp_BT), advantage_B, 0.2, 0.3)

    expected_BT = torch.tensor([[-1.0, -2.2, -2.6], [1.6, 2.2, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(loss_BT.detach(), expected_BT)
    assert is_clipped_BT.tolist() == [[False, False, True], [True, False, False]]
    # d loss / d logp = -r A, and nothing where clipped
    expected_grad_BT = torch.tensor([[-1.0, -2.2, 0.0], [0.0, 2.2, 4.0]], dtype=torch.float64)
    torch.testing.assert_close(grad_of(loss_BT.sum(), logp_BT), expected_grad_BT)


def test_one_clip_bound_stands_for_both() -> None:
    logp_BT, advantage_BT = 0.5 * randn(4, 6, seed=10), randn(4, 6, seed=11)
    one = clipped_policy_loss(logp_BT, torch.zeros_like(logp_BT), advantage_BT, 0.2)
    two = clipped_policy_loss(logp_BT, torch.zeros_like(logp_BT), advantage_BT, 0.2, 0.2)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_policy_loss_gradients_agree_with_finite_differences() -> None:
    logp_BT, old_logp_BT = randn(3, 4, seed=12, requires_grad=True), randn(3, 4, seed=13)
    advantage_BT = randn(3, 4, seed=14)
    ratio_BT = (logp_BT.detach() - old_logp_BT).exp()
    for bound in (0.8, 1.28):
        assert ((ratio_BT - bound).abs() > 1e-3).all(), "a kink is hit"
    assert gradcheck(lambda logp: clipped_policy_loss(logp, old_logp_BT, advantage_BT, 0.2, 0.28)[0], (logp_BT,))


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.floats(min_value=0, max_value=1), st.floats(min_value=0, max_value=1))
def test_on_policy_the_gradient_is_the_plain_policy_gradient(seed: int, eps_low: float, eps_high: float) -> None:
    logits_BTV = randn(2, 3, 5, seed=seed, requires_grad=True)
    token_BT = torch.randint(5, (2, 3), generator=torch.Generator().manual_seed(seed))
    advantage_B = randn(2, seed=seed + 1)
    logp_BT, _ = token_logprobs(logits_BTV, token_BT)
    loss_BT, is_clipped_BT = clipped_policy_loss(logp_BT, logp_BT.detach(), advantage_B, eps_low, eps_high)
    # grad log p of the drawn token is onehot - p
    score_BTV = F.one_hot(token_BT, 5) - torch.softmax(logits_BTV.detach(), dim=-1)
    torch.testing.assert_close(grad_of(loss_BT.sum(), logits_BTV), -advantage_B.view(2, 1, 1) * score_BTV)
    torch.testing.assert_close(loss_BT.detach(), -advantage_B.unsqueeze(1).expand(2, 3))
    assert not is_clipped_BT.any()


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_a_token_is_called_clipped_exactly_where_its_gradient_is_zero(seed: int) -> None:
    logp_BT = randn(4, 5, seed=seed, requires_grad=True)
    advantage_BT = randn(4, 5, seed=seed + 1)
    loss_BT, is_clipped_BT = clipped_policy_loss(
        logp_BT, torch.zeros(4, 5, dtype=torch.float64), advantage_BT, 0.2, 0.3
    )
    assert torch.equal(grad_of(loss_BT.sum(), logp_BT).eq(0), is_clipped_BT)


def test_one_advantage_per_sequence_is_not_read_as_one_per_position() -> None:
    logp_BT = torch.zeros(2, 2)
    loss_BT, _ = clipped_policy_loss(logp_BT, logp_BT, torch.tensor([1.0, 3.0]), 0.2, 0.2)
    assert loss_BT.tolist() == [[-1.0, -1.0], [-3.0, -3.0]]


def test_no_gradient_flows_into_old_log_probabilities_or_advantages() -> None:
    logp_BT, old_logp_BT, advantage_BT = (randn(2, 2, seed=s, requires_grad=True) for s in (15, 16, 17))
    loss_BT, _ = clipped_policy_loss(logp_BT, old_logp_BT, advantage_BT, 0.2)
    grads = torch.autograd.grad(loss_BT.sum(), (logp_BT, old_logp_BT, advantage_BT), allow_unused=True)
    assert [grad is None for grad in grads] == [False, True, True]


def test_advantages_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"advantage \[3\]: want \[B, T\], \[B, T\], and \[B, T\] or \[B\]$"):
        clipped_policy_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3), 0.2)


@pytest.mark.parametrize(("eps_clip", "eps_clip_high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1)])
def test_clip_bounds_out_of_range_are_refused(eps_clip: float, eps_clip_high: float) -> None:
    with pytest.raises(ValueError, match=rf"eps_clip = {eps_clip}, eps_clip_high = {eps_clip_high}: need 0 <="):
        clipped_policy_loss(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), eps_clip, eps_clip_high)


# --- value loss --------------------------------------------------------------------------------------


def test_the_value_loss_takes_the_worse_of_the_free_and_the_clipped_error() -> None:
    # old value 0, clip 1, return 3:
    #   v = 0.5 inside:             (0.5 - 3)^2 / 2 = 3.125, both the same, gradient v - R = -2.5
    #   v = 2 moved towards R:      max((2 - 3)^2, (1 - 3)^2) / 2 = 2, from the clipped one, gradient 0
    #   v = -2 moved away from R:   max((-2 - 3)^2, (-1 - 3)^2) / 2 = 12.5, from the free one, gradient -5
    value_BT = torch.tensor([[0.5, 2.0, -2.0]], requires_grad=True)
    loss_BT = value_loss(value_BT, torch.zeros(1, 3), torch.full((1, 3), 3.0), 1.0)
    assert loss_BT.tolist() == [[3.125, 2.0, 12.5]]
    assert grad_of(loss_BT.sum(), value_BT).tolist() == [[-2.5, 0.0, -5.0]]


def test_an_infinite_value_clip_leaves_half_the_squared_error() -> None:
    value_BT, old_value_BT, return_BT = randn(2, 3, seed=18), randn(2, 3, seed=19), randn(2, 3, seed=20)
    loss_BT = value_loss(value_BT, old_value_BT, return_BT, math.inf)
    torch.testing.assert_close(loss_BT, 0.5 * F.mse_loss(value_BT, return_BT, reduction="none"))


def test_value_loss_gradients_agree_with_finite_differences() -> None:
    value_BT = randn(3, 4, seed=21, requires_grad=True)
    old_value_BT, return_BT = randn(3, 4, seed=22), randn(3, 4, seed=23)
    assert (((value_BT - old_value_BT).abs() - 0.3).abs() > 1e-3).all(), "a kink is hit"
    assert gradcheck(lambda value: value_loss(value, old_value_BT, return_BT, 0.3), (value_BT,))


def test_no_gradient_flows_into_old_values_or_returns() -> None:
    value_BT, old_value_BT, return_BT = (randn(2, 2, seed=s, requires_grad=True) for s in (24, 25, 26))
    loss_BT = value_loss(value_BT, old_value_BT, return_BT, 0.2)
    grads = torch.autograd.grad(loss_BT.sum(), (value_BT, old_value_BT, return_BT), allow_unused=True)
    assert [grad is None for grad in grads] == [False, True, True]


def test_values_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^value \[2, 3\], old value \[2, 3\] and return \[2, 4\]"):
        value_loss(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 4), 0.2)


# --- aggregation -------------------------------------------------------------------------------------


# Three real tokens in row 1, one in row 2, none in row 3.
LOSS_BT = torch.tensor([[1.0, 2.0, 6.0], [5.0, 100.0, 100.0], [100.0, 100.0, 100.0]])
MASK_BT = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token", 14 / 4),  # (1 + 2 + 6 + 5) / 4
        ("sequence", 4.0),  # (9 / 3 + 5 / 1) / 2
    ],
)
def test_the_mean_over_tokens_and_over_sequences(mode: AggregationMode, expected: float) -> None:
    for mask_BT in (MASK_BT, MASK_BT.bool(), MASK_BT.float()):
        assert aggregate(LOSS_BT, mask_BT, mode).item() == expected


@pytest.mark.parametrize(("mode", "expected"), [("token", 4), ("sequence", 2)])
def test_empty_rows_count_neither_as_tokens_nor_as_sequences(mode: AggregationMode, expected: int) -> None:
    assert aggregation_count(MASK_BT, mode).item() == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("denominator", [10, 10.0, torch.tensor(10), torch.tensor(10.0)])
def test_a_given_denominator_replaces_the_count(mode: AggregationMode, denominator: float | Tensor) -> None:
    expected = {"token": 14 / 10, "sequence": (3 + 5) / 10}[mode]
    assert aggregate(LOSS_BT, MASK_BT, mode, denominator=denominator).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_padding_costs_zero_and_can_still_call_backward(mode: AggregationMode) -> None:
    loss_BT = torch.full((2, 3), math.nan, requires_grad=True)
    for denominator in (None, 0, torch.tensor(0), 7):
        total = aggregate(loss_BT, torch.zeros(2, 3), mode, denominator=denominator)
        assert total.item() == 0
        assert grad_of(total, loss_BT).eq(0).all()


@pytest.mark.parametrize("mode", MODES)
def test_padding_whose_log_probabilities_are_absurd_leaves_the_gradient_finite(mode: AggregationMode) -> None:
    # exp(1000) overflows; a product with the mask would make the gradient NaN
    logp_BT = torch.zeros(1, 2, requires_grad=True)
    absurd_BT = torch.tensor([[0.0, -1000.0]])
    policy_BT, _ = clipped_policy_loss(logp_BT, absurd_BT, torch.tensor([[-1.0, 0.0]]), 0.2)
    kl_BT = kl_estimate("k3", logp_BT + absurd_BT, torch.zeros(1, 2))
    grad_BT = grad_of(aggregate(policy_BT + kl_BT, torch.tensor([[1, 0]]), mode), logp_BT)
    assert grad_BT.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("mode", MODES)
def test_aggregate_gradients_agree_with_finite_differences(mode: AggregationMode) -> None:
    loss_BT = randn(3, 3, seed=27, requires_grad=True)
    assert gradcheck(lambda loss: aggregate(loss, MASK_BT, mode), (loss_BT,))


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(MODES), st.integers(min_value=0, max_value=6))
def test_ranks_dividing_by_the_global_count_add_up_to_one_rank(seed: int, mode: AggregationMode, cut: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask_BT = torch.rand(6, 4, generator=generator) < 0.5
    mask_BT[int(torch.randint(6, (1,), generator=generator))] = False
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    loss_BT = (weight * randn(6, 4, seed=seed)).sin()

    whole = aggregate(loss_BT, mask_BT, mode)
    ranks = [(loss_BT[:cut], mask_BT[:cut]), (loss_BT[cut:], mask_BT[cut:])]
    global_count = torch.stack([aggregation_count(mask, mode) for _, mask in ranks]).sum()
    parts = [aggregate(loss, mask, mode, denominator=global_count) for loss, mask in ranks]

    torch.testing.assert_close(parts[0] + parts[1], whole)
    grads = [torch.autograd.grad(part, weight, retain_graph=True)[0] for part in (*parts, whole)]
    torch.testing.assert_close(grads[0] + grads[1], grads[2])


def test_an_unknown_aggregation_is_refused() -> None:
    mode: Literal["token"] = "tokens"  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"^unknown aggregation 'tokens'; known: token, sequence$"):
        aggregate(torch.zeros(1, 1), torch.ones(1, 1), mode)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^loss \[2, 3\] and mask \[2, 4\]"):
        aggregate(torch.zeros(2, 3), torch.ones(2, 4), "token")
