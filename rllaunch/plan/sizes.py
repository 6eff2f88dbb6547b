"""Bytes of each region of a launch, from its architecture and its layout: no device is touched.

A pipeline stage is the unit: all ranks of a stage hold as much. The fullest stage decides what a GPU must
hold, the fullest node what a host must.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rllaunch.errors import ConfigError
from rllaunch.plan import constants as c
from rllaunch.plan.architecture import Architecture, Layer, Weight
from rllaunch.plan.handoff import Region
from rllaunch.resolve.schema import LaunchConfig

# Megatron's make_vocab_size_divisible_by: the padded vocabulary divides by it times TP.
VOCAB_DIVISOR = 128
# Block scales of FP8 weights: one float32 for 128 × 128 elements (DeepSeek-V3's format, which SGLang loads).
FP8_BLOCK = 128 * 128
# Rows that `backends.quantise` has in float32 at a time.
QUANTISER_ROWS = 32 * 128
# Parts of the host that are there once the trainer is built.
TRAINER_PARTS = ("optimizer_on_host", "gradients_on_host", "reference", "update_heap")
# Matrices that tensor parallelism leaves whole and FP8 checkpoints quantise all the same: the projections to latents
# and those of indexers (deepseek-ai/DeepSeek-V3, -V3.2 and -V4 model.safetensors.index.json have scales for them).
FP8_WHOLE = frozenset(
    f"self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa", "kv_proj", "indexer.wq_b", "indexer.wk")
)
# MXFP4: one byte of scale for 32 elements (OCP Microscaling Formats v1.0).
FP4_BLOCK = 32


@dataclass(frozen=True)
class Stage:
    """One pipeline stage, as each of its ranks holds it.

    Args:
        parameters: of a rank after TP, EP and ETP, a critic's and adapters included.
        shard: of a rank's parameters those whose optimizer state it owns (distributed optimizer), critic included.
        actor_bytes: of the policy's parameters alone, adapters included.
        regions: with a critic's beside the policy's.
    """

    layers: range
    parameters: int
    shard: int
    actor_bytes: int
    regions: Mapping[Region, int]


@dataclass(frozen=True)
class LaunchSizes:
    """All that the schedule's ledger is filled with.

    Args:
        gpus: region → bytes on a GPU when resident, for each pipeline stage that is fullest in some step.
        node: region → bytes on the fullest node's host when offloaded: all its GPUs together.
        static_gpu, static_host: what is there in every step, by name; of a GPU and of a node.
        save_staging: host bytes that writing a checkpoint takes on the fullest node while it is written.
        host_optimizer: parameters of the fullest node whose Adam runs on the host.
        notes: what was assumed, in words.
    """

    parameters: int
    stages: tuple[Stage, ...]
    gpus: tuple[Mapping[Region, int], ...]
    node: Mapping[Region, int]
    static_gpu: Mapping[str, int]
    static_host: Mapping[str, int]
    save_staging: int
    host_optimizer: int
    gpus_per_node: int
    tokens_in_kv: int
    update_bytes: int
    notes: tuple[str, ...] = field(default=())

    @property
    def gpu(self) -> Mapping[Region, int]:
        """Of the stage that holds most in all; another may hold more in a single step."""
        return max(self.gpus, key=lambda regions: sum(regions.values()))


def sizes_of(config: LaunchConfig, architecture: Architecture) -> LaunchSizes:
    """The bytes of a colocated launch on Megatron and SGLang.

    Raises:
        ConfigError: a layout that cannot be divided at all (the doctor names the nearest that can).
    """
    trainer = _Trainer(config, architecture)
    engine = _Engine(config, architecture)
    stages = trainer.stages()
    per_node = config.gpus_per_node
    ranks = _stage_of_each_rank(config, len(stages))
    nodes = [ranks[i : i + per_node] for i in range(0, len(ranks), per_node)]
    engine_gpu = engine.regions()
    # One is filled while the engine reads the other.
    bucket: dict[Region, int] = {"update_bucket": _update_bytes(config, architecture)}
    gpus = tuple(dict(regions) | engine_gpu | bucket for regions in _undominated([s.regions for s in stages]))
    kept = [_backup(config, s) for s in stages]

    def always(node: Sequence[int]) -> dict[str, int]:
        return _static_host(config, trainer, [stages[s] for s in node])

    # Nodes of the same stages hold the same; of the others the one whose backups and constant parts are most.
    busiest = max(set(map(tuple, nodes)), key=lambda n: sum(sum(kept[s].values()) for s in n) + sum(always(n).values()))
    node: dict[Region, int] = {r: sum(kept[s][r] for s in busiest) for r in ("params", "optimizer")}
    node["weights"] = engine_gpu["weights"] * len(busiest)
    return LaunchSizes(
        parameters=architecture.num_parameters,
        stages=stages,
        gpus=gpus,
        node=node,
        static_gpu=_static_gpu(config, architecture),
        static_host=always(busiest),
        save_staging=int(len(busiest) * c.SAVE_BUFFER.value),
        host_optimizer=trainer.host_optimizer([stages[s] for s in busiest]),
        gpus_per_node=len(busiest),
        tokens_in_kv=engine.tokens(engine_gpu["kv_cache"]),
        update_bytes=engine.sent_bytes(),
        notes=tuple(trainer.notes + engine.notes),
    )


def _update_bytes(config: LaunchConfig, architecture: Architecture) -> int:
    """Two buckets, each of which may meet a tensor larger than itself (embedding and head); where ranks share tensors,
    also the shards and the whole of the one under way; for engines in FP8 what quantising takes; of a family whose
    engines want a layer's experts in one tensor also that, beside its copies in both buckets."""
    element = 4 if config.model.dtype == "float32" else 2
    outside = [element * w.numel for w in (*architecture.embedding, *architecture.head)]
    stack = 0
    if architecture.model_type == "gpt_oss":
        stack = element * max(w.numel for layer in architecture.layers[:1] for w in layer.weights if w.is_expert)
    largest, second = sorted([*outside, stack, stack, 0, 0], reverse=True)[:2]
    size = config.handoff.update_weight_buffer_size
    trainer = config.trainer
    is_shared = trainer.tensor_model_parallel_size > 1 or trainer.pipeline_model_parallel_size > 1
    quantising = 0
    if config.rollout.dtype == "fp8":
        weights = (w.shape for layer in dict.fromkeys(architecture.layers) for w in layer.weights if is_in_fp8(w))
        quantising = max((quantiser_bytes(*shape[-2:]) for shape in weights), default=0)
    under_way = 2 * max(outside, default=0) if is_shared else 0
    return max(size, largest) + max(size, second) + under_way + stack + quantising


