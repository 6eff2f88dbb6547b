"""The embedded trainer: a `transformers` model, trained with flat parameters, gradients and moments."""

# B samples of a rollout, b rows of a micro-batch, P prompt tokens (left-padded), L response tokens, T = P + L

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rllaunch.algo.advantages import group_advantages, outcome_advantages
from rllaunch.algo.losses import (
    aggregate,
    aggregation_count,
    clipped_policy_loss,
    kl_estimate,
    kl_k3,
    token_logprobs,
    value_loss,
)
from rllaunch.backends.base import (
    Bucket,
    LaunchContext,
    MemoryReading,
    RankInfo,
    Slot,
    TensorSlice,
    TrainBatch,
    TrainMetrics,
    WeightSink,
)
from rllaunch.backends.embedded.cache import attends_by_token
from rllaunch.backends.embedded.decoding import rows_by
from rllaunch.backends.embedded.host_copies import make_host_copies
from rllaunch.backends.embedded.layout import Layout, dtype_name, lay_out, move_parameters, view_of
from rllaunch.backends.embedded.model import build_critic, build_model, engine_dtype
from rllaunch.backends.embedded.pool import FlatBuffer, open_pools
from rllaunch.backends.embedded.shared_file import SharedFile
from rllaunch.backends.embedded.sizes import arena_bytes, padded_bytes, read_memory
from rllaunch.backends.embedded.trainer_memory import CopiedState, Reader, TrainerMemory
from rllaunch.errors import RunError
from rllaunch.plan.handoff import BACKED_UP, Region

_ALIGNMENT_BYTES = 64
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class TrainerLayouts:
    """Where everything lies in the trainer's regions, from shapes alone.

    Gradients and moments are float32 whatever the parameters are. Parameters narrower than that have their
    float32 `main` copy beside the moments: a step of a usual size is smaller than bf16's rounding (at a learning
    rate of 1e-6 a bf16 model stood still, all but 0.1% of its parameters).
    """

    params: Layout
    grads: Layout
    optimizer: Layout
    activations: Layout
    trainable: tuple[str, ...]
    """Names with a gradient, in the order of `grads`."""
    sent: tuple[TensorSlice, ...]
    """What an update sends: of the actor, all that is trainable, in the engine's dtype; offsets in `params`."""


def trainer_layouts(context: LaunchContext) -> TrainerLayouts:
    models = build_models(context, device="meta")
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for role, model in models.items():
        for name, parameter in model.named_parameters():
            group = f"{role} {dtype_name(parameter.dtype)}" + ("" if parameter.requires_grad else " frozen")
            groups.setdefault(group, []).append((f"{role}.{name}", parameter))
    trainable = {
        group: [(n, torch.empty(p.shape, dtype=torch.float32, device="meta")) for n, p in members]
        for group, members in groups.items()
        if not group.endswith("frozen")
    }
    params, grads = lay_out(groups.items()), lay_out(trainable.items())
    optimizer = lay_out(
        (f"{group} {part}", [(f"{part}.{n}", p) for n, p in members])
        for group, members in trainable.items()
        for part in (*_MOMENTS, *(() if group.endswith(" float32") else ("main",)))
    )
    actor = {n for group, members in trainable.items() if group.startswith("actor ") for n, _ in members}
    return TrainerLayouts(
        params,
        grads,
        optimizer,
        _batch_layout(context),
        tuple(n for members in trainable.values() for n, _ in members),
        tuple(s for s in params.slices if s.name in actor),
    )


def build_models(context: LaunchContext, *, device: str = "cpu") -> dict[str, nn.Module]:
    """role → model: the actor, with KL the frozen reference, with PPO the critic; all from the same start."""
    models: dict[str, nn.Module] = {"actor": build_model(context, device=device)}
    if context.config.algorithm.kl_loss_coef > 0:
        models["reference"] = build_model(context, device=device, with_lora=False).requires_grad_(False)
    if context.config.has_critic:
        models["critic"] = build_critic(context, device=device).requires_grad_(True)
    return models


