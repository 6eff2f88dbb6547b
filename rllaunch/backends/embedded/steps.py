"""Optimizer steps of one rollout: GRPO or PPO on `transformers` models, each rank with a share of the samples."""

# B samples of a rollout, b rows of a micro-batch, P prompt tokens (left-padded), L response tokens, T = P + L

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rllaunch.algo.advantages import group_advantages, outcome_advantages
from rllaunch.algo.losses import (
    aggregate,
    aggregation_count,
    clipped_policy_loss,
    kl_estimate,
    kl_k3,
    token_logprobs,
    value_loss,
)
from rllaunch.algo.steps import step_orders
from rllaunch.backends.base import RankInfo
from rllaunch.backends.embedded.batch import Work
from rllaunch.backends.embedded.cache import attends_by_token
from rllaunch.backends.embedded.decoding import rows_by
from rllaunch.backends.embedded.optimizer import FlatAdamW
from rllaunch.errors import RunError
from rllaunch.resolve.schema import LaunchConfig


class Steps:
    """Trains the models; every rank calls it with the same rollout and takes its share of each step's samples.

    Denominators are those of all ranks, so that the sum of the ranks' gradients is the gradient of one rank.

    Args:
        models: by role; gradients of the trainable ones are added up in the optimizer's.
    """

    def __init__(
        self, config: LaunchConfig, models: Mapping[str, nn.Module], optimizer: FlatAdamW, rank: RankInfo
    ) -> None:
        self.config, self.models, self.optimizer = config, models, optimizer
        self._rank, self._world = rank.rank, rank.world_size
        self._takes_padding = attends_by_token(models["actor"])

    def train(self, work: Work, reward_B: Tensor, rollout_id: int) -> dict[str, float]:
        """Figures of the rollout, means over its steps, equal on every rank."""
        self._set_advantages(work, reward_B)
        num_samples, steps = self.config.num_samples, self.config.trainer.num_steps_per_rollout or 1
        totals: dict[str, float] = {}
        for step, rows in enumerate(step_orders(num_samples, steps, self.config.run.seed, rollout_id)):
            figures = self._step(work, rows, is_first=step == 0)
            for name, value in figures.items():
                if name == "logprob_diff":
                    totals.setdefault(name, value)
                else:
                    totals[name] = totals.get(name, 0.0) + value / steps
        totals["lr"] = self.optimizer.lr
        return totals

    def _set_advantages(self, work: Work, reward_B: Tensor) -> None:
        algorithm = self.config.algorithm
        if work.judgement is None:
            group_size = self.config.rollout.n_samples_per_prompt
            advantage_B = group_advantages(reward_B, group_size, normalize=algorithm.normalize_advantages)
            work.advantage_BL.copy_(advantage_B[:, None].expand_as(work.advantage_BL))
            return
        with torch.no_grad():
            for rows in self._micro_batches(work, torch.arange(len(reward_B))):
                work.judgement.value_BL[rows] = self._values(work, rows)
        advantage_BL, return_BL = outcome_advantages(
            reward_B,
            work.judgement.value_BL,
            work.mask_BL,
            algorithm.gamma,
            algorithm.lambd,
            normalize=algorithm.normalize_advantages,
        )
        work.advantage_BL.copy_(advantage_BL)
        work.judgement.return_BL.copy_(return_BL)

    def _step(self, work: Work, rows: Tensor, *, is_first: bool) -> dict[str, float]:
        """One optimizer step over `rows` of all ranks; figures summed over all ranks."""
        mask_BL = work.mask_BL[rows]
        denominator = aggregation_count(mask_BL, self.config.algorithm.loss_aggregation)
        num_tokens = mask_BL.sum()
        self.optimizer.zero_grad()
        sums: dict[str, Tensor] = {}
        worst_diff = torch.zeros(())
        for micro in self._micro_batches(work, rows[self._rank :: self._world]):
            figures, diff = self._backward(work, micro, denominator, num_tokens)
            worst_diff = torch.maximum(worst_diff, diff.cpu())
            for name, value in figures.items():
                sums[name] = sums.get(name, torch.zeros(())) + value.detach().cpu()
        if self._world > 1:
            names = sorted(sums)
            packed = torch.stack([sums[n].float() for n in names])
            for tensor in (packed, *self.optimizer.grads):
                dist.all_reduce(tensor)
            dist.all_reduce(worst_diff, op=dist.ReduceOp.MAX)
            sums = dict(zip(names, packed.unbind(), strict=True))
        sums["grad_norm"] = self.optimizer.clip()
        figures_out = {n: float(v) for n, v in sums.items()}
        for name, figure in figures_out.items():
            if not math.isfinite(figure):
                raise RunError(
                    f"{name} is {figure} in training", "", "lower --lr, or look at the rewards; --resume goes on"
                )
        self.optimizer.step()
        if is_first:
            figures_out["logprob_diff"] = float(worst_diff)
        return figures_out

    def _backward(
        self, work: Work, rows: Tensor, denominator: Tensor, num_tokens: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        algorithm = self.config.algorithm
        mask_bL, old_logp_bL = work.mask_BL[rows], work.old_logp_BL[rows]
        logp_bL, entropy_bL = self._logprobs("actor", work, rows)
        loss_bL, clipped_bL = clipped_policy_loss(
            logp_bL,
            old_logp_bL,
            work.advantage_BL[rows],
            algorithm.eps_clip,
            algorithm.eps_clip_high or algorithm.eps_clip,
        )
        mode = algorithm.loss_aggregation
        policy = aggregate(loss_bL, mask_bL, mode, denominator=denominator)
        entropy = aggregate(entropy_bL, mask_bL, mode, denominator=denominator)
        total = policy - algorithm.entropy_coef * entropy
        # How far the policy is from the one that sampled; with a reference there is a second distance.
        kl = aggregate(kl_k3(logp_bL.detach(), old_logp_bL), mask_bL, mode, denominator=denominator)
        figures = {"policy_loss": policy, "entropy": entropy, "kl": kl}
        if algorithm.kl_loss_coef > 0:
            with torch.no_grad():
                ref_logp_bL, _ = self._logprobs("reference", work, rows)
            kl_bL = kl_estimate(algorithm.kl_loss_type, logp_bL, ref_logp_bL)
            kl_reference = aggregate(kl_bL, mask_bL, mode, denominator=denominator)
            total = total + algorithm.kl_loss_coef * kl_reference
            figures["kl_reference"] = kl_reference
        if (judged := work.judgement) is not None:
            value_bL = self._values(work, rows)
            losses_bL = value_loss(value_bL, judged.value_BL[rows], judged.return_BL[rows], algorithm.value_clip)
            critic = aggregate(losses_bL, mask_bL, mode, denominator=denominator)
            total = total + critic
            figures["value_loss"] = critic
        figures["loss"] = total
        total.backward()  # type: ignore[no-untyped-call]
        figures["clip_fraction"] = (clipped_bL * mask_bL).sum() / num_tokens
        diff = ((logp_bL.detach() - old_logp_bL).abs() * mask_bL).max()
        return figures, diff

    def _logprobs(self, role: str, work: Work, rows: Tensor) -> tuple[Tensor, Tensor]:
        ids_bT, P = work.ids_BT[rows], work.prompt_width
        L, begin = ids_bT.shape[1] - P, self._begin(work, rows)
        out = self.models[role](
            input_ids=ids_bT[:, begin:-1], logits_to_keep=L, use_cache=False, **self._mask(work, rows)
        )
        return token_logprobs(out.logits, ids_bT[:, P:], self.config.rollout.rollout_temperature)

    def _values(self, work: Work, rows: Tensor) -> Tensor:
        """Value before each response token: what the critic says after the token before it."""
        ids_bT, P, begin = work.ids_BT[rows], work.prompt_width, self._begin(work, rows)
        mask = self._mask(work, rows)
        values_bT: Tensor = self.models["critic"](
            ids_bT[:, begin:-1], attention_mask_BT=mask.get("attention_mask"), position_ids_BT=mask.get("position_ids")
        )
        return values_bT[:, P - 1 - begin :]

    def _mask(self, work: Work, rows: Tensor) -> dict[str, Tensor]:
        """Nothing where no prompt is padded: then attention is plainly causal, and faster."""
        if not work.is_padded or not self._takes_padding:
            return {}
        attended_bT = work.attended_BT[rows][:, :-1]
        return {"attention_mask": attended_bT, "position_ids": (attended_bT.cumsum(-1) - 1).clamp(min=0)}

    def _begin(self, work: Work, rows: Tensor) -> int:
        """The first column of a micro-batch that the models read; the padding before it is cut off if it must be."""
        return 0 if self._takes_padding else work.prompt_width - int(work.prompt_lens_B[rows[0]])

    def _micro_batches(self, work: Work, rows: Tensor) -> Iterator[Tensor]:
        """Rows in batches of at most `micro_batch_size`, of equal prompts' length where a model takes no padding."""
        size = self.config.trainer.micro_batch_size or max(1, len(rows))
        if self._takes_padding:
            yield from torch.split(rows, size)
            return
        for _, members in rows_by(work.prompt_lens_B[rows]):
            yield from torch.split(rows[members], size)
