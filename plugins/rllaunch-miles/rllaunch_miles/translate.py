"""A launch as the arguments of miles' `train.py`: every key of the schema is one of the tables below, or a function's.

What is said here of miles is what radixark/miles@31f1ca9 does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from rllaunch.errors import ConfigError
from rllaunch.export import Export, LeftOut
from rllaunch.resolve.origins import Resolved
from rllaunch.resolve.schema import LaunchConfig
from rllaunch_miles.options import NotTaken, written
from rllaunch_miles.reward import VARIABLE

# Key → option of the same meaning. What is unset says nothing.
SAME = {
    "model.hf_checkpoint": "hf-checkpoint",
    "cluster.num_gpus_per_node": "num-gpus-per-node",
    "handoff.colocate": "colocate",
    "handoff.offload_train": "offload-train",
    "handoff.offload_rollout": "offload-rollout",
    "handoff.update_weight_buffer_size": "update-weight-buffer-size",
    "handoff.check_weight_update_equal": "check-weight-update-equal",
    "handoff.train_memory_margin_bytes": "train-memory-margin-bytes",
    "trainer.tensor_model_parallel_size": "tensor-model-parallel-size",
    "trainer.sequence_parallel": "sequence-parallel",
    "trainer.pipeline_model_parallel_size": "pipeline-model-parallel-size",
    "trainer.decoder_first_pipeline_num_layers": "decoder-first-pipeline-num-layers",
    "trainer.decoder_last_pipeline_num_layers": "decoder-last-pipeline-num-layers",
    "trainer.context_parallel_size": "context-parallel-size",
    "trainer.expert_model_parallel_size": "expert-model-parallel-size",
    "trainer.expert_tensor_parallel_size": "expert-tensor-parallel-size",
    "trainer.global_batch_size": "global-batch-size",
    "trainer.num_steps_per_rollout": "num-steps-per-rollout",
    "trainer.optimizer_cpu_offload": "optimizer-cpu-offload",
    "trainer.lr": "lr",
    "trainer.lr_warmup_iters": "lr-warmup-iters",
    "trainer.lr_decay_style": "lr-decay-style",
    "trainer.lr_decay_iters": "lr-decay-iters",
    "trainer.min_lr": "min-lr",
    "trainer.adam_beta1": "adam-beta1",
    "trainer.adam_beta2": "adam-beta2",
    "trainer.adam_eps": "adam-eps",
    "trainer.weight_decay": "weight-decay",
    "trainer.clip_grad": "clip-grad",
    "trainer.init_method_std": "init-method-std",
    "rollout.rollout_batch_size": "rollout-batch-size",
    "rollout.n_samples_per_prompt": "n-samples-per-prompt",
    "rollout.rollout_num_gpus_per_engine": "rollout-num-gpus-per-engine",
    "rollout.rollout_max_response_len": "rollout-max-response-len",
    "rollout.rollout_max_context_len": "rollout-max-context-len",
    "rollout.rollout_temperature": "rollout-temperature",
    "rollout.health_check_interval": "rollout-health-check-interval",
    "algorithm.advantage_estimator": "advantage-estimator",
    "algorithm.eps_clip": "eps-clip",
    "algorithm.eps_clip_high": "eps-clip-high",
    "algorithm.kl_loss_coef": "kl-loss-coef",
    "algorithm.kl_loss_type": "kl-loss-type",
    "algorithm.entropy_coef": "entropy-coef",
    "algorithm.gamma": "gamma",
    "algorithm.lambd": "lambd",
    "run.num_rollout": "num-rollout",
    "sglang.mem_fraction_static": "sglang-mem-fraction-static",
    "sglang.dp_size": "sglang-dp-size",
    "sglang.ep_size": "sglang-ep-size",
    "sglang.enable_dp_attention": "sglang-enable-dp-attention",
}

# Keys that decide nothing in the process that trains: names of profiles, facts of the machine, and what rllaunch itself
# reads before a run starts or on a machine without GPUs.
NOTHING_TO_SAY = (
    "model.name",
    "hardware.",
    "handoff.memory_headroom",
    "task.name",
    "run.disk_reserve_bytes",
    "run.torch_num_threads",
    "run.record_pss",
    "run.allow",
)

# Keys that the functions below speak of, in the order of the schema.
TRANSLATED = (
    "model.architecture",
    "model.vocabulary",
    "model.dtype",
    "cluster.num_nodes",
    "cluster.actor_num_nodes",
    "cluster.actor_num_gpus_per_node",
    "cluster.ray_address",
    "handoff.offload_rollout_level",
    "handoff.colocate_memory_peak_device",
    "handoff.offload_train_buffers",
    "handoff.trainer_offload_backend",
    "handoff.offload_train_process_groups",
    "handoff.engine_weights",
    "handoff.update_weights_from",
    "trainer.backend",
    "trainer.micro_batch_size",
    "trainer.max_tokens_per_gpu",
    "trainer.recompute_granularity",
    "trainer.precision",
    "rollout.backend",
    "rollout.rollout_num_gpus",
    "rollout.dtype",
    "algorithm.normalize_advantages",
    "algorithm.loss_aggregation",
    "algorithm.critic_lr",
    "algorithm.value_clip",
    "algorithm.lora_rank",
    "algorithm.lora_alpha",
    "algorithm.lora_target_modules",
    "task.prompt_data",
    "task.eval_prompt_data",
    "task.reward",
    "run.seed",
    "run.save_interval",
    "run.save_total_limit",
    "run.eval_interval",
    "run.run_dir",
    "pools.",
)

# What megatron takes where neither `micro_batch_size` nor `max_tokens_per_gpu` is set.
DEFAULT_TOKENS = 2048
NO_CHECKPOINT = "miles starts from a checkpoint: give one with --hf-checkpoint"
GROUPS = "miles destroys the trainer's process groups at each offload and makes them anew"
FRESH = (
    "miles allocates the trainer's host copy at each offload and frees it at the next onload: slower, and other peaks "
    "(`rllaunch plan --offload-train-buffers fresh`)"
)
UPDATES_LATE = (
    "miles offloads the trainer before it updates the engines (`rllaunch plan --update-weights-from host` is its order)"
)
SAVER = "miles moves the trainer's memory with torch_memory_saver"
DISCARDS = "miles drops the engines' weights at each offload, and the next update brings them back"
MIRRORS = "with --lora-base-cpu-backup, which [megatron] gives, miles keeps a host copy of the engines' weights"
KEEPS_ALL = "miles keeps every checkpoint; --save-retain-interval thins them"


@dataclass
class _Draft:
    """What is said so far. Options of the pass-through sections are the user's word and stand before what rllaunch
    would add by itself."""

    resolved: Resolved
    arguments: list[tuple[str, ...]] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    substitutions: list[str] = field(default_factory=list)

    @property
    def config(self) -> LaunchConfig:
        return self.resolved.config

    @property
    def flags(self) -> set[str]:
        return {words[0] for words in self.arguments}

    def say(self, key: str, option: str, value: Any) -> None:
        """An option for a key; where miles does not take it, the key is left out with what miles says to that."""
        try:
            words = written(option, value)
        except NotTaken as err:
            self.leave(key, str(err))
            return
        if words:
            self.arguments.append(words)

    def add(self, option: str, value: Any = True) -> None:
        """An option that rllaunch's own way asks for, unless the launch gives it already."""
        words = written(option, value)
        if words and words[0] not in self.flags and f"--no-{option}" not in self.flags:
            self.arguments.append(words)

    def leave(self, key: str, reason: str) -> None:
        self.left_out.append(LeftOut(key, self.resolved.value(key), reason))

    def passed(self, name: str) -> Any:
        """An option of [megatron], or None."""
        return (self.config.megatron.model_extra or {}).get(name)


