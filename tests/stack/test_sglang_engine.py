"""The real SGLang on the CPU: its log-probs are transformers', its weights after an update the trainer's, bit for bit.

make test-stack ARGS="-k sglang"
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from rig import QWEN3, QWEN3_MOE, hf_logprobs, make_batch, make_context, make_prompts, sent_by, started_trainer

from rllaunch.backends.base import Bucket, GenerateRequest, GenerateResult, LaunchContext, Slot, TensorSlice
from rllaunch.backends.embedded.model import build_model
from rllaunch.backends.embedded.trainer import EmbeddedTrainer
from rllaunch.backends.sglang.engine import SglangEngine, one_checksum
from rllaunch.backends.sglang.options import known_names
from rllaunch.errors import ConfigError, RunError
from rllaunch.plan.handoff import ENGINE_REGIONS, HandoffOptions

pytest.importorskip("sglang")
pytestmark = pytest.mark.stack

STUBS = str(Path(__file__).with_name("stubs"))
# Buckets of a few KiB, so that an update is many; longer answers than the other tests', so that the cache is read.
SECTIONS: dict[str, Any] = {
    "rollout": {"backend": "sglang", "rollout_max_response_len": 8, "rollout_temperature": 0.7},
    "handoff": {"update_weight_buffer_size": 4096},
}
# Experts of a width that SGLang does not pad.
MOE = {**QWEN3_MOE, "moe_intermediate_size": 32}
TEXTS = ["12", "12", "3456", "7", "7", "12", "", "3456"]


@pytest.fixture(scope="module", autouse=True)
def _stubs() -> Iterator[None]:
    """The engines' processes import stubs for kernels that this machine has no use for."""
    sys.path.insert(0, STUBS)
    yield
    sys.path.remove(STUBS)


@dataclass
class Pair:
    """An engine that has the trainer's first weights, and the trainer after a rollout."""

    engine: SglangEngine
    trainer: EmbeddedTrainer

    @property
    def context(self) -> LaunchContext:
        return self.engine.context

    def trained_model(self) -> Any:
        model = build_model(self.context)
        model.load_state_dict(sent_by(self.trainer), strict=False)
        return model


def made_pair(directory: Path, architecture: dict[str, Any]) -> Pair:
    context = make_context(options=HandoffOptions(engine_weights="discard"), architecture=architecture, **SECTIONS)
    engine = SglangEngine(context, Slot(0, 0, "cpu", str(directory / "engine")))
    try:
        engine.start()
    except BaseException:
        engine.shutdown()
        raise
    engine.version = 0
    trainer = started_trainer(directory / "trainer", architecture=architecture, **SECTIONS)
    return Pair(engine, trainer)


