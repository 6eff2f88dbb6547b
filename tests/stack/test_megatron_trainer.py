"""The megatron trainer on the CPU, against the embedded trainer and against itself on several ranks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding
from megatron_cpu import use_cpu
from rig import LLAMA, QWEN3, QWEN3_MOE, CollectedUpdate, make_batch, make_context, sent_by
from stack_process import resume_rank, run_ranks, same_on_every_rank, train_rank
from stack_rig import (
    DEEPSEEK,
    DEEPSEEK_V4_SHORT,
    GLM4_MOE,
    GLM4_MOE_LITE,
    GPT_OSS,
    MINIMAX_M2,
    QWEN3_5,
    QWEN3_5_MOE,
    QWEN3_NEXT,
    YARN,
    assert_trained_alike,
    critic_of,
    free_port,
)

from rllaunch.backends.base import RankInfo, Slot
from rllaunch.backends.embedded.engine import EmbeddedEngine
from rllaunch.backends.embedded.model import model_config
from rllaunch.backends.embedded.trainer import EmbeddedTrainer
from rllaunch.backends.megatron import checkpoint
from rllaunch.backends.megatron.attention import drop_tables
from rllaunch.backends.megatron.chunks import apart, chunks_of
from rllaunch.backends.megatron.context import segments
from rllaunch.backends.megatron.pieces import state_pieces
from rllaunch.backends.megatron.regions import torch_optimizers
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.trainer import MegatronTrainer
from rllaunch.backends.megatron.update import as_engine_wants
from rllaunch.backends.megatron.weights import unstack_experts
from rllaunch.errors import ConfigError, RunError
from rllaunch.plan.handoff import HandoffOptions

pytestmark = pytest.mark.stack

MOE = {**QWEN3_MOE, "norm_topk_prob": True}
FAMILIES = {
    "qwen3": QWEN3,
    "llama": {**LLAMA, "tie_word_embeddings": True},
    "qwen3_moe": MOE,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "minimax_m2": MINIMAX_M2,
    "gpt_oss": GPT_OSS,
    "qwen3_5_text": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE,
    "qwen3_next": QWEN3_NEXT,
    "deepseek_v4": DEEPSEEK_V4_SHORT,
}
# Adam divides by the root of a square: where a gradient is rounding alone, a larger eps keeps it from becoming a step.
STEADY = {"adam_eps": 1e-3, "micro_batch_size": 3}
# The other dispatcher, `alltoall`, works on streams of a GPU.
DISPATCHER = {"moe_token_dispatcher_type": "allgather"}


def launch(preset: str = "grpo", options: HandoffOptions | None = None, **sections: Any) -> Any:
    sections["trainer"] = {**STEADY, **sections.get("trainer", {})}
    sections["megatron"] = {**DISPATCHER, **sections.get("megatron", {})}
    return make_context(preset, options, **sections)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Start a trainer of a class in a directory of its own; each is shut down at the end."""
    use_cpu()
    running: list[Any] = []

    def start(cls: Any, context: Any) -> Any:
        # Megatron's groups are the process's: one at a time.
        while running:
            running.pop().shutdown()
        trainer = cls(context, Slot(0, 0, "cpu", str(tmp_path / f"ledgers-{len(list(tmp_path.iterdir()))}")))
        running.append(trainer)
        trainer.init(RankInfo(0, 1, "", 0))
        return trainer

    yield start
    while running:
        running.pop().shutdown()


def two_rollouts(trainer: Any) -> list[dict[str, float]]:
    return [dict(trainer.train(make_batch(trainer.context, i)).values) for i in range(2)]


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    """What an update sends, and the critic's parameters under the names of a checkpoint."""
    if isinstance(trainer, MegatronTrainer):
        return sent_by(trainer) | critic_of(trainer)
    if "critic" not in trainer.models:
        return sent_by(trainer)
    named = {n.replace("backbone.", "model."): p.detach() for n, p in trainer.models["critic"].named_parameters()}
    named["lm_head.weight"] = named.pop("value_head.weight")
    shape = read_shape(model_config(trainer.context).to_dict())
    return sent_by(trainer) | {f"critic {n}": p for n, p in unstack_experts(named.items(), shape)}


