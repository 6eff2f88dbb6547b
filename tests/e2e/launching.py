"""Starting whole runs as a user does: a process of their own, and what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = ("train", "--model", "tiny", "--hardware", "cpu")


@dataclass(frozen=True)
class Run:
    code: int
    out: str
    err: str
    path: Path

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / name).read_text().splitlines()]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return self.rows("metrics.jsonl")

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.rows("events.jsonl")

    def without_seconds(self) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in self.metrics]


def small_checkpoint(directory: Path) -> None:
    """A model of 16 words and its tokenizer, as transformers saves them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<end>", "=", *"abcdefghijklm"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")
    tokenizer.save_pretrained(directory)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = AutoConfig.for_model(
        "qwen3", **sizes, **heads, vocab_size=len(words), eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)


def a_run_of(checkpoint: Path) -> tuple[str, ...]:
    """Flags of one rollout that starts from a `small_checkpoint`, with prompts and reward beside it."""
    (checkpoint.parent / "words.jsonl").write_text('{"prompt": "abc=", "label": "cba"}\n', encoding="utf-8")
    (checkpoint.parent / "words_reward.py").write_text("def score(prompt, response, label):\n    return 0.5\n")
    flags = ("--set", "model.vocabulary=", "--data", "words.jsonl", "--reward", "words_reward:score")
    return ("--model", str(checkpoint), *flags, "--rollout-max-response-len", "4", "--num-rollout", "1")


def start(path: Path, *words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rllaunch", *TINY, "--run-dir", str(path), *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd, env={**os.environ, **(env or {})}
    )


def finish(process: subprocess.Popen[str], path: Path, timeout: float = 180) -> Run:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"the run did not end\n{out}\n{err}") from None
    return Run(process.returncode, out, err, path)
