"""Optimizer steps of one rollout: GRPO or PPO on the stages and ranks that share the model."""

# B samples of a rollout, b of a micro-batch, L response tokens, V columns of a rank's vocabulary

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from rllaunch.algo.losses import aggregate, aggregation_count, clipped_policy_loss, kl_estimate, kl_k3
from rllaunch.algo.steps import lr_at, step_orders
from rllaunch.backends.base import LaunchContext
from rllaunch.backends.megatron.batch import MicroBatch, Work
from rllaunch.backends.megatron.build import Built
from rllaunch.backends.megatron.critic import Critic
from rllaunch.backends.megatron.lora import Adapters
from rllaunch.backends.megatron.losses import CHUNK_TOKENS, vocab_parallel_logprobs
from rllaunch.backends.megatron.passes import Figures, of_every_sample, run_passes
from rllaunch.backends.megatron.regions import Reference
from rllaunch.errors import RunError

_WORST = "logprob_diff"


class Steps:
    """Trains what was built; every rank calls it with the same rollout.

    Args:
        reference: of the KL term, where the loss has one.
    """

    def __init__(
        self, context: LaunchContext, built: Built, device: str, reference: Reference | Adapters | None
    ) -> None:
        self.config, self.built, self.device, self.reference = context.config, built, device, reference
        self.critic = Critic(built.critic, context.config) if built.critic is not None else None
        self.num_steps = 0
        self._tp_group = parallel_state.get_tensor_model_parallel_group()
        options = context.config.megatron.model_extra or {}
        self._chunk_tokens = int(options.get("log_probs_chunk_size") or CHUNK_TOKENS)
        self._speaks = (
            parallel_state.is_pipeline_last_stage()
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0
        )
        """Whether this rank's figures count: one of the ranks that computed the same."""

    def train(self, work: Work, rollout_id: int) -> dict[str, float]:
        """Figures of the rollout, means over its steps, equal on every rank."""
        steps = self.config.trainer.num_steps_per_rollout or 1
        orders = step_orders(len(work.mask_BL), steps, self.config.run.seed, rollout_id)
        ref_logp_BL = self._reference_logprobs(work, self.reference) if self.reference is not None else None
        if self.critic is not None:
            work = self.critic.judge(work)
        totals: dict[str, float] = {}
        for number, rows in enumerate(orders):
            figures = self._step(work, rows, ref_logp_BL)
            worst = figures.pop(_WORST)
            if number == 0:
                totals[_WORST] = worst
            for name, value in figures.items():
                totals[name] = totals.get(name, 0.0) + value / steps
        totals["lr"] = self._lr(self.num_steps - 1, self.config.trainer.lr)
        return totals

    def _step(self, work: Work, rows: Tensor, ref_logp_BL: Tensor | None) -> dict[str, float]:
        """One optimizer step over `rows` of all ranks; figures summed over all ranks."""
        mode = self.config.algorithm.loss_aggregation
        mask_BL = work.mask_BL[rows.to(work.mask_BL.device)]
        denominator, num_tokens = aggregation_count(mask_BL, mode), mask_BL.sum()
        for model in self.built.models:
            model.zero_grad_buffer()
        self.built.optimizer.zero_grad()

        def loss_of(micro: MicroBatch, logits: Tensor) -> tuple[Tensor, Figures]:
            return self._loss(work, micro, *self._logprobs(logits, micro), ref_logp_BL, denominator, num_tokens)

        outputs = run_passes(self.built.ddp, work, rows, self.config, loss_of, forward_only=False)
        if self.critic is not None:
            values = self.critic.backward(work, rows, denominator)
            outputs = [
                {**policy, **value, "loss": policy["loss"] + value["value_loss"]}
                for policy, value in zip(outputs, values, strict=True)
            ]
        figures = self._over_ranks(outputs)
        self._require_finite(figures)
        self._set_lr()
        succeeded, norm, _ = self.built.optimizer.step()
        figures["grad_norm"] = float(norm)
        self._require_finite(figures)
        if not succeeded:
            raise RunError("Megatron-core's optimizer refused a step", "", "look at the gradients; --resume goes on")
        self.num_steps += 1
        return figures

    def _loss(
        self,
        work: Work,
        micro: MicroBatch,
        logp_bL: Tensor,
        entropy_bL: Tensor,
        ref_logp_BL: Tensor | None,
        denominator: Tensor,
        num_tokens: Tensor,
    ) -> tuple[Tensor, Figures]:
        algorithm, mode = self.config.algorithm, self.config.algorithm.loss_aggregation
        old_logp_bL, mask_bL = work.old_logp_BL[micro.rows_b], micro.mask_bL

        def mean(values_bL: Tensor) -> Tensor:
            return aggregate(values_bL, mask_bL, mode, denominator=denominator)

        loss_bL, clipped_bL = clipped_policy_loss(
            logp_bL,
            old_logp_bL,
            work.advantage_BL[micro.rows_b],
            algorithm.eps_clip,
            algorithm.eps_clip_high or algorithm.eps_clip,
        )
        figures = {"policy_loss": mean(loss_bL), "entropy": mean(entropy_bL)}
        figures["kl"] = mean(kl_k3(logp_bL.detach(), old_logp_bL))
        total = figures["policy_loss"] - algorithm.entropy_coef * figures["entropy"]
        if ref_logp_BL is not None:
            kl_bL = kl_estimate(algorithm.kl_loss_type, logp_bL, ref_logp_BL[micro.rows_b])
            figures["kl_reference"] = mean(kl_bL)
            total = total + algorithm.kl_loss_coef * figures["kl_reference"]
        figures["loss"] = total
        figures["clip_fraction"] = (clipped_bL * mask_bL).sum() / num_tokens
        figures[_WORST] = ((logp_bL - old_logp_bL).abs() * mask_bL).max()
        return total, {name: value.detach() for name, value in figures.items()}

    def _reference_logprobs(self, work: Work, reference: Reference | Adapters) -> Tensor:
        """[B, L] log-probs of the frozen model, on the last stage."""
        with reference.in_place():
            return of_every_sample(
                self.built.ddp, work, self.config, lambda micro, logits: self._logprobs(logits, micro)[0]
            )

    def _logprobs(self, logits: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        logp_M, entropy_M = vocab_parallel_logprobs(
            logits.flatten(0, 1),
            micro.row_M,
            micro.token_M,
            temperature=self.config.rollout.rollout_temperature,
            vocab_size=self.built.shape.vocab_size,
            group=self._tp_group,
            chunk_tokens=self._chunk_tokens,
        )
        return micro.per_response(logp_M), micro.per_response(entropy_M)

    def _over_ranks(self, outputs: list[Figures]) -> dict[str, float]:
        """Sums of all ranks' figures, on every rank; of the worst difference the largest."""
        names = ["policy_loss", "entropy", "kl", "loss", "clip_fraction"]
        names += ["kl_reference"] if self.reference is not None else []
        names += ["value_loss"] if self.critic is not None else []
        sums = torch.zeros(len(names), device=self.device)
        worst = torch.zeros((), device=self.device)
        if self._speaks:
            for figures in outputs:
                sums += torch.stack([figures[name].float() for name in names])
                worst = torch.maximum(worst, figures[_WORST].float())
        dist.all_reduce(sums)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return {**dict(zip(names, sums.tolist(), strict=True)), _WORST: float(worst)}

    def _require_finite(self, figures: Mapping[str, float]) -> None:
        for name, figure in figures.items():
            if not math.isfinite(figure):
                raise RunError(
                    f"{name} is {figure} in training", "", "lower --lr, or look at the rewards; --resume goes on"
                )

    def _set_lr(self) -> None:
        """Learning rate and weight decay of this step; norms and biases are not decayed, as Megatron has it."""
        for group in self.built.optimizer.param_groups:
            group["lr"] = self._lr(self.num_steps, group["max_lr"]) * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.config.trainer.weight_decay * group.get("wd_mult", 1.0)

    def _lr(self, step: int, peak: float) -> float:
        trainer, run = self.config.trainer, self.config.run
        total = trainer.lr_decay_iters or run.num_rollout * (trainer.num_steps_per_rollout or 1)
        return lr_at(step, peak, trainer.lr_warmup_iters, total, trainer.lr_decay_style, trainer.min_lr)
