"""Advantages against numbers worked out by hand, and against the identities that define them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rllaunch.algo.advantages import (
    Moments,
    gae,
    group_advantages,
    masked_moments,
    outcome_advantages,
    whiten,
    whiten_from_moments,
)

SEEDS = st.integers(min_value=0, max_value=2**31 - 1)
NAN = math.nan


def random_episodes(seed: int, b: int = 3, t: int = 5) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """Double-precision rewards, values and prefix masks, with the number of real tokens of each row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, t + 1, (b,), generator=generator)
    mask_BT = torch.arange(t).unsqueeze(0) < lengths.unsqueeze(1)
    reward_BT = torch.randn(b, t, generator=generator, dtype=torch.float64)
    value_BT = torch.randn(b, t, generator=generator, dtype=torch.float64)
    return reward_BT, value_BT, mask_BT, lengths.tolist()


def test_a_group_is_centred_and_divided_by_its_sample_std() -> None:
    # group 1: mean 2, deviations -1 0 1, std sqrt(2 / (3 - 1)) = 1
    # group 2: mean 3, deviations -3 0 3, std sqrt(18 / 2) = 3
    advantage_B = group_advantages(torch.tensor([1.0, 2.0, 3.0, 0.0, 3.0, 6.0]), 3, eps=0.0)
    assert advantage_B.tolist() == [-1.0, 0.0, 1.0, -1.0, 0.0, 1.0]


def test_eps_is_added_to_the_std() -> None:
    # mean 1, std sqrt(2 / 1) = 1.41421356; 1 / (1.41421356 + 0.5) = 0.52240775
    advantage_B = group_advantages(torch.tensor([0.0, 2.0], dtype=torch.float64), 2, eps=0.5)
    assert advantage_B.tolist() == pytest.approx([-0.52240775, 0.52240775], abs=1e-8)


def test_without_normalizing_a_group_is_only_centred() -> None:
    advantage_B = group_advantages(torch.tensor([1.0, 2.0, 3.0, 0.0, 3.0, 6.0]), 3, normalize=False)
    assert advantage_B.tolist() == [-1.0, 0.0, 1.0, -3.0, 0.0, 3.0]


@pytest.mark.parametrize("normalize", [True, False])
def test_equal_rewards_give_exactly_zero_even_where_their_mean_is_rounded(normalize: bool) -> None:
    rewards = [0.1, 0.7, 1 / 3, 1e8]
    for group_size in range(2, 12):
        reward_B = torch.tensor(rewards).repeat_interleave(group_size)
        assert group_advantages(reward_B, group_size, normalize=normalize, eps=1e-6).eq(0).all()


def test_integer_and_half_precision_rewards_give_float32_advantages() -> None:
    expected_B = group_advantages(torch.tensor([0.0, 1.0, 1.0, 1.0]), 4)
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.float16):
        advantage_B = group_advantages(torch.tensor([0, 1, 1, 1], dtype=dtype), 4)
        assert advantage_B.dtype == torch.float32
        assert torch.equal(advantage_B, expected_B)


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError) as raised:
        group_advantages(torch.tensor([1.0, 2.0]), 1)
    assert str(raised.value) == (
        "group_size = 1: an advantage is measured against the other samples of the prompt, and there "
        "are none. Use group_size >= 2, or advantages that need no group (gae)."
    )


def test_a_torn_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^5 rewards do not divide into groups of 2; keep all samples"):
        group_advantages(torch.zeros(5), 2)


def test_per_token_rewards_are_refused_as_group_rewards() -> None:
    with pytest.raises(ValueError, match=r"^reward_B has shape \[2, 4\]"):
        group_advantages(torch.zeros(2, 4), 2)


group_lists = st.integers(min_value=2, max_value=6).flatmap(
    lambda g: st.tuples(
        st.just(g),
        st.lists(
            st.lists(st.floats(min_value=-10, max_value=10, width=32), min_size=g, max_size=g),
            min_size=1,
            max_size=4,
        ),
    )
)


@settings(max_examples=60, deadline=None)
@given(group_lists, st.booleans())
def test_advantages_sum_to_zero_in_every_group(groups: tuple[int, list[list[float]]], normalize: bool) -> None:
    group_size, rows = groups
    reward_B = torch.tensor(rows, dtype=torch.float64).flatten()
    advantage_PG = group_advantages(reward_B, group_size, normalize=normalize).view(-1, group_size)
    # Rounding of the mean is about 1e-15 and eps = 1e-6 lets it grow by at most 1e6.
    assert advantage_PG.sum(dim=1).abs().max().item() < 1e-7


