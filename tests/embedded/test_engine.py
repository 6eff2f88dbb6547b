"""The engine samples from the very distribution a plain forward pass gives, and refuses every call out of order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rig import (
    ALGORITHMS,
    LLAMA,
    MAX_PROMPT_TOKENS,
    QWEN3,
    QWEN3_MOE,
    Rig,
    hf_logprobs,
    make_context,
    make_prompts,
    sent_by,
    started_engine,
    started_trainer,
)

from rllaunch.backends.base import Bucket, GenerateRequest, Slot, TensorSlice
from rllaunch.backends.embedded.engine import EmbeddedEngine
from rllaunch.backends.embedded.layout import checksum
from rllaunch.backends.embedded.model import build_model
from rllaunch.backends.embedded.tokenizer import EOS_ID, PAD_ID
from rllaunch.errors import RunError
from rllaunch.plan.handoff import ENGINE_REGIONS, Buffers, HandoffOptions
from rllaunch.run.rehearsal import shrink

ARCHITECTURES = {"qwen3": QWEN3, "llama": LLAMA, "qwen3_moe": QWEN3_MOE}
# Neighbours that repeat (samples of one prompt), a prompt that comes back later, and four lengths.
TEXTS = ["12", "12", "3456", "7", "7", "12", "", "3456"]


def request_of(*texts: str, seed: int | None = 0, version: int = 0, response_len: int = 4) -> GenerateRequest:
    ids_BP, lens_B = make_prompts(*texts)
    if seed is None:
        return GenerateRequest(ids_BP, lens_B, version)
    uniform_BL = np.random.default_rng(seed).random((len(texts), response_len), dtype=np.float32)
    return GenerateRequest(ids_BP, lens_B, version, uniform_BL)


@pytest.fixture
def engine(tmp_path: Path) -> EmbeddedEngine:
    return started_engine(tmp_path)


# -- sampling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [TEXTS, ["1234", "5678", "5678"]], ids=["padded", "of one length"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_with_a_cache_are_those_of_a_plain_forward(
    name: str, temperature: float, texts: list[str], tmp_path: Path
):
    engine = started_engine(
        tmp_path,
        architecture=ARCHITECTURES[name],
        rollout={"rollout_temperature": temperature, "rollout_max_response_len": 8},
    )
    request = request_of(*texts, response_len=8)
    result = engine.generate(request)
    plain = build_model(engine.context)
    with torch.no_grad():
        expected = hf_logprobs(plain, request.prompt_ids_BP, request.prompt_lens_B, result.response_ids_BL, temperature)
    np.testing.assert_allclose(result.logprob_BL, expected.numpy() * result.mask_BL, rtol=0, atol=1e-5)
    assert result.mask_BL.sum() > len(texts)  # answers of one token would not have read the cache


OTHER_CACHES: dict[str, dict[str, Any]] = {
    "multi-head latent attention": {
        **QWEN3, "model_type": "deepseek_v3", "head_dim": 4, "num_key_value_heads": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    },
    "sliding window": {**QWEN3, "model_type": "gemma3_text", "sliding_window": 4},
    "attention sinks": {
        **QWEN3, "model_type": "gpt_oss", "sliding_window": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("architecture", OTHER_CACHES.values(), ids=OTHER_CACHES)
def test_other_kinds_of_attention_are_served_from_the_same_cache(architecture: dict[str, Any], tmp_path: Path):
    engine = started_engine(tmp_path, architecture=architecture, rollout={"rollout_max_response_len": 8})
    request = request_of(*TEXTS, response_len=8)
    result = engine.generate(request)
    with torch.no_grad():
        plain = build_model(engine.context)
        expected = hf_logprobs(plain, request.prompt_ids_BP, request.prompt_lens_B, result.response_ids_BL)
    np.testing.assert_allclose(result.logprob_BL, expected.numpy() * result.mask_BL, rtol=0, atol=1e-5)
    assert result.mask_BL.sum() > 2 * len(TEXTS)


NO_FLAT_CACHE: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"num_hidden_layers": 4, "num_hash_layers": 2, "compress_ratios": [0, 4, 128, 4]},
    "deepseek_v32": {},
    "glm_moe_dsa": {"index_topk_freq": 4, "index_skip_topk_offset": 3},
    "qwen3_next": {},
    "qwen3_5_text": {},
    "qwen3_5_moe_text": {},
    "nemotron_h": {},
    "inkling_text": {},
}
FLAT_CACHE = ("qwen2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "minimax_m2")
IN_SMALL = {
    **{name: shrink({"model_type": name, **facts}, 13) for name, facts in NO_FLAT_CACHE.items()},
    **{name: shrink({"model_type": name}, 13) for name in (*FLAT_CACHE, "llama", "qwen3", "qwen3_moe")},
    "mamba": {"model_type": "mamba", "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
}


@pytest.mark.parametrize("architecture", IN_SMALL.values(), ids=IN_SMALL)
def test_every_architecture_samples_from_the_distribution_of_a_plain_forward(
    architecture: dict[str, Any], tmp_path: Path
):
    """Prompts of four lengths in one batch; the plain forward sees each row alone and without padding."""
    # Answers longer than every window and compression of the small models.
    engine = started_engine(tmp_path, architecture=architecture, rollout={"rollout_max_response_len": 12})
    request = request_of(*TEXTS, response_len=12)
    result = engine.generate(request)
    with torch.no_grad():
        plain = build_model(engine.context)
        expected = hf_logprobs(plain, request.prompt_ids_BP, request.prompt_lens_B, result.response_ids_BL)
    np.testing.assert_allclose(result.logprob_BL, expected.numpy() * result.mask_BL, rtol=0, atol=2e-5)
    assert result.mask_BL.sum() > 2 * len(TEXTS)


TRAINED = [(name, "grpo") for name in IN_SMALL] + [
    (name, preset) for name in ("deepseek_v4", "qwen3_next") for preset in ALGORITHMS if preset != "grpo"
]


@pytest.mark.parametrize(("name", "preset"), TRAINED)
def test_every_architecture_trains_and_its_log_probs_are_the_engines(name: str, preset: str, tmp_path: Path):
    """Two cycles: the second samples with the trained weights, so what was sent is what was trained."""
    context = make_context(
        preset,
        HandoffOptions(engine_weights="mirror"),
        architecture=IN_SMALL[name],
        rollout={"rollout_max_response_len": 8},
    )
    rig = Rig(context, tmp_path)
    for _ in rig.run(cycles=2):
        pass
    assert all(m["logprob_diff"] < 5e-5 for m in rig.metrics), rig.metrics
    assert all(m["grad_norm"] > 0 for m in rig.metrics)
    before, after = build_model(context).named_parameters(), dict(rig.engine.model.named_parameters())
    assert any(not torch.equal(p, after[n]) for n, p in before if p.requires_grad)
    rig.shutdown()


def test_a_model_without_a_flat_cache_books_the_cache_of_plain_attention(tmp_path: Path):
    engine = EmbeddedEngine(make_context(architecture=IN_SMALL["qwen3_next"]), Slot(0, 0, "cpu", str(tmp_path)))
    rows, tokens = 8, MAX_PROMPT_TOKENS + 4
    assert engine.region_bytes()["kv_cache"] == 2 * 2 * rows * 2 * tokens * 32 * 4  # as in the test below, of two heads


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_answers_are_those_of_transformers(name: str, tmp_path: Path):
    engine = started_engine(tmp_path, architecture=ARCHITECTURES[name], rollout={"rollout_max_response_len": 6})
    request = request_of(*TEXTS, seed=None)
    result = engine.generate(request)
    plain = build_model(engine.context)
    for ids, length, response, mask in zip(
        request.prompt_ids_BP, request.prompt_lens_B, result.response_ids_BL, result.mask_BL, strict=True
    ):
        expected = plain.generate(
            torch.tensor(ids[MAX_PROMPT_TOKENS - length :])[None],
            max_new_tokens=6,
            do_sample=False,
            pad_token_id=PAD_ID,
        )[0, length:].tolist()
        assert response[: int(mask.sum())].tolist() == expected


def test_samples_do_not_depend_on_the_batch_they_are_in(engine: EmbeddedEngine):
    whole = request_of(*TEXTS)
    together = engine.generate(whole)
    for size in (1, 3):
        for begin in range(0, len(TEXTS), size):
            rows = slice(begin, begin + size)
            alone = engine.generate(
                GenerateRequest(whole.prompt_ids_BP[rows], whole.prompt_lens_B[rows], 0, whole.uniform_BL[rows])
            )
            np.testing.assert_array_equal(alone.response_ids_BL, together.response_ids_BL[rows])
            np.testing.assert_allclose(alone.logprob_BL, together.logprob_BL[rows], rtol=0, atol=1e-5)


def test_a_request_larger_than_the_cache_is_answered_in_chunks(engine: EmbeddedEngine):
    texts = [*TEXTS, *reversed(TEXTS), "99", "0"]
    assert len(texts) > 2 * engine.max_rows
    whole = request_of(*texts)
    result = engine.generate(whole)
    assert result.response_ids_BL.shape == (18, 4)
    last = engine.generate(
        GenerateRequest(whole.prompt_ids_BP[-1:], whole.prompt_lens_B[-1:], 0, whole.uniform_BL[-1:])
    )
    np.testing.assert_array_equal(result.response_ids_BL[-1:], last.response_ids_BL)


def test_a_token_is_drawn_with_its_probability(tmp_path: Path):
    engine = started_engine(
        tmp_path, rollout={"rollout_batch_size": 250, "n_samples_per_prompt": 8, "rollout_max_response_len": 1}
    )
    result = engine.generate(request_of(*["12"] * 2000, response_len=1))
    p_V = np.zeros(13)
    p_V[result.response_ids_BL[:, 0]] = np.exp(result.logprob_BL[:, 0])
    shares_V = np.bincount(result.response_ids_BL[:, 0], minlength=13) / 2000
    # Three standard deviations of a share among 2000.
    assert np.all(np.abs(shares_V - p_V) <= 3 * np.sqrt(p_V * (1 - p_V) / 2000) + 1e-9)
    assert p_V.sum() > 0.9


def set_next_token(engine: EmbeddedEngine, **logit_of: float) -> None:
    """Make the model say these logits everywhere, 0 for all other tokens: `set_next_token(engine, t5=3.0)`."""
    model: Any = engine.model
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.lm_head.weight.zero_()

    def forward(*args: Any, **kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        for name, logit in logit_of.items():
            out.logits[..., int(name[1:])] = logit
        return out

    original, model.forward = model.forward, forward


def test_temperature_divides_the_logits(tmp_path: Path):
    engine = started_engine(tmp_path, rollout={"rollout_temperature": 0.5})
    set_next_token(engine, t5=2.0)
    result = engine.generate(request_of(*["12"] * 8))
    mass = 12 + np.exp(4.0)
    expected = np.where(result.response_ids_BL == 5, np.log(np.exp(4.0) / mass), np.log(1 / mass)) * result.mask_BL
    np.testing.assert_allclose(result.logprob_BL, expected, rtol=0, atol=1e-5)


def test_greedy_ignores_the_temperature(tmp_path: Path):
    engine = started_engine(tmp_path, rollout={"rollout_temperature": 0.5})
    set_next_token(engine, t5=2.0)
    result = engine.generate(request_of("12", seed=None))
    np.testing.assert_allclose(result.logprob_BL, np.log(np.exp(2.0) / (12 + np.exp(2.0))), atol=1e-5)


def test_the_largest_uniform_number_draws_the_last_token_that_has_mass(engine: EmbeddedEngine):
    set_next_token(engine, t12=-1e9, t11=-1e9)
    ids_BP, lens_B = make_prompts("12")
    largest = np.full((1, 4), np.nextafter(np.float32(1), np.float32(0)))
    result = engine.generate(GenerateRequest(ids_BP, lens_B, 0, largest))
    assert result.response_ids_BL.tolist() == [[10] * 4]
    assert np.isfinite(result.logprob_BL).all()


def test_a_response_ends_at_the_end_token_which_is_in_the_mask(engine: EmbeddedEngine):
    set_next_token(engine, **{f"t{EOS_ID}": 30.0})
    result = engine.generate(request_of("12", "7"))
    assert result.response_ids_BL.tolist() == [[EOS_ID, PAD_ID, PAD_ID, PAD_ID]] * 2
    assert result.mask_BL.tolist() == [[1, 0, 0, 0]] * 2
    assert (result.logprob_BL[:, 1:] == 0).all()


def test_no_more_tokens_are_computed_once_all_responses_have_ended(engine: EmbeddedEngine):
    set_next_token(engine, **{f"t{EOS_ID}": 30.0})
    calls = []
    forward = engine.model.forward
    engine.model.forward = lambda *a, **k: calls.append(1) or forward(*a, **k)  # type: ignore[method-assign]
    engine.generate(request_of("12", "7"))
    assert len(calls) == 1


def test_rows_that_have_ended_do_not_stop_the_others(tmp_path: Path):
    engine = started_engine(tmp_path, rollout={"rollout_max_response_len": 12})
    set_next_token(engine, **{f"t{EOS_ID}": 1.0})
    result = engine.generate(request_of(*["12"] * 8, response_len=12))
    lengths = result.mask_BL.sum(axis=1).astype(int)
    assert len(set(lengths.tolist())) > 2
    for ids, length in zip(result.response_ids_BL, lengths, strict=True):
        assert EOS_ID not in ids[: length - 1]
        assert length == 12 or ids[length - 1] == EOS_ID
        assert (ids[length:] == PAD_ID).all()


def test_what_was_sampled_survives_the_next_request_and_a_release(engine: EmbeddedEngine):
    first = engine.generate(request_of("12"))
    kept = first.response_ids_BL.copy()
    engine.generate(request_of("7", seed=1))
    engine.release_memory_occupation(["cuda_graph"])
    np.testing.assert_array_equal(first.response_ids_BL, kept)


# -- versions and updates ------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [1, 3])
def test_a_stale_or_a_future_version_is_refused(engine: EmbeddedEngine, asked: int):
    engine.version = 2
    with pytest.raises(RunError) as caught:
        engine.generate(request_of("12", version=asked))
    assert str(caught.value) == (
        f"error: engine-0 holds weights of version 2, version {asked} is asked for\n"
        "hint: the weight update before this step did not reach the engine"
    )


def test_an_engine_that_was_never_updated_has_no_version_to_sample_with(tmp_path: Path):
    engine = EmbeddedEngine(make_context(), Slot(0, 0, "cpu", str(tmp_path)))
    engine.start()
    with pytest.raises(RunError, match="holds weights of version None"):
        engine.generate(request_of("12"))


def different_trainer(directory: Path, **sections: Any) -> Any:
    """A trainer beside the engine whose weights are others."""
    trainer = started_trainer(directory, **sections)
    with torch.no_grad():
        for parameter in trainer.models["actor"].parameters():
            parameter.add_(0.25)
    return trainer


def test_an_update_makes_the_weights_those_of_the_trainer(engine: EmbeddedEngine, tmp_path: Path):
    trainer = different_trainer(tmp_path)
    theirs = checksum(trainer.models["actor"].named_parameters())
    assert engine.weights_checksum() != theirs
    trainer.update_weights(5, engine)
    assert engine.weights_checksum() == theirs
    assert engine.version == 5
    engine.generate(request_of("12", version=5))


def test_discarded_weights_are_gone_and_an_update_brings_them_back(tmp_path: Path):
    options = HandoffOptions(engine_weights="discard")
    engine = started_engine(tmp_path, options=options)
    trainer = started_trainer(tmp_path, options=options)
    before = engine.weights_checksum()
    engine.release_memory_occupation(["weights"])
    assert engine.memory().host_bytes == 0
    engine.resume_memory_occupation(["weights"])
    assert all(p.isnan().all() for p in engine.model.parameters())
    trainer.update_weights(1, engine)
    assert engine.weights_checksum() == before == checksum(trainer.models["actor"].named_parameters())
    assert np.isfinite(engine.generate(request_of("12", version=1)).logprob_BL).all()


def test_discarded_weights_have_no_version_until_the_next_update(tmp_path: Path):
    engine = started_engine(tmp_path, options=HandoffOptions(engine_weights="discard"))
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation(["weights"])
    with pytest.raises(RunError, match="holds weights of version None, version 0 is asked for"):
        engine.generate(request_of("12", version=0))


@pytest.mark.parametrize("buffers", ["fresh", "retained"])
def test_mirrored_weights_come_back_without_an_update(tmp_path: Path, buffers: Buffers):
    engine = started_engine(tmp_path, options=HandoffOptions(engine_weights="mirror", buffers=buffers))
    before, checksum_before = engine.generate(request_of(*TEXTS)), engine.weights_checksum()
    engine.release_memory_occupation(["weights"])
    assert engine.memory().host_bytes == engine.region_bytes()["weights"]
    engine.resume_memory_occupation(["weights"])
    assert engine.memory().host_bytes == (engine.region_bytes()["weights"] if buffers == "retained" else 0)
    assert engine.weights_checksum() == checksum_before
    after = engine.generate(request_of(*TEXTS))
    np.testing.assert_array_equal(before.logprob_BL, after.logprob_BL)


@pytest.mark.parametrize("region", ["kv_cache", "cuda_graph"])
def test_cache_and_graphs_come_back_undefined_and_are_not_needed(engine: EmbeddedEngine, region: Any):
    before = engine.generate(request_of(*TEXTS))
    engine.release_memory_occupation([region])
    engine.resume_memory_occupation([region])
    engine._buffers[region].bytes.fill_(255)
    after = engine.generate(request_of(*TEXTS))
    np.testing.assert_array_equal(before.response_ids_BL, after.response_ids_BL)
    np.testing.assert_array_equal(before.logprob_BL, after.logprob_BL)


# -- misuse --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["mirror", "discard"])
@pytest.mark.parametrize("region", ENGINE_REGIONS)
def test_a_second_release_and_a_second_resume_are_refused(region: Any, weights: Any, tmp_path: Path):
    engine = started_engine(tmp_path, options=HandoffOptions(engine_weights=weights))
    with pytest.raises(RunError, match=f"{region} is allocated twice"):
        engine.resume_memory_occupation([region])
    engine.release_memory_occupation([region])
    with pytest.raises(RunError, match=f"{region} is used while it is offloaded"):
        engine.release_memory_occupation([region])


@pytest.mark.parametrize("region", ENGINE_REGIONS)
def test_generate_while_anything_is_offloaded_is_refused(engine: EmbeddedEngine, region: Any):
    engine.release_memory_occupation([region])
    with pytest.raises(RunError) as caught:
        engine.generate(request_of("12"))
    assert str(caught.value) == f"error: engine-0: {region} is used while it is offloaded\nhint: onload it first"


def test_an_engine_is_healthy_exactly_while_it_could_answer(engine: EmbeddedEngine):
    assert engine.check_health()
    engine.release_memory_occupation(["kv_cache"])
    assert not engine.check_health()
    engine.resume_memory_occupation(["kv_cache"])
    assert engine.check_health()


def test_an_unknown_region_is_refused_before_any_is_released(engine: EmbeddedEngine):
    with pytest.raises(RunError, match="engine-0 has no region 'params'"):
        engine.release_memory_occupation(["kv_cache", "params"])
    engine.generate(request_of("12"))


def test_an_update_or_a_checksum_of_offloaded_weights_is_refused(engine: EmbeddedEngine):
    engine.release_memory_occupation(["weights"])
    for call in (lambda: engine.begin_weight_update(1), engine.weights_checksum):
        with pytest.raises(RunError, match="weights is used while it is offloaded"):
            call()


def send(engine: EmbeddedEngine, tensors: dict[str, torch.Tensor], path: Path) -> None:
    """One bucket with these tensors, whose dtype is float32."""
    slices, end = [], 0
    for name, tensor in tensors.items():
        slices.append(TensorSlice(name, "float32", tuple(tensor.shape), end))
        end += tensor.numel() * 4
    path.write_bytes(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors.values()))
    engine.load_bucket(Bucket(str(path), end, tuple(slices)))


def test_an_update_that_lacks_a_tensor_is_refused(engine: EmbeddedEngine, tmp_path: Path):
    tensors = dict(engine.model.named_parameters())
    tensors.pop("lm_head.weight")
    engine.begin_weight_update(1)
    send(engine, tensors, tmp_path / "bucket")
    with pytest.raises(RunError, match=r"the update to version 1 lacks 1 tensors: lm_head\.weight"):
        engine.end_weight_update(1)
    assert engine.version == 0
    with pytest.raises(RunError, match="generate during the update to version 1"):
        engine.generate(request_of("12"))


def test_a_tensor_the_engine_lacks_or_of_another_shape_is_refused(engine: EmbeddedEngine, tmp_path: Path):
    engine.begin_weight_update(1)
    with pytest.raises(RunError, match=r"has no such tensor: the update brings model\.bias \[2\]"):
        send(engine, {"model.bias": torch.zeros(2)}, tmp_path / "bucket")
    with pytest.raises(RunError, match=r"holds \[13, 16\]: the update brings lm_head\.weight \[16, 13\]"):
        send(engine, {"lm_head.weight": torch.zeros(16, 13)}, tmp_path / "bucket")


def test_a_bucket_outside_an_update_and_updates_out_of_order_are_refused(engine: EmbeddedEngine, tmp_path: Path):
    with pytest.raises(RunError, match="a bucket arrived outside a weight update"):
        send(engine, {"lm_head.weight": torch.zeros(13, 16)}, tmp_path / "bucket")
    with pytest.raises(RunError, match="the update to None was ended as one to 1"):
        engine.end_weight_update(1)
    engine.begin_weight_update(1)
    with pytest.raises(RunError, match="an update to version 1 is under way already"):
        engine.begin_weight_update(2)
    with pytest.raises(RunError, match="the update to 1 was ended as one to 2"):
        engine.end_weight_update(2)


# -- types, bytes and architectures --------------------------------------------------------------------


def test_an_engine_may_hold_bf16_weights_of_a_float32_trainer(tmp_path: Path):
    engine = started_engine(tmp_path, rollout={"dtype": "bfloat16"})
    trainer = different_trainer(tmp_path, rollout={"dtype": "bfloat16"})
    full = engine.region_bytes()["weights"] * 2
    assert full == trainer.region_bytes()["params"]
    trainer.update_weights(1, engine)
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, trainer.models["actor"].get_parameter(name).to(torch.bfloat16)), name
    assert np.isfinite(engine.generate(request_of(*TEXTS, version=1)).logprob_BL).all()
    assert all(t.dtype == torch.bfloat16 for t in sent_by(trainer).values())


def test_region_bytes_are_those_of_the_shapes(engine: EmbeddedEngine):
    B, T, L = 8, 5 + 4, 4
    parameters = sum(p.numel() for p in engine.model.parameters())
    kv_bytes = 2 * 2 * B * 1 * T * 8 * 4  # keys and values, layers, rows, heads, tokens, size, float32
    workspace = B * L * 8 + B * T * 8 + 3 * B * L * 4  # ids, attended; log-probs, mask, uniform numbers
    assert engine.region_bytes() == {"weights": parameters * 4, "kv_cache": kv_bytes, "cuda_graph": workspace}
    assert engine.memory().gpu_bytes == parameters * 4 + kv_bytes + workspace


def test_samples_are_spread_over_the_slots_rows(tmp_path: Path):
    assert started_engine(tmp_path, num_slots=3).max_rows == 3  # 8 samples on 3 engines


def test_after_shutdown_nothing_is_booked(tmp_path: Path):
    rig = Rig(make_context("grpo", HandoffOptions("gpu", engine_weights="mirror", buffers="shared")), tmp_path)
    for _, step, _ in rig.run(cycles=1):
        if step.name == "train":  # the mirror is on the host now
            break
    rig.shutdown()
    assert (rig.engine.memory().gpu_bytes, rig.engine.memory().host_bytes) == (0, 0)
