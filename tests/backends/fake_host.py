"""A stand-in for the process of an SGLang engine, as unforgiving as SGLang: misuse ends it.

`sys.argv` and the pipe are those of the real one. It answers a prompt with its own tokens, backwards, then the end token.
With a journal (`fake_engines`) it writes down what it is asked, and does what a file there tells it to.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rllaunch.backends.base import Bucket, TensorSlice
from rllaunch.backends.sglang import host
from rllaunch.errors import ConfigError, RunError

TAGS = {"weights", "kv_cache", "cuda_graph"}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def note(name: str, **facts: Any) -> None:
    """Write `<journal>/<part>.<name>.json` and obey `<part>.<name>.do`: `together N`, then `raise`, `die` or `hang`."""
    if "FAKE_JOURNAL" not in os.environ:
        return
    stem = Path(os.environ["FAKE_JOURNAL"]) / f"{os.environ['FAKE_PART']}.{name}"
    shown = {
        k: os.environ[k] for k in ("CUDA_VISIBLE_DEVICES", "SGLANG_BLOCK_NONZERO_RANK_CHILDREN") if k in os.environ
    }
    half = stem.with_name(f"{stem.name}.half")
    half.write_text(json.dumps({"pid": os.getpid(), "environment": shown, **facts}))
    half.rename(stem.with_name(f"{stem.name}.json"))
    order = stem.with_name(f"{stem.name}.do")
    words = order.read_text().split() if order.exists() else []
    if words[:1] == ["together"]:
        deadline = time.monotonic() + 120
        while len(list(stem.parent.glob(f"*.{name}.json"))) < int(words[1]):
            if time.monotonic() > deadline:
                raise RunError(f"{stem.name}: the others were not asked while this one was at it")
            time.sleep(0.02)
        words = words[2:]
    match words:
        case ["raise"]:
            raise RunError(f"{stem.name} was told to fail", "where it was", "what to do")
        case ["die"]:
            die()
        case ["hang"]:
            time.sleep(600)


def rank() -> subprocess.Popen[bytes]:
    """What SGLang's ranks are: a process below this one that the kernel ends with it."""
    return subprocess.Popen(
        [sys.executable, "-c", "import ctypes, time; ctypes.CDLL(None).prctl(1, 9); time.sleep(600)"]
    )


class FakeHost:
    def follow(self, decided: Mapping[str, Any], preferred: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        note("start", arguments=dict(decided))
        self.child = rank()
        return [self.child.pid]

    def start(self, decided: Mapping[str, Any], preferred: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
        note("start", arguments=dict(decided))
        if "no_such_option" in given:
            raise ConfigError("SGLang has no option 'no_such_option'")
        self.resident = set(TAGS)
        self.is_updating = False
        self.content: dict[str, int] = {}
        self.updates, self.is_garbled = 0, False
        self.child = rank()
        usage = {"weight": 0.5, "kvcache": 2.0, "graph": {"decode": 0.25, "target_verify": 0.0}}
        return usage, [self.child.pid]

    def release(self, tags: Sequence[str]) -> None:
        if not tags or not set(tags) <= self.resident:
            die()
        note("release")
        self.resident -= set(tags)

    def resume(self, tags: Sequence[str]) -> None:
        if not tags or set(tags) & self.resident:
            die()
        self.resident |= set(tags)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sequence[Mapping[str, Any]]) -> Any:
        if self.resident != TAGS or self.is_updating:
            die()
        note("generate", rows=len(prompts))
        end = sampling[0]["stop_token_ids"][0]
        rows = [[*reversed(ids), end][: s["max_new_tokens"]] for ids, s in zip(prompts, sampling, strict=True)]
        return [(row, [-s["temperature"]] * len(row)) for row, s in zip(rows, sampling, strict=True)]

    def begin_weight_update(self) -> None:
        self.is_updating = True

    def load_bucket(self, bucket: Bucket, tensors: Sequence[TensorSlice]) -> None:
        note("load_bucket", handle=[str(h) for h in bucket.handle])
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