def quantiser_bytes(rows: int, columns: int) -> int:
    """What `backends.quantise` holds of a matrix beside it: the result, and some of its rows twice in float32."""
    return rows * columns + 8 * min(rows, QUANTISER_ROWS) * columns


def _undominated(stages: Sequence[Mapping[Region, int]]) -> list[Mapping[Region, int]]:
    """Without those that hold no more of anything than another: what is left decides every step."""
    left: list[Mapping[Region, int]] = []
    for regions in stages:
        if any(all(regions[r] <= other[r] for r in regions) for other in left):
            continue
        left = [other for other in left if not all(other[r] <= regions[r] for r in regions)]
        left.append(regions)
    return left


def kinds_of(architecture: Architecture, layers: range) -> list[tuple[Layer, int]]:
    """The different layers among these, and how often each occurs: a model of 90 layers has two or three kinds."""
    found: dict[int, tuple[Layer, int]] = {}
    for index in layers:
        layer = architecture.layers[index]
        _, count = found.get(id(layer.weights), (layer, 0))
        found[id(layer.weights)] = (layer, count + 1)
    return list(found.values())


def stage_layers(config: LaunchConfig, num_layers: int) -> list[range]:
    """The layers of each pipeline stage; a rest that does not divide makes the first of the middle stages longer."""
    trainer = config.trainer
    size = trainer.pipeline_model_parallel_size
    if size == 1:
        return [range(num_layers)]
    first, last = trainer.decoder_first_pipeline_num_layers, trainer.decoder_last_pipeline_num_layers
    middle = size - (first is not None) - (last is not None)
    rest = num_layers - (first or 0) - (last or 0)
    if rest < 0 or (middle == 0 and rest):
        ends = " and ".join(f"{n} in the {end}" for n, end in ((first, "first"), (last, "last")) if n is not None)
        raise ConfigError(
            f"{size} pipeline stages with {ends} do not hold {num_layers} layers",
            "trainer.pipeline_model_parallel_size",
            "set decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers so that the rest divides",
        )
    counts = [rest // middle + (i < rest % middle) for i in range(middle)]
    counts = [*([first] if first is not None else []), *counts, *([last] if last is not None else [])]
    starts = [sum(counts[:i]) for i in range(size)]
    return [range(start, start + n) for start, n in zip(starts, counts, strict=True)]


def _stage_of_each_rank(config: LaunchConfig, num_stages: int) -> list[int]:
    """Megatron's order of ranks is tp-cp-ep-dp-pp: a stage's ranks stand together."""
    world = config.world_size
    share = max(1, world // num_stages)
    return [min(rank // share, num_stages - 1) for rank in range(world)]


def _backup(config: LaunchConfig, stage: Stage) -> dict[Region, int]:
    """What a rank's host backup holds. Weights that are rebuilt from the masters need none."""
    rebuilt = bool(_megatron(config, "rematerialize_param_from_master_weight", False))
    params = 0 if rebuilt else stage.regions["params"]
    return {"params": params, "optimizer": stage.regions["optimizer"]}


def _megatron(config: LaunchConfig, name: str, default: object) -> object:
    return (config.megatron.model_extra or {}).get(name, default)


def _number(config: LaunchConfig, section: str, name: str, default: float, most: float = math.inf) -> float:
    """A number of a section that passes through.

    Raises:
        ConfigError: it is none, or outside 0 to `most`.
    """
    value = (getattr(config, section).model_extra or {}).get(name, default)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 <= number <= most:
        upto = f" from 0 to {most:g}" if most < math.inf else " of at least 0"
        raise ConfigError(f"{section}.{name} is a number{upto}, not {value!r}", f"{section}.{name}", "correct it")
    return number


def _sglang(config: LaunchConfig, name: str, default: object) -> object:
    return (config.sglang.model_extra or {}).get(name, default)


# -- trainer ---------------------------------------------------------------------------------------


class _Trainer:
    """Megatron's side: Megatron-core 0.19, distributed optimizer."""

    def __init__(self, config: LaunchConfig, architecture: Architecture) -> None:
        self.config = config
        self.arch = architecture
        t = config.trainer
        self.tp, self.pp, self.cp = (
            t.tensor_model_parallel_size,
            t.pipeline_model_parallel_size,
            t.context_parallel_size,
        )
        self.ep, self.etp = t.expert_model_parallel_size, t.expert_tensor_parallel_size or self.tp
        world = config.world_size
        self.dp = max(1, world // (self.tp * self.pp * self.cp))
        self.dense_owners = max(1, world // (self.tp * self.pp))  # data and context parallel ranks share the state
        self.expert_owners = max(1, world // (self.etp * self.ep * self.pp))
        if not _megatron(config, "use_distributed_optimizer", True):
            self.dense_owners = self.expert_owners = 1
        self.notes: list[str] = []

    def stages(self) -> tuple[Stage, ...]:
        return tuple(
            self._stage(i, layers) for i, layers in enumerate(stage_layers(self.config, len(self.arch.layers)))
        )

    def _stage(self, index: int, layers: range) -> Stage:
        dense, expert = self._parameters(index, layers)
        trained_dense, trained_expert = self._trained(index, layers, dense, expert)
        shard = self._owned(trained_dense, trained_expert)
        actor, trained = dense + expert, trained_dense + trained_expert
        element = 4 if self.config.model.dtype == "float32" else 2
        actor_bytes = actor * element
        if self.config.has_lora:
            actor, actor_bytes = actor + trained, actor_bytes + trained * 4  # adapters are float32 beside any weights
        critic_dense = critic_expert = 0
        if self.config.has_critic:
            critic_dense, critic_expert = self._parameters(index, layers, is_critic=True)
        critic, critic_shard = critic_dense + critic_expert, self._owned(critic_dense, critic_expert)
        state = shard * self.state_bytes() + critic_shard * self.state_bytes(is_critic=True)
        gradients = trained * self._gradient_bytes() + critic * self._gradient_bytes(is_critic=True)
        regions: dict[Region, int] = {
            "params": actor_bytes + critic * element,
            "optimizer": int(state * (1 - self.offloaded_fraction)),
            "grads": gradients,
            "activations": self._transient(index, layers, shard),
        }
        return Stage(layers, actor + critic, shard + critic_shard, actor_bytes, regions)

    def _owned(self, dense: int, expert: int) -> int:
        """Parameters whose optimizer state one rank holds, of those it shares with its data-parallel ranks."""
        return math.ceil(dense / self.dense_owners) + math.ceil(expert / self.expert_owners)

    def _parameters(self, index: int, layers: range, *, is_critic: bool = False) -> tuple[int, int]:
        """(dense, routed experts') parameters of a rank of this stage, of the policy or of the critic.

        A critic has one row for a head, counted as wide as the rest, and no layers that predict further tokens.
        """
        dense = expert = 0
        for layer, count in kinds_of(self.arch, layers):
            d, e = _cut(layer.weights, self.tp, self.ep, self.etp)
            dense, expert = dense + d * count, expert + e * count
        padded = padded_vocab(self.arch.vocab_size, self.tp)
        outside: list[Weight] = []
        if index == 0:
            outside += self.arch.embedding
        if index == self.pp - 1 and is_critic:
            outside += [w for w in self.arch.head if w.split != "vocab"]
            dense += self.arch.hidden_size
        elif index == self.pp - 1:
            outside += self.arch.head
            if self.arch.tied and self.pp > 1:
                outside += self.arch.embedding  # the last stage has a copy of the tied embedding
            if _megatron(self.config, "mtp_num_layers", 0):
                for mtp in self.arch.mtp:
                    d, e = _cut(mtp.weights, self.tp, self.ep, self.etp)
                    dense, expert = dense + d, expert + e
        for weight in outside:
            numel = weight.numel
            if weight.split == "vocab":
                numel = numel // self.arch.vocab_size * padded // self.tp
            dense += numel
        return dense, expert

    def _trained(self, index: int, layers: range, dense: int, expert: int) -> tuple[int, int]:
        """Of those, the ones with gradients: all, or LoRA's adapters, which are on linear layers and not on experts."""
        rank = self.config.algorithm.lora_rank
        if not rank:
            return dense, expert
        adapters = 0
        for layer, count in kinds_of(self.arch, layers):
            for weight in layer.weights:
                if not is_adaptable(weight) or not self._is_target(weight):
                    continue
                out, into = weight.shape
                # Of the two small matrices the one beside the cut dimension is cut with it.
                out //= self.tp if weight.split == "column" else 1
                into //= self.tp if weight.split == "row" else 1
                adapters += count * rank * (out + into)
        return adapters, 0

    def _is_target(self, weight: Weight) -> bool:
        """Whether LoRA puts an adapter beside this matrix, by its name."""
        targets = self.config.algorithm.lora_target_modules
        return "all-linear" in targets or any(part in targets for part in weight.name.split("."))

    def _gradient_bytes(self, *, is_critic: bool = False) -> int:
        if _megatron(self.config, "grad_reduce_in_bf16", False) and (is_critic or not self.config.has_lora):
            return 2
        return 4

    @property
    def offloaded_fraction(self) -> float:
        if not self.config.trainer.optimizer_cpu_offload:
            return 0.0
        return _number(self.config, "megatron", "optimizer_offload_fraction", 1.0, most=1.0)

    def host_optimizer(self, ranks: Sequence[Stage]) -> int:
        """Parameters of these ranks whose optimizer state and step are on the host."""
        return int(sum(stage.shard for stage in ranks) * self.offloaded_fraction)

    def on_host(self, parameters: int) -> dict[str, int]:
        """Megatron's optimizer on the host: masters and moments, and gradients in pinned memory.

        NVIDIA/Megatron-LM core_v0.16.1 core/optimizer/cpu_offloading/hybrid_optimizer.py: a precision-aware
        optimizer's masters are made of a bf16 copy and pageable; otherwise they are pinned themselves.
        """
        config = self.config
        rounding = self.pinned_rounding()
        is_aware = bool(_megatron(config, "use_precision_aware_optimizer", False))
        masters = 1.0 if is_aware or _megatron(config, "pin_cpu_params", True) is False else rounding
        gradients = 1.0 if _megatron(config, "pin_cpu_grads", True) is False else rounding
        state = 4 * masters + self.state_bytes() - 4
        return {"optimizer_on_host": int(parameters * state), "gradients_on_host": int(parameters * 4 * gradients)}

    def pinned_rounding(self) -> float:
        """How much more torch's pinned allocator takes than it is asked for, over a rank's tensors in float32.

        It rounds each up to a power of two (1.78 × was seen, pytorch/pytorch#186161); experts of DeepSeek-V4
        are powers of two, those of Qwen3-30B-A3B a third below one.
        """
        asked = taken = 0
        for layer, count in kinds_of(self.arch, range(len(self.arch.layers))):
            a, t = _rounded(layer.weights, self.tp, self.etp)
            asked, taken = asked + a * count, taken + t * count
        return taken / asked if asked else 1.0

    def state_bytes(self, *, is_critic: bool = False) -> int:
        """Masters and Adam's moments of one parameter that is trained, in bytes."""
        if self.config.model.dtype == "float32" or (self.config.has_lora and not is_critic):
            return 8  # float32 parameters are their own masters
        moments = sum(_DTYPE_BYTES.get(str(_megatron(self.config, key, "fp32")), 4) for key in _MOMENTS)
        precision_aware = bool(_megatron(self.config, "use_precision_aware_optimizer", False))
        # With bf16 parameters it keeps the lower half of each master only
        # (NVIDIA/Megatron-LM core/optimizer/optimizer_config.py: store_param_remainders).
        master = 2 if precision_aware and not self.config.trainer.optimizer_cpu_offload else 4
        return master + moments

    def _transient(self, index: int, layers: range, shard: int) -> int:
        """The most that lives within a training step only: activations and logits, or the optimizer's step."""
        tokens = self.micro_batch_tokens()
        forward = self._activations(index, layers, tokens)
        if self.config.trainer.precision == "fp8":
            matrices = sum(n * self._matrix_elements(layer) for layer, n in kinds_of(self.arch, layers))
            forward += int(matrices * c.FP8_WEIGHT_COPY_BYTES.value)
        if index == self.pp - 1:
            vocab = padded_vocab(self.arch.vocab_size, self.tp) // self.tp
            forward += int(self.longest_tokens() * vocab * 4 * c.LOGITS_COPIES.value)
        step = 0
        if _megatron(self.config, "transformer_impl", "transformer_engine") == "local":
            step = int(shard * (1 - self.offloaded_fraction) * c.UNFUSED_ADAM_BYTES.value)
        return max(forward, step)

    def longest_tokens(self) -> int:
        """Tokens of a rank's largest micro-batch: a sample beyond the budget is one by itself (THUDM/slime#1951)."""
        rollout = self.config.rollout
        longest = rollout.rollout_max_context_len or rollout.rollout_max_response_len
        samples = self.config.trainer.micro_batch_size or 1
        budget = self.config.trainer.max_tokens_per_gpu
        if budget is None:
            return math.ceil(samples * longest / self.cp)
        return max(budget, math.ceil(longest / self.cp))

    micro_batch_tokens = longest_tokens

    def _activations(self, index: int, layers: range, tokens: int) -> int:
        """Bytes kept for the backward pass, in bf16: every layer, or with full recompute their inputs and one layer."""
        in_flight = self._in_flight(index)
        kinds = kinds_of(self.arch, layers)
        by_layer = [(layer, self._layer_bytes_per_token(layer)) for layer, _ in kinds]
        sequence = self.tp if self.config.trainer.sequence_parallel else 1
        inputs = 2 * self.arch.hidden_size // sequence * len(layers)
        if self.config.trainer.recompute_granularity == "full":
            one = (size + self._delta_rule_bytes_per_token(layer) for layer, size in by_layer)
            return int(tokens * (inputs * in_flight + max(one, default=0)))
        kept = in_flight * sum(size * count for (_, size), (_, count) in zip(by_layer, kinds, strict=True))
        again = max(
            (max(self._gathered_bytes_per_token(layer), self._delta_rule_bytes_per_token(layer)) for layer, _ in kinds),
            default=0,
        )
        return int(tokens * (kept + again))

    def _in_flight(self, index: int) -> int:
        """Micro-batches whose activations a stage holds at once (one forward, one backward)."""
        samples = self.config.trainer.global_batch_size or self.config.num_samples
        return max(1, min(self.pp - index, math.ceil(samples / self.dp)))

    def _layer_bytes_per_token(self, layer: Layer) -> float:
        """What each matrix puts out, two residual streams, two norms; routed experts as often as they are chosen.

        With context parallelism the keys and values that the rank's queries read, in place of its own, unless attention
        is computed again; and what goes into linear attention, of whole samples.
        """
        trainer = self.config.trainer
        sequence = self.tp if trainer.sequence_parallel else 1
        keeps_gathered = self.cp > 1 and trainer.recompute_granularity != "selective"
        elements = 4 * self.arch.hidden_size / sequence
        if keeps_gathered:
            elements += _read_elements(layer, self.cp) / self.tp
        for weight in layer.weights:
            if len(weight.shape) < 2 or (keeps_gathered and _of_attention(weight) in _KEYS_AND_VALUES):
                continue
            # gpt-oss has its experts' matrices the other way round.
            out = weight.shape[-1 if weight.is_expert and self.arch.model_type == "gpt_oss" else -2]
            if weight.is_expert:
                elements += self.arch.num_experts_per_tok * (out + self.arch.hidden_size) / self.etp
            elif weight.split == "column":
                elements += out / self.tp * (self.cp if weight.name.startswith(_DELTA_INPUTS) else 1)
            else:
                elements += out / sequence
        return 2 * elements

    def _delta_rule_bytes_per_token(self, layer: Layer) -> float:
        """What linear attention holds while it is computed again, which it always is: of whole samples."""
        values = next((w.shape[1] for w in layer.weights if w.name == _DELTA_OUTPUT), 0)
        return c.DELTA_RULE_BYTES.value * values / self.tp * self.cp

    def _gathered_bytes_per_token(self, layer: Layer) -> float:
        """What attention that is computed again holds while it is: all ranks' keys and values, and those read."""
        if self.cp == 1 or self.config.trainer.recompute_granularity != "selective":
            return 0
        return 2 * (self.cp * sum(_keys_and_values(layer)) + _read_elements(layer, self.cp)) / self.tp

    def _matrix_elements(self, layer: Layer) -> int:
        matrices = [w for w in layer.weights if len(w.shape) >= 2 and w.split in ("column", "row")]
        return sum(_cut(matrices, self.tp, self.ep, self.etp))


_DELTA_INPUTS, _DELTA_OUTPUT = "linear_attn.in_proj_", "linear_attn.out_proj.weight"
_KEYS_AND_VALUES = frozenset({"k_proj.weight", "v_proj.weight", "kv_b_proj.weight"})
_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")
_DTYPE_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "bf16": 2, "bfloat16": 2, "fp8": 1}


def _of_attention(weight: Weight) -> str:
    return weight.name.removeprefix("self_attn.")


def _keys_and_values(layer: Layer) -> tuple[int, int]:
    """Elements of a token's keys and of its values, of all heads; of latents what the heads make of them."""
    shapes = {_of_attention(w): w.shape for w in layer.weights}
    if "kv_b_proj.weight" in shapes:  # a key is as wide as a query
        queries = shapes.get("q_b_proj.weight") or shapes["q_proj.weight"]
        return queries[0], shapes["o_proj.weight"][1]
    keys, values = shapes.get("k_proj.weight", (0,)), shapes.get("v_proj.weight", (0,))
    return keys[0], values[0]


def _read_elements(layer: Layer, cp: int) -> float:
    """Elements of keys and values that the queries of a context-parallel rank read, for each of its tokens.

    Its chunks r and 2·CP - 1 - r, half its tokens each, read r + 1 and 2·CP - r chunks. Values that are narrower than
    keys are there a second time, as wide.
    """
    keys, values = _keys_and_values(layer)
    return (cp + 0.5) * (keys + values + (keys if values != keys else 0))


def is_adaptable(weight: Weight) -> bool:
    """Whether it is a linear layer's, which LoRA can put an adapter beside; transformers stacks experts into none."""
    is_linear = len(weight.shape) == 2 and (weight.split in ("column", "row") or weight.name in FP8_WHOLE)
    return is_linear and not weight.is_expert


def padded_vocab(size: int, tp: int) -> int:
    """Rows of the embedding as Megatron pads them, over all TP ranks."""
    multiple = VOCAB_DIVISOR * tp
    return -(-size // multiple) * multiple


def _cut(weights: Sequence[Weight], tp: int, ep: int, etp: int) -> tuple[int, int]:
    """(dense, routed experts') parameters of these weights on one rank."""
    dense = expert = 0
    for weight in weights:
        if weight.is_expert:
            expert += weight.numel // (ep * (etp if weight.split in ("column", "row") else 1))
        elif weight.split in ("column", "row"):
            dense += weight.numel // tp
        else:
            dense += weight.numel
    return dense, expert


def _rounded(weights: tuple[Weight, ...], tp: int, etp: int) -> tuple[int, int]:
    """(bytes asked, bytes taken) when each tensor of a rank is pinned by itself in float32."""
    asked = taken = 0
    for weight in weights:
        count = _experts(weight) if weight.is_expert else weight.copies
        size = 4 * weight.numel // count
        if weight.split in ("column", "row"):
            size //= etp if weight.is_expert else tp
        asked += size * count
        taken += (1 << max(0, size - 1).bit_length()) * count
    return asked, taken


def _experts(weight: Weight) -> int:
    """How many experts a weight holds: fused ones have them as the first dimension."""
    return weight.copies * (weight.shape[0] if len(weight.shape) == 3 else 1)


# -- engine ----------------------------------------------------------------------------------------


class _Engine:
    """SGLang's side: one engine over `rollout_num_gpus_per_engine` GPUs."""

    def __init__(self, config: LaunchConfig, architecture: Architecture) -> None:
        self.config = config
        self.arch = architecture
        self.tp = config.rollout.rollout_num_gpus_per_engine
        self.attention_tp = max(1, self.tp // config.sglang.attention_dp)
        self.notes: list[str] = []

    def regions(self) -> dict[Region, int]:
        weights = self.weights()
        hbm = self.config.hardware.gpu_memory_bytes
        kv = 0
        if hbm is None:
            self.notes.append("the profile states no GPU memory: the KV cache's size is unknown")
        else:
            usable = hbm - c.ENGINE_RESIDUAL.value - c.TRAINER_RESIDUAL.value
            kv = max(0, int(self.config.sglang.mem_fraction_static * usable) - weights)
        if limit := _number(self.config, "sglang", "max_total_tokens", 0):
            kv = min(kv, int(limit) * self._kv_bytes_per_token())
        return {"weights": weights, "kv_cache": kv, "cuda_graph": int(c.CUDA_GRAPHS.value)}

    def weights(self) -> int:
        """Bytes of one GPU's part of the engine's weights."""
        outside = self.arch.embedding + self.arch.head
        total = sum(self._bytes(w, quantised=False) for w in outside)
        for layer, count in kinds_of(self.arch, range(len(self.arch.layers))):
            total += count * sum(self._bytes(weight, quantised=True) for weight in layer.weights)
        if _sglang(self.config, "speculative_algorithm", None):
            # The draft model: the model's own layers for predicting further tokens.
            total += sum(self._bytes(weight, quantised=True) for layer in self.arch.mtp for weight in layer.weights)
        return total

    def sent_bytes(self) -> int:
        """What one update sends to one GPU: all weights, in the trainer's precision or in FP8 with their scales, LoRA's
        adapters merged into them. An engine of several GPUs cuts them itself."""
        if self.config.rollout.dtype != "fp8":
            return self.arch.num_parameters * (4 if self.config.model.dtype == "float32" else 2)
        outside = sum(w.numel * 2 for w in (*self.arch.embedding, *self.arch.head))
        layers = kinds_of(self.arch, range(len(self.arch.layers)))
        return outside + sum(count * sum(_whole_bytes_in_fp8(w) for w in layer.weights) for layer, count in layers)

    def tokens(self, kv_bytes: int) -> int:
        per_token = self._kv_bytes_per_token()
        return kv_bytes // per_token if per_token else 0

    def _kv_bytes_per_token(self) -> int:
        element = 1 if str(_sglang(self.config, "kv_cache_dtype", "auto")).startswith("fp8") else 2
        total = 0
        for layer in self.arch.layers:
            # A rank keeps its share of the KV heads, at least one whole head.
            total += layer.kv_elements_per_token * element // max(1, min(self.attention_tp, layer.kv_heads))
        return total

    def _bytes(self, weight: Weight, *, quantised: bool) -> int:
        return _weight_bytes(
            weight, self.config.rollout.dtype if quantised else "bfloat16", self.tp, self.attention_tp, self.arch
        )


def _whole_bytes_in_fp8(weight: Weight) -> int:
    return _fp8_bytes(weight.numel) if is_in_fp8(weight) else weight.numel * 2


def is_in_fp8(weight: Weight) -> bool:
    """Whether an engine in FP8 holds it so. Of a layer's weights; what an update sends says it by name
    (`backends.block_fp8`), and a test holds the two together."""
    return (len(weight.shape) >= 2 and weight.split in ("column", "row")) or weight.name in FP8_WHOLE


def _fp8_bytes(numel: int) -> int:
    return numel + numel * 4 // FP8_BLOCK


def _is_attention(name: str) -> bool:
    projections = ("q_proj", "k_proj", "v_proj", "o_proj")
    return "attn" in name or "attention" in name or any(part in name for part in projections)


def _weight_bytes(weight: Weight, dtype: str, tp: int, attention_tp: int, arch: Architecture) -> int:
    numel = weight.numel
    if weight.is_expert:
        numel //= tp  # experts over EP, each expert over the rest of TP: the same bytes
    elif weight.split == "vocab":
        numel //= attention_tp
    elif weight.split in ("column", "row"):
        cut = attention_tp if _is_attention(weight.name) else tp
        if any(part in weight.name for part in ("k_proj", "v_proj")) and arch.num_kv_heads < cut:
            cut = max(1, arch.num_kv_heads)  # fewer KV heads than ranks: each head is on several
        numel //= cut
    matrix = len(weight.shape) >= 2 and weight.split in ("column", "row")
    if dtype == "fp8" and is_in_fp8(weight):
        return _fp8_bytes(numel)
    if dtype == "fp4" and matrix:
        # FP4 checkpoints keep the experts in four bits and the rest in eight (DeepSeek-V4) or sixteen (gpt-oss).
        return numel // 2 + numel // FP4_BLOCK if weight.is_expert else 2 * numel
    if dtype == "int4" and matrix and weight.is_expert:
        return numel // 2 + numel * 2 // FP4_BLOCK  # four bits and a bf16 scale for 32 elements (Kimi-K2's checkpoints)
    return numel * (4 if dtype == "float32" else 2)


# -- what is always there --------------------------------------------------------------------------


def _static_gpu(config: LaunchConfig, architecture: Architecture) -> dict[str, int]:
    static = {"trainer_residual": int(c.TRAINER_RESIDUAL.value), "engine_residual": int(c.ENGINE_RESIDUAL.value)}
    if config.world_size > 1:
        t = config.trainer
        groups = [
            t.tensor_model_parallel_size,
            t.pipeline_model_parallel_size,
            t.context_parallel_size,
            t.expert_model_parallel_size if architecture.num_experts else 1,
            config.world_size // (t.tensor_model_parallel_size * t.pipeline_model_parallel_size),
        ]
        static["nccl"] = int(sum(size > 1 for size in groups) * c.NCCL_BUFFERS.value)
    return static


def _static_host(config: LaunchConfig, trainer: _Trainer, ranks: Sequence[Stage]) -> dict[str, int]:
    """Of a node; `ranks` are the stages of its ranks."""
    count = len(ranks)
    engines = max(1, count // config.rollout.rollout_num_gpus_per_engine)
    processes = count * (c.TRAINER_PROCESS.value + c.ENGINE_PROCESS.value) + engines * c.ENGINE_FRONT.value
    static = {"processes": int(processes + c.NODE_BASE.value)}
    params = sum(stage.actor_bytes for stage in ranks)
    if config.world_size > 1:
        static["distributed"] = sum(map(_distributed_host, ranks))
        static["update_heap"] = int(c.UPDATE_HEAP.value * params)
    if parameters := trainer.host_optimizer(ranks):
        static |= trainer.on_host(parameters)
    static["object_store"] = rollout_bytes(config)
    has_reference = config.algorithm.kl_loss_coef > 0 or _megatron(config, "use_kl_loss", False)
    if has_reference and not config.has_lora:  # with LoRA the base is the reference
        static["reference"] = params
    return static


def _distributed_host(stage: Stage) -> int:
    """What a rank's communicators, loaders and page cache take: large models' measure, or less where less is loaded."""
    loaded = c.COMMUNICATORS_HOST.value + 4 * stage.parameters
    return int(min(c.DISTRIBUTED_HOST.value, loaded))


def object_store_bytes(config: LaunchConfig) -> int:
    """What a local Ray is given for its object store, in shared memory: two rollouts, at least 256 MiB."""
    return max(256 * 2**20, 2 * rollout_bytes(config))


def rollout_bytes(config: LaunchConfig) -> int:
    """A rollout's samples in the object store, whole on each node: ids, log-probs and masks, made and read."""
    longest = config.rollout.rollout_max_context_len or config.rollout.rollout_max_response_len
    return config.num_samples * longest * (8 + 4 + 4) * 2
