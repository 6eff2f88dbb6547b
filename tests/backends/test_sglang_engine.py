"""The launch's side of an engine, against a stand-in process that dies of misuse as SGLang does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rig import PROMPTS, VOCABULARY, make_context, make_prompts

from rllaunch.backends.base import Bucket, GenerateRequest, LaunchContext, Slot, TensorSlice
from rllaunch.backends.embedded.pool import Pool
from rllaunch.backends.embedded.tokenizer import EOS_ID, PAD_ID, CharTokenizer
from rllaunch.backends.node_memory import pss_of
from rllaunch.backends.sglang.checkpoint import write_checkpoint
from rllaunch.backends.sglang.engine import SglangEngine, one_checksum, to_arrays
from rllaunch.backends.sglang.process import EngineProcess
from rllaunch.errors import ConfigError, RunError
from rllaunch.plan.handoff import HandoffOptions, build_schedule
from rllaunch.run.rollout_manager import RolloutManager, make_manager

ORDERS = [
    HandoffOptions("cpu", engine_weights="discard"),
    HandoffOptions("cpu", engine_weights="mirror", buffers="fresh"),
    HandoffOptions("gpu", engine_weights="discard"),
    HandoffOptions("cpu", level=frozenset({"kv_cache"})),
    HandoffOptions("cpu", offload_rollout=False),
]


class FakeEngine(SglangEngine):
    host_module = "fake_host"


def fake_context(options: HandoffOptions | None = None, **sections: object) -> LaunchContext:
    return make_context("grpo", options, **{"sglang": {}, **sections})  # type: ignore[arg-type]


def started(directory: Path, options: HandoffOptions | None = None, **sections: object) -> FakeEngine:
    engine = FakeEngine(fake_context(options, **sections), Slot(0, 0, "cpu", str(directory)))
    engine.start()
    return engine


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    engine = started(tmp_path)
    try:
        yield engine
    finally:
        engine.shutdown()


def is_running(process: psutil.Process) -> bool:
    """A process that is over stays a zombie until its new parent looks at it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def whole_update(engine: SglangEngine, version: int) -> None:
    """All tensors of the checkpoint, at offsets that differ from version to version."""
    engine.begin_weight_update(version)
    for index, name in enumerate(sorted(engine._names._known or ())):
        engine.load_bucket(Bucket("file", 64, (TensorSlice(name, "float32", (2, 2), 64 * index + version),)))
    engine.end_weight_update(version)


def request_of(*texts: str, version: int, greedy: bool = False) -> GenerateRequest:
    ids_BP, lens_B = make_prompts(*texts)
    return GenerateRequest(ids_BP, lens_B, version, None if greedy else np.full((len(texts), 4), 0.5, np.float32))


# -- a whole launch's calls ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", ORDERS, ids=lambda o: f"{o.order} {o.weights_mode} {'+'.join(sorted(o.level))}")
def test_the_schedule_of_every_order_runs_on_an_engine_that_dies_of_misuse(options: HandoffOptions, tmp_path: Path):
    engine = FakeEngine(fake_context(options), Slot(0, 0, "cpu", str(tmp_path)))
    manager = RolloutManager(engine.context, [engine], CharTokenizer(VOCABULARY), PROMPTS, PROMPTS[:3], "rig:reward")
    manager.start()
    schedule = build_schedule(options)
    try:
        for version, steps in enumerate([schedule.init, *([list(schedule.steps(save=True, evaluate=True))] * 2)]):
            for step in steps:
                side, _, method = step.name.rpartition(".")
                if side == "engine":
                    getattr(manager, method)()
                elif method == "generate":
                    batch, _ = manager.generate(version - 1, version - 1)
                    assert batch.mask_BL.sum() > 0
                elif method == "update_weights":
                    whole_update(engine, version)
                elif method == "eval":
                    manager.evaluate(version)
            assert engine.version == version
        assert engine.check_health()
    finally:
        manager.shutdown()


# -- what comes back -----------------------------------------------------------------------------------


def test_answers_are_cut_at_the_end_token_and_padded(engine: FakeEngine):
    whole_update(engine, 0)
    result = engine.generate(request_of("12", "3456", "", version=0))
    # The stand-in answers a prompt backwards and then the end token, within four tokens; ids are 3 and up, bos is 1.
    assert result.response_ids_BL.tolist() == [[5, 4, 1, EOS_ID], [9, 8, 7, 6], [1, EOS_ID, PAD_ID, PAD_ID]]
    assert result.mask_BL.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert (result.logprob_BL == -result.mask_BL).all()
    greedy = engine.generate(request_of("12", version=0, greedy=True))
    assert (greedy.logprob_BL == 0).all()


