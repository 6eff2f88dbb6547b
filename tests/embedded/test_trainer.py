"""The trainer takes the step that the textbook takes, however it is cut, moved, saved or shared between ranks."""

from __future__ import annotations

import math
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_process import train_rank
from rig import (
    QWEN3,
    QWEN3_MOE,
    CollectedUpdate,
    Rig,
    hf_logprobs,
    make_batch,
    make_context,
    make_prompts,
    sent_by,
    started_engine,
    started_trainer,
)

from rllaunch.algo.steps import lr_at
from rllaunch.backends.base import TrainBatch
from rllaunch.backends.embedded.layout import checksum
from rllaunch.backends.embedded.model import build_model
from rllaunch.backends.embedded.trainer import EmbeddedTrainer
from rllaunch.errors import RunError
from rllaunch.plan.handoff import HandoffOptions
from rllaunch.run.rehearsal import shrink

# Adam's first step is lr * g / (|g| + eps): with an eps far above rounding it says something about g.
ONE_STEP = {"num_steps_per_rollout": 1, "adam_eps": 1e-4}


def parameters_of(trainer: EmbeddedTrainer, role: str = "actor") -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in trainer.models[role].named_parameters()}


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


# -- the step ------------------------------------------------------------------------------------------


def grpo_by_hand(context: Any, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Parameters after one step of GRPO, written down with nothing of rllaunch but the initial model."""
    model = build_model(context)
    reference = build_model(context)
    config = context.config
    algorithm, trainer = config.algorithm, config.trainer
    temperature = config.rollout.rollout_temperature
    logp_BL = hf_logprobs(model, batch.prompt_ids_BP, batch.prompt_lens_B, batch.response_ids_BL, temperature)
    old_BL, mask_BL = torch.tensor(batch.logprob_BL), torch.tensor(batch.mask_BL)
    reward_PG = torch.tensor(batch.reward_B).view(-1, config.rollout.n_samples_per_prompt)
    advantage_B1 = ((reward_PG - reward_PG.mean(1, keepdim=True)) / (reward_PG.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    ratio_BL = torch.exp(logp_BL - old_BL)
    clipped_BL = ratio_BL.clamp(1 - algorithm.eps_clip, 1 + (algorithm.eps_clip_high or algorithm.eps_clip))
    loss_BL = -torch.minimum(ratio_BL * advantage_B1, clipped_BL * advantage_B1)
    with torch.no_grad():
        ref_BL = hf_logprobs(reference, batch.prompt_ids_BP, batch.prompt_lens_B, batch.response_ids_BL, temperature)
    loss_BL = loss_BL + algorithm.kl_loss_coef * (torch.exp(ref_BL - logp_BL) - (ref_BL - logp_BL) - 1)
    if algorithm.loss_aggregation == "token":
        loss = (loss_BL * mask_BL).sum() / mask_BL.sum()
    else:
        loss = ((loss_BL * mask_BL).sum(1) / mask_BL.sum(1)).mean()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=trainer.lr, betas=(0.9, 0.95), eps=trainer.adam_eps, weight_decay=trainer.weight_decay
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.clip_grad or math.inf)
    optimizer.step()
    return {n: p.detach() for n, p in model.named_parameters()}


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"algorithm": {"loss_aggregation": "sequence"}},
        {"algorithm": {"eps_clip": 0.05, "eps_clip_high": 0.3}, "rollout": {"rollout_temperature": 0.7}},
        {"trainer": {"clip_grad": 0.01, "weight_decay": 0.1}},
        {"trainer": {"clip_grad": 0.0}},
        {"model": {"architecture": QWEN3_MOE}},
        {"model": {"architecture": shrink({"model_type": "qwen3_next"}, 13)}},
        {"model": {"architecture": shrink({"model_type": "deepseek_v4"}, 13)}},
    ],
    ids=[
        "token mean",
        "sequence mean",
        "two clip bounds",
        "clipped gradient",
        "unclipped gradient",
        "moe",
        "linear attention",
        "compressed attention",
    ],
)
def test_one_step_is_that_of_a_hand_written_grpo(sections: dict[str, Any], tmp_path: Path):
    sections = {**sections, "trainer": {**ONE_STEP, **sections.get("trainer", {})}}
    trainer = started_trainer(tmp_path, **sections)
    batch = make_batch(trainer.context)
    before = parameters_of(trainer)
    trainer.train(batch)
    expected = grpo_by_hand(trainer.context, batch)
    assert_close(parameters_of(trainer), expected, atol=2e-6)
    moved = max(float((expected[n] - p).abs().max()) for n, p in before.items())
    assert moved > 1e-3


@pytest.mark.parametrize("micro_batch_size", [1, 3, 8])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "kl"])
def test_micro_batches_of_any_size_take_the_same_step(algorithm: str, micro_batch_size: int, tmp_path: Path):
    results = []
    for size in (None, micro_batch_size):
        trainer = started_trainer(tmp_path / str(size), algorithm, trainer={"adam_eps": 1e-4, "micro_batch_size": size})
        figures = [trainer.train(make_batch(trainer.context, i)).values for i in range(2)]
        results.append((parameters_of(trainer), figures))
    assert_close(results[0][0], results[1][0], atol=1e-6)
    for whole, cut in zip(results[0][1], results[1][1], strict=True):
        assert whole == pytest.approx(cut, abs=1e-5)


def test_what_is_outside_the_mask_does_not_matter(tmp_path: Path):
    results = []
    for junk in (0, 7):
        trainer = started_trainer(tmp_path / str(junk), trainer=ONE_STEP)
        batch = make_batch(trainer.context)
        is_outside = batch.mask_BL == 0
        assert is_outside.any()
        batch = replace(
            batch,
            response_ids_BL=np.where(is_outside, junk, batch.response_ids_BL),
            logprob_BL=np.where(is_outside, np.float32(-junk), batch.logprob_BL),
        )
        trainer.train(batch)
        results.append(parameters_of(trainer))
    assert_close(*results, atol=1e-7)


def test_each_sample_is_in_exactly_one_step_of_a_rollout(tmp_path: Path):
    trainer = started_trainer(tmp_path, trainer={"num_steps_per_rollout": 4})
    seen: list[list[int]] = []
    step = trainer.steps._step
    trainer.steps._step = lambda work, rows, **k: seen.append(rows.tolist()) or step(work, rows, **k)  # type: ignore[method-assign]
    for rollout_id in range(2):
        trainer.train(make_batch(trainer.context, rollout_id))
    assert [len(rows) for rows in seen] == [2] * 8
    for steps in (seen[:4], seen[4:]):
        assert sorted(row for rows in steps for row in rows) == list(range(8))
    assert seen[:4] != seen[4:]


def test_kl_is_measured_against_the_frozen_first_policy(tmp_path: Path):
    trainer = started_trainer(tmp_path, "kl", trainer=ONE_STEP)
    reference = parameters_of(trainer, "reference")
    figures = [trainer.train(make_batch(trainer.context, i)).values for i in range(2)]
    assert figures[0]["kl_reference"] == pytest.approx(0, abs=1e-7)
    assert figures[1]["kl_reference"] > 1e-4
    assert_close(parameters_of(trainer, "reference"), reference, atol=0)


def test_the_kl_term_holds_the_policy_back(tmp_path: Path):
    distance = {}
    for coefficient in (0.001, 10.0):
        trainer = started_trainer(tmp_path / str(coefficient), algorithm={"kl_loss_coef": coefficient})
        distance[coefficient] = [
            trainer.train(make_batch(trainer.context, i)).values["kl_reference"] for i in range(6)
        ][-1]
    assert distance[10.0] < 0.5 * distance[0.001]


def test_a_critic_learns_the_returns(tmp_path: Path):
    trainer = started_trainer(tmp_path, "ppo", algorithm={"advantage_estimator": "ppo", "value_clip": 100.0})
    batch = make_batch(trainer.context)
    losses = [trainer.train(batch).values["value_loss"] for _ in range(12)]
    # The head starts at 0, so the first loss is half the mean square of the rewards, whose returns they are.
    tokens_B = batch.mask_BL.sum(1)
    by_hand = float((0.5 * batch.reward_B**2 * tokens_B).sum() / tokens_B.sum())
    first = started_trainer(tmp_path / "one", "ppo", trainer=ONE_STEP).train(batch).values["value_loss"]
    assert first == pytest.approx(by_hand, rel=1e-5)
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_part_of_a_critic_is_trained_whatever_its_dtype(dtype: str, tmp_path: Path):
    """A bf16 critic has two dtypes, for its head stays float32."""
    trainer = started_trainer(tmp_path, "ppo", model={"dtype": dtype})
    before = {role: parameters_of(trainer, role) for role in ("actor", "critic")}
    for rollout_id in range(4):
        trainer.train(make_batch(trainer.context, rollout_id))
    for role, names in before.items():
        after = parameters_of(trainer, role)
        assert [n for n in names if torch.equal(names[n], after[n])] == [], role


def test_a_bf16_model_learns_in_steps_smaller_than_its_rounding(tmp_path: Path):
    """Weights of about 0.3 lie 0.002 apart in bf16, so no single step of 0.0002 moves one; twenty do."""
    trainer = started_trainer(tmp_path, model={"dtype": "bfloat16"}, trainer={"lr": 2e-4, "clip_grad": 0.0})
    before = parameters_of(trainer)["model.layers.0.mlp.up_proj.weight"]
    batch = make_batch(trainer.context)
    for _ in range(10):
        trainer.train(batch)
    after = parameters_of(trainer)["model.layers.0.mlp.up_proj.weight"]
    assert after.dtype == torch.bfloat16
    assert (after != before).float().mean() > 0.6
    numel = sum(p.numel() for p in trainer.models["actor"].parameters())
    assert trainer.region_bytes()["optimizer"] == 12 * numel  # two moments and the float32 copy
    assert trainer.region_bytes()["grads"] == 4 * numel


def test_the_critic_has_a_learning_rate_of_its_own(tmp_path: Path):
    trainer = started_trainer(tmp_path, "ppo", algorithm={"advantage_estimator": "ppo", "critic_lr": 1e-12})
    before = {role: parameters_of(trainer, role) for role in ("actor", "critic")}
    trainer.train(make_batch(trainer.context))
    assert_close(parameters_of(trainer, "critic"), before["critic"], atol=1e-10)
    assert not torch.allclose(parameters_of(trainer)["lm_head.weight"], before["actor"]["lm_head.weight"], atol=1e-4)


def test_log_probs_of_the_engine_are_the_trainers(tmp_path: Path):
    """The largest difference between sampling and training is reported; without an update between, it is rounding."""
    rig = Rig(make_context("grpo", HandoffOptions(offload_train=False, offload_rollout=False)), tmp_path)
    for _ in rig.run(cycles=2):
        pass
    assert len(rig.metrics) == 2
    assert all(m["logprob_diff"] < 1e-5 for m in rig.metrics)
    rig.shutdown()


def test_a_loss_that_is_not_a_number_stops_before_the_parameters_are_touched(tmp_path: Path):
    trainer = started_trainer(tmp_path)
    before = parameters_of(trainer)
    batch = make_batch(trainer.context)
    with pytest.raises(RunError) as caught:
        trainer.train(replace(batch, reward_B=np.full_like(batch.reward_B, np.nan)))
    assert str(caught.value).startswith("error: policy_loss is nan in training\n")
    assert_close(parameters_of(trainer), before, atol=0)
    assert trainer._device_pool.by_region().keys() == {"params", "optimizer", "grads"}
    trainer.train(batch)


# -- learning rate -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "step", "expected"),
    [
        ("constant", 0, 0.25), ("constant", 2, 0.75), ("constant", 3, 1.0), ("constant", 4, 1.0), ("constant", 99, 1.0),
        ("linear", 0, 0.25), ("linear", 4, 1.0), ("linear", 9, 0.6), ("linear", 14, 0.2), ("linear", 20, 0.2),
        ("cosine", 3, 1.0), ("cosine", 4, 1.0), ("cosine", 9, 0.6), ("cosine", 14, 0.2), ("cosine", 20, 0.2),
        ("cosine", 6, 0.2 + 0.4 * (1 + math.cos(math.pi / 5))),
    ],
)  # fmt: skip
def test_the_learning_rate_warms_up_over_four_steps_and_decays_over_ten(style: str, step: int, expected: float):
    assert lr_at(step, 1.0, 4, 14, style, 0.2) == pytest.approx(expected)


def test_without_warm_up_the_first_step_has_the_whole_learning_rate():
    assert [lr_at(0, 1.0, 0, 10, style, 0.0) for style in ("constant", "linear", "cosine")] == [1.0, 1.0, 1.0]


def test_the_rate_goes_by_optimizer_steps_of_the_whole_run(tmp_path: Path):
    trainer = started_trainer(tmp_path, trainer={"lr": 1.0, "lr_decay_style": "linear"}, run={"num_rollout": 2})
    rates = [trainer.train(make_batch(trainer.context, i)).values["lr"] for i in range(2)]
    assert rates == [0.75, 0.25]  # of the second and of the fourth step of four


# -- ranks ---------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_ranks_train_as_one(tmp_path: Path):
    ports = {"grpo": free_port(), "ppo": free_port()}
    train_rank(0, 1, ports, str(tmp_path))
    torch.multiprocessing.spawn(train_rank, args=(2, ports, str(tmp_path)), nprocs=2)
    alone, first, second = (torch.load(tmp_path / f"rank-{name}.pt") for name in ("0-of-1", "0-of-2", "1-of-2"))
    for algorithm in ports:
        assert_close(first[algorithm][0], alone[algorithm][0], atol=1e-5)
        assert_close(second[algorithm][0], first[algorithm][0], atol=0)
        assert first[algorithm][1] == second[algorithm][1]
        for one, two in zip(alone[algorithm][1], first[algorithm][1], strict=True):
            assert two == pytest.approx(one, abs=1e-4)


# -- checkpoints ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo", "lora", "kl"])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(algorithm: str, dtype: str, tmp_path: Path):
    sections = {"model": {"dtype": dtype}, "trainer": {"lr_decay_style": "cosine", "lr_warmup_iters": 3}}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    whole = started_trainer(tmp_path / "whole", algorithm, **sections)
    whole.train(make_batch(whole.context, 0))
    whole.save(str(checkpoint))
    expected = whole.train(make_batch(whole.context, 1)).values
    resumed = started_trainer(tmp_path / "resumed", algorithm, **sections)
    resumed.load(str(checkpoint))
    assert resumed.train(make_batch(resumed.context, 1)).values == expected
    for region in ("params", "optimizer"):
        assert torch.equal(resumed._buffers[region].bytes, whole._buffers[region].bytes), region


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    trainer = started_trainer(tmp_path / "one")
    trainer.save(str(tmp_path))
    wider = started_trainer(tmp_path / "other", architecture={**QWEN3, "intermediate_size": 48})
    before = parameters_of(wider)
    with pytest.raises(RunError) as caught:
        wider.load(str(tmp_path))
    assert str(caught.value) == (
        "error: the checkpoint is of another model\n"
        f"  {tmp_path}\n"
        "hint: resume with the model, the vocabulary and the LoRA rank it was made with"
    )
    assert_close(parameters_of(wider), before, atol=0)
    with pytest.raises(RunError, match="of another model"):
        started_trainer(tmp_path / "lora", "lora").load(str(tmp_path))


@pytest.mark.parametrize(
    ("algorithm", "architecture"),
    [("grpo", QWEN3), ("lora", QWEN3), ("grpo", {**QWEN3, "tie_word_embeddings": True}), ("grpo", QWEN3_MOE)],
    ids=["plain", "lora", "tied embeddings", "moe"],
)
def test_transformers_loads_the_exported_model_with_equal_logits(
    algorithm: str, architecture: dict[str, Any], tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    trainer = started_trainer(tmp_path / "ledgers", algorithm, architecture=architecture)
    trainer.train(make_batch(trainer.context))
    trainer.save(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    ids = torch.tensor(make_prompts("1234", "5678")[0])
    with torch.no_grad():
        ours, theirs = trainer.models["actor"](ids).logits, loaded(ids).logits
        initial = build_model(trainer.context, with_lora=False)(ids).logits
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-5)
    assert (ours - initial).abs().max() > 1e-2


def test_save_and_train_of_an_offloaded_trainer_are_refused(tmp_path: Path):
    trainer = started_trainer(tmp_path)
    trainer.offload()
    with pytest.raises(RunError, match="trainer-0: save while params is offloaded"):
        trainer.save(str(tmp_path))
    with pytest.raises(RunError, match="trainer-0: train while params is offloaded"):
        trainer.train(make_batch(trainer.context))


# -- moving and sending --------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", ["retained", "fresh", "shared"])
def test_offload_and_onload_change_nothing_and_may_be_repeated(buffers: Any, tmp_path: Path):
    trainer = started_trainer(tmp_path, options=HandoffOptions(buffers=buffers))
    trainer.train(make_batch(trainer.context))
    before = {r: trainer._buffers[r].bytes.clone() for r in ("params", "optimizer")}
    for _ in range(2):
        for move in (trainer.offload, trainer.onload):
            move()
            move()
    for region, content in before.items():
        assert torch.equal(trainer._buffers[region].bytes, content)
    twin = started_trainer(tmp_path / "twin")
    twin.train(make_batch(twin.context))
    assert trainer.train(make_batch(trainer.context, 1)).values == twin.train(make_batch(twin.context, 1)).values


def test_an_offloaded_trainer_holds_no_device_memory(tmp_path: Path):
    trainer = started_trainer(tmp_path)
    sizes = trainer.region_bytes()
    trainer.offload()
    assert (trainer.memory().gpu_bytes, trainer.memory().host_bytes) == (0, sizes["params"] + sizes["optimizer"])


@pytest.mark.parametrize("buffers", ["retained", "fresh", "shared"])
def test_an_update_from_the_backup_sends_what_one_from_the_device_sends(buffers: Any, tmp_path: Path):
    trainer = started_trainer(tmp_path, options=HandoffOptions(buffers=buffers))
    trainer.train(make_batch(trainer.context))
    from_device = sent_by(trainer)
    trainer.offload()
    assert_close(sent_by(trainer), from_device, atol=0)


@pytest.mark.parametrize("limit", [1, 700, 3000])
def test_an_update_in_several_buckets_is_the_update_in_one(limit: int, tmp_path: Path):
    trainer = started_trainer(tmp_path / "cut", handoff={"update_weight_buffer_size": limit})
    sink = CollectedUpdate()
    trainer.update_weights(1, sink)
    assert_close(sink.tensors, parameters_of(trainer), atol=0)
    assert len(sink.bucket_bytes) > 3
    assert max(sink.bucket_bytes) <= max(limit, 32 * 16 * 4)  # the largest tensor has a bucket of its own
    assert trainer.region_bytes()["update_bucket"] == max(sink.bucket_bytes)
    engine = started_engine(tmp_path / "engine", run={"seed": 8})
    trainer.update_weights(1, engine)
    assert engine.weights_checksum() == checksum(trainer.models["actor"].named_parameters())


def test_an_update_says_how_many_bytes_it_sent(tmp_path: Path):
    trainer = started_trainer(tmp_path)
    sink = CollectedUpdate()
    sent = trainer.update_weights(1, sink)
    assert sent == sum(sink.bucket_bytes) == trainer.region_bytes()["update_bucket"]
    assert trainer.memory().gpu_peak_bytes - trainer.memory().gpu_bytes == sent


def test_the_update_of_a_failing_engine_leaves_no_bucket_in_the_books(tmp_path: Path):
    class Refusing(CollectedUpdate):
        def load_bucket(self, bucket: Any) -> None:
            raise RunError("refused")

    trainer = started_trainer(tmp_path)
    with pytest.raises(RunError, match="refused"):
        trainer.update_weights(1, Refusing())
    assert "update_bucket" not in trainer._device_pool.by_region()


def test_lora_changes_and_sends_adapters_only(tmp_path: Path):
    trainer = started_trainer(tmp_path / "trainer", "lora")
    before = parameters_of(trainer)
    for rollout_id in range(2):
        trainer.train(make_batch(trainer.context, rollout_id))
    after = parameters_of(trainer)
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    adapters = {n for n in after if n.rpartition(".")[2] in ("lora_a", "lora_b")}
    assert changed == adapters
    assert len(adapters) == 2 * 7 * 2  # A and B of seven projections in two layers
    assert sent_by(trainer).keys() == adapters
    engine = started_engine(tmp_path / "engine", "lora", HandoffOptions(engine_weights="mirror"))
    trainer.update_weights(1, engine)
    assert engine.weights_checksum() == checksum(trainer.models["actor"].named_parameters())


def test_adapters_reach_an_engine_of_bf16_weights_unrounded(tmp_path: Path):
    sections = {"model": {"dtype": "bfloat16"}, "rollout": {"dtype": "bfloat16"}}
    trainer = started_trainer(tmp_path / "trainer", "lora", **sections)
    trainer.train(make_batch(trainer.context))
    engine = started_engine(tmp_path / "engine", "lora", HandoffOptions(engine_weights="mirror"), **sections)
    trainer.update_weights(1, engine)
    assert engine.weights_checksum() == checksum(trainer.models["actor"].named_parameters())
    assert {p.dtype for p in engine.model.parameters()} == {torch.bfloat16, torch.float32}


def test_an_adapted_model_starts_as_the_plain_one(tmp_path: Path):
    prompts = torch.tensor(make_prompts("1234")[0])
    with torch.no_grad():
        adapted = started_trainer(tmp_path, "lora").models["actor"](prompts).logits
        plain = build_model(make_context())(prompts).logits
    assert torch.equal(adapted, plain)


def test_only_rank_0_sends(tmp_path: Path):
    trainer = started_trainer(tmp_path)
    trainer._rank = 1
    assert trainer.update_weights(1, None) == 0  # type: ignore[arg-type]
