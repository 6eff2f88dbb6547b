"""A whole launch in one process: engine, trainer and rollout manager of the embedded backend on one slot, without Ray."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rllaunch.backends.base import Bucket, LaunchContext, MemoryReading, RankInfo, Slot, TrainBatch
from rllaunch.backends.embedded.engine import EmbeddedEngine
from rllaunch.backends.embedded.model import build_model
from rllaunch.backends.embedded.tokenizer import CharTokenizer
from rllaunch.backends.embedded.trainer import EmbeddedTrainer
from rllaunch.plan.handoff import HandoffOptions, Region, Step, build_schedule
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.data import Prompt
from rllaunch.run.rollout_manager import RolloutManager

VOCABULARY = "0123456789"
MAX_PROMPT_TOKENS = 5  # bos and four characters
PROMPTS = [Prompt(text, text[::-1]) for text in ("12", "3456", "7", "890", "1234", "55", "678", "9")]

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
LLAMA = {**QWEN3, "model_type": "llama"}
QWEN3_MOE = {
    **QWEN3, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip

ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"advantage_estimator": "ppo"},
    "lora": {"lora_rank": 2, "lora_alpha": 4.0},
    "kl": {"kl_loss_coef": 0.1},
}


def reward(prompt: str, response: str, label: str) -> float:
    """Something that differs between the samples of an untrained model."""
    return float(sum(map(ord, response)) % 7)


def make_context(
    preset: str = "grpo",
    options: HandoffOptions | None = None,
    *,
    architecture: dict[str, Any] | None = None,
    num_slots: int = 1,
    **sections: dict[str, Any],
) -> LaunchContext:
    """A tiny launch; `sections` add to or replace what stands here (`trainer={"lr": 1.0}`).

    Args:
        preset: one of `ALGORITHMS`.
        options: its critic and LoRA follow the preset.
    """
    facts: dict[str, dict[str, Any]] = {
        "model": {"architecture": architecture or QWEN3, "dtype": "float32"},
        "trainer": {"backend": "embedded", "lr": 1e-2, "num_steps_per_rollout": 2, "init_method_std": 0.3, "precision": "fp32"},
        "rollout": {
            "backend": "embedded", "dtype": "float32", "rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 4,
        },
        "algorithm": ALGORITHMS[preset],
        "run": {"num_rollout": 10, "seed": 7},
    }  # fmt: skip
    for name, values in sections.items():
        facts[name] = {**facts.get(name, {}), **values}
    config = LaunchConfig.model_validate(facts)
    options = replace(options or HandoffOptions(), critic=config.has_critic, lora=config.has_lora)
    return LaunchContext(config, options, VOCABULARY, MAX_PROMPT_TOKENS, num_slots)


@dataclass
class Rig:
    """One slot of a launch.

    Args:
        directory: of the ledgers and of what `save` writes; new for each rig.
    """

    context: LaunchContext
    directory: Path
    device: str = "cpu"
    metrics: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slot = Slot(0, 0, self.device, str(self.directory / "ledgers"))
        self.engine = EmbeddedEngine(self.context, self.slot)
        self.trainer = EmbeddedTrainer(self.context, self.slot)
        tokenizer = CharTokenizer(VOCABULARY)
        self.manager = RolloutManager(self.context, [self.engine], tokenizer, PROMPTS, PROMPTS[:3], "rig:reward")
        self.schedule = build_schedule(self.context.options)
        self.batch: TrainBatch | None = None

    @property
    def sizes(self) -> dict[Region, int]:
        return {**self.engine.region_bytes(), **self.trainer.region_bytes()}

    def run(self, cycles: int = 2) -> Iterator[tuple[str, Step, MemoryReading]]:
        """Start-up and `cycles` cycles that save and evaluate: phase, step and the books after it."""
        self.manager.start()
        self.engine.memory()  # the peak of loading is not the schedule's
        for step in self.schedule.init:
            yield "init", step, self._call(step, 0, 0)
        for rollout_id in range(cycles):
            for step in self.schedule.steps(save=True, evaluate=True):
                version = rollout_id if step.name == "generate" else rollout_id + 1
                yield f"cycle {rollout_id}", step, self._call(step, rollout_id, version)

    def _call(self, step: Step, rollout_id: int, version: int) -> MemoryReading:
        match step.name.rpartition("."):
            case "engine", _, method:
                getattr(self.manager, method)()
            case "trainer", _, "init":
                self.trainer.init(RankInfo(0, 1, "", 0))
            case "trainer", _, method:
                getattr(self.trainer, method)()
            case _, _, "generate":
                self.batch, _ = self.manager.generate(rollout_id, version)
            case _, _, "train":
                self.metrics.append(dict(self.trainer.train(self.batch).values))
            case _, _, "update_weights":
                self.trainer.update_weights(version, self.manager)
            case _, _, "save":
                target = self.directory / "save"
                shutil.rmtree(target, ignore_errors=True)
                target.mkdir()
                self.trainer.save(str(target))
            case _, _, "eval":
                self.manager.evaluate(version)
        reading = self.engine.memory()
        return replace(reading, moved_bytes=reading.moved_bytes + self.trainer.memory().moved_bytes)

    def shutdown(self) -> None:
        self.trainer.shutdown()
        self.manager.shutdown()


def started_engine(
    directory: Path, preset: str = "grpo", options: HandoffOptions | None = None, **sections: Any
) -> EmbeddedEngine:
    """An engine that has the first weights, as version 0."""
    context = make_context(preset, options, **sections)
    engine = EmbeddedEngine(context, Slot(0, 0, "cpu", str(directory)))
    engine.start()
    engine.version = 0
    return engine


def started_trainer(
    directory: Path, preset: str = "grpo", options: HandoffOptions | None = None, **sections: Any
) -> EmbeddedTrainer:
    context = make_context(preset, options, **sections)
    trainer = EmbeddedTrainer(context, Slot(0, 0, "cpu", str(directory)))
    trainer.init(RankInfo(0, 1, "", 0))
    return trainer


def make_prompts(*texts: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids, left-padded to the launch's width, and lengths."""
    tokenizer = CharTokenizer(VOCABULARY)
    ids_BP = np.full((len(texts), MAX_PROMPT_TOKENS), tokenizer.pad_id, dtype=np.int64)
    lens_B = np.zeros(len(texts), dtype=np.int64)
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)
        ids_BP[row, MAX_PROMPT_TOKENS - len(ids) :] = ids
        lens_B[row] = len(ids)
    return ids_BP, lens_B