def _batch_layout(context: LaunchContext) -> Layout:
    B, L = context.config.num_samples, context.config.rollout.rollout_max_response_len
    T = context.max_prompt_tokens + L
    long, real = torch.int64, torch.float32

    def tensor(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(B, width, dtype=dtype, device="meta")

    names = ["mask", "old_logp", "advantage"]
    names += ["value", "return"] if context.config.has_critic else []
    named = [("ids", tensor(T, long)), ("attended", tensor(T, long)), *((n, tensor(L, real)) for n in names)]
    return lay_out([("batch", named)])


class EmbeddedTrainer:
    """One trainer rank. See `rllaunch.backends.base.TrainerBackend` for the promises."""

    def __init__(self, context: LaunchContext, slot: Slot) -> None:
        torch.set_num_threads(context.config.run.torch_num_threads)
        self.context = context
        self.slot = slot
        self.layouts = trainer_layouts(context)
        self._owner = f"trainer-{slot.index}"
        self._buckets = list(_buckets(context, self.layouts.sent))
        layouts = self._region_layouts()
        needed: dict[Region, int] = {r: layout.nbytes for r, layout in layouts.items()}
        self._sizes = padded_bytes(context, needed | {"update_bucket": max(b.nbytes for b in self._buckets)})
        self._device_pool, self._host_pool = open_pools(context, slot)
        self._buffers: dict[Region, FlatBuffer] = {
            r: FlatBuffer(self._device_pool, self._owner, r, self._sizes[r], slot.device) for r in layouts
        }
        self._memory = TrainerMemory(self._buffers, self._backup())
        self._bucket_file: SharedFile | None = None
        self._num_steps = 0
        self._world = 1
        self._rank = 0
        self._is_built = False

    def _region_layouts(self) -> dict[Region, Layout]:
        made = self.layouts
        return {
            "params": made.params,
            "optimizer": made.optimizer,
            "grads": made.grads,
            "activations": made.activations,
        }

    def region_bytes(self) -> Mapping[Region, int]:
        return self._sizes

    # -- life --------------------------------------------------------------------------------------

    def init(self, rank: RankInfo) -> None:
        self._rank, self._world = rank.rank, rank.world_size
        if nbytes := self.context.config.pools.host_trainer_bytes:
            self._host_pool.charge_once("static", "trainer", nbytes)
        if rank.world_size > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://{rank.master_addr}:{rank.master_port}",
                rank=rank.rank,
                world_size=rank.world_size,
                # A rank that is gone is noticed in minutes, not in the half hour of the default.
                timeout=timedelta(minutes=5),
            )
        self.models = build_models(self.context)
        for model in self.models.values():
            model.eval().to(self.slot.device)
        self._takes_padding = attends_by_token(self.models["actor"])
        for region in BACKED_UP:
            self._buffers[region].allocate()
        named = {f"{role}.{n}": p for role, m in self.models.items() for n, p in m.named_parameters()}
        move_parameters(named, self.layouts.params, self._buffers["params"])
        self._buffers["optimizer"].bytes.zero_()
        self._buffers["grads"].allocate()
        grads = self.layouts.grads.views(self._buffers["grads"])
        for name in self.layouts.trainable:
            _accumulate_into(named[name], grads[name])
        self._build_optimizer()
        self._is_built = True

    def _build_optimizer(self) -> None:
        """AdamW over one flat float32 parameter a segment; its moments are views of the `optimizer` region."""
        config = self.context.config
        trainer, algorithm = config.trainer, config.algorithm
        state = {s.group: s.view(self._buffers["optimizer"]) for s in self.layouts.optimizer.segments}
        values = {s.group: s.view(self._buffers["params"]) for s in self.layouts.params.segments}
        self._grads = {s.group: s.view(self._buffers["grads"]) for s in self.layouts.grads.segments}
        self._narrow: list[tuple[Tensor, Tensor]] = []
        groups, self._flat = [], {}
        for group, grad in self._grads.items():
            main = state.get(f"{group} main")
            if main is None:
                main = values[group]
            else:
                main.copy_(values[group])
                self._narrow.append((values[group], main))
            flat = nn.Parameter(main, requires_grad=True)
            flat.grad = grad
            self._flat[group] = flat
            lr = algorithm.critic_lr or trainer.lr if group.startswith("critic ") else trainer.lr
            groups.append({"params": [flat], "base_lr": lr})
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=trainer.lr,
            betas=(trainer.adam_beta1, trainer.adam_beta2),
            eps=trainer.adam_eps,
            weight_decay=trainer.weight_decay,
        )
        for group, flat in self._flat.items():
            moments = {name: state[f"{group} {name}"] for name in _MOMENTS}
            self.optimizer.state[flat] = {"step": torch.tensor(0.0), **moments}

    def _backup(self) -> CopiedState | None:
        options = self.context.options
        if not options.offload_train:
            return None
        sizes: dict[Region, int] = {r: self._sizes[r] for r in BACKED_UP}
        copies = make_host_copies(
            options, self.slot, self._host_pool, self._owner, sizes, lambda: arena_bytes(self.context)
        )
        return CopiedState(self._buffers, copies)

    # -- handoff -----------------------------------------------------------------------------------

    def offload(self) -> None:
        self._memory.offload()

    def onload(self) -> None:
        self._memory.onload()

    def clear_memory(self) -> None:
        self._memory.free_grads()

    def memory(self) -> MemoryReading:
        return read_memory(self._device_pool, self._host_pool, self._memory.take_moved())

    def shutdown(self) -> None:
        self._memory.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- training ----------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> TrainMetrics:
        """Train on one rollout.

        Every rank is given all samples and takes its share of each optimizer step's; denominators are
        those of all ranks, so that the sum of the ranks' gradients is the gradient of one rank.
        """
        self._memory.require(*BACKED_UP, "grads", to="train")
        buffer = self._buffers["activations"]
        buffer.allocate()
        try:
            work = self.layouts.activations.views(buffer)
            self._load_batch(work, batch)
            self._set_advantages(work, batch)
            totals = self._optimize(work, batch.rollout_id)
        finally:
            del work
            buffer.free()
        return TrainMetrics(totals)

    def _load_batch(self, work: dict[str, Tensor], batch: TrainBatch) -> None:
        P = batch.prompt_ids_BP.shape[1]
        work["ids"][:, :P].copy_(torch.from_numpy(batch.prompt_ids_BP))
        work["ids"][:, P:].copy_(torch.from_numpy(batch.response_ids_BL))
        work["attended"].fill_(1)
        lens_B1 = torch.from_numpy(batch.prompt_lens_B)[:, None]
        work["attended"][:, :P].copy_(torch.arange(P) >= P - lens_B1)
        work["mask"].copy_(torch.from_numpy(batch.mask_BL))
        work["old_logp"].copy_(torch.from_numpy(batch.logprob_BL))
        self._is_padded = bool((batch.prompt_lens_B != P).any())
        self._prompt_width: int = P
        self._prompt_lens_B = torch.from_numpy(batch.prompt_lens_B)

    def _set_advantages(self, work: dict[str, Tensor], batch: TrainBatch) -> None:
        algorithm = self.context.config.algorithm
        reward_B = torch.from_numpy(batch.reward_B).to(self.slot.device)
        if not self.context.config.has_critic:
            group_size = self.context.config.rollout.n_samples_per_prompt
            advantage_B = group_advantages(reward_B, group_size, normalize=algorithm.normalize_advantages)
            work["advantage"].copy_(advantage_B[:, None].expand_as(work["advantage"]))
            return
        with torch.no_grad():
            for rows in self._micro_batches(torch.arange(len(reward_B))):
                work["value"][rows] = self._values(work, rows)
        advantage_BL, return_BL = outcome_advantages(
            reward_B,
            work["value"],
            work["mask"],
            algorithm.gamma,
            algorithm.lambd,
            normalize=algorithm.normalize_advantages,
        )
        work["advantage"].copy_(advantage_BL)
        work["return"].copy_(return_BL)

    def _optimize(self, work: dict[str, Tensor], rollout_id: int) -> dict[str, float]:
        config = self.context.config
        num_samples, steps = config.num_samples, config.trainer.num_steps_per_rollout or 1
        # Which sample is in which step depends on seed and rollout only, so that a resumed run repeats it.
        rng = np.random.Generator(np.random.Philox(key=[config.run.seed, (2 << 32) + rollout_id]))
        order_B = torch.from_numpy(rng.permutation(num_samples))
        totals: dict[str, float] = {}
        for step, rows in enumerate(order_B.chunk(steps)):
            figures = self._step(work, rows, is_first=step == 0)
            for name, value in figures.items():
                if name == "logprob_diff":
                    totals.setdefault(name, value)
                else:
                    totals[name] = totals.get(name, 0.0) + value / steps
        totals["lr"] = self.optimizer.param_groups[0]["lr"]
        return totals

    def _step(self, work: dict[str, Tensor], rows: Tensor, *, is_first: bool) -> dict[str, float]:
        """One optimizer step over `rows` of all ranks; figures summed over all ranks."""
        algorithm = self.context.config.algorithm
        mask_BL = work["mask"][rows]
        denominator = aggregation_count(mask_BL, algorithm.loss_aggregation)
        num_tokens = mask_BL.sum()
        for grad in self._grads.values():
            grad.zero_()
        sums: dict[str, Tensor] = {}
        worst_diff = torch.zeros(())
        for micro in self._micro_batches(rows[self._rank :: self._world]):
            figures, diff = self._backward(work, micro, denominator, num_tokens)
            worst_diff = torch.maximum(worst_diff, diff.cpu())
            for name, value in figures.items():
                sums[name] = sums.get(name, torch.zeros(())) + value.detach().cpu()
        if self._world > 1:
            names = sorted(sums)
            packed = torch.stack([sums[n].float() for n in names])
            for tensor in (packed, *self._grads.values()):
                dist.all_reduce(tensor)
            dist.all_reduce(worst_diff, op=dist.ReduceOp.MAX)
            sums = dict(zip(names, packed.unbind(), strict=True))
        sums["grad_norm"] = self._clip()
        figures_out = {n: float(v) for n, v in sums.items()}
        for name, figure in figures_out.items():
            if not math.isfinite(figure):
                raise RunError(
                    f"{name} is {figure} in training", "", "lower --lr, or look at the rewards; --resume goes on"
                )
        self._set_lr()
        self.optimizer.step()
        for values, main in self._narrow:
            values.copy_(main)
        self._num_steps += 1
        if is_first:
            figures_out["logprob_diff"] = float(worst_diff)
        return figures_out

    def _backward(
        self, work: dict[str, Tensor], rows: Tensor, denominator: Tensor, num_tokens: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        algorithm = self.context.config.algorithm
        mask_bL, old_logp_bL = work["mask"][rows], work["old_logp"][rows]
        logp_bL, entropy_bL = self._logprobs("actor", work, rows)
        loss_bL, clipped_bL = clipped_policy_loss(
            logp_bL,
            old_logp_bL,
            work["advantage"][rows],
            algorithm.eps_clip,
            algorithm.eps_clip_high or algorithm.eps_clip,
        )
        mode = algorithm.loss_aggregation
        policy = aggregate(loss_bL, mask_bL, mode, denominator=denominator)
        entropy = aggregate(entropy_bL, mask_bL, mode, denominator=denominator)
        total = policy - algorithm.entropy_coef * entropy
        # How far the policy is from the one that sampled; with a reference there is a second distance.
        kl = aggregate(kl_k3(logp_bL.detach(), old_logp_bL), mask_bL, mode, denominator=denominator)
        figures = {"policy_loss": policy, "entropy": entropy, "kl": kl}
        if algorithm.kl_loss_coef > 0:
            with torch.no_grad():
                ref_logp_bL, _ = self._logprobs("reference", work, rows)
            kl_bL = kl_estimate(algorithm.kl_loss_type, logp_bL, ref_logp_bL)
            kl_reference = aggregate(kl_bL, mask_bL, mode, denominator=denominator)
            total = total + algorithm.kl_loss_coef * kl_reference
            figures["kl_reference"] = kl_reference
        if self.context.config.has_critic:
            value_bL = self._values(work, rows)
            losses_bL = value_loss(value_bL, work["value"][rows], work["return"][rows], algorithm.value_clip)
            critic = aggregate(losses_bL, mask_bL, mode, denominator=denominator)
            total = total + critic
            figures["value_loss"] = critic
        figures["loss"] = total
        total.backward()  # type: ignore[no-untyped-call]
        figures["clip_fraction"] = (clipped_bL * mask_bL).sum() / num_tokens
        diff = ((logp_bL.detach() - old_logp_bL).abs() * mask_bL).max()
        return figures, diff

    def _logprobs(self, role: str, work: dict[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
        ids_bT, P = work["ids"][rows], self._prompt_width
        L, begin = ids_bT.shape[1] - P, self._begin(rows)
        out = self.models[role](
            input_ids=ids_bT[:, begin:-1], logits_to_keep=L, use_cache=False, **self._mask(work, rows)
        )
        temperature = self.context.config.rollout.rollout_temperature
        return token_logprobs(out.logits, ids_bT[:, P:], temperature)

    def _values(self, work: dict[str, Tensor], rows: Tensor) -> Tensor:
        """Value before each response token: what the critic says after the token before it."""
        ids_bT, P, begin = work["ids"][rows], self._prompt_width, self._begin(rows)
        mask = self._mask(work, rows)
        values_bT: Tensor = self.models["critic"](
            ids_bT[:, begin:-1], attention_mask_BT=mask.get("attention_mask"), position_ids_BT=mask.get("position_ids")
        )
        return values_bT[:, P - 1 - begin :]

    def _mask(self, work: dict[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
        """Nothing where no prompt is padded: then attention is plainly causal, and faster."""
        if not self._is_padded or not self._takes_padding:
            return {}
        attended_bT = work["attended"][rows][:, :-1]
        return {"attention_mask": attended_bT, "position_ids": (attended_bT.cumsum(-1) - 1).clamp(min=0)}

    def _begin(self, rows: Tensor) -> int:
        """The first column of a micro-batch that the models read; the padding before it is cut off if it must be."""
        return 0 if self._takes_padding else self._prompt_width - int(self._prompt_lens_B[rows[0]])

    def _micro_batches(self, rows: Tensor) -> Iterator[Tensor]:
        """Rows in batches of at most `micro_batch_size`, of equal prompts' length where a model takes no padding."""
        size = self.context.config.trainer.micro_batch_size or max(1, len(rows))
        if self._takes_padding:
            yield from torch.split(rows, size)
            return
        for _, members in rows_by(self._prompt_lens_B[rows]):
            yield from torch.split(rows[members], size)

    def _clip(self) -> Tensor:
        norms = [torch.linalg.vector_norm(grad) for grad in self._grads.values()]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        limit = self.context.config.trainer.clip_grad
        if limit > 0 and norm > limit:
            for grad in self._grads.values():
                grad.mul_(limit / (norm + 1e-6))
        return norm

    def _set_lr(self) -> None:
        trainer, run = self.context.config.trainer, self.context.config.run
        total = trainer.lr_decay_iters or run.num_rollout * (trainer.num_steps_per_rollout or 1)
        for group in self.optimizer.param_groups:
            group["lr"] = lr_at(
                self._num_steps,
                group["base_lr"],
                trainer.lr_warmup_iters,
                total,
                trainer.lr_decay_style,
                trainer.min_lr,
            )

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, version: int, sink: WeightSink) -> int:
        if self._rank != 0:
            return 0
        params = self._memory.reader("params")
        nbytes = self._sizes["update_bucket"]
        sink.begin_weight_update(version)
        self._device_pool.charge(self._owner, "update_bucket", nbytes)
        try:
            if self._bucket_file is None:
                self._bucket_file = SharedFile(Path(self.slot.ledger_dir) / f"update-{self.slot.index}.bin", nbytes)
            for bucket in self._buckets:
                self._fill(bucket, params)
                sink.load_bucket(Bucket(str(self._bucket_file.path), bucket.nbytes, bucket.tensors))
            sink.end_weight_update(version)
        finally:
            self._device_pool.release(self._owner, "update_bucket")
        return sum(b.nbytes for b in self._buckets)

    def _fill(self, bucket: _PlannedBucket, params: Reader) -> None:
        assert self._bucket_file is not None, "the file is made before it is filled"
        for source, target in zip(bucket.sources, bucket.tensors, strict=True):
            view_of(self._bucket_file.bytes, target).copy_(params(source))

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        """Rank 0 writes all: every rank holds the same."""
        if self._rank != 0:
            return
        if nbytes := self.context.config.pools.host_save_bytes:
            self._host_pool.charge(self._owner, "save_staging", nbytes)
            self._host_pool.release(self._owner, "save_staging")
        self._memory.require(*BACKED_UP, to="save", fix="save before the trainer sleeps")
        state: dict[str, Any] = {
            **{region: _own_storage(self._content(region).cpu()) for region in BACKED_UP},
            "num_steps": self._num_steps,
            "layout": self.layouts.params.fingerprint(),
        }
        torch.save(state, Path(directory) / "trainer.pt")
        self._export(Path(directory) / "hf")

    def _content(self, region: Region) -> Tensor:
        """The bytes of a region without its padding."""
        return self._buffers[region].bytes[: self._region_layouts()[region].nbytes]

    def _export(self, directory: Path) -> None:
        """The actor as transformers loads it, adapters merged."""
        from safetensors.torch import save_file

        from rllaunch.algo.lora import merged_state_dict

        directory.mkdir()
        model: Any = self.models["actor"]
        tensors = {n: t.detach().cpu().clone().contiguous() for n, t in merged_state_dict(model).items()}
        if getattr(model.config, "tie_word_embeddings", False):
            tensors.pop("lm_head.weight", None)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        model.config.architectures = [type(model).__name__]
        (directory / "config.json").write_text(json.dumps(model.config.to_dict(), indent=2, default=str))

    def load(self, directory: str) -> None:
        state = torch.load(Path(directory) / "trainer.pt", weights_only=True)
        if state["layout"] != self.layouts.params.fingerprint():
            raise RunError(
                "the checkpoint is of another model",
                directory,
                "resume with the model, the vocabulary and the LoRA rank it was made with",
            )
        for region in BACKED_UP:
            self._content(region).copy_(state[region])
        self._num_steps = state["num_steps"]
        for flat in self._flat.values():
            self.optimizer.state[flat]["step"].fill_(self._num_steps)


@dataclass(frozen=True)
class _PlannedBucket:
    sources: tuple[TensorSlice, ...]
    tensors: tuple[TensorSlice, ...]
    nbytes: int


def _buckets(context: LaunchContext, sent: tuple[TensorSlice, ...]) -> Iterator[_PlannedBucket]:
    """The update cut into buckets of at most `update_weight_buffer_size`; a larger tensor has one of its own."""
    limit = context.config.handoff.update_weight_buffer_size
    # The engine's own: LoRA adapters are float32 beside bf16 weights.
    engine = build_model(context, dtype=engine_dtype(context), device="meta")
    dtypes = {name: parameter.dtype for name, parameter in engine.named_parameters()}
    sources: list[TensorSlice] = []
    targets: list[TensorSlice] = []
    end = 0
    for source in sent:
        name = source.name.removeprefix("actor.")
        dtype = dtypes[name]
        offset = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        size = math.prod(source.shape) * dtype.itemsize
        if sources and offset + size > limit:
            yield _PlannedBucket(tuple(sources), tuple(targets), end)
            sources, targets, offset = [], [], 0
        sources.append(source)
        targets.append(TensorSlice(name, dtype_name(dtype), source.shape, offset))
        end = offset + size
    yield _PlannedBucket(tuple(sources), tuple(targets), end)


def _own_storage(flat: Tensor) -> Tensor:
    """The tensor on a storage of its size: torch saves whole storages, padding and all."""
    return flat if flat.untyped_storage().nbytes() == flat.nbytes else flat.clone()


def _accumulate_into(parameter: nn.Parameter, grad: Tensor) -> None:
    """Make backward add the parameter's gradient to `grad`, which is float32 and a view of the region."""
    if parameter.dtype == grad.dtype:
        parameter.grad = grad
        return

    def add(of: Tensor) -> None:
        assert of.grad is not None, "called when a gradient was accumulated"
        grad.add_(of.grad)
        of.grad = None

    parameter.register_post_accumulate_grad_hook(add)  # type: ignore[no-untyped-call]


def lr_at(step: int, peak: float, warmup: int, total: int, style: str, floor: float) -> float:
    """The learning rate of optimizer step `step` (0-based): linear warm-up, then the decay that was asked for."""
    if step < warmup:
        return peak * (step + 1) / warmup
    if style == "constant":
        return peak
    share = min(1.0, (step - warmup) / max(1, total - warmup))
    fall = 1.0 - share if style == "linear" else 0.5 * (1.0 + math.cos(math.pi * share))
    return floor + (peak - floor) * fall
