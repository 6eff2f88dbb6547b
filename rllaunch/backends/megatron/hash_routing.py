"""Routing by the root of a softplus, and in some layers to experts that a table names for each token id: DeepSeek-V4's.

Megatron-core 0.16.1 knows neither.
"""

# T positions of this rank, B rows, X of both, E experts, K of a token

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from rllaunch.backends.megatron.shape import Experts

# Of the sum that the weights of a token's experts are divided by, as transformers has it.
_EPS = 1e-20


class SoftplusRouter(TopKRouter):  # type: ignore[misc]
    """`router` of a layer with experts; whoever calls the layer puts the ids of its tokens here before.

    Args:
        num_tokens: rows of the table, where this layer has one.
        layer: 0-based, of the whole model.
    """

    def __init__(self, config: Any, *, experts: Experts, num_tokens: int, layer: int, **more: Any) -> None:
        super().__init__(config=config, **more)
        self._scaling = experts.scaling or 1.0
        self.ids_BT: Tensor | None = None
        is_hashed = experts.is_hashed(layer)
        self.register_buffer("tid2eid", torch.zeros(num_tokens, experts.top_k, dtype=torch.long) if is_hashed else None)

    def routing(self, logits: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[T, B, E] → weights, [X, E], and which experts are chosen, [X, E].

        The table may name an expert twice for a token: it then has the weight of both.
        """
        logits_XE = logits.flatten(0, 1)
        scores_XE = F.softplus(logits_XE.float()).sqrt()
        if self.tid2eid is not None:
            chosen_XK = self.tid2eid[self._ids_here()]
        else:
            chosen_XK = torch.topk(scores_XE.detach() + self.expert_bias, self.topk, dim=-1).indices
        weights_XK = scores_XE.gather(1, chosen_XK)
        weights_XK = self._scaling * weights_XK / (weights_XK.sum(dim=-1, keepdim=True) + _EPS)
        weights_XE = torch.zeros_like(scores_XE).scatter_add(1, chosen_XK, weights_XK)
        is_chosen_XE = torch.zeros_like(scores_XE, dtype=torch.bool).scatter(1, chosen_XK, True)
        self._apply_expert_bias(is_chosen_XE)
        return weights_XE.type_as(logits), is_chosen_XE

    def _ids_here(self) -> Tensor:
        """[X]; of ranks that share sequences each has its part of the positions."""
        assert self.ids_BT is not None, "a layer with a table is told its tokens"
        ids_TB = self.ids_BT.t()
        if self.config.sequence_parallel:
            ids_TB = ids_TB.chunk(self.tp_group.size())[self.tp_group.rank()]
        return ids_TB.flatten()
