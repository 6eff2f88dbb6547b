"""The launch configuration: every key, its type, its default and one sentence about it.

Keys follow the names the field uses (Megatron, SGLang, miles, slime). A `Flag` beside a key gives
the command-line flag; without one the key is reached with `--set section.key=value`. The config is
frozen: once resolved nobody rewrites it, and it is what every process of a run receives.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rllaunch.units import AMOUNT, parse_amount

PeakDevice = Literal["cpu", "gpu", "auto"]
TrainBuffers = Literal["retained", "fresh", "shared", "auto"]
UpdateSource = Literal["host", "gpu", "auto"]
OffloadBackend = Literal["arena", "torch_memory_saver"]
EngineWeights = Literal["mirror", "discard", "auto"]
RegionName = Literal[
    "weights", "kv_cache", "cuda_graph", "params", "optimizer", "grads", "activations", "update_bucket"
]


@dataclass(frozen=True)
class Flag:
    """The names under which a key appears on the command line; the first is the canonical one."""

    name: str
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unit:
    """What a key counts, where a text may give it in a larger unit."""

    name: Literal["B", "B/s"]


def _amount(unit: Literal["B", "B/s"], number: Any) -> BeforeValidator:
    """A number, or a text with one and its unit (`180 GiB`, `55.3 GB/s`); what the config holds is the number."""

    def read(value: Any) -> Any:
        try:
            return parse_amount(value, unit) if isinstance(value, str) else value
        except ValueError as err:
            raise PydanticCustomError("unit", "{why}", {"why": str(err)}) from None

    return BeforeValidator(read, json_schema_input_type=number | Annotated[str, Field(pattern=AMOUNT[unit])])


_AnyInt = Annotated[int, Field(ge=0)]
_PositiveInt = Annotated[int, Field(ge=1)]
_PositiveFloat = Annotated[float, Field(gt=0)]
Bytes = Annotated[_AnyInt, Unit("B"), _amount("B", _AnyInt)]
SomeBytes = Annotated[_PositiveInt, Unit("B"), _amount("B", _PositiveInt)]
BytesPerSecond = Annotated[_PositiveFloat, Unit("B/s"), _amount("B/s", _PositiveFloat)]


def unit_of(info: FieldInfo | None) -> Literal["B", "B/s", ""]:
    """The unit of a key that counts bytes, or bytes a second; empty for any other."""
    parts = [] if info is None else [info, *get_args(info.annotation)]
    marks = (m for part in parts for m in (*getattr(part, "metadata", ()), *getattr(part, "__metadata__", ())))
    return next((mark.name for mark in marks if isinstance(mark, Unit)), "")


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)


class PassThrough(BaseModel):
    """A section whose further keys are handed to a backend as they are."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=(), allow_inf_nan=False)


class Model(Section):
    name: Annotated[str, Flag("--model")] = ""
    """Model profile, one of its aliases, or a directory with a Hugging Face `config.json`."""
    hf_checkpoint: Annotated[str, Flag("--hf-checkpoint")] = ""
    """Weights to start from: a local directory or a hub name. Empty: random initialisation."""
    architecture: dict[str, Any] = {}
    """Facts of the architecture under the names of the Hugging Face `config.json` (`model_type`, `hidden_size`, …)."""
    vocabulary: str = ""
    """Characters of a character tokenizer; `auto` takes those of the task's prompts and labels. Empty: the
    checkpoint's tokenizer."""
    dtype: Annotated[Literal["float32", "bfloat16"], Flag("--model-dtype")] = "bfloat16"
    """Type of the parameters in the trainer and of what the trainer sends to the engines."""