@settings(max_examples=60, deadline=None)
@given(group_lists, st.booleans(), st.randoms(use_true_random=False))
def test_reordering_prompts_reorders_advantages_and_nothing_else(
    groups: tuple[int, list[list[float]]], normalize: bool, random: object
) -> None:
    group_size, rows = groups
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    reward_PG = torch.tensor(rows, dtype=torch.float64)
    straight_PG = group_advantages(reward_PG.flatten(), group_size, normalize=normalize).view(-1, group_size)
    reordered_PG = group_advantages(reward_PG[order].flatten(), group_size, normalize=normalize).view(-1, group_size)
    assert torch.equal(reordered_PG, straight_PG[order])


@settings(max_examples=60, deadline=None)
@given(group_lists)
def test_normalized_advantages_do_not_depend_on_the_rewards_zero_and_unit(
    groups: tuple[int, list[list[float]]],
) -> None:
    group_size, rows = groups
    reward_B = torch.tensor(rows, dtype=torch.float64).flatten()
    spread_PG = reward_B.view(-1, group_size)
    if (spread_PG.amax(1) - spread_PG.amin(1)).min() < 1e-2:
        return  # eps shows
    torch.testing.assert_close(
        group_advantages(4.0 * reward_B - 7.0, group_size, eps=0.0),
        group_advantages(reward_B, group_size, eps=0.0),
        rtol=1e-9,
        atol=1e-9,
    )


def test_gae_of_three_tokens_is_the_one_worked_out_by_hand() -> None:
    # gamma 0.5, lambda 0.5, so advantages decay by 0.25; values 1 2 4, one reward of 8 at the last token.
    # delta: 0 + 0.5 * 2 - 1 = 0;  0 + 0.5 * 4 - 2 = 0;  8 + 0 - 4 = 4
    # A:     0.25 * 1 = 0.25;       0.25 * 4 = 1;         4
    advantage_BT, return_BT = gae(
        torch.tensor([[0.0, 0.0, 8.0]]), torch.tensor([[1.0, 2.0, 4.0]]), torch.ones(1, 3), 0.5, 0.5
    )
    assert advantage_BT.tolist() == [[0.25, 1.0, 4.0]]
    assert return_BT.tolist() == [[1.25, 3.0, 8.0]]


def test_gae_ends_an_episode_at_its_last_real_token_and_never_reads_the_padding() -> None:
    # row 1, two tokens: delta_1 = 3 - 2 = 1;  delta_0 = 1 + 0.5 * 2 - 1 = 1;  A = [1 + 0.25 * 1, 1]
    # row 2, no token at all
    advantage_BT, return_BT = gae(
        torch.tensor([[1.0, 3.0, NAN], [NAN, NAN, NAN]]),
        torch.tensor([[1.0, 2.0, NAN], [9.0, 9.0, 9.0]]),
        torch.tensor([[1, 1, 0], [0, 0, 0]]),
        0.5,
        0.5,
    )
    assert advantage_BT.tolist() == [[1.25, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert return_BT.tolist() == [[2.25, 3.0, 0.0], [0.0, 0.0, 0.0]]


@settings(max_examples=50, deadline=None)
@given(SEEDS)
def test_gae_with_gamma_and_lambda_one_is_the_reward_to_go_minus_the_value(seed: int) -> None:
    reward_BT, value_BT, mask_BT, lengths = random_episodes(seed)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, 1.0, 1.0)
    for b, length in enumerate(lengths):
        for t in range(length):
            reward_to_go = sum(reward_BT[b, t:length].tolist())
            assert return_BT[b, t].item() == pytest.approx(reward_to_go, abs=1e-12)
            assert advantage_BT[b, t].item() == pytest.approx(reward_to_go - value_BT[b, t].item(), abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.floats(min_value=0, max_value=1))
def test_gae_with_lambda_zero_is_the_td_error(seed: int, gamma: float) -> None:
    reward_BT, value_BT, mask_BT, lengths = random_episodes(seed)
    advantage_BT, _ = gae(reward_BT, value_BT, mask_BT, gamma, 0.0)
    for b, length in enumerate(lengths):
        for t in range(length):
            next_value = value_BT[b, t + 1].item() if t + 1 < length else 0.0
            td_error = reward_BT[b, t].item() + gamma * next_value - value_BT[b, t].item()
            assert advantage_BT[b, t].item() == pytest.approx(td_error, abs=1e-12)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.floats(min_value=0, max_value=1), st.floats(min_value=0, max_value=1))
def test_gae_is_the_discounted_sum_of_td_errors(seed: int, gamma: float, lambd: float) -> None:
    reward_BT, value_BT, mask_BT, lengths = random_episodes(seed)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma, lambd)
    td_error_BT, _ = gae(reward_BT, value_BT, mask_BT, gamma, 0.0)
    for b, length in enumerate(lengths):
        for t in range(length):
            total = sum((gamma * lambd) ** k * td_error_BT[b, t + k].item() for k in range(length - t))
            assert advantage_BT[b, t].item() == pytest.approx(total, abs=1e-12)
    assert torch.equal(return_BT, torch.where(mask_BT, advantage_BT + value_BT, 0.0))
    assert advantage_BT[~mask_BT].eq(0).all()


