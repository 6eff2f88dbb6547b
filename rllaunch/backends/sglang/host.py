"""The process of one engine: holds `sglang.Engine` and does what it is told through a pipe.

SGLang ends the process it was started from when one of its own dies, and its `shutdown` ends every child of that
process, whoever started it (sglang 0.5.23 `entrypoints/engine.py`). In a process of its own it can only end itself.
Its event loop belongs to one thread, and so do its children: they die with the thread that started them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rllaunch.backends.base import Bucket, TensorSlice
from rllaunch.errors import ConfigError, RllaunchError, RunError

# B rows, L response tokens; lists, because rows differ in length

DRAIN_SECONDS = 30.0


class Host:
    """What the parent may call, by name. Every answer of SGLang is looked at: it says no without raising."""

    def start(
        self, decided: Mapping[str, Any], preferred: Mapping[str, Any], given: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], list[int]]:
        """Load the engine; what it reports of its memory, in GiB, and the ids of its ranks' processes."""
        from rllaunch.backends.sglang.update import Payloads

        self._payloads = Payloads(self._load(decided, preferred, given))
        state = self.engine.get_server_info()["internal_states"][0]
        usage: Mapping[str, Any] = state.get("memory_usage", {})
        return usage, list(self.engine.get_all_child_pids())

    def follow(self, decided: Mapping[str, Any], preferred: Mapping[str, Any], given: Mapping[str, Any]) -> list[int]:
        """Load the ranks of a further node, which then obey those of the first; the ids of their processes.

        SGLang makes no tokenizer manager here, so nothing but `shutdown` can be asked of this engine
        (sglang 0.5.23 `entrypoints/engine.py`).
        """
        self._load(decided, preferred, given)
        return list(self.engine.get_all_child_pids())

    def _load(self, decided: Mapping[str, Any], preferred: Mapping[str, Any], given: Mapping[str, Any]) -> int:
        """Make `self.engine`; the number of its ranks on all nodes."""
        from sglang.srt.server_args import ServerArgs

        from rllaunch.backends.sglang.options import server_arguments

        arguments = server_arguments(decided, preferred, given, ServerArgs)
        from sglang.srt.entrypoints.engine import Engine

        try:
            self.engine = Engine(**arguments)
        except (ValueError, TypeError, AssertionError) as err:
            raise ConfigError(f"SGLang refuses its arguments: {err}", _said(given), "see the section [sglang]") from err
        return int(arguments["tp_size"])

    def generate(
        self, prompt_ids: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]]
    ) -> list[tuple[list[int], list[float]]]:
        """Token ids and log-probs of each answer, the end token included."""
        answers = self.engine.generate(
            input_ids=[list(ids) for ids in prompt_ids],
            sampling_params=[dict(s) for s in sampling],
            return_logprob=True,
        )
        rows = []
        for answer in answers:
            meta = answer["meta_info"]
            if (finish := meta.get("finish_reason") or {}).get("type") == "abort":
                raise RunError(f"SGLang gave up a request: {finish.get('message', 'no reason given')}")
            rows.append((list(answer["output_ids"]), [float(entry[0]) for entry in meta["output_token_logprobs"]]))
        return rows

    def release(self, tags: Sequence[str]) -> None:
        # SGLang asserts that it is idle, and dies if it is not; a flush is refused for as long as requests run.
        if "kv_cache" in tags:
            self.flush()
        self.engine.release_memory_occupation(tags=list(tags))

    def resume(self, tags: Sequence[str]) -> None:
        self.engine.resume_memory_occupation(tags=list(tags))

    def flush(self) -> None:
        """Forget every cached prefix, when the last request is done."""
        import time

        deadline = time.monotonic() + DRAIN_SECONDS
        while not _succeeded(answer := self.engine.flush_cache()):
            if time.monotonic() > deadline:
                raise RunError(f"SGLang did not flush its cache in {DRAIN_SECONDS:.0f} s: {_message(answer)}")
            time.sleep(0.05)

    def begin_weight_update(self) -> None:
        # Since 0.5.2x an update outside such a session is refused; before, there was none.
        if hasattr(self.engine, "begin_weight_update"):
            _require("to begin a weight update", self.engine.begin_weight_update())

    def load_bucket(self, bucket: Bucket, tensors: Sequence[TensorSlice]) -> None:
        answer = self.engine.update_weights_from_tensor(
            self._payloads.of(bucket, tensors), load_format="flattened_bucket", flush_cache=False
        )
        _require(f"a bucket of {len(tensors)} tensors from {tensors[0].name} on", answer)

    def end_weight_update(self) -> None:
        if hasattr(self.engine, "end_weight_update"):
            _require("to end a weight update", self.engine.end_weight_update())
        # What the old weights computed must not answer for the new ones.
        self.flush()

    def checksums(self) -> list[dict[str, str]]:
        """Of each rank: name of a tensor as the engine has it → its checksum."""
        answer = self._check_weights("checksum")
        _require("to sum its weights", answer)
        return [dict(rank["checksums"]) for rank in answer[2]]

    def overwrite(self) -> None:
        """Random numbers in place of every weight, so that only an update that writes them all brings them back."""
        _require("to overwrite its weights", self._check_weights("reset_tensors"))

    def _check_weights(self, action: str) -> Any:
        from sglang.srt.managers.io_struct import CheckWeightsReqInput

        engine = self.engine
        return engine.loop.run_until_complete(
            engine.tokenizer_manager.check_weights(CheckWeightsReqInput(action=action), None)
        )

    def shutdown(self) -> None:
        if engine := self.__dict__.pop("engine", None):
            engine.shutdown()


def _require(what: str, answer: Any) -> None:
    """
    Raises:
        RunError: SGLang answered no.
    """
    if not _succeeded(answer):
        raise RunError(
            f"SGLang refused {what}: {_message(answer)}",
            "",
            "the engine's weights are neither the old nor the new ones; the run cannot go on with it",
        )


def _succeeded(answer: Any) -> bool:
    """Of (success, message, …) or an object with those fields."""
    if isinstance(answer, tuple | list):
        return bool(answer) and answer[0] is True
    return getattr(answer, "success", None) is True


def _message(answer: Any) -> str:
    if isinstance(answer, tuple | list):
        return str(answer[1]) if len(answer) > 1 else repr(answer)
    return str(getattr(answer, "message", None) or answer)


def _said(given: Mapping[str, Any]) -> list[str]:
    return [f"sglang.{name} = {value!r}" for name, value in given.items()]


def serve(connection: Connection, host: Any) -> None:
    """Answer until the parent says shutdown or is gone. An error of any kind is an answer too."""
    while True:
        try:
            name, arguments = connection.recv()
        except (EOFError, OSError):
            break
        try:
            answer = True, getattr(host, name)(*arguments)
        except RllaunchError as err:
            traceback.print_exc()
            answer = False, err
        except Exception as err:
            traceback.print_exc()
            where = [line.strip() for line in traceback.format_exc().splitlines()[-4:-1]]
            answer = False, RunError(f"SGLang failed in {name}: {type(err).__name__}: {err}", where)
        try:
            connection.send(answer)
        except OSError:
            break
        if name == "shutdown":
            return
    host.shutdown()


def main() -> None:
    fd = int(sys.argv[1])
    os.set_inheritable(fd, False)  # a child that held it would keep the pipe open past our end
    serve(Connection(fd), Host())


if __name__ == "__main__":
    main()