class Hardware(Section):
    name: Annotated[str, Flag("--hardware")] = "auto"
    """Hardware profile, or `auto` to detect it on this machine."""
    accelerator: Literal["cuda", "rocm", "cpu"] = "cpu"
    """What the trainer and the engines compute on."""
    gpus_per_node: int = Field(default=1, ge=1)
    """GPUs one node has (on `cpu`: slots that stand for one)."""
    gpu_memory_bytes: SomeBytes | None = None
    """Memory of one GPU as the driver shows it, in bytes; unset when no source says."""
    host_memory_bytes: SomeBytes | None = None
    """Host RAM of one node that a job may use, in bytes; unset when no source says."""
    host_link: str = ""
    """How a GPU reaches host RAM, such as `PCIe Gen5 x16` or `NVLink-C2C`."""
    host_link_bytes_per_second: BytesPerSecond | None = None
    """Bytes per second between one GPU and host RAM, one direction."""
    host_pin_bytes_per_second: BytesPerSecond | None = None
    """Bytes per second of a copy from one GPU into host pages that are made and locked for it; unset: as on the host of
    one H200."""
    hbm_bytes_per_second: BytesPerSecond | None = None
    """Bytes per second one GPU reads from its own memory."""
    gpu_link_bytes_per_second: BytesPerSecond | None = None
    """Bytes per second between two GPUs of one node, both directions together."""


class Cluster(Section):
    num_nodes: Annotated[int, Flag("--num-nodes")] = Field(default=1, ge=1)
    """Nodes of the launch."""
    num_gpus_per_node: Annotated[int | None, Flag("--num-gpus-per-node")] = Field(default=None, ge=1)
    """GPUs used on each node; follows the hardware profile unless set."""
    actor_num_nodes: Annotated[int | None, Flag("--actor-num-nodes")] = Field(default=None, ge=1)
    """Nodes of the trainer; when colocated the same as `num_nodes`."""
    actor_num_gpus_per_node: Annotated[int | None, Flag("--actor-num-gpus-per-node")] = Field(default=None, ge=1)
    """GPUs the trainer uses on each node; when colocated the same as `num_gpus_per_node`."""
    ray_address: Annotated[str, Flag("--ray-address")] = ""
    """Ray cluster to join; empty: `RAY_ADDRESS` if set, else a local one that ends with the run."""


class Handoff(Section):
    colocate: Annotated[bool, Flag("--colocate")] = True
    """Trainer and engines take turns on the same GPUs."""
    offload_train: Annotated[bool, Flag("--offload-train")] = True
    """Move the trainer's state off the GPU while the engines generate."""
    offload_rollout: Annotated[bool, Flag("--offload-rollout")] = True
    """Move the engines' memory off the GPU while the trainer trains."""
    offload_rollout_level: Annotated[tuple[str, ...], Flag("--offload-rollout-level")] = ("kv_cache", "weight")
    """What an engine releases: `kv_cache`, `weight` or both. CUDA graphs always go with the KV cache's turn."""
    colocate_memory_peak_device: Annotated[PeakDevice, Flag("--colocate-memory-peak-device")] = "cpu"
    """Where the engine's weights and the trainer's state may coexist while they change places."""
    offload_train_buffers: Annotated[TrainBuffers, Flag("--offload-train-buffers")] = "auto"
    """How host copies are held: `retained` for the whole run, `fresh` at each offload, or in one arena `shared` by
    the trainer's backup and the engine's mirror."""
    offload_train_process_groups: Annotated[bool, Flag("--offload-train-process-groups")] = False
    """Destroy the NCCL communicators of the trainer's process groups while it is offloaded and make them anew when it
    returns: frees their GPU memory for the engines, and costs the time in which all groups connect, every rollout. The
    default group's stays: the engines' weights go over it."""
    trainer_offload_backend: Annotated[OffloadBackend, Flag("--trainer-offload-backend")] = "arena"
    """What moves the trainer's state: `arena`, pinned memory of our own, or `torch_memory_saver`, which keeps the
    addresses of tensors and is slower unless its buffers are retained."""
    engine_weights: Annotated[EngineWeights, Flag("--engine-weights")] = "auto"
    """What releasing the engine's weights does: copy them to the host (`mirror`), or drop them (`discard`)
    because the next update rewrites them."""
    update_weights_from: Annotated[UpdateSource, Flag("--update-weights-from")] = "auto"
    """Where a weight update reads the trainer's parameters: on the GPU before the trainer is offloaded (`gpu`, in `gpu`
    order), or from their copies on the host after it (`host`). From the GPU it is faster and holds its buckets beside
    engine and trainer."""
    update_weight_buffer_size: Annotated[SomeBytes, Flag("--update-weight-buffer-size")] = 512 * 2**20
    """Largest bucket of a weight update, in bytes. On GPUs there are two: one is filled while the other is read."""
    check_weight_update_equal: Annotated[bool, Flag("--check-weight-update-equal")] = False
    """Overwrite the engines' weights before the first update, and compare all engines' checksums after every one.
    Without it only the first update is compared, with what the engines loaded by themselves."""
    train_memory_margin_bytes: Annotated[Bytes, Flag("--train-memory-margin-bytes")] = 2**30
    """GPU memory the trainer leaves free, in bytes."""
    memory_headroom: Annotated[float, Flag("--memory-headroom")] = Field(default=0.05, ge=0, lt=1)
    """Share of each memory limit that a choice of `auto` keeps free, where it can."""