def test_tokens_after_the_end_token_are_dropped_and_missing_logprobs_are_an_error():
    result = to_arrays([([5, EOS_ID, 7, 8], [-1, -2, -3, -4])], 3, PAD_ID, frozenset({EOS_ID}))
    assert result.response_ids_BL.tolist() == [[5, EOS_ID, PAD_ID]]
    assert result.logprob_BL.tolist() == [[-1, -2, 0]]
    assert to_arrays([([5, 6, 7, 8], [0] * 4)], 3, PAD_ID, frozenset()).mask_BL.tolist() == [[1, 1, 1]]
    for bad in (([5, 6], [-1.0]), ([], [])):
        with pytest.raises(RunError, match=f"answered {len(bad[0])} tokens with {len(bad[1])} log-probs"):
            to_arrays([bad], 3, PAD_ID, frozenset())


def test_seeds_of_rows_follow_the_numbers_of_rows(engine: FakeEngine):
    uniform_BL = np.asarray([[0.25, 0.9], [0.5, 0.9], [0.25, 0.1]], np.float32)
    seeds = [row["sampling_seed"] for row in engine._sampling(3, uniform_BL)]
    assert seeds == [2**29, 2**30, 2**29]
    assert "sampling_seed" not in engine._sampling(1, None)[0]


# -- refusals ------------------------------------------------------------------------------------------


def test_misuse_is_refused_here_and_the_engine_lives(engine: FakeEngine):
    whole_update(engine, 0)
    engine.release_memory_occupation(["kv_cache", "cuda_graph"])
    for call in (
        lambda: engine.release_memory_occupation(["kv_cache"]),
        lambda: engine.resume_memory_occupation(["weights"]),
        lambda: engine.generate(request_of("12", version=0)),
        lambda: engine.load_bucket(Bucket("f", 1, ())),
    ):
        with pytest.raises(RunError, match="engine-0"):
            call()
    engine.release_memory_occupation([])  # to SGLang no tags are all tags
    engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert engine.generate(request_of("12", version=0)).mask_BL.any()


def test_weights_of_another_version_are_not_sampled_from(engine: FakeEngine):
    whole_update(engine, 1)
    with pytest.raises(RunError, match="holds weights of version 1, version 2 is asked for"):
        engine.generate(request_of("12", version=2))


def test_a_refused_bucket_is_an_error_and_the_engine_is_not_used_again(engine: FakeEngine):
    name = sorted(engine._names._known or ())[0]
    engine.begin_weight_update(1)
    with pytest.raises(RunError, match="SGLang refused a bucket: no room"):
        engine.load_bucket(Bucket("refused", 64, (TensorSlice(name, "float32", (2, 2), 0),)))
    assert engine.version is None
    with pytest.raises(RunError, match="failed in the update to version 1: SGLang refused a bucket"):
        engine.end_weight_update(1)
    assert not engine.check_health()


def test_an_update_that_lacks_tensors_does_not_count(engine: FakeEngine):
    engine.begin_weight_update(1)
    with pytest.raises(RunError, match="the update to version 1 lacks"):
        engine.end_weight_update(1)
    assert engine.version is None


def test_checksums_tell_versions_apart(engine: FakeEngine):
    whole_update(engine, 0)
    first = engine.weights_checksum()
    whole_update(engine, 1)
    assert engine.weights_checksum() != first
    engine.release_memory_occupation(["weights"])
    with pytest.raises(RunError, match="weights is offloaded"):
        engine.weights_checksum()
    assert one_checksum([{"a": "1", "b": "2"}]) == one_checksum([{"b": "2", "a": "1"}])
    assert one_checksum([{"a": "1"}, {"a": "2"}]) != one_checksum([{"a": "2"}, {"a": "1"}])


def test_what_it_cannot_do_is_said_before_it_starts(tmp_path: Path):
    context = make_context("lora", HandoffOptions(engine_weights="mirror"))
    with pytest.raises(ConfigError, match="takes whole weights, not LoRA adapters"):
        SglangEngine(context, Slot(0, 0, "cpu", str(tmp_path)))


def test_adapters_that_the_trainer_merges_are_no_concern_of_the_engine(tmp_path: Path):
    context = make_context("lora", HandoffOptions(engine_weights="mirror"), trainer={"backend": "megatron"})
    SglangEngine(context, Slot(0, 0, "cpu", str(tmp_path)))