def test_no_gradient_flows_from_advantages_or_returns_into_the_critic() -> None:
    value_BT = torch.ones(1, 2, requires_grad=True)
    advantage_BT, return_BT = gae(torch.ones(1, 2), value_BT, torch.ones(1, 2), 0.9, 0.9)
    assert not advantage_BT.requires_grad
    assert not return_BT.requires_grad


def test_gae_refuses_a_mask_with_a_hole() -> None:
    with pytest.raises(ValueError, match=r"^mask_BT has a real token after a padded one"):
        gae(torch.zeros(1, 3), torch.zeros(1, 3), torch.tensor([[1, 0, 1]]), 1.0, 1.0)


def test_gae_refuses_one_reward_per_sequence() -> None:
    with pytest.raises(ValueError, match=r"got reward \[3\], value \[3, 2\], mask \[3, 2\]$"):
        gae(torch.zeros(3), torch.zeros(3, 2), torch.ones(3, 2), 1.0, 1.0)


def test_whitening_uses_the_masked_entries_only_and_leaves_zero_elsewhere() -> None:
    # inside: 1 3 5, mean 3, variance (4 + 0 + 4) / (3 - 1) = 4
    x_BT = torch.tensor([[1.0, 3.0, NAN], [5.0, 1e9, -1e9]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert whiten(x_BT, mask_BT, eps=0.0).tolist() == [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]
    assert [m.item() for m in masked_moments(x_BT, mask_BT)] == [9.0, 35.0, 3.0]


def test_whitening_one_entry_or_none_gives_zero() -> None:
    x_BT = torch.tensor([[7.0, 8.0]])
    assert whiten(x_BT, torch.tensor([[1, 0]])).tolist() == [[0.0, 0.0]]
    assert whiten(x_BT, torch.tensor([[0, 0]])).tolist() == [[0.0, 0.0]]


def test_whitening_keeps_a_small_spread_around_a_large_mean() -> None:
    # In float32 the sums of squares are 1e8 each and their difference is rounding.
    x_BT = torch.tensor([[10000.0, 10000.125, 9999.875, 10000.0]])
    white_BT = whiten(x_BT, torch.ones(1, 4), eps=0.0)
    # deviations 0 1 -1 0 eighths, variance 2 / 3 of an eighth squared
    assert white_BT.tolist()[0] == pytest.approx([0.0, 1.2247449, -1.2247449, 0.0], abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(min_value=1, max_value=5))
def test_whitening_over_summed_moments_of_ranks_equals_whitening_on_one_rank(seed: int, cut: int) -> None:
    x_BT, _, mask_BT, _ = random_episodes(seed, b=6)
    whole_BT = whiten(x_BT.float(), mask_BT)
    ranks = [(x_BT[:cut].float(), mask_BT[:cut]), (x_BT[cut:].float(), mask_BT[cut:])]
    summed_3 = torch.stack([torch.stack(masked_moments(x, mask)) for x, mask in ranks]).sum(dim=0)
    parts = [whiten_from_moments(x, mask, Moments(*summed_3)) for x, mask in ranks]
    torch.testing.assert_close(torch.cat(parts), whole_BT, rtol=1e-6, atol=1e-7)
    if mask_BT.sum() > 1:
        inside = whole_BT[mask_BT].double()
        assert inside.mean().item() == pytest.approx(0.0, abs=1e-6)
        assert inside.var().item() == pytest.approx(1.0, abs=1e-4)


def test_a_response_is_rewarded_with_its_last_real_token() -> None:
    reward_B, mask_BT = torch.tensor([8.0, 3.0, 5.0]), torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0]])
    value_BT = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, NAN], [9.0, 9.0, 9.0]])
    advantage_BT, return_BT = outcome_advantages(reward_B, value_BT, mask_BT, 0.5, 0.5, normalize=False)
    # The first row as worked out above; in the second delta_1 = 3 - 2 = 1 and delta_0 = 0.5 * 2 - 1 = 0.
    assert advantage_BT.tolist() == [[0.25, 1.0, 4.0], [0.25, 1.0, 0.0], [0.0, 0.0, 0.0]]
    white_BT, same_return_BT = outcome_advantages(reward_B, value_BT, mask_BT, 0.5, 0.5, normalize=True)
    assert torch.equal(white_BT, whiten(advantage_BT, mask_BT))
    assert torch.equal(same_return_BT, return_BT)
