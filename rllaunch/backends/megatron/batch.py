"""A rollout as Megatron-core reads it: prompts beside their responses, micro-batches of one size on every rank."""

# B samples of a rollout, b of a micro-batch, P prompt tokens (left-padded), L response tokens, S positions read

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rllaunch.algo.advantages import group_advantages
from rllaunch.backends.base import TrainBatch
from rllaunch.resolve.schema import LaunchConfig


@dataclass(frozen=True)
class Judgement:
    """A critic's values before the first step, and the returns to fit them to."""

    value_BL: Tensor
    return_BL: Tensor


@dataclass(frozen=True)
class Work:
    """All samples, on the device. A row's first token stands in its first column, padding only at its end, so that
    causal attention needs no mask.

    Args:
        advantage_BL: 0 until a critic has judged the work, where there is one.
    """

    ids_BS: Tensor
    prompt_lens_B: Tensor
    response_BL: Tensor
    mask_BL: Tensor
    old_logp_BL: Tensor
    reward_B: Tensor
    advantage_BL: Tensor
    judgement: Judgement | None = None

    @property
    def width(self) -> int:
        return self.ids_BS.shape[1]


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of the work; those that fill it up have an empty mask.

    Args:
        row_M, token_M: for each real response token the row of logits, [b·S], that predicts it, and the token.
    """

    rows_b: Tensor
    ids_bS: Tensor
    position_bS: Tensor
    mask_bL: Tensor
    row_M: Tensor
    token_M: Tensor

    def per_response(self, values_M: Tensor) -> Tensor:
        """[M] → [b, L], 0 where there is no real token; gradients flow back."""
        return torch.zeros_like(self.mask_bL, dtype=values_M.dtype).masked_scatter(self.mask_bL.bool(), values_M)


def make_work(batch: TrainBatch, config: LaunchConfig, device: torch.device | str, *, multiple: int) -> Work:
    """
    Args:
        multiple: what the positions must divide by, where ranks share them.
    """
    P = batch.prompt_ids_BP.shape[1]
    lens_B1 = batch.prompt_lens_B[:, None]
    num_response_B1 = batch.mask_BL.astype(bool).sum(1, keepdims=True)
    ids_BT = np.concatenate([batch.prompt_ids_BP, batch.response_ids_BL], axis=1)
    # The last token predicts nothing that is asked for.
    needed = int((lens_B1 + num_response_B1).max()) - 1
    width = -(-max(1, needed) // multiple) * multiple
    column_BS = np.arange(width)[None] + P - lens_B1
    taken_BS = np.take_along_axis(ids_BT, np.minimum(column_BS, ids_BT.shape[1] - 1), axis=1)
    reward_B = torch.from_numpy(batch.reward_B)
    if config.has_critic:
        advantage_B = torch.zeros_like(reward_B)
    else:
        group_size, normalize = config.rollout.n_samples_per_prompt, config.algorithm.normalize_advantages
        advantage_B = group_advantages(reward_B, group_size, normalize=normalize)
    return Work(
        ids_BS=torch.from_numpy(taken_BS).to(device),
        prompt_lens_B=torch.from_numpy(batch.prompt_lens_B).to(device),
        response_BL=torch.from_numpy(batch.response_ids_BL).to(device),
        mask_BL=torch.from_numpy(batch.mask_BL).to(device),
        old_logp_BL=torch.from_numpy(batch.logprob_BL).to(device),
        reward_B=reward_B.to(device),
        advantage_BL=advantage_B[:, None].expand(-1, batch.mask_BL.shape[1]).to(device),
    )


def micro_batch_rows(rows: Tensor, rank: int, size: int, config: LaunchConfig, width: int) -> list[Tensor]:
    """This data-parallel rank's micro-batches of an optimizer step, as many and as large as on every other rank.

    Ranks exchange activations in the middle of a layer (experts) or of a pass (stages), so that none may have fewer.
    Rows of -1 fill up.
    """
    trainer = config.trainer
    share = -(-len(rows) // size)
    per_batch = trainer.micro_batch_size or share
    if trainer.micro_batch_size is None and trainer.max_tokens_per_gpu is not None:
        per_batch = max(1, trainer.max_tokens_per_gpu // width)
    per_batch = max(1, min(per_batch, share))
    count = max(1, -(-share // per_batch))
    mine = torch.full((count * per_batch,), -1, dtype=torch.int64)
    own = rows[rank::size]
    mine[: len(own)] = own
    return list(torch.split(mine, per_batch))


def take(work: Work, rows_b: Tensor) -> MicroBatch:
    rows_b = rows_b.to(work.ids_BS.device)
    is_real_b1 = (rows_b >= 0)[:, None]
    rows_b = rows_b.clamp(min=0)
    mask_bL = work.mask_BL[rows_b] * is_real_b1
    b, S, L = len(rows_b), work.width, mask_bL.shape[1]
    offset_b1 = (torch.arange(b, device=rows_b.device) * S + work.prompt_lens_B[rows_b] - 1)[:, None]
    row_bL = offset_b1 + torch.arange(L, device=rows_b.device)[None]
    chosen_bL = mask_bL.bool()
    position_bS = torch.arange(S, device=rows_b.device)[None].expand(b, S)
    response_bL = work.response_BL[rows_b]
    return MicroBatch(rows_b, work.ids_BS[rows_b], position_bS, mask_bL, row_bL[chosen_bL], response_bL[chosen_bL])


def step_orders(num_samples: int, steps: int, seed: int, rollout_id: int) -> list[Tensor]:
    """Which samples are in which optimizer step: by seed and rollout alone, so that a resumed run repeats it."""
    rng = np.random.Generator(np.random.Philox(key=[seed, (2 << 32) + rollout_id]))
    return list(torch.from_numpy(rng.permutation(num_samples)).chunk(steps))
