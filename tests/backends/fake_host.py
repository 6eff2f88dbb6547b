"""A stand-in for the process of an SGLang engine, as unforgiving as SGLang: misuse ends it.

`sys.argv` and the pipe are those of the real one. It answers a prompt with its own tokens, backwards, then the end token.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rllaunch.backends.base import Bucket, TensorSlice
from rllaunch.backends.sglang import host
from rllaunch.errors import ConfigError, RunError

TAGS = {"weights", "kv_cache", "cuda_graph"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class FakeHost:
    def start(self, decided: Mapping[str, Any], preferred: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        if "no_such_option" in given:
            raise ConfigError("SGLang has no option 'no_such_option'")
        self.resident = set(TAGS)
        self.is_updating = False
        self.content: dict[str, int] = {}
        self.updates, self.is_garbled = 0, False
        # What SGLang's ranks are: processes below this one.
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        usage = {"weight": 0.5, "kvcache": 2.0, "graph": {"decode": 0.25, "target_verify": 0.0}}
        return usage, [self.child.pid]

    def release(self, tags: Sequence[str]) -> None:
        if not tags or not set(tags) <= self.resident:
            die()
        self.resident -= set(tags)

    def resume(self, tags: Sequence[str]) -> None:
        if not tags or set(tags) & self.resident:
            die()
        self.resident |= set(tags)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]]) -> Any:
        if self.resident != TAGS or self.is_updating:
            die()
        end = sampling[0]["stop_token_ids"][0]
        rows = [[*reversed(ids), end][: s["max_new_tokens"]] for ids, s in zip(prompts, sampling, strict=True)]
        return [(row, [-s["temperature"]] * len(row)) for row, s in zip(rows, sampling, strict=True)]

    def begin_weight_update(self) -> None:
        self.is_updating = True

    def load_bucket(self, bucket: Bucket, tensors: Sequence[TensorSlice]) -> None:
        if bucket.handle == "refused":
            host._require("a bucket", (False, "no room"))
        self.is_garbled = bucket.handle == "garbled"
        self.content |= {t.name: t.offset for t in tensors}

    def end_weight_update(self) -> None:
        self.is_updating = False
        self.updates += 1

    def checksums(self) -> list[dict[str, str]]:
        """The first update brings what was loaded, as a trainer's does."""
        if self.is_garbled:
            return [{"lm_head": "other"}]
        return [{n: str(v) for n, v in self.content.items()} if self.updates > 1 else {"lm_head": "as loaded"}]

    def overwrite(self) -> None:
        self.is_garbled = True

    def fail(self, kind: str) -> None:
        if kind == "ours":
            raise RunError("a refusal", "where it was", "what to do")
        if kind == "theirs":
            raise KeyError("weights")
        die()

    def shutdown(self) -> None:
        self.child.kill()


if __name__ == "__main__":
    host.serve(Connection(int(sys.argv[1])), FakeHost())
