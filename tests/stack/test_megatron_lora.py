"""LoRA in the megatron trainer: against the embedded trainer's, and on several ranks against one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from rig import QWEN3, make_batch, make_context, sent_by
from stack_process import run_ranks, same_on_every_rank, train_rank
from stack_rig import DEEPSEEK, QWEN3_NEXT, assert_trained_alike, free_port
from test_megatron_trainer import (
    DISPATCHER,
    FAMILIES,
    MOE,
    SP,
    STEADY,
    TIED,
    TWO_GROUPS,
    everything,
    launch,
    started,
    two_rollouts,
    with_padding_sampled,
)

from rllaunch.algo.lora import merged_state_dict
from rllaunch.backends.embedded.engine import EmbeddedEngine
from rllaunch.backends.embedded.model import build_model
from rllaunch.backends.embedded.trainer import EmbeddedTrainer
from rllaunch.backends.megatron import options
from rllaunch.backends.megatron.trainer import MegatronTrainer
from rllaunch.errors import ConfigError, RunError
from rllaunch.plan.handoff import HandoffOptions

pytestmark = pytest.mark.stack
__all__ = ["started"]  # a fixture

KL = {"kl_loss_coef": 0.1}


def lora(backend: str = "megatron", algorithm: dict[str, Any] | None = None, **sections: Any) -> Any:
    sections["trainer"] = {"backend": backend, **sections.get("trainer", {})}
    algorithm = {"lora_rank": 2, "lora_alpha": 4.0, **(algorithm or {})}
    return launch("lora", HandoffOptions(engine_weights="mirror"), algorithm=algorithm, **sections)


def parameters_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.data.clone() for n, p in trainer.built.ddp.module.named_parameters()}


ALL = ("all-linear",)


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        *((family, ALL) for family in FAMILIES if family != "deepseek_v4"),  # which is refused, in test_deepseek_v4
        ("qwen3", ("q_proj", "up_proj", "down_proj", "lm_head")),
        ("deepseek_v3", ("kv_b_proj", "gate_proj")),
    ],
)
def test_it_trains_the_adapters_that_the_embedded_trainer_trains(
    family: str, targets: tuple[str, ...], started: Any
) -> None:
    architecture = FAMILIES[family]
    facts: dict[str, Any] = {"architecture": architecture, "algorithm": KL | {"lora_target_modules": targets}}
    facts["trainer"] = {"lr_decay_style": "cosine", "weight_decay": 0.1}
    theirs = started(EmbeddedTrainer, lora("embedded", **facts))
    want = two_rollouts(theirs)
    merged = {n: t.clone() for n, t in merged_state_dict(theirs.models["actor"]).items()}
    ours = started(MegatronTrainer, lora(**facts))
    got, sent = two_rollouts(ours), sent_by(ours)
    for rollout in range(2):
        assert got[rollout].keys() == want[rollout].keys()
        for name, value in want[rollout].items():
            assert got[rollout][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    start = {n: p.data for n, p in build_model(ours.context, with_lora=False).named_parameters()}
    assert sent.keys() == start.keys()
    changed = set()
    linear = ("_proj", "shared_expert_gate")
    everywhere = {n.split(".")[-2] for n in start if any(part in n for part in linear) and ".experts." not in n}
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-4, atol=1e-5, msg=name)
        if not torch.equal(tensor, start[name]):
            changed.add(name.split(".")[-2])
    assert changed == (everywhere if targets == ALL else set(targets))


def test_beside_a_critic_the_policy_alone_has_adapters(started: Any) -> None:
    algorithm = KL | {"advantage_estimator": "ppo"}
    figures = []
    for cls, backend in ((MegatronTrainer, "megatron"), (EmbeddedTrainer, "embedded")):
        trainer = started(cls, lora(backend, architecture=QWEN3, algorithm=algorithm))
        figures.append(two_rollouts(trainer))
        if cls is MegatronTrainer:
            assert not any("lora" in name for name, _ in trainer.built.critic.named_parameters())
    for got, want in zip(*figures, strict=True):
        assert got == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in want.items()}


def test_the_base_has_neither_gradients_nor_state_nor_a_reference_beside_it(started: Any) -> None:
    model = {"architecture": TIED, "dtype": "bfloat16"}
    trainer = started(
        MegatronTrainer, lora(architecture=TIED, algorithm=KL, trainer={"precision": "bf16"}, model=model)
    )
    before = parameters_of(trainer)
    trainer.train(make_batch(trainer.context))
    adapters = 0
    for name, tensor in parameters_of(trainer).items():
        is_adapter = name.endswith(("lora_a", "lora_b"))
        assert tensor.dtype == (torch.float32 if is_adapter else torch.bfloat16), name
        assert torch.equal(tensor, before[name]) != is_adapter, name
        adapters += tensor.numel() if is_adapter else 0
    sizes = trainer.region_bytes()
    # Megatron pads buffers, and keeps parameters on boundaries of 64 elements.
    assert 8 * adapters <= sizes["optimizer"] <= 10 * adapters
    assert 4 * adapters <= sizes["grads"] <= 5 * adapters
    assert trainer.memory().host_bytes == 0


def test_regions_before_the_start_are_what_the_plan_says(tmp_path: Path, started: Any) -> None:
    trainer = started(MegatronTrainer, lora(architecture=QWEN3))
    real = trainer.region_bytes()
    planned = MegatronTrainer(trainer.context, trainer.slot).region_bytes()
    for region in ("params", "optimizer", "grads"):
        assert planned[region] <= real[region] <= 1.25 * planned[region], region


@pytest.mark.parametrize("buffers", ["retained", "fresh"])
def test_asleep_it_holds_nothing_on_the_device_and_awake_it_is_the_same(buffers: Any, started: Any) -> None:
    context = lora(architecture=MOE, algorithm=KL)
    trainer = started(MegatronTrainer, context)
    trainer.train(make_batch(context))
    kept = {n: t.clone() for n, t in everything(trainer).items()}
    awake = sent_by(trainer)
    trainer.offload()
    assert trainer.memory().gpu_bytes == 0
    asleep = sent_by(trainer)
    trainer.onload()
    for name, tensor in everything(trainer).items():
        assert torch.equal(tensor, kept[name]), name
    assert all(torch.equal(asleep[n], t) for n, t in awake.items())


def test_layers_that_are_computed_again_give_the_same_gradients(started: Any) -> None:
    results = []
    for how in ("none", "full"):
        trainer = started(MegatronTrainer, lora(architecture=QWEN3, trainer={"recompute_granularity": how}))
        results.append((two_rollouts(trainer), sent_by(trainer)))
    (plain, sent), (again, resent) = results
    assert again == plain
    assert all(torch.equal(resent[n], t) for n, t in sent.items())


def test_an_embedded_engine_takes_the_merged_weights(started: Any) -> None:
    trainer = started(MegatronTrainer, lora(architecture=QWEN3))
    engine = EmbeddedEngine(trainer.context, trainer.slot)
    engine.start()
    trainer.train(make_batch(trainer.context))
    trainer.update_weights(1, engine)
    for name, tensor in sent_by(trainer).items():
        assert torch.equal(engine._weights[name], tensor), name
    engine.shutdown()


def test_what_is_saved_for_transformers_is_merged(started: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = started(MegatronTrainer, lora(architecture=QWEN3))
    trainer.train(make_batch(trainer.context))
    trainer.save(str(tmp_path))
    sent = sent_by(trainer)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    assert {n for n, _ in loaded.named_parameters()} == sent.keys()
    assert all(torch.equal(p, sent[n]) for n, p in loaded.named_parameters())


@pytest.mark.parametrize(
    ("algorithm", "says"),
    [
        ({"lora_rank": 3}, r"adapters: 'rank 2, alpha 4, on all-linear' there, 'rank 3,"),
        ({"lora_rank": 0}, r"adapters: 'rank 2, alpha 4, on all-linear' there, 'none' here"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(
    algorithm: dict[str, Any], says: str, started: Any, tmp_path: Path
) -> None:
    started(MegatronTrainer, lora(architecture=QWEN3)).save(str(tmp_path))
    other = started(MegatronTrainer, lora(architecture=QWEN3, algorithm=algorithm))
    with pytest.raises(RunError, match=says):
        other.load(str(tmp_path))


def test_a_target_that_is_no_layer_of_the_model_is_an_error(started: Any) -> None:
    with pytest.raises(ConfigError, match="no linear layer is named q_prj; this model's linear layers: down_proj"):
        started(MegatronTrainer, lora(architecture=QWEN3, algorithm={"lora_target_modules": ("q_prj",)}))


def test_layers_of_transformer_engine_carry_no_adapters(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "has_transformer_engine", lambda: True)
    started(MegatronTrainer, lora(architecture=QWEN3))  # of local layers
    with pytest.raises(ConfigError, match="beside Megatron-core's local layers only"):
        started(MegatronTrainer, lora(architecture=QWEN3, megatron={"transformer_impl": "transformer_engine"}))


LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": (QWEN3, {}),
    "tensor": (TWO_GROUPS, {"tensor_model_parallel_size": 2}),
    "tensor, one group of key heads": (QWEN3, {"tensor_model_parallel_size": 2}),
    "pipeline, tied": (TIED, {"pipeline_model_parallel_size": 2}),
    "sequence": (TWO_GROUPS, SP),
    "sequence, latents": (DEEPSEEK, SP),
    "sequence, linear attention": (QWEN3_NEXT, SP),
    "experts by tensor ranks": (MOE, SP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


def test_two_ranks_in_any_layout_train_as_one(started: Any, tmp_path: Path) -> None:
    """Each layout in the same two processes, which is what takes the time."""
    launches = {
        name: {
            "preset": "lora",
            "architecture": architecture,
            "algorithm": {"lora_rank": 2, "lora_alpha": 4.0, **KL},
            "trainer": {"backend": "megatron", **STEADY, **trainer},
            "megatron": DISPATCHER,
        }
        for name, (architecture, trainer) in LAYOUTS.items()
    }
    run_ranks(2, train_rank, [free_port() for _ in launches], str(tmp_path), launches)
    assert same_on_every_rank(tmp_path, 2) == set(LAYOUTS)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    alone: dict[str, Any] = {}
    for name, (architecture, _) in LAYOUTS.items():
        if (key := repr(architecture)) not in alone:
            sections = launches[name] | {"trainer": {"backend": "megatron", **STEADY}}
            trainer = started(MegatronTrainer, make_context(**sections))
            figures = [dict(trainer.train(with_padding_sampled(trainer.context, i)).values) for i in range(2)]
            alone[key] = figures, sent_by(trainer)
        (figures, sent, _), (others, _, _) = (rank[name] for rank in ranks)
        assert figures == others, f"{name}: every rank reports the same"
        assert_trained_alike(name, (figures, sent), alone[key], rel=1e-3, abs_=1e-5)
