"""Adapters on a real, tiny transformers model: what they compute, what they train, what they merge into."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from transformers import Qwen3Config, Qwen3ForCausalLM

from rllaunch.algo.lora import LoraLinear, apply_lora, merged_state_dict, plain_name

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
INPUT_IDS_BT = torch.tensor([[1, 5, 9, 2], [15, 0, 3, 3]])


def tiny_model(*, tied: bool = False, bias: bool = False) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attention_bias=bias,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    if bias:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    return model


def logits_of(model: nn.Module) -> Tensor:
    with torch.no_grad():
        logits_BTV: Tensor = model(input_ids=INPUT_IDS_BT, use_cache=False).logits
        return logits_BTV


def train_a_little(model: nn.Module) -> None:
    """Two steps, so that A moves as well as B."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=INPUT_IDS_BT, use_cache=False).logits.square().mean().backward()
        optimizer.step()


def test_a_layer_adds_the_scaled_low_rank_product() -> None:
    # x = (1, 2), W = identity, A = (3 4; 0 1), B = (1 0; -1 1), alpha / rank = 4 / 2 = 2:
    # x A^T = (11, 2), times B^T = (11, -11 + 2), times 2 = (22, -18)
    layer = LoraLinear(nn.Linear(2, 2, bias=False), rank=2, alpha=4.0)
    with torch.no_grad():
        layer.base_layer.weight.copy_(torch.eye(2))
        layer.lora_a.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        layer.lora_b.copy_(torch.tensor([[1.0, 0.0], [-1.0, 1.0]]))
    assert layer(torch.tensor([1.0, 2.0])).tolist() == [23.0, -16.0]
    # W + 2 B A = identity + 2 (3 4; -3 -3)
    assert layer.merged_weight().tolist() == [[7.0, 8.0], [-6.0, -5.0]]


def test_a_wrapped_layer_freezes_its_weight_and_bias() -> None:
    layer = LoraLinear(nn.Linear(2, 2), rank=1, alpha=1.0)
    assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["lora_a", "lora_b"]


def test_layer_gradients_agree_with_finite_differences() -> None:
    layer = LoraLinear(nn.Linear(3, 2, dtype=torch.float64), rank=2, alpha=3.0)
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def output(a_RI: Tensor, b_OR: Tensor) -> Tensor:
        result: Tensor = torch.func.functional_call(layer, {"lora_a": a_RI, "lora_b": b_OR}, (x,))
        return result

    b_OR = torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(output, (layer.lora_a, b_OR))


@pytest.mark.parametrize("targets", [ATTENTION, MLP, ["all-linear"], "all-linear"])
def test_fresh_adapters_leave_the_logits_identical(targets: list[str] | str) -> None:
    model = tiny_model(bias=True)
    before_BTV = logits_of(model)
    apply_lora(model, rank=4, alpha=8, target_modules=targets)
    assert torch.equal(logits_of(model), before_BTV)


@pytest.mark.parametrize("build", [lambda: tiny_model(), lambda: tiny_model(bias=True), lambda: tiny_model(tied=True)])
def test_a_plain_model_with_the_merged_weights_computes_what_the_trained_adapters_do(
    build: Callable[[], Qwen3ForCausalLM],
) -> None:
    model, plain = build(), build()
    apply_lora(model, rank=4, alpha=8, target_modules="all-linear")
    train_a_little(model)
    plain_logits_BTV = logits_of(plain)
    plain.load_state_dict(merged_state_dict(model), strict=True)
    torch.testing.assert_close(logits_of(plain), logits_of(model), rtol=1e-4, atol=1e-5)
    assert (logits_of(plain) - plain_logits_BTV).abs().max() > 1e-2, "the adapters were not trained"