class Trainer(Section):
    backend: Annotated[str, Flag("--trainer-backend")] = "megatron"
    """Trainer backend: `megatron`, `embedded`, or one a plugin brings."""
    tensor_model_parallel_size: Annotated[int, Flag("--tensor-model-parallel-size")] = Field(default=1, ge=1)
    """GPUs that share each layer's matrices (TP)."""
    sequence_parallel: Annotated[bool, Flag("--sequence-parallel")] = False
    """Split activations along the sequence between the GPUs of a tensor-parallel group."""
    pipeline_model_parallel_size: Annotated[int, Flag("--pipeline-model-parallel-size")] = Field(default=1, ge=1)
    """Stages the layers are cut into (PP)."""
    decoder_first_pipeline_num_layers: Annotated[int | None, Flag("--decoder-first-pipeline-num-layers")] = Field(
        default=None, ge=1
    )
    """Layers of the first pipeline stage, when it is not an even share."""
    decoder_last_pipeline_num_layers: Annotated[int | None, Flag("--decoder-last-pipeline-num-layers")] = Field(
        default=None, ge=1
    )
    """Layers of the last pipeline stage, when it is not an even share."""
    context_parallel_size: Annotated[int, Flag("--context-parallel-size")] = Field(default=1, ge=1)
    """GPUs that share one sequence (CP)."""
    expert_model_parallel_size: Annotated[int, Flag("--expert-model-parallel-size")] = Field(default=1, ge=1)
    """GPUs the experts are spread over (EP)."""
    expert_tensor_parallel_size: Annotated[int | None, Flag("--expert-tensor-parallel-size")] = Field(
        default=None, ge=1
    )
    """GPUs that share one expert's matrices (ETP); follows TP unless set, as in Megatron."""
    global_batch_size: Annotated[int | None, Flag("--global-batch-size")] = Field(default=None, ge=1)
    """Samples of one optimizer step; prompts × samples ÷ `num_steps_per_rollout` unless set."""
    num_steps_per_rollout: Annotated[int | None, Flag("--num-steps-per-rollout")] = Field(default=None, ge=1)
    """Optimizer steps one rollout is cut into; follows from `global_batch_size` when that is set, else 1."""
    micro_batch_size: Annotated[int | None, Flag("--micro-batch-size")] = Field(default=None, ge=1)
    """Samples of one forward and backward pass on a rank. Unset: as many as `max_tokens_per_gpu` has room for
    (`megatron`), or the whole share (`embedded`)."""
    max_tokens_per_gpu: Annotated[int | None, Flag("--max-tokens-per-gpu")] = Field(default=None, ge=1)
    """Tokens of one forward and backward pass on a rank; a longer sample is one by itself. `megatron` takes 2048 where
    neither this nor `micro_batch_size` is set."""
    recompute_granularity: Annotated[Literal["none", "selective", "full"], Flag("--recompute-granularity")] = "none"
    """Which activations are computed again in the backward pass."""
    optimizer_cpu_offload: Annotated[bool, Flag("--optimizer-cpu-offload")] = False
    """Keep the optimizer state and its step on the host."""
    precision: Annotated[Literal["bf16", "fp8", "fp32"], Flag("--train-precision")] = "bf16"
    """Precision of the matrix multiplications in training."""
    lr: Annotated[float, Flag("--lr")] = Field(default=1e-6, gt=0)
    """Learning rate after warm-up."""
    lr_warmup_iters: Annotated[int, Flag("--lr-warmup-iters")] = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises from 0."""
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine"], Flag("--lr-decay-style")] = "constant"
    """How the learning rate falls over the run after warm-up."""
    lr_decay_iters: Annotated[int | None, Flag("--lr-decay-iters")] = Field(default=None, ge=1)
    """Optimizer steps after which a linear or cosine decay has ended; the whole run's unless set."""
    min_lr: Annotated[float, Flag("--min-lr")] = Field(default=0.0, ge=0)
    """Learning rate at the end of a linear or cosine decay."""
    adam_beta1: Annotated[float, Flag("--adam-beta1")] = Field(default=0.9, ge=0, lt=1)
    """Decay of Adam's first moment."""
    adam_beta2: Annotated[float, Flag("--adam-beta2")] = Field(default=0.95, ge=0, lt=1)
    """Decay of Adam's second moment."""
    adam_eps: Annotated[float, Flag("--adam-eps")] = Field(default=1e-8, gt=0)
    """Added to the denominator of Adam."""
    weight_decay: Annotated[float, Flag("--weight-decay")] = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: Annotated[float, Flag("--clip-grad")] = Field(default=1.0, ge=0)
    """Largest norm of the gradient over all parameters; 0 does not clip."""
    init_method_std: Annotated[float, Flag("--init-method-std")] = Field(default=0.02, gt=0)
    """Standard deviation of a random initialisation."""