def translate(resolved: Resolved, environment: Mapping[str, str]) -> Export:
    """
    Raises:
        ConfigError: the launch is for other backends than miles has.
    """
    _check_backends(resolved)
    draft = _Draft(resolved)
    for key, option in SAME.items():
        if (value := resolved.value(key)) is not None and value != "":
            draft.say(key, option, value)
    for section in ("sglang", "megatron"):
        _pass_through(draft, section)
    for part in (_model, _cluster, _handoff, _trainer, _rollout, _algorithm, _run):
        part(draft)
    variables = dict(environment) | dict(_task(draft))
    if resolved.config.cluster.ray_address:
        variables["RAY_ADDRESS"] = resolved.config.cluster.ray_address
    draft.notes.append("the variables must reach Ray's workers: export them before `ray start`, or give --runtime-env")
    return Export(
        ("python3", "train.py"),
        tuple(draft.arguments),
        variables,
        tuple(draft.left_out),
        tuple(draft.substitutions),
        tuple(draft.notes),
    )


def _check_backends(resolved: Resolved) -> None:
    for side, name in (("trainer", "megatron"), ("rollout", "sglang")):
        key = f"{side}.backend"
        if resolved.value(key) != name:
            raise ConfigError(
                f"miles has no {side} backend {resolved.value(key)!r}",
                resolved.describe(key),
                f"--{side}-backend {name}",
            )