@pytest.mark.parametrize(("slot", "per_engine", "expected"), [(0, 1, "GPU-a"), (3, 1, "GPU-d"), (2, 2, "GPU-c,GPU-d")])
def test_an_engine_has_the_gpus_of_its_slots(slot: int, per_engine: int, expected: str):
    """By UUID: the numbers in this process's CUDA_VISIBLE_DEVICES are its own."""
    context = make_context(
        cluster={"num_gpus_per_node": 4}, rollout={"rollout_num_gpus_per_engine": per_engine}, num_slots=4
    )
    context = replace(context, gpus=("GPU-a", "GPU-b", "GPU-c", "GPU-d"))
    engine = SglangEngine(context, Slot(slot, 0, "cuda", ""))
    assert engine._environment()["CUDA_VISIBLE_DEVICES"] == expected


@pytest.mark.parametrize(
    ("weights", "buffers", "expected"),
    [("mirror", "retained", "1"), ("mirror", "fresh", "0"), ("discard", "retained", "0")],
)
def test_a_retained_mirror_is_pinned_once(weights: Any, buffers: Any, expected: str):
    engine = SglangEngine(
        make_context("grpo", HandoffOptions(engine_weights=weights, buffers=buffers)), Slot(0, 0, "cuda", "")
    )
    assert engine._environment()["TMS_RETAIN_CPU_BACKUP"] == expected


def test_engines_of_several_gpus_are_one_for_each_group_of_slots():
    context = make_context(
        rollout={"backend": "sglang", "rollout_num_gpus_per_engine": 4}, cluster={"num_gpus_per_node": 8}, num_slots=8
    )
    slots = [Slot(i, 0, "cuda", "") for i in range(8)]
    manager = make_manager(context, slots, f"{SglangEngine.__module__}:SglangEngine", PROMPTS, [], "rig:reward")
    assert [engine.slot.index for engine in manager.engines] == [0, 4]  # type: ignore[attr-defined]


# -- memory and processes ------------------------------------------------------------------------------


def test_regions_are_those_the_engine_reports_and_are_booked(tmp_path: Path):
    engine = started(tmp_path)
    try:
        sizes = dict(engine.region_bytes())
        assert sizes["kv_cache"] == 2 * 2**30
        assert sizes["cuda_graph"] == 2**28
        # The parameters of this model, by hand: embedding and head, two layers, the last norm; 4 bytes each.
        layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32 + 2 * 16 + 2 * 8
        assert sizes["weights"] == 4 * (2 * 13 * 16 + 2 * layer + 16)
        assert engine.memory().gpu_bytes == sum(sizes.values())
        pool = next(tmp_path.glob("device*"))
    finally:
        engine.shutdown()
    assert Pool.open(pool).used() == 0


def test_its_own_host_memory_is_that_of_its_processes_where_it_is_asked_for(tmp_path: Path):
    plain, asked = started(tmp_path / "a"), started(tmp_path / "b", run={"record_pss": True})
    try:
        assert plain.memory().pss_bytes is None
        assert asked._process is not None
        whole = asked.memory().pss_bytes
        top = pss_of([asked._process.pid])
        assert whole is not None
        assert top is not None
        assert whole > top > 2**20, "what is below its process counts too"
    finally:
        plain.shutdown()
        asked.shutdown()


def test_shutdown_ends_the_engines_processes_and_no_other(tmp_path: Path):
    bystander = started(tmp_path / "a")
    engine = started(tmp_path / "b")
    try:
        assert engine._process is not None
        assert bystander._process is not None
        top = psutil.Process(engine._process.pid)
        tree = [top, *top.children(recursive=True)]
        assert len(tree) >= 2
        directory = engine._directory
        assert directory is not None
        assert (directory / "config.json").exists()
        assert not list(directory.glob("*.safetensors"))  # memory the engine no longer needs
        engine.shutdown()
        engine.shutdown()  # once more does nothing
        assert not any(is_running(p) for p in tree)
        assert not directory.exists()
        assert bystander.check_health()
        assert len(psutil.Process(bystander._process.pid).children()) >= 1
    finally:
        bystander.shutdown()
        engine.shutdown()


def test_an_engine_whose_process_was_killed_is_unhealthy_and_says_so(engine: FakeEngine):
    whole_update(engine, 0)
    assert engine.check_health()
    assert engine._process is not None
    psutil.Process(engine._process.pid).kill()
    deadline = time.monotonic() + 10
    while engine.check_health() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.check_health()
    # Its rank may have gone with it by now, and is looked at first.
    with pytest.raises(
        RunError, match=r"engine-0: its process (was killed by SIGKILL during|\d+ ended before) generate"
    ):
        engine.generate(request_of("12", version=0))


def test_an_engine_with_a_dead_rank_is_unhealthy(engine: FakeEngine):
    assert engine._process is not None
    assert engine.check_health()
    [rank] = psutil.Process(engine._process.pid).children()
    rank.kill()
    deadline = time.monotonic() + 10
    while engine.check_health() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not engine.check_health()
    with pytest.raises(RunError, match=f"engine-0: its process {rank.pid} ended before release"):
        engine.release_memory_occupation(["kv_cache"])


