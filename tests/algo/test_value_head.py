"""The critic on a real, tiny transformers backbone."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from rllaunch.algo.value_head import ValueModel

INPUT_IDS_BT = torch.tensor([[1, 5, 9, 2], [15, 0, 3, 3]])


def tiny_critic() -> ValueModel:
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    return ValueModel(Qwen3Model(config), config.hidden_size)


def tiny_critic_with_a_random_head() -> ValueModel:
    critic = tiny_critic()
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(1))
    return critic


def test_first_values_are_zero_and_the_head_learns_from_the_first_step() -> None:
    critic = tiny_critic()
    value_BT = critic(INPUT_IDS_BT)
    assert torch.equal(value_BT, torch.zeros(2, 4))
    (value_BT - 1).square().mean().backward()
    gradient = critic.value_head.weight.grad
    assert gradient is not None
    assert gradient.abs().max().item() > 1e-3


def test_a_value_is_the_hidden_state_times_the_head() -> None:
    critic = tiny_critic_with_a_random_head()
    # Positions with gaps, because a rotary backbone sees only their differences.
    mask_BT, position_ids_BT = (
        torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]),
        torch.tensor([[0, 2, 3, 7]]).expand(2, 4),
    )
    with torch.no_grad():
        for mask, position_ids in [(None, None), (mask_BT, None), (mask_BT, position_ids_BT)]:
            output = critic.backbone(input_ids=INPUT_IDS_BT, attention_mask=mask, position_ids=position_ids)
            expected_BT = output.last_hidden_state @ critic.value_head.weight[0]
            torch.testing.assert_close(critic(INPUT_IDS_BT, mask, position_ids), expected_BT)


@torch.no_grad()
def test_a_value_depends_on_its_own_token_and_earlier_ones_only() -> None:
    critic = tiny_critic_with_a_random_head()
    changed_BT = INPUT_IDS_BT.clone()
    changed_BT[:, 2] = 7
    value_BT, changed_value_BT = critic(INPUT_IDS_BT), critic(changed_BT)
    torch.testing.assert_close(value_BT[:, :2], changed_value_BT[:, :2])
    assert (value_BT[:, 2:] - changed_value_BT[:, 2:]).abs().min().item() > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_does_not_change_the_values_of_real_tokens(side: str) -> None:
    critic = tiny_critic_with_a_random_head()
    padding_BT, ones_BT = torch.zeros(2, 3, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    parts = [(padding_BT, padding_BT), (INPUT_IDS_BT, ones_BT)]
    ids, masks = zip(*(parts if side == "left" else reversed(parts)), strict=True)
    mask_BT = torch.cat(masks, dim=1)
    position_ids_BT = (mask_BT.cumsum(dim=1) - 1).clamp(min=0)
    value_BT = critic(torch.cat(ids, dim=1), mask_BT, position_ids_BT)
    torch.testing.assert_close(value_BT[mask_BT.bool()].view(2, 4), critic(INPUT_IDS_BT), rtol=1e-4, atol=1e-5)


def test_a_bf16_backbone_still_gives_float32_values() -> None:
    critic = ValueModel(tiny_critic().backbone.bfloat16(), 32)
    assert critic(INPUT_IDS_BT).dtype == torch.float32