def _pass_through(draft: _Draft, section: str) -> None:
    """Options under their own names; miles takes those of SGLang with a prefix."""
    for name, value in (getattr(draft.config, section).model_extra or {}).items():
        option = f"sglang-{name}" if section == "sglang" else name
        draft.say(f"{section}.{name}", option.replace("_", "-"), value)


@cache
def model_files() -> dict[str, str]:
    """Model profile → the file in miles' `scripts/models` that has its shape, without `.py`."""
    lines = files(__package__).joinpath("models.txt").read_text(encoding="utf-8").splitlines()
    found = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, file = line.split()
            found[name] = file
    return found


def _model(draft: _Draft) -> None:
    config, resolved = draft.config, draft.resolved
    file = model_files().get(config.model.name)
    own = [key for key in _shape_keys(resolved) if resolved.origin(key).layer not in ("model profile", "derived")]
    if file:
        draft.substitutions.append(f"$(python3 miles/utils/external_utils/model_args_utils.py {file})")
        for key in own:
            draft.leave(key, f"miles has the model's shape from its scripts/models/{file}.py: change it there")
    elif config.model.architecture:
        reason = "miles has no file in scripts/models for this model: write one, with Megatron's options of its shape"
        draft.leave("model.architecture", reason)
    if not config.model.hf_checkpoint:
        draft.leave("model.hf_checkpoint", NO_CHECKPOINT)
    if config.model.vocabulary:
        draft.leave("model.vocabulary", "miles has no character tokenizer: it takes the checkpoint's")
    if config.model.dtype != "bfloat16":
        draft.leave("model.dtype", "miles trains in bf16, or with --fp16")
    is_bridge = draft.passed("megatron_to_hf_mode") == "bridge"
    if is_bridge and Path(config.model.hf_checkpoint or "/nowhere").is_dir():
        draft.add("ref-load", config.model.hf_checkpoint)
    elif not is_bridge or _has_reference(config):
        how = "a directory with the checkpoint" if is_bridge else "the checkpoint converted to torch_dist"
        draft.notes.append(f"add --ref-load DIR: miles has its first weights from {how}")


def _shape_keys(resolved: Resolved) -> Iterator[str]:
    return (key for key in resolved.origins if key.startswith("model.architecture."))


def _has_reference(config: LaunchConfig) -> bool:
    return config.algorithm.kl_loss_coef > 0