def make_batch(context: LaunchContext, rollout_id: int = 0, *, seed: int = 3) -> TrainBatch:
    """Responses of random tokens and lengths, with the log-probs of a policy a little off the initial one."""
    rng = np.random.default_rng([seed, rollout_id])
    group, L = context.config.rollout.n_samples_per_prompt, context.config.rollout.rollout_max_response_len
    texts = [PROMPTS[(rollout_id + i) % len(PROMPTS)].text for i in range(context.config.rollout.rollout_batch_size)]
    ids_BP, lens_B = make_prompts(*(t for t in texts for _ in range(group)))
    B = len(ids_BP)
    mask_BL = (np.arange(L) < rng.integers(1, L + 1, (B, 1))).astype(np.float32)
    response_BL = np.where(mask_BL > 0, rng.integers(3, 3 + len(VOCABULARY), (B, L)), 0)
    model = build_model(context, with_lora=False)
    logp_BL = hf_logprobs(model, ids_BP, lens_B, response_BL).detach().numpy()
    logp_BL = (logp_BL + rng.normal(0, 0.2, (B, L)).astype(np.float32)) * mask_BL
    reward_B = rng.normal(0, 1, B).astype(np.float32)
    return TrainBatch(rollout_id, ids_BP, lens_B, response_BL, logp_BL.astype(np.float32), mask_BL, reward_B)


def hf_logprobs(
    model: Any, prompt_ids_BP: Any, prompt_lens_B: Any, response_BL: Any, temperature: float = 1.0
) -> torch.Tensor:
    """Log-probs of the responses, [B, L]: each row alone, its padding cut off, through a plain forward."""
    rows = []
    for prompt, length, response in zip(prompt_ids_BP, prompt_lens_B, response_BL, strict=True):
        prompt_ids = torch.as_tensor(prompt[len(prompt) - length :])
        response_ids = torch.as_tensor(response)
        ids = torch.cat([prompt_ids, response_ids])[None]
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
        rows.append(torch.log_softmax(logits, -1).gather(1, response_ids[:, None]).squeeze(1))
    return torch.stack(rows)


@dataclass
class CollectedUpdate:
    """A sink that keeps what it is sent: name → tensor, and the sizes of the buckets."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    bucket_bytes: list[int] = field(default_factory=list)

    def begin_weight_update(self, version: int) -> None: ...

    def end_weight_update(self, version: int) -> None: ...

    def load_bucket(self, bucket: Bucket) -> None:
        self.bucket_bytes.append(bucket.nbytes)
        content = np.fromfile(bucket.handle, dtype=np.uint8)
        for piece in bucket.tensors:
            dtype = getattr(torch, piece.dtype)
            count = int(np.prod(piece.shape))
            raw = content[piece.offset : piece.offset + count * dtype.itemsize].tobytes()
            self.tensors[piece.name] = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(piece.shape)


def sent_by(trainer: EmbeddedTrainer) -> dict[str, torch.Tensor]:
    """What an update of this trainer sends."""
    sink = CollectedUpdate()
    trainer.update_weights(1, sink)
    return sink.tensors
