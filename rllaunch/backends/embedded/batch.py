"""A rollout as the embedded trainer reads it: views of its `activations` region, prompts beside their responses."""

# B samples of a rollout, P prompt tokens (left-padded), L response tokens, T = P + L

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rllaunch.algo.advantages import Judgement
from rllaunch.backends.base import LaunchContext, TrainBatch
from rllaunch.backends.embedded.layout import Layout, lay_out


@dataclass(frozen=True)
class Work:
    """All samples.

    Args:
        advantage_BL: undefined until it is set.
        judgement: where there is a critic; undefined until it judges.
        prompt_width: P.
        prompt_lens_B: on the host.
        is_padded: whether any prompt is.
    """

    ids_BT: Tensor
    attended_BT: Tensor
    mask_BL: Tensor
    old_logp_BL: Tensor
    advantage_BL: Tensor
    judgement: Judgement | None
    prompt_width: int
    prompt_lens_B: Tensor
    is_padded: bool


def batch_layout(context: LaunchContext) -> Layout:
    B, L = context.config.num_samples, context.config.rollout.rollout_max_response_len
    T = context.max_prompt_tokens + L
    long, real = torch.int64, torch.float32

    def tensor(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(B, width, dtype=dtype, device="meta")

    names = ["mask", "old_logp", "advantage"]
    names += ["value", "return"] if context.config.has_critic else []
    named = [("ids", tensor(T, long)), ("attended", tensor(T, long)), *((n, tensor(L, real)) for n in names)]
    return lay_out([("batch", named)])


def load_batch(views: Mapping[str, Tensor], batch: TrainBatch) -> Work:
    """Fill the views of `batch_layout`."""
    P = batch.prompt_ids_BP.shape[1]
    ids_BT, attended_BT = views["ids"], views["attended"]
    ids_BT[:, :P].copy_(torch.from_numpy(batch.prompt_ids_BP))
    ids_BT[:, P:].copy_(torch.from_numpy(batch.response_ids_BL))
    attended_BT.fill_(1)
    prompt_lens_B = torch.from_numpy(batch.prompt_lens_B)
    attended_BT[:, :P].copy_(torch.arange(P) >= P - prompt_lens_B[:, None])
    views["mask"].copy_(torch.from_numpy(batch.mask_BL))
    views["old_logp"].copy_(torch.from_numpy(batch.logprob_BL))
    return Work(
        ids_BT=ids_BT,
        attended_BT=attended_BT,
        mask_BL=views["mask"],
        old_logp_BL=views["old_logp"],
        advantage_BL=views["advantage"],
        judgement=Judgement(views["value"], views["return"]) if "value" in views else None,
        prompt_width=P,
        prompt_lens_B=prompt_lens_B,
        is_padded=bool((batch.prompt_lens_B != P).any()),
    )
