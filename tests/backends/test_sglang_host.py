"""The side that talks to SGLang: every answer is looked at, whatever form it has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rllaunch.backends.base import Bucket, TensorSlice
from rllaunch.backends.sglang import host
from rllaunch.backends.sglang.host import Host
from rllaunch.errors import RunError

ANSWERS_OF_NO = [
    (False, "not now"),
    [False, "not now"],
    SimpleNamespace(success=False, message="not now"),
    None,
    (),
    (None, "not now"),
    SimpleNamespace(),
]


class Engine:
    """Records calls; answers each with what it was given, yes by default."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[str] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or (name in ("begin_weight_update", "end_weight_update") and "is_old" in self._answers):
            raise AttributeError(name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.calls.append(name)
            answer = self._answers.get(name, (True, "Success"))
            return answer.pop(0) if isinstance(answer, list) and answer and not isinstance(answer[0], bool) else answer

        return call


class Payloads:
    def of(self, bucket: Bucket, tensors: Any) -> list[bytes]:
        return [b""]


def hosting(engine: Engine) -> Host:
    made = Host()
    made.engine, made._payloads = engine, Payloads()  # type: ignore[assignment]
    return made


BUCKET = Bucket("file", 64, (TensorSlice("norm", "float32", (4,), 0),))


def update(hosted: Host) -> None:
    hosted.begin_weight_update()
    hosted.load_bucket(BUCKET, BUCKET.tensors)
    hosted.end_weight_update()


def test_an_update_is_a_session_with_one_flush_at_its_end():
    engine = Engine()
    update(hosting(engine))
    assert engine.calls == ["begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache"]


def test_an_older_sglang_without_sessions_is_updated_without():
    engine = Engine(is_old=True)
    update(hosting(engine))
    assert engine.calls == ["update_weights_from_tensor", "flush_cache"]


@pytest.mark.parametrize("answer", ANSWERS_OF_NO, ids=repr)
@pytest.mark.parametrize(
    ("call", "what"),
    [
        ("begin_weight_update", "to begin a weight update"),
        ("update_weights_from_tensor", "a bucket of 1 tensors from norm on"),
        ("end_weight_update", "to end a weight update"),
    ],
)
def test_anything_but_a_yes_is_an_error_that_names_what_was_refused(call: str, what: str, answer: Any):
    engine = Engine(**{call: answer})
    with pytest.raises(RunError, match=f"SGLang refused {what}"):
        update(hosting(engine))
    assert engine.calls[-1] == call


def test_a_release_of_the_cache_waits_until_requests_are_done():
    busy = [
        SimpleNamespace(success=False, message="busy"),
        SimpleNamespace(success=False),
        SimpleNamespace(success=True),
    ]
    engine = Engine(flush_cache=busy)
    hosting(engine).release(["kv_cache", "cuda_graph"])
    assert engine.calls == ["flush_cache"] * 3 + ["release_memory_occupation"]
    weights_only = Engine()
    hosting(weights_only).release(["weights"])
    assert weights_only.calls == ["release_memory_occupation"]


def test_requests_that_do_not_end_keep_the_memory_and_are_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "DRAIN_SECONDS", 0.1)
    engine = Engine(flush_cache=SimpleNamespace(success=False, message="2 requests are running"))
    with pytest.raises(RunError, match="did not flush its cache in 0 s: 2 requests are running"):
        hosting(engine).release(["kv_cache"])
    assert "release_memory_occupation" not in engine.calls


def answer_of(ids: list[int], finish: dict[str, Any]) -> dict[str, Any]:
    entries = [(-0.5 * (i + 1), token, None) for i, token in enumerate(ids)]
    return {"output_ids": ids, "meta_info": {"finish_reason": finish, "output_token_logprobs": entries}}


def test_answers_are_ids_and_logprobs_and_an_aborted_one_is_an_error():
    stop, aborted = {"type": "stop", "matched": 2}, {"type": "abort", "message": "prompt too long"}
    engine = Engine(generate=({}, answer_of([7, 2], stop))[1:])
    assert hosting(engine).generate([[1]], [{}]) == [([7, 2], [-0.5, -1.0])]
    with pytest.raises(RunError, match="SGLang gave up a request: prompt too long"):
        hosting(Engine(generate=(answer_of([7], aborted),))).generate([[1]], [{}])