@pytest.mark.parametrize("preset", ["grpo", "kl", "ppo"])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_trains_as_the_embedded_trainer_does(family: str, preset: str, started: Any) -> None:
    context = launch(preset, architecture=FAMILIES[family], trainer={"lr_decay_style": "cosine", "lr_warmup_iters": 2})
    ours = started(MegatronTrainer, context)
    got, sent = two_rollouts(ours), weights_of(ours)
    theirs = started(EmbeddedTrainer, context)
    want, theirs_sent = two_rollouts(theirs), weights_of(theirs)
    for rollout in range(2):
        assert got[rollout].keys() == want[rollout].keys()
        for name, value in want[rollout].items():
            assert got[rollout][name] == pytest.approx(value, rel=1e-3, abs=1e-4), name
    assert sent.keys() == theirs_sent.keys()
    for name, tensor in theirs_sent.items():
        torch.testing.assert_close(sent[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_reference_beside_a_critic_is_of_the_policy_alone(started: Any) -> None:
    context = launch("ppo", architecture=MOE, algorithm={"advantage_estimator": "ppo", "kl_loss_coef": 0.1})
    ours = started(MegatronTrainer, context)
    policy = 4 * sum(p.numel() for p in ours.built.ddp.module.parameters())
    assert policy <= ours.memory().host_bytes < 1.1 * policy < 0.6 * ours.region_bytes()["params"]
    got, weights = two_rollouts(ours), weights_of(ours)
    theirs = started(EmbeddedTrainer, context)
    for figures, want in zip(got, two_rollouts(theirs), strict=True):
        assert figures == pytest.approx(want, rel=1e-3, abs=1e-4)
    for name, tensor in weights_of(theirs).items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_a_critic_needs_no_other_samples_of_a_prompt(started: Any) -> None:
    context = launch("ppo", architecture=QWEN3, rollout={"n_samples_per_prompt": 1, "rollout_batch_size": 8})
    got = two_rollouts(started(MegatronTrainer, context))
    for figures, want in zip(got, two_rollouts(started(EmbeddedTrainer, context)), strict=True):
        assert figures == pytest.approx(want, rel=1e-3, abs=1e-4)


def test_rates_of_linear_attention_are_float32_in_a_model_of_bfloat16(started: Any) -> None:
    """Trained by steps that bfloat16 would round away, sent to an engine in its own type, and saved as they are."""
    context = launch(
        architecture=QWEN3_5,
        trainer={"precision": "bf16", "lr": 1e-3},
        model={"architecture": QWEN3_5, "dtype": "bfloat16"},
    )
    trainer = started(MegatronTrainer, context)
    before = {n: t.clone() for n, t in gathered(trainer).items()}
    trainer.train(make_batch(context))
    after = gathered(trainer)
    rates = {n for n in after if n.endswith("A_log")}
    assert rates == {n for n, t in after.items() if t.dtype == torch.float32}
    for name in rates:
        assert not torch.equal(after[name], before[name]), name
        assert not torch.equal(after[name].bfloat16().float(), after[name]), name
    to_sglang = launch(architecture=QWEN3_5, rollout={"backend": "sglang", "dtype": "bfloat16"})
    sent = dict(as_engine_wants(after.items(), to_sglang, trainer.built.shape))
    assert all(torch.equal(sent[n], after[n]) for n in after)


def gathered(trainer: Any) -> dict[str, torch.Tensor]:
    placement, model = trainer.built.placement, trainer.built.ddp.module
    local = dict(model.named_parameters()) | dict(model.named_buffers())
    return {n: t.detach().clone() for n, t in placement.gather(local.__getitem__, "cpu")}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_part_of_a_critic_learns_and_its_head_is_float32(precision: str, started: Any) -> None:
    dtype = "float32" if precision == "fp32" else "bfloat16"
    # As wide as Megatron-core's buffers are aligned: the head fills one of its own.
    architecture = {**QWEN3, "hidden_size": 128}
    context = launch(
        "ppo",
        architecture=architecture,
        model={"architecture": architecture, "dtype": dtype},
        trainer={"precision": precision, "num_steps_per_rollout": 1},
        algorithm={"advantage_estimator": "ppo", "value_clip": 100.0},
    )
    trainer = started(MegatronTrainer, context)
    before, batch = weights_of(trainer), make_batch(context)
    assert not before["critic lm_head.weight"].any()
    head = trainer.built.critic.module.output_layer.weight.untyped_storage().data_ptr()
    groups = [g for o in torch_optimizers(trainer.built.optimizer) for g in o.param_groups]
    assert any(p.untyped_storage().data_ptr() == head for g in groups for p in g["params"]), "it is stepped in place"
    losses = [trainer.train(batch).values["value_loss"] for _ in range(12)]
    for name, tensor in weights_of(trainer).items():
        assert not torch.equal(tensor, before[name]), name
        assert tensor.dtype == (torch.float32 if "critic" not in name or "lm_head" in name else getattr(torch, dtype))
    assert losses[-1] < 0.5 * losses[0]


def with_padding_sampled(context: Any, rollout_id: int) -> Any:
    """A rollout in which the policy has sampled the token that pads, as an untrained one does."""
    batch = make_batch(context, rollout_id)
    response_BL = batch.response_ids_BL.copy()
    response_BL[::3, 0] = 0
    return replace(batch, response_ids_BL=response_BL)


@pytest.mark.parametrize("tied", [False, True])
def test_a_sampled_padding_token_is_trained_as_transformers_trains_it(tied: bool, started: Any) -> None:
    context = launch(architecture={**QWEN3, "tie_word_embeddings": tied})
    results = []
    for cls in (MegatronTrainer, EmbeddedTrainer):
        trainer = started(cls, context)
        figures = [dict(trainer.train(with_padding_sampled(context, i)).values) for i in range(2)]
        results.append((figures, sent_by(trainer)))
    (got, sent), (want, theirs) = results
    for rollout in range(2):
        assert got[rollout]["grad_norm"] == pytest.approx(want[rollout]["grad_norm"], rel=1e-3)
    for name, tensor in theirs.items():
        torch.testing.assert_close(sent[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_an_embedded_engine_takes_its_updates(started: Any, tmp_path: Path) -> None:
    context = launch(architecture=MOE, handoff={"update_weight_buffer_size": 3000})
    trainer = started(MegatronTrainer, context)
    engine = EmbeddedEngine(context, trainer.slot)
    engine.start()
    before = engine.weights_checksum()
    trainer.train(make_batch(context))
    sent = trainer.update_weights(1, engine)
    assert engine.weights_checksum() != before
    for name, tensor in sent_by(trainer).items():
        assert torch.equal(engine._weights[name], tensor), name
    assert sent >= sum(t.nbytes for t in engine._weights.values())
    engine.shutdown()


# -- handoff ---------------------------------------------------------------------------------------


def everything(trainer: Any) -> dict[str, torch.Tensor]:
    """Every tensor with state: parameters, what the optimizer steps, and its moments."""
    models = enumerate(trainer.built.models)
    tensors = {f"parameter {i} {n}": p.data for i, model in models for n, p in model.module.named_parameters()}
    for number, optimizer in enumerate(torch_optimizers(trainer.built.optimizer)):
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                at = f"{number} {id(group)} {index}"
                tensors[f"main {at}"] = parameter.data
                tensors |= {f"{n} {at}": t for n, t in optimizer.state[parameter].items()}
    return tensors


@pytest.mark.parametrize("buffers", ["retained", "fresh", "shared"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("preset", ["kl", "ppo"])
def test_asleep_it_holds_nothing_on_the_device_and_awake_it_is_the_same(
    preset: str, buffers: Any, precision: str, started: Any
) -> None:
    context = launch(
        preset, HandoffOptions(buffers=buffers, engine_weights="discard"), architecture=MOE, trainer={"precision": precision},
        model={"architecture": MOE, "dtype": "float32" if precision == "fp32" else "bfloat16"},
    )  # fmt: skip
    trainer = started(MegatronTrainer, context)
    trainer.train(make_batch(context))
    tensors = everything(trainer)
    views = {name: (id(t), t.data_ptr() - t.untyped_storage().data_ptr()) for name, t in tensors.items()}
    kept = {name: t.clone() for name, t in tensors.items()}
    sizes = trainer.region_bytes()
    state, reference = sizes["params"] + sizes["optimizer"], sizes["params"] if preset == "kl" else 0
    assert trainer.memory().gpu_bytes == state + sizes["grads"]
    for _ in range(2):
        trainer.offload()
        trainer.offload()
        asleep = trainer.memory()
        assert (asleep.gpu_bytes, asleep.host_bytes) == (0, state + reference)
        assert asleep.moved_bytes > 0.9 * state
        big = [t for name, t in tensors.items() if not name.startswith("step")]
        assert all(t.untyped_storage().nbytes() == 0 for t in big)
        grads = [b.grad_data for m in trainer.built.models for b in (*m.buffers, *m.expert_parallel_buffers)]
        assert all(g.untyped_storage().nbytes() == 0 for g in grads)
        trainer.onload()
        trainer.onload()
        assert trainer.memory().gpu_bytes == state + sizes["grads"]
        assert trainer.memory().host_bytes == reference + (0 if buffers == "fresh" else state)
        again = everything(trainer)
        assert {n: (id(t), t.data_ptr() - t.untyped_storage().data_ptr()) for n, t in tensors.items()} == views
        for name, tensor in again.items():
            assert torch.equal(tensor, kept[name]), name


@pytest.mark.parametrize("does", ["offload", "clear_memory", "shutdown"])
@pytest.mark.parametrize("rope", ["default", "yarn", "default, linear attention"])
def test_tables_of_lengths_seen_before_are_let_go_with_the_rest(rope: str, does: str, started: Any) -> None:
    is_linear = "linear" in rope
    plain = QWEN3_5 if is_linear else QWEN3
    architecture = {**DEEPSEEK, "rope_parameters": YARN} if rope == "yarn" else plain
    options = HandoffOptions(engine_weights="discard")
    trainer = started(
        MegatronTrainer, launch(options=options, architecture=architecture, trainer={"micro_batch_size": 1})
    )
    drop_tables()
    trainer.train(make_batch(trainer.context))
    kept = {(YarnRotaryEmbedding if rope == "yarn" else RotaryEmbedding).forward, segments}
    kept |= {apart, chunks_of} if is_linear else set()
    assert all(table.cache_info().currsize > 1 for table in kept)
    getattr(trainer, does)()
    assert all(table.cache_info().currsize == 0 for table in kept)


def test_an_arena_that_an_embedded_engine_sizes_otherwise_is_refused(started: Any) -> None:
    options = HandoffOptions(buffers="shared", engine_weights="mirror", order="gpu")
    with pytest.raises(ConfigError, match="shares no arena with embedded engines"):
        started(MegatronTrainer, launch(architecture=QWEN3, options=options))


@pytest.mark.parametrize("preset", ["grpo", "ppo"])
def test_trained_after_sleep_it_is_bit_for_bit_as_if_it_had_not_slept(preset: str, started: Any) -> None:
    context = launch(preset, architecture=QWEN3)
    results = []
    for sleeps in (False, True):
        trainer = started(MegatronTrainer, context)
        figures = []
        for rollout_id in range(3):
            if sleeps:
                trainer.clear_memory()
                trainer.offload()
                gc.collect()
                trainer.onload()
            figures.append(dict(trainer.train(make_batch(context, rollout_id)).values))
        results.append((figures, weights_of(trainer)))
    (plain, plain_sent), (slept, slept_sent) = results
    assert plain == slept
    assert all(torch.equal(slept_sent[n], t) for n, t in plain_sent.items())


def test_an_update_from_the_backup_is_that_from_the_device(started: Any) -> None:
    trainer = started(MegatronTrainer, launch(architecture=DEEPSEEK))
    trainer.train(make_batch(trainer.context))
    awake = sent_by(trainer)
    trainer.offload()
    asleep = sent_by(trainer)
    assert awake.keys() == asleep.keys()
    assert all(torch.equal(asleep[n], t) for n, t in awake.items())


def test_what_needs_state_says_that_it_is_asleep(started: Any, tmp_path: Path) -> None:
    trainer = started(MegatronTrainer, launch(architecture=QWEN3))
    trainer.offload()
    with pytest.raises(RunError, match="train while params is offloaded"):
        trainer.train(make_batch(trainer.context))
    with pytest.raises(RunError, match="save while params is offloaded"):
        trainer.save(str(tmp_path))


@pytest.mark.parametrize(
    ("family", "preset"),
    [("qwen3", "grpo"), ("qwen3", "ppo"), ("gpt_oss", "grpo"), ("qwen3_next", "grpo"), ("deepseek_v4", "grpo")],
)
def test_regions_before_the_start_are_what_the_plan_says(family: str, preset: str, tmp_path: Path) -> None:
    trainer = MegatronTrainer(launch(preset, architecture=FAMILIES[family]), Slot(0, 0, "cpu", str(tmp_path)))
    planned = trainer.region_bytes()
    use_cpu()
    trainer.init(RankInfo(0, 1, "", 0))
    real = trainer.region_bytes()
    frozen = sum(p.numel() for p in trainer.built.ddp.module.parameters() if not p.requires_grad)
    trainer.shutdown()
    assert planned.keys() == real.keys()
    # An indexer, which nothing trains, is less than a thousandth of a large model: the plan counts its optimizer, too.
    planned = {**planned, "optimizer": planned["optimizer"] - 8 * frozen, "grads": planned["grads"] - 4 * frozen}
    # Megatron pads buffers to the ranks that share them and keeps parameters on boundaries of 64 elements.
    for region in ("params", "optimizer", "grads"):
        assert planned[region] <= real[region] <= 1.25 * planned[region], region


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "preset"),
    [("qwen3", "kl"), ("deepseek_v3", "kl"), ("deepseek_v3", "ppo"), ("gpt_oss", "kl"), ("deepseek_v4", "kl")],
)
def test_a_resumed_run_goes_on_bit_for_bit(family: str, preset: str, started: Any, tmp_path: Path) -> None:
    context = launch(preset, architecture=FAMILIES[family], trainer={"lr_decay_style": "linear"})
    trainer = started(MegatronTrainer, context)
    trainer.train(make_batch(context, 0))
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    trainer.save(str(directory))
    want = dict(trainer.train(make_batch(context, 1)).values), weights_of(trainer)
    trainer = started(MegatronTrainer, context)
    trainer.load(str(directory))
    got = dict(trainer.train(make_batch(context, 1)).values), weights_of(trainer)
    assert got[0] == want[0]
    assert all(torch.equal(got[1][n], t) for n, t in want[1].items())


def test_of_both_types_of_parameters_a_resumed_run_has_every_bit(started: Any, tmp_path: Path) -> None:
    """In bfloat16, of which some stay float32 and are stepped where they are."""
    facts: dict[str, Any] = {
        "architecture": DEEPSEEK_V4_SHORT,
        "trainer": {"precision": "bf16"},
        "model": {"architecture": DEEPSEEK_V4_SHORT, "dtype": "bfloat16"},
    }
    trainer = started(MegatronTrainer, launch(**facts))
    before = weights_of(trainer)
    trainer.train(make_batch(trainer.context, 0))
    trainer.save(str(tmp_path))
    want = dict(trainer.train(make_batch(trainer.context, 1)).values), weights_of(trainer)
    again = started(MegatronTrainer, launch(**facts))
    again.load(str(tmp_path))
    assert dict(again.train(make_batch(again.context, 1)).values) == want[0]
    assert all(torch.equal(tensor, want[1][name]) for name, tensor in weights_of(again).items())
    kept = {name for name, tensor in want[1].items() if torch.equal(tensor, before[name])}
    # A table of zeros asks for one expert twice, whose weight then is half whatever the router says.
    same = {name for name in kept if ".mlp." not in name}
    assert same == {name for name in before if ".compressor.indexer." in name}, "all else is trained"


@pytest.mark.parametrize("family", ["qwen3_moe", "minimax_m2", "gpt_oss", "qwen3_5_text", "qwen3_next", "deepseek_v4"])
def test_transformers_loads_what_is_saved_and_training_starts_from_it(
    family: str, started: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    context = launch(architecture=FAMILIES[family])
    trainer = started(MegatronTrainer, context)
    trainer.train(make_batch(context))
    sent = sent_by(trainer)
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    trainer.save(str(directory))
    loaded = AutoModelForCausalLM.from_pretrained(directory / "hf", dtype=torch.float32)
    parameters = dict(loaded.named_parameters())
    assert parameters.keys() == sent.keys()
    assert all(torch.equal(parameters[n], t) for n, t in sent.items())
    again = started(
        MegatronTrainer,
        launch(architecture=FAMILIES[family], model={"hf_checkpoint": str(directory / "hf"), "dtype": "float32"}),
    )
    resent = sent_by(again)
    assert all(torch.equal(resent[n], t) for n, t in sent.items())


def test_a_checkpoint_keeps_both_models_and_transformers_loads_the_policy(started: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = started(MegatronTrainer, launch("ppo", architecture=QWEN3))
    trainer.train(make_batch(trainer.context))
    sent = sent_by(trainer)
    trainer.save(str(tmp_path))
    parameters = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).named_parameters())
    assert parameters.keys() == sent.keys()
    assert all(torch.equal(parameters[n], t) for n, t in sent.items())
    without = started(MegatronTrainer, launch("grpo", architecture=QWEN3))
    with pytest.raises(RunError, match="does not fit this launch: critic: 'True' there, 'False' here"):
        without.load(str(tmp_path))


def test_a_checkpoint_of_another_model_is_refused(started: Any, tmp_path: Path) -> None:
    trainer = started(MegatronTrainer, launch(architecture=QWEN3))
    trainer.save(str(tmp_path))
    other = started(MegatronTrainer, launch(architecture={**QWEN3, "num_hidden_layers": 3}))
    with pytest.raises(RunError, match=r"does not fit this launch: model: .*num_layers=2.* there"):
        other.load(str(tmp_path))


def test_a_gpu_without_room_for_the_buckets_says_what_needs_less(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = started(MegatronTrainer, launch(options=HandoffOptions("gpu", update_from="gpu")))

    class Full:
        def __init__(self, *_: Any) -> None: ...

        def send(self, *_: Any) -> int:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.\nMore of it.")

    monkeypatch.setattr("rllaunch.backends.megatron.trainer.IpcSender", Full)
    monkeypatch.setattr(trainer, "_uses_ipc", True)
    with pytest.raises(RunError, match="no room for an update's buckets: CUDA out of memory") as caught:
        trainer.update_weights(0, CollectedUpdate())
    assert caught.value.fix.endswith("or --update-weights-from host, which offloads the trainer first")
    assert "More of it" not in caught.value.what


def test_a_state_is_written_in_several_files(started: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_STAGED_BYTES", 4096)
    trainer = started(MegatronTrainer, launch(architecture=QWEN3))
    trainer.train(make_batch(trainer.context))
    trainer.save(str(tmp_path))
    kept = {n: t.clone() for n, t in everything(trainer).items()}
    sizes = [path.stat().st_size for path in (tmp_path / "state").glob("*.distcp")]
    assert len(sizes) > 5
    again = started(MegatronTrainer, launch(architecture=QWEN3))
    again.load(str(tmp_path))
    assert all(torch.equal(t, was) for t, was in zip(everything(again).values(), kept.values(), strict=True))


def test_an_optimizer_on_the_host_is_in_the_checkpoint_and_fits_one_on_the_device(started: Any, tmp_path: Path) -> None:
    facts: dict[str, Any] = {"architecture": QWEN3, "model": {"architecture": QWEN3, "dtype": "bfloat16"}}
    trainer = started(MegatronTrainer, launch(**facts, trainer={"precision": "bf16", "optimizer_cpu_offload": True}))
    # Its step moves gradients off a GPU, and there is none here: values stand for what it would leave.
    torch.manual_seed(5)
    for piece in state_pieces(trainer.built, with_copies=False):
        piece.tensor.copy_(torch.randn_like(piece.tensor))
    want = {(p.key, p.offset): p.tensor.clone() for p in state_pieces(trainer.built, with_copies=False)}
    assert {key.partition(": ")[2] for key, _ in want} == {"weight", "main", "exp_avg", "exp_avg_sq"}
    trainer.save(str(tmp_path))
    for more in ({"optimizer_cpu_offload": True}, {}):
        other = started(MegatronTrainer, launch(**facts, trainer={"precision": "bf16", **more}))
        other.load(str(tmp_path))
        got = {(p.key, p.offset): p.tensor for p in state_pieces(other.built, with_copies=False)}
        assert got.keys() == want.keys()
        assert all(torch.equal(got[at], tensor) for at, tensor in want.items()), more


def test_a_checkpoint_of_another_backend_is_refused(started: Any, tmp_path: Path) -> None:
    started(EmbeddedTrainer, launch(architecture=QWEN3)).save(str(tmp_path))
    with pytest.raises(RunError, match="no state of the megatron trainer"):
        started(MegatronTrainer, launch(architecture=QWEN3)).load(str(tmp_path))


# -- several ranks ---------------------------------------------------------------------------------

TWO_GROUPS = {**QWEN3, "num_attention_heads": 4, "num_key_value_heads": 2}
# So few that there are several micro-batches of a step, and a sample that has one by itself.
BY_TOKENS = {"micro_batch_size": None, "max_tokens_per_gpu": 6}
PADDED = {"qkv_format": "bshd"}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "data": (QWEN3, {}),
    "tensor": (TWO_GROUPS, {"tensor_model_parallel_size": 2}),
    "tensor, tied": ({**TWO_GROUPS, "tie_word_embeddings": True}, {"tensor_model_parallel_size": 2}),
    "tensor, one group of key heads": (QWEN3, {"tensor_model_parallel_size": 2}),
    "pipeline": (QWEN3, {"pipeline_model_parallel_size": 2}),
    "pipeline, tied": ({**QWEN3, "tie_word_embeddings": True}, {"pipeline_model_parallel_size": 2}),
    "experts": (MOE, {"expert_model_parallel_size": 2}),
    "sequence": (TWO_GROUPS, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "sequence, latents": (DEEPSEEK, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "sequence, biases": (GLM4_MOE, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "experts, biases": (GLM4_MOE, {"expert_model_parallel_size": 2}),
    "tensor, norms over all heads": (MINIMAX_M2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "tensor, norms over all heads, one group of key heads": (
        {**MINIMAX_M2, "num_key_value_heads": 1},
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "experts, norms over all heads": (MINIMAX_M2, {"expert_model_parallel_size": 2}),
    "tensor, linear attention": (QWEN3_5, {"tensor_model_parallel_size": 2}),
    "tensor, linear attention, one group of key heads": (
        {**QWEN3_5, "num_key_value_heads": 1},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True, "recompute_granularity": "selective"},
    ),
    "pipeline, linear attention": (
        {**QWEN3_5, "tie_word_embeddings": True},
        {"pipeline_model_parallel_size": 2, "recompute_granularity": "full"},
    ),
    "experts, linear attention": (QWEN3_5_MOE, {"expert_model_parallel_size": 2}),
    "sequence and experts, linear attention": (
        QWEN3_NEXT,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "linear attention, padded": (QWEN3_5, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "experts' tensors": (MOE, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "experts by tensor ranks": (
        MOE,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "experts by tensor ranks, latents": (
        GLM4_MOE_LITE,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "experts, sinks and windows": (GPT_OSS, {"expert_model_parallel_size": 2}),
    "experts' tensors, sinks and windows": (GPT_OSS, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "experts' tensors, sinks and windows, padded": (
        GPT_OSS,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
    "experts by tensor ranks, sinks and windows": (
        GPT_OSS,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
    "pipeline, sinks and windows": (GPT_OSS, {"pipeline_model_parallel_size": 2, "recompute_granularity": "full"}),
    "experts, entries": (DEEPSEEK_V4_SHORT, {"expert_model_parallel_size": 2}),
    "experts' tensors, entries": (DEEPSEEK_V4_SHORT, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "experts by tensor ranks, entries, padded": (
        DEEPSEEK_V4_SHORT,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "expert_model_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
            "recompute_granularity": "selective",
        },
    ),
    "pipeline, entries": (DEEPSEEK_V4_SHORT, {"pipeline_model_parallel_size": 2, "recompute_granularity": "full"}),
    "pipeline, entries, padded": (DEEPSEEK_V4_SHORT, {"pipeline_model_parallel_size": 2}),
    "data, by tokens": (QWEN3, BY_TOKENS),
    "pipeline, by tokens": (QWEN3, {**BY_TOKENS, "pipeline_model_parallel_size": 2}),
    "experts, by tokens": (MOE, {**BY_TOKENS, "expert_model_parallel_size": 2}),
    "sequence, by tokens": (TWO_GROUPS, {**BY_TOKENS, "tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pipeline, padded": (QWEN3, {"pipeline_model_parallel_size": 2}),
    "experts, padded": (MOE, {"expert_model_parallel_size": 2}),
    "sequence, latents, padded": (DEEPSEEK, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


def test_two_ranks_in_any_layout_train_as_one(started: Any, tmp_path: Path) -> None:
    """Each layout in the same two processes, which is what takes the time."""
    launches = {
        name: {
            "preset": "kl",
            "architecture": architecture,
            "trainer": {**STEADY, **trainer},
            "megatron": DISPATCHER | (PADDED if "padded" in name else {}),
            "handoff": {"update_weight_buffer_size": 4096},
        }
        for name, (architecture, trainer) in LAYOUTS.items()
    }
    run_ranks(2, train_rank, [free_port() for _ in launches], str(tmp_path), launches)
    assert same_on_every_rank(tmp_path, 2) == set(LAYOUTS)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    alone: dict[str, Any] = {}
    for name, (architecture, _) in LAYOUTS.items():
        if (key := repr(architecture)) not in alone:
            trainer = started(MegatronTrainer, launch("kl", architecture=architecture))
            figures = [dict(trainer.train(with_padding_sampled(trainer.context, i)).values) for i in range(2)]
            alone[key] = figures, sent_by(trainer)
        (figures, sent, sent_bytes), (others, not_sent, none_bytes) = (rank[name] for rank in ranks)
        assert figures == others, f"{name}: every rank reports the same"
        assert (not_sent, none_bytes) == ({}, 0)
        assert sent_bytes > 0
        assert_trained_alike(name, (figures, sent), alone[key], rel=2e-3, abs_=2e-4)
        if "sinks" in name:
            # The biases of half the experts are 0.03% of it.
            (norm, norm_alone) = (f[0]["grad_norm"] for f in (figures, alone[key][0]))
            assert norm == pytest.approx(norm_alone, rel=5e-5), name


TIED = {**TWO_GROUPS, "tie_word_embeddings": True}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
CP: dict[str, Any] = {"context_parallel_size": 2}
BY_ONE_RANK = {
    "dense": {"architecture": TIED},
    "experts": {"architecture": MOE, "trainer": {"precision": "bf16"}, "model": {"architecture": MOE, "dtype": "bfloat16"}},
    "latents": {"architecture": DEEPSEEK},
    "sinks": {"architecture": GPT_OSS},
    "linear": {"architecture": QWEN3_5, "trainer": {"precision": "bf16"}, "model": {"architecture": QWEN3_5, "dtype": "bfloat16"}},
    "entries": {"architecture": DEEPSEEK_V4_SHORT},
    "adapters": {"preset": "lora", "architecture": TIED, "trainer": {"backend": "megatron"}},
    "critic": {"preset": "ppo", "architecture": TIED, "trainer": {"precision": "bf16"}, "model": {"architecture": TIED, "dtype": "bfloat16"}},
}  # fmt: skip
RESUMED: dict[int, dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    1: {"alone, whole optimizer": ("experts", {}, {"use_distributed_optimizer": False})},
    2: {
        "data": ("dense", {}, {}),
        "data, whole optimizer": ("dense", {}, {"use_distributed_optimizer": False}),
        "tensor": ("dense", {"tensor_model_parallel_size": 2}, {}),
        "pipeline": ("dense", {"pipeline_model_parallel_size": 2}, {}),
        "experts by 2": ("experts", {"expert_model_parallel_size": 2}, {}),
        "experts, whole optimizer": (
            "experts",
            {"expert_model_parallel_size": 2},
            {"use_distributed_optimizer": False},
        ),
        "experts' tensors": ("experts", SP, {}),
        "latents, sequence": ("latents", SP, {}),
        "sinks, experts' tensors": ("sinks", SP, {}),
        "sinks, experts by 2": ("sinks", {"expert_model_parallel_size": 2}, {"use_distributed_optimizer": False}),
        "linear attention, sequence": ("linear", SP, {}),
        "linear attention, pipeline": (
            "linear",
            {"pipeline_model_parallel_size": 2},
            {"use_distributed_optimizer": False},
        ),
        "entries, experts' tensors": ("entries", SP, {}),
        "entries, pipeline": ("entries", {"pipeline_model_parallel_size": 2}, {"use_distributed_optimizer": False}),
        "adapters, tensor": ("adapters", {"tensor_model_parallel_size": 2}, {}),
        "adapters, pipeline": ("adapters", {"pipeline_model_parallel_size": 2}, {}),
        "critic, tensor": ("critic", SP, {}),
        "critic, pipeline": ("critic", {"pipeline_model_parallel_size": 2}, {"use_distributed_optimizer": False}),
        "critic, data": ("critic", {}, {}),
        "adapters, data": ("adapters", {}, {"use_distributed_optimizer": False}),
        "context": ("dense", CP, {}),
        "context, whole optimizer": ("experts", CP, {"use_distributed_optimizer": False}),
        "critic, context": ("critic", CP, {}),
    },
    4: {
        "context and tensor": ("dense", CP | {"tensor_model_parallel_size": 2}, {}),
        "context and experts": ("experts", CP | {"expert_model_parallel_size": 4}, {}),
        "tensor and data": ("dense", {"tensor_model_parallel_size": 2}, {}),
        "all at once": ("experts", SP | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1}, {}),
    },
}


def sections_of(source: str, trainer: dict[str, Any], megatron: dict[str, Any]) -> dict[str, Any]:
    sections = dict(BY_ONE_RANK[source])
    sections["trainer"] = {**STEADY, **sections.get("trainer", {}), **trainer}
    return sections | {"megatron": {**DISPATCHER, **megatron}}


def test_a_run_resumes_on_any_other_layout_and_back_again_bit_for_bit(started: Any, tmp_path: Path) -> None:
    """One rank's checkpoint → each layout → saved there → one rank again, which has every bit it once saved."""
    want: dict[str, tuple[dict[str, float], dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {}
    for source in BY_ONE_RANK:
        trainer = started(MegatronTrainer, make_context(**sections_of(source, {}, {})))
        trainer.train(make_batch(trainer.context, 0))
        (tmp_path / source).mkdir()
        trainer.save(str(tmp_path / source))
        saved = {n: t.clone() for n, t in everything(trainer).items()}
        want[source] = dict(trainer.train(make_batch(trainer.context, 1)).values), sent_by(trainer), saved
    for world, layouts in RESUMED.items():
        launches = {name: (source, sections_of(source, *more)) for name, (source, *more) in layouts.items()}
        run_ranks(world, resume_rank, [free_port() for _ in launches], str(tmp_path), launches)
        ranks = [torch.load(tmp_path / f"resumed-{rank}.pt") for rank in range(world)]
        for name, (source, *_) in layouts.items():
            figures, sent, saved = want[source]
            assert all(rank[name] == ranks[0][name] for rank in ranks), name
            for figure, value in figures.items():
                tolerance = 2e-2 if source in ("experts", "critic", "linear") else 2e-3  # in bf16 and in float32
                if figure == "clip_fraction" and tolerance > 1e-2:
                    tolerance = 6e-2  # rounding takes one of nine tokens of one step of two over the clip's edge
                assert ranks[0][name][figure] == pytest.approx(value, rel=tolerance, abs=tolerance), f"{name}: {figure}"
            trainer = started(MegatronTrainer, make_context(**sections_of(source, {}, {})))
            trainer.load(str(tmp_path / name))
            for (tensor_name, tensor), was in zip(everything(trainer).items(), saved.values(), strict=True):
                assert torch.equal(tensor, was), f"{name}: {tensor_name}"
            assert dict(trainer.train(make_batch(trainer.context, 1)).values) == figures, name
            assert all(torch.equal(t, sent[n]) for n, t in sent_by(trainer).items()), name


# A critic's own rate, clip and discount, and one norm that clips both models.
PPO = {"advantage_estimator": "ppo", "critic_lr": 3e-2, "value_clip": 0.1, "gamma": 0.97, "lambd": 0.9}


def test_two_ranks_in_any_layout_train_a_critic_as_the_embedded_trainer_does(started: Any, tmp_path: Path) -> None:
    names = ("data", "tensor", "pipeline", "pipeline, tied", "experts", "sequence")
    launches = {
        name: {
            "preset": "ppo",
            "architecture": LAYOUTS[name][0],
            "algorithm": PPO,
            "trainer": {**STEADY, **LAYOUTS[name][1]},
            "megatron": DISPATCHER,
        }
        for name in names
    }
    run_ranks(2, train_rank, [free_port() for _ in launches], str(tmp_path), launches)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=False) for rank in range(2)]
    for name in names:
        trainer = started(EmbeddedTrainer, launch("ppo", architecture=LAYOUTS[name][0], algorithm=PPO))
        want = [dict(trainer.train(with_padding_sampled(trainer.context, i)).values) for i in range(2)]
        (figures, weights, _), (others, _, _) = (rank[name] for rank in ranks)
        assert figures == others, f"{name}: every rank reports the same"
        assert_trained_alike(name, (figures, weights), (want, weights_of(trainer)), rel=2e-3, abs_=2e-4)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"trainer": {"context_parallel_size": 2}}, "1 trainer ranks do not divide by TP × PP × CP = 2"),
        ({"trainer": {"tensor_model_parallel_size": 2}}, "1 trainer ranks do not divide by TP × PP × CP = 2"),
    ],
)
def test_what_it_does_not_serve_is_an_error(sections: Any, says: str, tmp_path: Path) -> None:
    use_cpu()
    context = launch(architecture=QWEN3, **sections)
    trainer = MegatronTrainer(context, Slot(0, 0, "cpu", str(tmp_path)))
    with pytest.raises(ConfigError, match=says):
        trainer.init(RankInfo(0, 1, "", 0))
    trainer.shutdown()