def _cluster(draft: _Draft) -> None:
    cluster = draft.config.cluster
    nodes, gpus = cluster.actor_num_nodes, cluster.actor_num_gpus_per_node
    draft.say("cluster.num_nodes", "actor-num-nodes", nodes or cluster.num_nodes)
    draft.say("cluster.num_gpus_per_node", "actor-num-gpus-per-node", gpus or cluster.num_gpus_per_node)


def _handoff(draft: _Draft) -> None:
    handoff, has_lora = draft.config.handoff, draft.config.has_lora
    if handoff.offload_rollout:
        draft.say("handoff.offload_rollout_level", "offload-rollout-level", handoff.offload_rollout_level)
    if handoff.colocate_memory_peak_device == "gpu":
        draft.say("handoff.colocate_memory_peak_device", "colocate-memory-peak-device", "gpu")
        draft.notes.append("--colocate-memory-peak-device needs miles with radixark/miles#2781 (after 2026-08-21)")
    if handoff.offload_train and handoff.offload_train_buffers != "fresh":
        draft.leave("handoff.offload_train_buffers", FRESH)
    if handoff.offload_train and handoff.update_weights_from == "gpu":
        draft.leave("handoff.update_weights_from", UPDATES_LATE)
    if handoff.offload_train and handoff.trainer_offload_backend != "torch_memory_saver":
        draft.leave("handoff.trainer_offload_backend", SAVER)
    if handoff.offload_train and not handoff.offload_train_process_groups:
        draft.leave("handoff.offload_train_process_groups", GROUPS)
    if not (handoff.offload_rollout and "weight" in handoff.offload_rollout_level):
        return
    if handoff.engine_weights == "mirror" and has_lora:
        draft.add("lora-base-cpu-backup")
    elif handoff.engine_weights == "mirror":
        draft.leave("handoff.engine_weights", DISCARDS)
    elif "--lora-base-cpu-backup" in draft.flags:
        draft.leave("handoff.engine_weights", MIRRORS)


def _trainer(draft: _Draft) -> None:
    trainer = draft.config.trainer
    if trainer.micro_batch_size is not None:
        draft.say("trainer.micro_batch_size", "micro-batch-size", trainer.micro_batch_size)
        if trainer.max_tokens_per_gpu is not None:
            draft.say("trainer.max_tokens_per_gpu", "max-tokens-per-gpu", trainer.max_tokens_per_gpu)
    else:
        draft.add("use-dynamic-batch-size")
        tokens = trainer.max_tokens_per_gpu or DEFAULT_TOKENS
        draft.say("trainer.max_tokens_per_gpu", "max-tokens-per-gpu", tokens)
    if trainer.recompute_granularity != "none":
        draft.say("trainer.recompute_granularity", "recompute-granularity", trainer.recompute_granularity)
    if trainer.recompute_granularity == "full":
        draft.add("recompute-method", "uniform")
        draft.add("recompute-num-layers", 1)
    if trainer.precision == "fp8":
        draft.add("fp8-format", "hybrid")
    elif trainer.precision == "fp32":
        draft.leave("trainer.precision", "miles trains in bf16, or with --fp16")
    # Megatron's own defaults are others.
    draft.add("optimizer", "adam")
    draft.add("attention-dropout", 0.0)
    draft.add("hidden-dropout", 0.0)
    draft.add("attention-softmax-in-fp32")


def _rollout(draft: _Draft) -> None:
    config = draft.config
    if not config.handoff.colocate:
        draft.say("rollout.rollout_num_gpus", "rollout-num-gpus", config.rollout.rollout_num_gpus)
    dtype = config.rollout.dtype
    if dtype in ("float32", "bfloat16"):
        draft.add("sglang-dtype", dtype)
    elif "quantization_config" not in config.model.architecture:
        reason = "miles serves and updates the engines in the format of --hf-checkpoint: give it one in that format"
        draft.leave("rollout.dtype", reason)
    draft.add("rollout-shuffle")