class Rollout(Section):
    backend: Annotated[str, Flag("--rollout-backend")] = "sglang"
    """Rollout backend: `sglang`, `embedded`, or one a plugin brings."""
    rollout_batch_size: Annotated[int, Flag("--rollout-batch-size")] = Field(default=32, ge=1)
    """Prompts of one rollout."""
    n_samples_per_prompt: Annotated[int, Flag("--n-samples-per-prompt")] = Field(default=8, ge=1)
    """Responses sampled for each prompt (the group of GRPO)."""
    rollout_num_gpus: Annotated[int | None, Flag("--rollout-num-gpus")] = Field(default=None, ge=1)
    """GPUs of all engines together; when colocated the trainer's."""
    rollout_num_gpus_per_engine: Annotated[int, Flag("--rollout-num-gpus-per-engine")] = Field(default=1, ge=1)
    """GPUs of one engine."""
    rollout_max_response_len: Annotated[int, Flag("--rollout-max-response-len")] = Field(default=1024, ge=1)
    """Tokens a response may have, the end token included."""
    rollout_max_context_len: Annotated[int | None, Flag("--rollout-max-context-len")] = Field(default=None, ge=2)
    """Tokens prompt and response may have together; unset: whatever the longest prompt and response need."""
    rollout_temperature: Annotated[float, Flag("--rollout-temperature")] = Field(default=1.0, gt=0)
    """Sampling temperature of a rollout; evaluation is greedy."""
    dtype: Annotated[Literal["float32", "bfloat16", "fp8", "fp4", "int4"], Flag("--rollout-dtype")] = "bfloat16"
    """Type of the engine's weights."""
    health_check_interval: Annotated[float, Flag("--rollout-health-check-interval")] = Field(default=10.0, gt=0)
    """Seconds between two health checks of an engine; they pause while it is offloaded."""