def test_a_start_that_fails_is_told_in_its_own_words_and_leaves_no_process(tmp_path: Path):
    engine = FakeEngine(fake_context(sglang={"no_such_option": 1}), Slot(0, 0, "cpu", str(tmp_path)))
    with pytest.raises(ConfigError, match="SGLang has no option 'no_such_option'"):
        engine.start()
    assert engine._process is not None
    pid = engine._process.pid
    engine.shutdown()
    assert not psutil.pid_exists(pid)  # our own child: not even a zombie is left


def test_errors_over_there_arrive_as_errors_of_ours():
    process = EngineProcess("engine-7", {}, "fake_host")
    try:
        process.call("start", {}, {}, {})
        with pytest.raises(RunError, match="a refusal") as caught:
            process.call("fail", "ours")
        assert (caught.value.where, caught.value.fix) == (("where it was",), "what to do")
        with pytest.raises(RunError, match="SGLang failed in fail: KeyError: 'weights'"):
            process.call("fail", "theirs")
        with pytest.raises(RunError, match="engine-7: its process was killed by SIGKILL during fail") as died:
            process.call("fail", "die")
        assert died.value.fix is not None
        assert "the run's engine-7.log has SGLang's last words" in str(died.value.fix)
    finally:
        process.shutdown()


def test_the_process_ends_when_its_parent_lets_go():
    process = EngineProcess("engine-7", {}, "fake_host")
    process.watch(process.call("start", {}, {}, {})[1])
    process._connection.close()  # what the kernel does when the parent is killed
    deadline = time.monotonic() + 20
    while any(map(is_running, process._tree)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, process._tree))
    process.shutdown()


def first_update(engine: SglangEngine, handle: str) -> None:
    engine.begin_weight_update(0)
    for name in sorted(engine._names._known or ()):
        engine.load_bucket(Bucket(handle, 64, (TensorSlice(name, "float32", (2, 2), 0),)))
    engine.end_weight_update(0)


IN_FP8: dict[str, dict[str, object]] = {
    "rollout": {"backend": "sglang", "dtype": "fp8"}, "trainer": {"backend": "megatron"},
}  # fmt: skip


@pytest.mark.parametrize("is_of_the_hub", [False, True])
def test_an_engine_in_fp8_of_a_checkpoint_that_is_not_must_be_brought_everything_and_is_compared_with_nothing(
    is_of_the_hub: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cache = tmp_path / "hub" / "models--org--tiny"
    checkpoint = cache / "snapshots" / ("0" * 40)
    write_checkpoint(fake_context(), checkpoint)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text(checkpoint.name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    engine = started(tmp_path, **IN_FP8, model={"hf_checkpoint": "org/tiny" if is_of_the_hub else str(checkpoint)})
    try:
        scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
        assert engine._names._known is not None
        assert scale in engine._names._known
        first_update(engine, "garbled")
        assert engine.version == 0
        engine.begin_weight_update(1)
        engine.load_bucket(Bucket("", 64, (TensorSlice(scale, "float32", (1, 1), 0),)))
        with pytest.raises(RunError, match="the update to version 1 lacks"):
            engine.end_weight_update(1)
    finally:
        engine.shutdown()


def test_an_engine_in_fp8_of_a_model_without_a_checkpoint_is_compared_with_the_one_that_was_written_for_it(
    tmp_path: Path,
):
    engine = started(tmp_path, **IN_FP8)
    try:
        with pytest.raises(RunError, match="of the first update differ from what SGLang loaded by itself"):
            first_update(engine, "garbled")
    finally:
        engine.shutdown()


def test_a_first_update_that_brings_other_weights_than_were_loaded_is_refused(engine: FakeEngine):
    with pytest.raises(RunError, match="of the first update differ from what SGLang loaded by itself: lm_head"):
        first_update(engine, "garbled")
    with pytest.raises(RunError, match="it failed in the update to version 0"):
        engine.generate(request_of("12", version=0))


@pytest.mark.parametrize(("asked", "expected"), [(True, "other"), (False, "as loaded")])
def test_asked_for_the_check_starts_from_weights_that_were_overwritten(tmp_path: Path, asked: bool, expected: str):
    """So that an update which writes nothing does not pass for one that wrote the same."""
    engine = started(tmp_path, handoff={"check_weight_update_equal": asked})
    try:
        engine.begin_weight_update(0)
        assert engine._call("checksums") == [{"lm_head": expected}]
    finally:
        engine.shutdown()
