"""From rewards to advantages: group-relative (GRPO, Dr. GRPO), GAE (PPO), and whitening.

Masks are 1 (or True) at real response tokens. What stands outside a mask is never read into a result,
so padding may hold anything, NaN included, and comes back as 0.
"""

# B sequences in the batch, P prompts, G samples per prompt (B = P * G), T response tokens

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def group_advantages(reward_B: Tensor, group_size: int, *, normalize: bool = True, eps: float = 1e-6) -> Tensor:
    """Advantage of each sample over the mean reward of its own prompt's samples, [B].

    (r - mean) / (std + eps) inside each group, or just r - mean with `normalize=False` (Dr. GRPO). The
    std is the sample one, with G - 1 in its denominator: the paper writes only "std", and TRL and verl
    both correct it. A group whose rewards are all equal gets exactly 0, whatever the rounding of its mean.

    Args:
        reward_B: one reward per sample; the G samples of one prompt are adjacent.
        group_size: G, at least 2.
        eps: added to the std, in the reward's unit.
    Raises:
        ValueError: `group_size` is below 2 or does not divide B, or `reward_B` is not one-dimensional.
    Source: GRPO, arXiv:2402.03300 section 4.1.2; Dr. GRPO, arXiv:2503.20783; eps and the corrected std as
        in verl, verl/trainer/ppo/core_algos.py@b178a3c (TRL: the same std, eps 1e-4).
    """
    if reward_B.dim() != 1:
        raise ValueError(f"reward_B has shape {list(reward_B.shape)}; group advantages need one reward per sample, [B]")
    if group_size < 2:
        raise ValueError(
            f"group_size = {group_size}: an advantage is measured against the other samples of the prompt, "
            "and there are none. Use group_size >= 2, or advantages that need no group (gae)."
        )
    if reward_B.numel() % group_size:
        raise ValueError(
            f"{reward_B.numel()} rewards do not divide into groups of {group_size}; "
            "keep all samples of a prompt in one batch"
        )
    if not reward_B.is_floating_point() or reward_B.itemsize < 4:
        reward_B = reward_B.float()
    reward_PG = reward_B.view(-1, group_size)
    centred_PG = reward_PG - reward_PG.mean(dim=1, keepdim=True)
    # The float32 mean of equal rewards can miss them by an ulp (three times 0.1), and an ulp over
    # (std of about an ulp + eps) is a push in a random direction. Hence exact, not merely small.
    is_tied_P1 = reward_PG.amax(dim=1, keepdim=True) == reward_PG.amin(dim=1, keepdim=True)
    centred_PG = torch.where(is_tied_P1, torch.zeros_like(centred_PG), centred_PG)
    if not normalize:
        return centred_PG.flatten()
    return (centred_PG / (reward_PG.std(dim=1, keepdim=True) + eps)).flatten()