class Algorithm(Section):
    advantage_estimator: Annotated[Literal["grpo", "ppo"], Flag("--advantage-estimator")] = "grpo"
    """`grpo`: group-normalised rewards; `ppo`: a critic (value model) with generalised advantage estimation."""
    normalize_advantages: Annotated[bool, Flag("--normalize-advantages")] = True
    """Divide by the standard deviation: of the group's rewards (`grpo`), of all advantages (`ppo`)."""
    eps_clip: Annotated[float, Flag("--eps-clip")] = Field(default=0.2, gt=0, lt=1)
    """Lower bound of the probability ratio is 1 − `eps_clip`."""
    eps_clip_high: Annotated[float | None, Flag("--eps-clip-high")] = Field(default=None, gt=0)
    """Upper bound of the probability ratio is 1 + `eps_clip_high`; `eps_clip` unless set."""
    kl_loss_coef: Annotated[float, Flag("--kl-loss-coef")] = Field(default=0.0, ge=0)
    """Weight of the KL term to the frozen initial policy; above 0 a reference model is kept."""
    kl_loss_type: Annotated[Literal["k1", "k2", "k3"], Flag("--kl-loss-type")] = "k3"
    """Estimator of that KL."""
    entropy_coef: Annotated[float, Flag("--entropy-coef")] = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    loss_aggregation: Annotated[Literal["token", "sequence"], Flag("--loss-aggregation")] = "token"
    """Mean over all tokens of an optimizer step, or over its sequences' own means."""
    gamma: Annotated[float, Flag("--gamma")] = Field(default=1.0, gt=0, le=1)
    """Discount of GAE."""
    lambd: Annotated[float, Flag("--lambd")] = Field(default=1.0, ge=0, le=1)
    """λ of GAE."""
    critic_lr: Annotated[float | None, Flag("--critic-lr")] = Field(default=None, gt=0)
    """Learning rate of the critic; the trainer's unless set."""
    value_clip: Annotated[float, Flag("--value-clip")] = Field(default=0.2, gt=0)
    """How far a value may move from its old estimate before its loss is clipped."""
    lora_rank: Annotated[int, Flag("--lora-rank")] = Field(default=0, ge=0)
    """Rank of the LoRA adapters; 0 trains all parameters."""
    lora_alpha: Annotated[float, Flag("--lora-alpha")] = Field(default=32.0, gt=0)
    """Adapters are scaled by `lora_alpha` / `lora_rank`."""
    lora_target_modules: Annotated[tuple[str, ...], Flag("--lora-target-modules")] = ("all-linear",)
    """Names of the linear layers that get an adapter."""


class Task(Section):
    name: Annotated[str, Flag("--task")] = ""
    """Task profile: prompts and reward; empty: `prompt_data` and `reward` are given."""
    prompt_data: Annotated[str, Flag("--prompt-data", ("--data",))] = ""
    """JSONL file, one object a line with `prompt` and, if the reward wants it, `label`."""
    eval_prompt_data: Annotated[str, Flag("--eval-prompt-data", ("--eval-data",))] = ""
    """JSONL file of held-out prompts; empty: no evaluation."""
    reward: Annotated[str, Flag("--reward")] = ""
    """`module:function` called as `function(prompt, response, label)`, returning a finite number."""


class Run(Section):
    num_rollout: Annotated[int, Flag("--num-rollout")] = Field(default=100, ge=1)
    """Rollouts (generate, train, update) of the whole run."""
    seed: Annotated[int, Flag("--seed")] = Field(default=0, ge=0, le=2**63 - 1)
    """Seed of initialisation, prompt order and sampling."""
    save_interval: Annotated[int, Flag("--save-interval")] = Field(default=20, ge=0)
    """Rollouts between two checkpoints, and one after the last; 0: only after the last."""
    save_total_limit: Annotated[int, Flag("--save-total-limit")] = Field(default=2, ge=1)
    """Checkpoints kept; older ones are removed after a newer one is whole."""
    eval_interval: Annotated[int, Flag("--eval-interval")] = Field(default=0, ge=0)
    """Rollouts between two evaluations on the held-out prompts; 0: only after the last."""
    run_dir: Annotated[str, Flag("--run-dir")] = ""
    """Directory of the run; empty: `runs/MODEL-HARDWARE-TIME`."""
    record_pss: Annotated[bool, Flag("--record-pss")] = False
    """Read the host memory of trainer ranks and engines by themselves after every step (PSS; `events.jsonl` has the
    largest as `pss_bytes`). The kernel walks page tables for it, 4 to 19 ms a GiB, counted in the step's seconds."""
    disk_reserve_bytes: Bytes = 64 * 2**20
    """Free bytes the run directory's disk must keep beyond the checkpoints."""
    torch_num_threads: int = Field(default=1, ge=1)
    """Threads of one process on `cpu`: more of them spin against each other when cores are few."""
    allow: Annotated[tuple[str, ...], Flag("--allow")] = ()
    """Codes of overridable findings to take as warnings, knowingly."""


