"""The critic of PPO: a language model's backbone with one number per token on top."""

# B sequences in the batch, T tokens of prompt and response, H hidden size

from __future__ import annotations

import torch
from torch import Tensor, nn


class ValueModel(nn.Module):
    """A backbone and a linear head that gives the value of the state after each token.

    The head starts at 0: first values are 0 rather than noise, and its own gradient is not 0, so it learns
    from the first step on. No bias, as in transformers' one-label classification heads: a
    parameter of one element is awkward to shard, and the final norm's output can stand in for one. The
    head is float32 whatever the backbone is; returns are small differences that bf16 rounds away.

    Args:
        backbone: a transformers base model (`causal_lm.model`): takes `input_ids`, `attention_mask`,
            `position_ids` and `use_cache`, and returns an object with `last_hidden_state`.
        hidden_size: H, the backbone's `config.hidden_size`.
    """

    def __init__(self, backbone: nn.Module, hidden_size: int) -> None:
        super().__init__()
        self.backbone = backbone
        device = next((p.device for p in backbone.parameters()), None)
        self.value_head = nn.Linear(hidden_size, 1, bias=False, device=device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)

    def forward(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
    ) -> Tensor:
        """Value after reading each token, [B, T], in the head's dtype.

        Entry t is the value of the state before token t + 1, the one a logit at t decides about: for
        `gae`, take the same columns as the logits that predict the response (one to the left of its tokens).

        Args:
            attention_mask_BT: 1 at real tokens; needed where padding comes before them.
            position_ids_BT: the column's number, padding counted, where it is None.
        """
        output = self.backbone(
            input_ids=input_ids_BT,
            attention_mask=attention_mask_BT,
            position_ids=position_ids_BT,
            use_cache=False,
        )
        hidden_BTH: Tensor = output.last_hidden_state
        value_BT1: Tensor = self.value_head(hidden_BTH.to(self.value_head.weight.dtype))
        return value_BT1.squeeze(-1)
