"""Logits of the next token, from what was sampled so far: out of a cache, or by the whole forward pass each time."""

# B rows, U unique prompts, P prompt tokens (left-padded), t response tokens so far, T = P + L, V vocabulary

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import Tensor

from rllaunch.backends.embedded.cache import FlatCache


class Decoder(Protocol):
    """Runs the model for the rows of one request."""

    def start(self, prompt_ids_BP: Tensor, prompt_lens_B: Tensor) -> None: ...

    def next_logits(self, ids_Bt: Tensor) -> Tensor:
        """float32 logits [B, V] after the response tokens `ids_Bt`; each call brings one token more, the first none."""
        ...


class CachedDecoder:
    """A forward pass over the newest token; keys and values of the others lie in the cache.

    Args:
        attended_BT: memory for the attention mask of as many rows and tokens as the cache has.
    """

    def __init__(self, model: Any, cache: FlatCache, attended_BT: Tensor) -> None:
        self._model = model
        self._cache = cache
        self._whole_attended_BT = attended_BT
        # transformers 5.24 renamed it and drops the old name in 5.40.
        arguments = inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if "cache" in arguments else "past_key_values"

    def start(self, prompt_ids_BP: Tensor, prompt_lens_B: Tensor) -> None:
        B, P = prompt_ids_BP.shape
        device = prompt_ids_BP.device
        # The samples of a prompt are adjacent: its tokens run through the model once.
        self._is_new_B = torch.ones(B, dtype=torch.bool, device=device)
        self._is_new_B[1:] = (prompt_ids_BP[1:] != prompt_ids_BP[:-1]).any(dim=1)
        self._prompt_of_row_B = self._is_new_B.cumsum(0) - 1
        self._prompt_ids_BP, self._prompt_lens_B = prompt_ids_BP, prompt_lens_B
        self._is_padded = bool((prompt_lens_B != P).any())
        self._attended_BT = self._whole_attended_BT[:B]
        self._attended_BT.fill_(1)
        if self._is_padded:
            is_token_BP = torch.arange(P, device=device) >= P - prompt_lens_B[:, None]
            self._attended_BT[:, :P] = is_token_BP.to(self._attended_BT.dtype)
        self._cache.start(B, self._prompt_of_row_B)

    def next_logits(self, ids_Bt: Tensor) -> Tensor:
        P, t = self._prompt_ids_BP.shape[1], ids_Bt.shape[1]
        if t == 0:
            mask_UP = self._attended_BT[:, :P][self._is_new_B]
            positions_UP = (mask_UP.cumsum(-1) - 1).clamp(min=0)
            logits_UV = self._run(self._prompt_ids_BP[self._is_new_B], mask_UP, positions_UP)
            return logits_UV[self._prompt_of_row_B]
        return self._run(ids_Bt[:, -1:], self._attended_BT[:, : P + t], (self._prompt_lens_B + t - 1)[:, None])

    def _run(self, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        out = self._model(
            input_ids=ids,
            # Without padding attention is plainly causal, and faster.
            attention_mask=mask if self._is_padded else None,
            position_ids=positions if self._is_padded else None,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: self._cache},
        )
        logits: Tensor = out.logits[:, -1].float()
        return logits


class WholeDecoder:
    """A forward pass over prompt and response for each token, for models whose state is no `FlatCache`.

    Slower, and exact: rows of equal length run together, without the padding that would change their state.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def start(self, prompt_ids_BP: Tensor, prompt_lens_B: Tensor) -> None:
        P = prompt_ids_BP.shape[1]
        self._num_rows = len(prompt_ids_BP)
        groups = rows_by(prompt_lens_B)
        self._groups = [(rows, prompt_ids_BP[rows, P - length :]) for length, rows in groups]

    def next_logits(self, ids_Bt: Tensor) -> Tensor:
        parts = [
            self._model(
                input_ids=torch.cat([prompt_ids_bp, ids_Bt[rows]], dim=1), use_cache=False, logits_to_keep=1
            ).logits[:, -1]
            for rows, prompt_ids_bp in self._groups
        ]
        logits_BV = torch.empty(self._num_rows, parts[0].shape[-1], device=ids_Bt.device)
        for (rows, _), logits_bV in zip(self._groups, parts, strict=True):
            logits_BV[rows] = logits_bV.float()
        return logits_BV


def rows_by(values_B: Tensor) -> list[tuple[int, Tensor]]:
    """(value, indices of the rows that have it), smallest value first."""
    return [(value, (values_B == value).nonzero().squeeze(1)) for value in sorted(set(values_B.tolist()))]