class Pools(Section):
    """The embedded backend's memory pools: capacities, and what a rehearsal of a larger launch books in them."""

    device_capacity_bytes: SomeBytes | None = None
    """Bytes of one device pool, shared by the trainer rank and the engine on it; unset: no limit."""
    host_capacity_bytes: SomeBytes | None = None
    """Bytes of a node's host pool; unset: no limit."""
    region_bytes: dict[RegionName, Bytes] = {}
    """Bytes each region is given at least, by name, as a rehearsal of a larger launch sets them; regions: `weights`,
    `kv_cache`, `cuda_graph`, `params`, `optimizer`, `grads`, `activations`, `update_bucket`."""
    device_static_bytes: Bytes = 0
    """Bytes of a device pool that are in use all the time: processes, contexts, buffers."""
    host_static_bytes: Bytes = 0
    """Bytes of a node's host pool that are in use all the time: processes, contexts, buffers."""
    host_trainer_bytes: Bytes = 0
    """Bytes of a node's host pool that are in use once the trainer is built: an optimizer on the host, a reference."""
    host_save_bytes: Bytes = 0
    """Bytes of a node's host pool that are in use while a checkpoint is written."""


class SGLang(PassThrough):
    """Options of the SGLang engines, under SGLang's names; unknown ones pass through."""

    mem_fraction_static: Annotated[float, Flag("--sglang-mem-fraction-static")] = Field(default=0.7, gt=0, lt=1)
    """Share of GPU memory an engine takes for weights and KV cache."""
    dp_size: Annotated[int, Flag("--sglang-dp-size")] = Field(default=1, ge=1)
    """Data-parallel attention groups inside an engine."""
    ep_size: Annotated[int, Flag("--sglang-ep-size")] = Field(default=1, ge=1)
    """GPUs an engine spreads its experts over."""
    enable_dp_attention: Annotated[bool, Flag("--sglang-enable-dp-attention")] = False
    """Attention runs data parallel inside an engine."""

    @property
    def attention_dp(self) -> int:
        """Groups of an engine's GPUs that attend to requests of their own."""
        return self.dp_size if self.enable_dp_attention else 1


class Megatron(PassThrough):
    """Further options of Megatron-core, under Megatron's names; all of them pass through."""


class Environment(PassThrough):
    """Environment variables for the processes of the run; a variable the user already set wins."""

    __pydantic_extra__: dict[str, str | int | float | bool]


class LaunchConfig(BaseSettings):
    """A resolved launch. Sections in the order a person thinks of them."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Model = Model()
    hardware: Hardware = Hardware()
    cluster: Cluster = Cluster()
    handoff: Handoff = Handoff()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    algorithm: Algorithm = Algorithm()
    task: Task = Task()
    run: Run = Run()
    pools: Pools = Pools()
    sglang: SGLang = SGLang()
    megatron: Megatron = Megatron()
    env: Environment = Environment()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what the resolver hands over: its layers know the environment too, with origins."""
        return (init_settings,)

    @property
    def gpus_per_node(self) -> int:
        """GPUs used on each node."""
        return self.cluster.num_gpus_per_node or self.hardware.gpus_per_node

    @property
    def world_size(self) -> int:
        """GPUs of the whole launch."""
        return self.cluster.num_nodes * self.gpus_per_node

    @property
    def has_critic(self) -> bool:
        return self.algorithm.advantage_estimator == "ppo"

    @property
    def has_lora(self) -> bool:
        return self.algorithm.lora_rank > 0

    @property
    def sends_adapters(self) -> bool:
        """Whether updates send LoRA's adapters by themselves: only the embedded trainer does not merge them."""
        return self.has_lora and self.trainer.backend == "embedded"

    @property
    def num_samples(self) -> int:
        """Samples of one rollout: prompts × samples a prompt."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt


@cache
def descriptions() -> dict[str, str]:
    """`section.key` → the sentence under it here.

    Read from this file when help or an error needs them: pydantic can read them at import too, which would
    be a tenth of every command's time.
    """
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    by_class: dict[str, dict[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found = by_class.setdefault(node.name, {})
            for field_node, doc in zip(node.body, node.body[1:], strict=False):
                if not (isinstance(field_node, ast.AnnAssign) and isinstance(field_node.target, ast.Name)):
                    continue
                if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                    found[field_node.target.id] = " ".join(str(doc.value.value).split())
    return {
        f"{section}.{key}": text
        for section, info in LaunchConfig.model_fields.items()
        for key, text in by_class[info.annotation.__name__ if info.annotation else ""].items()
    }