def gae(reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lambd: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the returns to fit values to, both [B, T] and without gradient.

    delta_t = r_t + gamma * V_{t+1} - V_t and A_t = delta_t + gamma * lambd * A_{t+1}; return_t = A_t + V_t.
    The episode ends with the mask: nothing is bootstrapped after the last real token, so a response cut
    off by the length limit counts as finished.

    Args:
        reward_BT: reward received on emitting token t (an outcome reward stands at the last real token).
        value_BT: value of the state before token t is emitted.
        mask_BT: 1 at real tokens, which come first in every row.
    Raises:
        ValueError: the shapes differ, or a row of the mask has a real token after a padded one.
    Source: Schulman et al., arXiv:1506.02438, equations 11 to 16.
    """
    if not reward_BT.shape == value_BT.shape == mask_BT.shape or reward_BT.dim() != 2:
        raise ValueError(
            f"gae needs three tensors of one shape [B, T]; got reward {list(reward_BT.shape)}, "
            f"value {list(value_BT.shape)}, mask {list(mask_BT.shape)}"
        )
    is_real_BT = mask_BT.bool()
    if bool((is_real_BT[:, 1:] & ~is_real_BT[:, :-1]).any()):
        raise ValueError(
            "mask_BT has a real token after a padded one; gae needs each row's real tokens first, unbroken"
        )

    with torch.no_grad():
        reward_BT = torch.where(is_real_BT, reward_BT, torch.zeros_like(reward_BT))
        value_BT = torch.where(is_real_BT, value_BT, torch.zeros_like(value_BT))
        next_value_B = torch.zeros_like(value_BT[:, 0])
        next_advantage_B = torch.zeros_like(value_BT[:, 0])
        advantage_BT = torch.zeros_like(value_BT)
        # With rewards and values zeroed outside the mask, the recursion yields 0 there by itself, and
        # the last real token sees V_{t+1} = 0.
        for t in reversed(range(value_BT.shape[1])):
            delta_B = reward_BT[:, t] + gamma * next_value_B - value_BT[:, t]
            next_advantage_B = delta_B + gamma * lambd * next_advantage_B
            next_value_B = value_BT[:, t]
            advantage_BT[:, t] = next_advantage_B
        return advantage_BT, advantage_BT + value_BT


def outcome_advantages(
    reward_B: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lambd: float, *, normalize: bool
) -> tuple[Tensor, Tensor]:
    """`gae` where a response is rewarded as a whole, with its last real token: advantages and returns, [B, T] each.

    Args:
        normalize: whiten the advantages over all of the mask; the returns stay in the reward's unit.
    """
    reward_BT = torch.zeros_like(value_BT)
    last_B = (mask_BT.bool().sum(1) - 1).clamp(min=0)
    reward_BT[torch.arange(len(reward_B), device=reward_B.device), last_B] = reward_B.to(value_BT.dtype)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, gamma, lambd)
    return (whiten(advantage_BT, mask_BT) if normalize else advantage_BT), return_BT


class Moments(NamedTuple):
    """What a mean and a variance are made of; adds up over ranks. Each a float64 scalar."""

    total: Tensor
    total_of_squares: Tensor
    num_entries: Tensor


def masked_moments(x_BT: Tensor, mask_BT: Tensor) -> Moments:
    """Sum, sum of squares and number of the entries inside the mask.

    To whiten over data-parallel ranks, add the moments up first:

        summed_3 = torch.stack(masked_moments(x_BT, mask_BT))
        dist.all_reduce(summed_3)
        whiten_from_moments(x_BT, mask_BT, Moments(*summed_3))
    """
    # float64, because the variance is a difference of two sums that grow with the mean: in float32
    # advantages around 1000 with a std of 0.1 lose the std altogether.
    is_real_BT = mask_BT.bool()
    x_BT = torch.where(is_real_BT, x_BT, torch.zeros_like(x_BT)).double()
    return Moments(x_BT.sum(), x_BT.square().sum(), is_real_BT.sum().double())


def whiten_from_moments(x_BT: Tensor, mask_BT: Tensor, moments: Moments, *, eps: float = 1e-8) -> Tensor:
    """`x_BT` shifted and scaled by the mean and std the moments stand for, [B, T]; 0 outside the mask.

    (x - mean) / sqrt(var + eps), with num_entries - 1 in the variance's denominator. One entry becomes 0.

    Source: `masked_whiten` of verl, verl/utils/torch_functional.py@b178a3c, which TRL's PPO shares.
    """
    mean = moments.total / moments.num_entries.clamp(min=1)
    variance = (moments.total_of_squares - moments.total * mean) / (moments.num_entries - 1).clamp(min=1)
    # Rounding can leave an exact 0 slightly negative.
    white_BT = (x_BT.double() - mean) * torch.rsqrt(variance.clamp(min=0) + eps)
    return torch.where(mask_BT.bool(), white_BT, torch.zeros_like(white_BT)).to(x_BT.dtype)


def whiten(x_BT: Tensor, mask_BT: Tensor, *, eps: float = 1e-8) -> Tensor:
    """`x_BT` with mean 0 and variance 1 over the mask of this rank alone, [B, T]; 0 outside the mask."""
    return whiten_from_moments(x_BT, mask_BT, masked_moments(x_BT, mask_BT), eps=eps)


@dataclass(frozen=True)
class Judgement:
    """A critic's values before the first step, and the returns to fit them to."""

    value_BL: Tensor
    return_BL: Tensor