def test_a_merged_state_dict_has_the_plain_keys_in_the_plain_order_and_changes_targets_only() -> None:
    model, plain_state = tiny_model(bias=True), tiny_model(bias=True).state_dict()
    apply_lora(model, rank=4, alpha=8, target_modules=["q_proj", "down_proj"])
    train_a_little(model)
    merged = merged_state_dict(model)
    assert list(merged) == list(plain_state)
    changed = [key for key in merged if not torch.equal(merged[key], plain_state[key])]
    assert changed == [
        f"model.layers.{i}.{name}.weight" for i in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert not any(tensor.requires_grad for tensor in merged.values())


def test_a_single_layer_that_is_the_whole_model_can_be_merged() -> None:
    layer = LoraLinear(nn.Linear(2, 2), rank=1, alpha=1.0)
    nn.init.ones_(layer.lora_b)
    merged = merged_state_dict(layer)
    assert list(merged) == ["weight", "bias"]
    assert torch.equal(merged["weight"], layer.merged_weight())


def test_only_adapters_are_trained() -> None:
    model = tiny_model(bias=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = apply_lora(model, rank=4, alpha=8, target_modules=ATTENTION)
    trainable = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trainable == [f"{name}.{leaf}" for name in names for leaf in ("lora_a", "lora_b")]
    train_a_little(model)
    after = {plain_name(key): tensor for key, tensor in model.state_dict().items() if plain_name(key)}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_the_names_replaced_are_returned_in_the_models_order() -> None:
    model = tiny_model()
    names = apply_lora(model, rank=2, alpha=2, target_modules=["v_proj", "q_proj"])
    assert names == [f"model.layers.{i}.self_attn.{leaf}" for i in range(2) for leaf in ("q_proj", "v_proj")]
    assert all(isinstance(model.get_submodule(name), LoraLinear) for name in names)


def test_all_linear_means_every_linear_layer_but_the_lm_head() -> None:
    names = apply_lora(tiny_model(), rank=2, alpha=2, target_modules=["all-linear"])
    assert sorted({name.rpartition(".")[2] for name in names}) == sorted(ATTENTION + MLP)
    assert len(names) == 2 * 7


def test_one_seed_draws_one_adapter_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1).item()
    drawn = []
    for seed in (3, 3, 4):
        model = tiny_model()
        torch.manual_seed(7)
        apply_lora(model, rank=2, alpha=2, target_modules=["q_proj"], seed=seed)
        assert torch.rand(1).item() == expected
        drawn.append([model.get_parameter(f"model.layers.{i}.self_attn.q_proj.lora_a") for i in range(2)])
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert not torch.equal(drawn[0][0], drawn[2][0])
    assert not torch.equal(drawn[0][0], drawn[0][1]), "every layer draws its own"


def test_a_is_drawn_as_in_peft_and_b_is_zero() -> None:
    # kaiming_uniform with a = sqrt(5) is uniform within 1 / sqrt(in_features)
    layer = LoraLinear(nn.Linear(64, 8), rank=32, alpha=1.0, generator=torch.Generator().manual_seed(0))
    assert layer.lora_a.shape == (32, 64)
    assert layer.lora_b.shape == (8, 32)
    assert 0.99 / 8 < layer.lora_a.abs().max().item() <= 1 / 8
    assert layer.lora_a.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.05)
    assert layer.lora_b.eq(0).all()


def test_adapters_of_a_bf16_model_are_float32_and_the_merged_weights_are_bf16() -> None:
    model = tiny_model().bfloat16()
    before_BTV = logits_of(model)
    names = apply_lora(model, rank=2, alpha=2, target_modules="all-linear")
    assert {model.get_parameter(f"{name}.{leaf}").dtype for name in names for leaf in ("lora_a", "lora_b")} == {
        torch.float32
    }
    assert torch.equal(logits_of(model), before_BTV)
    assert {tensor.dtype for tensor in merged_state_dict(model).values()} == {torch.bfloat16}


def test_plain_name_undoes_the_wrapping_and_nothing_else() -> None:
    model, plain_keys = tiny_model(bias=True), list(tiny_model(bias=True).state_dict())
    apply_lora(model, rank=2, alpha=2, target_modules="all-linear")
    assert [name for key in model.state_dict() if (name := plain_name(key))] == plain_keys
    assert plain_name("layers.0.q_proj.base_layer.bias") == "layers.0.q_proj.bias"
    assert plain_name("layers.0.q_proj.lora_a") is None
    assert plain_name("model.embed_tokens.weight") == "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("targets", "missed"), [(["c_attn"], "c_attn"), (["q_proj", "q_porj"], "q_porj"), ([], "an empty list")]
)
def test_a_target_that_matches_nothing_is_refused_and_the_model_is_left_as_it_was(
    targets: list[str], missed: str
) -> None:
    model = tiny_model()
    with pytest.raises(ValueError) as raised:
        apply_lora(model, rank=2, alpha=2, target_modules=targets)
    assert str(raised.value) == (
        f"LoRA target_modules: no linear layer is named {missed}; this model's linear layers: "
        "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    )
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_tied_lm_head_is_refused_and_an_untied_one_is_not() -> None:
    with pytest.raises(ValueError) as raised:
        apply_lora(tiny_model(tied=True), rank=2, alpha=2, target_modules=["lm_head"])
    assert str(raised.value) == (
        "LoRA cannot adapt lm_head.weight: it is the same tensor as model.embed_tokens.weight, and merging "
        "would change both; leave it out of target_modules or untie the two"
    )
    assert apply_lora(tiny_model(), rank=2, alpha=2, target_modules=["lm_head"]) == ["lm_head"]


def test_adapters_are_not_put_on_adapters() -> None:
    model = tiny_model()
    apply_lora(model, rank=2, alpha=2, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"^the model carries LoRA adapters already \(model.layers.0"):
        apply_lora(model, rank=2, alpha=2, target_modules="all-linear")


def test_a_rank_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^LoRA rank = 0: must be at least 1$"):
        apply_lora(tiny_model(), rank=0, alpha=2, target_modules="all-linear")
