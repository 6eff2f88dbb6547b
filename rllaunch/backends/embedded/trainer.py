"""The embedded trainer: a `transformers` model, trained with flat parameters, gradients and moments."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rllaunch.backends.base import LaunchContext, MemoryReading, RankInfo, Slot, TrainBatch, TrainMetrics, WeightSink
from rllaunch.backends.embedded.batch import load_batch
from rllaunch.backends.embedded.checkpoint import export, load_state, save_state
from rllaunch.backends.embedded.host_copies import make_host_copies
from rllaunch.backends.embedded.layout import Layout, move_parameters
from rllaunch.backends.embedded.optimizer import FlatAdamW, accumulate_into
from rllaunch.backends.embedded.pool import FlatBuffer, open_pools
from rllaunch.backends.embedded.sizes import arena_bytes, padded_bytes, read_memory
from rllaunch.backends.embedded.steps import Steps
from rllaunch.backends.embedded.tokenizer import tokenizer_to_export
from rllaunch.backends.embedded.trainer_layouts import build_models, trainer_layouts
from rllaunch.backends.embedded.trainer_memory import CopiedState, TrainerMemory
from rllaunch.backends.embedded.update import PlannedSender, plan_buckets
from rllaunch.plan.handoff import BACKED_UP, Region


class EmbeddedTrainer:
    """One trainer rank. See `rllaunch.backends.base.TrainerBackend` for the promises."""

    def __init__(self, context: LaunchContext, slot: Slot) -> None:
        torch.set_num_threads(context.config.run.torch_num_threads)
        self.context = context
        self.slot = slot
        self.layouts = trainer_layouts(context)
        self._owner = f"trainer-{slot.index}"
        buckets = plan_buckets(context, self.layouts.sent)
        layouts = self._region_layouts()
        needed: dict[Region, int] = {r: layout.nbytes for r, layout in layouts.items()}
        self._sizes = padded_bytes(context, needed | {"update_bucket": max(b.nbytes for b in buckets)})
        path = Path(slot.ledger_dir) / f"update-{slot.index}.bin"
        self._sender = PlannedSender(path, buckets, self._sizes["update_bucket"])
        self._device_pool, self._host_pool = open_pools(context, slot)
        self._buffers: dict[Region, FlatBuffer] = {
            r: FlatBuffer(self._device_pool, self._owner, r, self._sizes[r], slot.device) for r in layouts
        }
        self._memory = TrainerMemory(self._buffers, self._backup())
        self._rank = 0
        self._tokenizer: Any = None

    def _region_layouts(self) -> dict[Region, Layout]:
        made = self.layouts
        return {
            "params": made.params,
            "optimizer": made.optimizer,
            "grads": made.grads,
            "activations": made.activations,
        }

    def _backup(self) -> CopiedState | None:
        options = self.context.options
        if not options.offload_train:
            return None
        sizes: dict[Region, int] = {r: self._sizes[r] for r in BACKED_UP}
        copies = make_host_copies(
            options, self.slot, self._host_pool, self._owner, sizes, lambda: arena_bytes(self.context)
        )
        return CopiedState(self._buffers, copies)

    def region_bytes(self) -> Mapping[Region, int]:
        return self._sizes

    # -- life --------------------------------------------------------------------------------------

    def init(self, rank: RankInfo) -> None:
        self._rank = rank.rank
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
        if rank.rank == 0:
            self._tokenizer = tokenizer_to_export(self.context.config, self.context.vocabulary)
        self.models = build_models(self.context)
        for model in self.models.values():
            model.eval().to(self.slot.device)
        for region in BACKED_UP:
            self._buffers[region].allocate()
        named = {f"{role}.{n}": p for role, m in self.models.items() for n, p in m.named_parameters()}
        move_parameters(named, self.layouts.params, self._buffers["params"])
        self._buffers["optimizer"].bytes.zero_()
        self._buffers["grads"].allocate()
        grads = self.layouts.grads.views(self._buffers["grads"])
        for name in self.layouts.trainable:
            accumulate_into(named[name], grads[name])
        self.optimizer = FlatAdamW(self.context.config, self.layouts, self._buffers)
        self.steps = Steps(self.context.config, self.models, self.optimizer, rank)

    def shutdown(self) -> None:
        self._memory.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group()

    # -- handoff -----------------------------------------------------------------------------------

    def offload(self) -> None:
        self._memory.offload()

    def onload(self) -> None:
        self._memory.onload()

    def clear_memory(self) -> None:
        self._memory.free_grads()

    def memory(self) -> MemoryReading:
        return read_memory(self._device_pool, self._host_pool, self._memory.take_moved())

    # -- training ----------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> TrainMetrics:
        """Train on one rollout; every rank is given all samples."""
        self._memory.require(*BACKED_UP, "grads", to="train")
        buffer = self._buffers["activations"]
        buffer.allocate()
        try:
            work = load_batch(self.layouts.activations.views(buffer), batch)
            reward_B = torch.from_numpy(batch.reward_B).to(self.slot.device)
            figures = self.steps.train(work, reward_B, batch.rollout_id)
        finally:
            buffer.free()
        return TrainMetrics(figures)

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, version: int, sink: WeightSink) -> int:
        if self._rank != 0:
            return 0
        params = self._memory.reader("params")
        sink.begin_weight_update(version)
        self._device_pool.charge(self._owner, "update_bucket", self._sizes["update_bucket"])
        try:
            sent = self._sender.send(params, sink)
            sink.end_weight_update(version)
        finally:
            self._device_pool.release(self._owner, "update_bucket")
        return sent

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        """Rank 0 writes all: every rank holds the same."""
        if self._rank != 0:
            return
        if nbytes := self.context.config.pools.host_save_bytes:
            self._host_pool.charge(self._owner, "save_staging", nbytes)
            self._host_pool.release(self._owner, "save_staging")
        self._memory.require(*BACKED_UP, to="save", fix="save before the trainer sleeps")
        save_state(Path(directory), self._content(), self.layouts.params, self.optimizer.num_steps)
        export(self.models["actor"], self._tokenizer, Path(directory) / "hf")

    def load(self, directory: str) -> None:
        num_steps = load_state(Path(directory), self._content(), self.layouts.params)
        self.optimizer.resume_at(num_steps)

    def _content(self) -> dict[Region, Tensor]:
        """The bytes of what is backed up, without the regions' padding."""
        layouts = self._region_layouts()
        return {region: self._buffers[region].bytes[: layouts[region].nbytes] for region in BACKED_UP}