@pytest.fixture(scope="module", params=[QWEN3, MOE], ids=["qwen3", "qwen3_moe"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = made_pair(tmp_path_factory.mktemp("pair"), request.param)
    yield made
    made.trainer.shutdown()
    made.engine.shutdown()


def request_of(version: int, *, greedy: bool = False) -> GenerateRequest:
    ids_BP, lens_B = make_prompts(*TEXTS)
    uniform_BL = None if greedy else np.random.default_rng(0).random((len(TEXTS), 8), dtype=np.float32)
    return GenerateRequest(ids_BP, lens_B, version, uniform_BL)


def off_by(model: Any, request: GenerateRequest, result: GenerateResult, temperature: float) -> float:
    """Largest difference between the engine's log-probs and those of a plain forward pass."""
    with torch.no_grad():
        plain = hf_logprobs(model, request.prompt_ids_BP, request.prompt_lens_B, result.response_ids_BL, temperature)
    return float(np.abs(plain.numpy() * result.mask_BL - result.logprob_BL).max())


def test_logprobs_are_those_of_transformers_before_and_after_an_update(pair: Pair):
    engine, trainer = pair.engine, pair.trainer
    request = request_of(engine.version or 0)
    first = engine.generate(request)
    assert first.mask_BL.sum() > 2 * len(TEXTS)
    assert off_by(build_model(pair.context), request, first, 0.7) < 1e-4
    before = engine.weights_checksum()

    trainer.train(make_batch(trainer.context))
    trainer.update_weights(1, engine)
    assert engine.version == 1
    assert engine.weights_checksum() != before
    trained = pair.trained_model()
    after = engine.generate(request_of(1))
    assert off_by(trained, request_of(1), after, 0.7) < 1e-4
    # An update that changed nothing that matters would pass as well.
    assert off_by(build_model(pair.context), request_of(1), after, 0.7) > 1e-2


def test_greedy_answers_are_the_most_likely_tokens(pair: Pair):
    request = request_of(pair.engine.version or 0, greedy=True)
    result = pair.engine.generate(request)
    model = pair.trained_model()
    assert off_by(model, request, result, 1.0) < 1e-4
    for prompt, length, ids, mask in zip(
        request.prompt_ids_BP, request.prompt_lens_B, result.response_ids_BL, result.mask_BL, strict=True
    ):
        count = int(mask.sum())
        whole = torch.tensor([*prompt[len(prompt) - length :], *ids[:count]])[None]
        with torch.no_grad():
            best = model(input_ids=whole).logits[0, length - 1 : -1].argmax(-1)
        assert best.tolist() == ids[:count].tolist()


def fused(sent: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A trainer's tensors as SGLang has them on one rank: q, k, v together, gate and up together, the vocabulary padded."""
    experts = {"experts.gate_up_proj": "experts.w13_weight", "experts.down_proj": "experts.w2_weight"}
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in sent.items():  # in the order of the model: q, k, v and gate, up
        target = name.replace(".gate_proj.", ".gate_up_proj.").replace(".up_proj.", ".gate_up_proj.")
        for part in ("q_proj", "k_proj", "v_proj"):
            target = target.replace(f".{part}.", ".qkv_proj.")
        for part, whole in experts.items():
            target = target.replace(part, whole)
        found.setdefault(target, []).append(tensor)
    joined = {name: torch.cat(tensors) for name, tensors in found.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        joined[name] = torch.nn.functional.pad(joined[name], (0, 0, 0, -len(joined[name]) % 64))
    return joined


def test_the_checksum_is_that_of_the_trainers_tensors(pair: Pair):
    pair.trainer.update_weights(7, pair.engine)
    sums = {
        # SGLang's own sum of a tensor on the CPU: the first 8 bytes of its SHA-256 (0.5.23 managers/mm_utils.py).
        name: sha256(tensor.contiguous().numpy().tobytes()).digest()[:8].hex()
        for name, tensor in fused(sent_by(pair.trainer)).items()
    }
    assert pair.engine._call("checksums") == [sums]
    assert pair.engine.weights_checksum() == one_checksum([sums])


def test_a_refused_update_is_an_error(pair: Pair):
    name = "model.norm.weight"
    piece = TensorSlice(name, "float32", (16,), 0)
    file = Path(pair.engine.slot.ledger_dir) / "bucket.bin"
    file.write_bytes(b"\0" * 64)
    before = pair.engine.weights_checksum()
    # Around our own guard: SGLang itself answers False here and raises nothing.
    with pytest.raises(
        RunError, match=r"SGLang refused a bucket of 1 tensors from model\.norm\.weight on: .*begin_weight_update"
    ):
        pair.engine._call("load_bucket", Bucket(str(file), 64, (piece,)), [piece])
    with pytest.raises(RunError, match="SGLang refused to end a weight update"):
        pair.engine._call("end_weight_update")
    assert pair.engine.weights_checksum() == before


def test_a_released_engine_does_not_generate_and_needs_an_update_where_weights_were_discarded(pair: Pair):
    engine = pair.engine
    version = engine.version
    assert version is not None
    engine.release_memory_occupation(["cuda_graph", "kv_cache"])
    with pytest.raises(RunError, match="generate while kv_cache, cuda_graph is offloaded"):
        engine.generate(request_of(version))
    with pytest.raises(RunError, match="kv_cache is released already"):
        engine.release_memory_occupation(["kv_cache"])
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation(["weights"])
    pair.trainer.update_weights(version + 1, engine)
    engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
    result = engine.generate(request_of(version + 1))
    assert off_by(pair.trained_model(), request_of(version + 1), result, 0.7) < 1e-4


def test_regions_are_reported_and_the_engine_is_healthy(pair: Pair):
    assert set(pair.engine.region_bytes()) == set(ENGINE_REGIONS)
    parameters = sum(p.numel() * 4 for p in build_model(pair.context).parameters())
    assert pair.engine.region_bytes()["weights"] == parameters
    assert pair.engine.check_health()


def test_the_options_of_every_shipped_cell_are_known_to_the_installed_sglang():
    import tomllib

    from sglang.srt.server_args import ServerArgs

    names = known_names(ServerArgs)
    cells = sorted((Path(__file__).parents[2] / "profiles/rllaunch_profiles/cells").glob("*.toml"))
    said = {c.name: tomllib.loads(c.read_text(encoding="utf-8")).get("choices", {}).get("sglang", {}) for c in cells}
    assert sum(map(len, said.values())) > 5
    assert {(cell, key) for cell, section in said.items() for key in section if key not in names} == set()


def test_an_option_sglang_does_not_know_is_named(tmp_path: Path):
    context = make_context(**SECTIONS, sglang={"mem_fraction_statik": 0.5})
    engine = SglangEngine(context, Slot(0, 0, "cpu", str(tmp_path)))
    with pytest.raises(ConfigError, match="SGLang has no option 'mem_fraction_statik'") as caught:
        engine.start()
    assert caught.value.fix == "did you mean 'mem_fraction_static'?"
    engine.shutdown()


def test_when_a_rank_dies_the_engine_is_unhealthy_and_leaves_nothing_behind(tmp_path: Path):
    made = made_pair(tmp_path, QWEN3)
    engine = made.engine
    try:
        assert engine._process is not None
        tree = psutil.Process(engine._process.pid).children(recursive=True)
        rank = max(tree, key=lambda p: p.memory_info().rss)
        rank.kill()
        deadline = time.monotonic() + 60
        while engine.check_health() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not engine.check_health()
        with pytest.raises(RunError, match=f"engine-0: its process {rank.pid} ended before generate"):
            engine.generate(request_of(0))
    finally:
        engine.shutdown()
        made.trainer.shutdown()
    assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
