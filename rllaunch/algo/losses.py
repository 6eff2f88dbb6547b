"""From log-probabilities to a scalar loss: policy surrogate, KL, entropy, value, and how they are averaged.

Every loss comes per token and unmasked; only `aggregate` knows the mask.
"""

# B sequences in the batch, T tokens, V vocabulary

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

AggregationMode = Literal["token", "sequence"]
KlKind = Literal["k1", "k2", "k3"]

# exp(20) is 4.9e8, far beyond any ratio that means something. The limit is for padding: the log-probs
# there are arbitrary, exp overflows to inf, and inf times the 0 gradient that the mask sends back is NaN
# in every parameter. Same limit as verl.
MAX_LOG_RATIO = 20.0


def token_logprobs(logits_BTV: Tensor, token_BT: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each given token, and entropy of its distribution, in nats, [B, T] each.

    Both are of softmax(logits / temperature), the distribution that is sampled from. Computed in float32
    where the logits are narrower. A logit of -inf is a token that cannot occur and is fine.

    Args:
        logits_BTV: row t predicts token t (the caller has made the shift by one).
        token_BT: ids in [0, V), padding included: replace a label of -100 by any id.
        temperature: above 0, the rollout's own.
    Raises:
        ValueError: the shapes do not fit, or `temperature` is not above 0.
    """
    if temperature <= 0:
        raise ValueError(f"temperature = {temperature}: must be above 0; greedy sampling has no log-probs to train on")
    if logits_BTV.shape[:-1] != token_BT.shape:
        raise ValueError(
            f"logits {list(logits_BTV.shape)} and tokens {list(token_BT.shape)}: want [B, T, V] and [B, T]"
        )
    if logits_BTV.itemsize < 4:
        logits_BTV = logits_BTV.float()
    logp_BTV = torch.log_softmax(logits_BTV / temperature, dim=-1)
    p_BTV = logp_BTV.exp()
    logp_BT = logp_BTV.gather(-1, token_BT.unsqueeze(-1)).squeeze(-1)
    # The sum over the vocabulary, not -mean(logp_BT). The latter estimates the same number, but its
    # gradient on on-policy samples is E[grad log p] = 0: as an entropy bonus it is pure noise.
    # 0 log 0 is 0, where the product would be NaN.
    entropy_BT = -(p_BTV * logp_BTV.masked_fill(p_BTV == 0, 0.0)).sum(dim=-1)
    return logp_BT, entropy_BT


def kl_k3(logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, never negative, [B, T].

    exp(d) - d - 1 with d = ref_logp - logp; d counts as 20 where it is more. The mean over tokens drawn from
    the policy is the KL. The mean gradient is another one: that of KL(reference || policy).

    Source: Schulman, http://joschu.net/blog/kl-approx.html; as GRPO's loss term, arXiv:2402.03300 equation 4;
        on its gradient, arXiv:2506.09477.
    """
    log_ratio_BT = (ref_logp_BT - logp_BT).clamp(max=MAX_LOG_RATIO)
    # expm1 keeps the estimate right for a policy close to its reference, where exp(d) - 1 cancels.
    return torch.expm1(log_ratio_BT) - log_ratio_BT


def kl_estimate(kind: KlKind, logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """Per-token estimate of KL(policy || reference) in nats, from tokens the policy drew, [B, T].

    What each is good for, on tokens drawn from the policy:

        k1   logp - ref_logp       unbiased, can be negative. Right inside a reward. As a loss its
                                   gradient is 0 on average: it regularises nothing.
        k2   (logp - ref_logp)^2/2 biased, but its gradient is the KL's own.
        k3   see `kl_k3`           unbiased and non-negative; gradient of KL(reference || policy).

    Raises:
        ValueError: `kind` is none of these.
    Source: Schulman, http://joschu.net/blog/kl-approx.html; on the gradients, arXiv:2506.09477.
    """
    if kind == "k1":
        return logp_BT - ref_logp_BT
    if kind == "k2":
        return 0.5 * (logp_BT - ref_logp_BT).square()
    if kind == "k3":
        return kl_k3(logp_BT, ref_logp_BT)
    raise ValueError(f"unknown KL estimate {kind!r}; known: k1, k2, k3")


def clipped_policy_loss(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage: Tensor,
    eps_clip: float,
    eps_clip_high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Per-token policy loss to minimise, and which tokens the clip cut off from the gradient, [B, T] each.

    -min(r A, clip(r, 1 - eps_clip, 1 + eps_clip_high) A) with r = exp(logp - old_logp). `r` counts as exp(20)
    where it is more. A token is clipped where r left the band in the direction its advantage pushes:
    above it with A > 0, below it with A < 0.

    Args:
        old_logp_BT: log-probs of the policy that drew the tokens; no gradient flows into them.
        advantage: [B, T], or [B] for one advantage per sequence; no gradient flows into it.
        eps_clip: lower bound on r is 1 - eps_clip; in [0, 1].
        eps_clip_high: upper bound on r is 1 + eps_clip_high; `eps_clip` where it is None.
    Raises:
        ValueError: the shapes do not fit or a bound is out of range.
    Source: PPO, arXiv:1707.06347 equation 7; two bounds ("clip higher"), DAPO, arXiv:2503.14476 section 3.1.
    """
    eps_clip_high = eps_clip if eps_clip_high is None else eps_clip_high
    if not 0 <= eps_clip <= 1 or eps_clip_high < 0:
        raise ValueError(
            f"clip bounds eps_clip = {eps_clip}, eps_clip_high = {eps_clip_high}: "
            "need 0 <= eps_clip <= 1 and eps_clip_high >= 0"
        )
    advantage_BT = advantage
    # By the number of dimensions: plain broadcasting would read [B] as [T] where the two are equal.
    if logp_BT.dim() == 2 and advantage.shape == logp_BT.shape[:1]:
        advantage_BT = advantage.unsqueeze(1).expand_as(logp_BT)
    if not logp_BT.shape == old_logp_BT.shape == advantage_BT.shape:
        raise ValueError(
            f"logp {list(logp_BT.shape)}, old logp {list(old_logp_BT.shape)}, advantage "
            f"{list(advantage.shape)}: want [B, T], [B, T], and [B, T] or [B]"
        )
    advantage_BT = advantage_BT.detach()
    ratio_BT = (logp_BT - old_logp_BT.detach()).clamp(max=MAX_LOG_RATIO).exp()
    free_BT = ratio_BT * advantage_BT
    bounded_BT = ratio_BT.clamp(1 - eps_clip, 1 + eps_clip_high) * advantage_BT
    return -torch.minimum(free_BT, bounded_BT), bounded_BT < free_BT


def value_loss(value_BT: Tensor, old_value_BT: Tensor, return_BT: Tensor, eps_clip_value: float) -> Tensor:
    """Per-token squared error of the value, moving at most `eps_clip_value` from the old one, [B, T].

    0.5 * max((v - R)^2, (v_clipped - R)^2), v_clipped = old + clip(v - old, -eps_clip_value, eps_clip_value).
    No gradient flows into `old_value_BT` or `return_BT`.

    Args:
        eps_clip_value: in the value's own unit, unlike the policy's bounds; infinity turns the clip off.
    Raises:
        ValueError: the shapes differ.
    Source: the PPO2 code of OpenAI Baselines; the same in TRL, trl/experimental/ppo/ppo_trainer.py@f2cd577.
    """
    if not value_BT.shape == old_value_BT.shape == return_BT.shape:
        raise ValueError(
            f"value {list(value_BT.shape)}, old value {list(old_value_BT.shape)} and return "
            f"{list(return_BT.shape)} must have one shape, [B, T]"
        )
    old_value_BT, return_BT = old_value_BT.detach(), return_BT.detach()
    clipped_value_BT = old_value_BT + (value_BT - old_value_BT).clamp(-eps_clip_value, eps_clip_value)
    return 0.5 * torch.maximum((value_BT - return_BT).square(), (clipped_value_BT - return_BT).square())


def aggregation_count(mask_BT: Tensor, mode: AggregationMode) -> Tensor:
    """What `aggregate` divides by if nothing else is said: real tokens, or sequences that have any. A scalar.

    Summed over data-parallel ranks and micro-batches it is the `denominator` for all of them.
    """
    if mode == "token":
        return mask_BT.bool().sum()
    if mode == "sequence":
        return mask_BT.bool().any(dim=-1).sum()
    raise ValueError(f"unknown aggregation {mode!r}; known: token, sequence")


def aggregate(
    loss_BT: Tensor, mask_BT: Tensor, mode: AggregationMode, *, denominator: float | Tensor | None = None
) -> Tensor:
    """The mean loss over tokens or over sequences, a scalar.

    token: the sum over real tokens / the number of them; long sequences weigh more (DAPO).
    sequence: the mean over sequences of each one's mean over its real tokens (GRPO). A sequence without
    real tokens is no sequence: it adds nothing to the sum and nothing to the count.

    What stands outside the mask is not read, and gets a gradient of 0. Where there is nothing to average, the
    result is 0 and still has a gradient (of 0), so that a rank with only padding can call backward.

    Args:
        denominator: divide by this instead of the count in this mask. With the `aggregation_count`
            summed over all ranks and micro-batches, the sum of their losses and gradients is that of
            one rank holding everything. A wrapper that averages gradients over ranks (DDP, FSDP)
            wants the loss multiplied by the number of ranks.
    Raises:
        ValueError: the shapes differ or `mode` is unknown.
    Source: GRPO, arXiv:2402.03300 equation 3; token mean, DAPO, arXiv:2503.14476 section 3.3.
    """
    if loss_BT.shape != mask_BT.shape:
        raise ValueError(f"loss {list(loss_BT.shape)} and mask {list(mask_BT.shape)} must have one shape, [B, T]")
    count = aggregation_count(mask_BT, mode)
    is_real_BT = mask_BT.bool()
    # where, not a product: 0 * inf at a padded token would be NaN.
    loss_BT = torch.where(is_real_BT, loss_BT, torch.zeros_like(loss_BT))
    if mode == "sequence":
        loss_BT = loss_BT / is_real_BT.sum(dim=-1, keepdim=True).clamp(min=1)
    divisor = torch.as_tensor(count if denominator is None else denominator, device=loss_BT.device)
    # Only a sum of nothing has a count of 0, and that sum is 0 whatever it is divided by.
    return loss_BT.sum() / torch.where(divisor == 0, torch.ones_like(divisor), divisor)