def _algorithm(draft: _Draft) -> None:
    config = draft.config
    algorithm = config.algorithm
    if config.has_critic:
        draft.say("algorithm.normalize_advantages", "normalize-advantages", algorithm.normalize_advantages)
        draft.say("algorithm.value_clip", "value-clip", algorithm.value_clip)
        draft.say("algorithm.critic_lr", "critic-lr", algorithm.critic_lr or config.trainer.lr)
        draft.say("trainer.lr_warmup_iters", "critic-lr-warmup-iters", config.trainer.lr_warmup_iters)
    elif not algorithm.normalize_advantages:
        draft.say("algorithm.normalize_advantages", "disable-grpo-std-normalization", True)
    if algorithm.loss_aggregation == "token":
        draft.add("calculate-per-token-loss")
    if _has_reference(config):
        draft.add("use-kl-loss")
    # rllaunch's ratio is to the policy that sampled. With TIS miles corrects for that by itself, and refuses both.
    if not draft.passed("use_tis"):
        draft.add("use-rollout-logprobs")
    if not config.has_lora:
        return
    draft.say("algorithm.lora_rank", "lora-rank", algorithm.lora_rank)
    if algorithm.lora_alpha.is_integer():
        draft.say("algorithm.lora_alpha", "lora-alpha", int(algorithm.lora_alpha))
    else:
        draft.leave("algorithm.lora_alpha", "miles takes whole numbers")
    draft.say("algorithm.lora_target_modules", "target-modules", ",".join(algorithm.lora_target_modules))


def _task(draft: _Draft) -> Iterator[tuple[str, str]]:
    """Options for prompts, reward and evaluation; yields the variable that the reward needs."""
    task, run = draft.config.task, draft.config.run
    if task.prompt_data:
        draft.say("task.prompt_data", "prompt-data", task.prompt_data)
        draft.add("input-key", "prompt")
        draft.add("label-key", "label")
    else:
        draft.notes.append("add --prompt-data FILE, --input-key and --label-key: the launch names no prompts")
    if task.eval_prompt_data:
        # Greedy, one answer a prompt; and never before the first rollout.
        draft.arguments.append(("--eval-prompt-data", "heldout", task.eval_prompt_data))
        draft.say("run.eval_interval", "eval-interval", run.eval_interval or run.num_rollout)
        draft.add("n-samples-per-eval-prompt", 1)
        draft.add("eval-temperature", 0.0)
        draft.add("skip-eval-before-train")
    elif run.eval_interval:
        draft.leave("run.eval_interval", "there are no held-out prompts, here as there")
    if not task.reward:
        draft.notes.append("add --rm-type or --custom-rm-path: the launch names no reward")
        return
    draft.add("custom-rm-path", "rllaunch_miles.reward.score")
    if "--custom-rm-path" in draft.flags:
        draft.notes.append("rllaunch-miles must be installed where miles runs: --custom-rm-path names its adapter")
    yield VARIABLE, task.reward


def _run(draft: _Draft) -> None:
    run, config = draft.config.run, draft.config
    draft.say("run.seed", "rollout-seed", run.seed)
    if run.seed:
        draft.say("run.seed", "seed", run.seed)
    else:
        draft.leave("run.seed", "as --rollout-seed it is there; Megatron refuses a --seed of 0, and miles has 1234")
    directory = run.run_dir or f"runs/{config.model.name}-{config.hardware.name}"
    draft.add("save", f"{directory}/checkpoints")
    draft.say("run.save_interval", "save-interval", run.save_interval or run.num_rollout)
    draft.leave("run.save_total_limit", KEEPS_ALL)
    for name in ("region_bytes", "device_capacity_bytes", "host_capacity_bytes"):
        if getattr(config.pools, name):
            draft.leave(f"pools.{name}", "miles has no memory pools: they are the embedded backend's")
