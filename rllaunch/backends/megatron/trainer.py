"""The megatron trainer: one rank of a model that Megatron-core builds, shares out and optimizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rllaunch.backends.base import (
    LaunchContext,
    MemoryReading,
    RankInfo,
    Slot,
    TensorSlice,
    TrainBatch,
    TrainMetrics,
    WeightSink,
)
from rllaunch.backends.block_fp8 import engine_scheme, no_linear_attention
from rllaunch.backends.embedded.host_copies import make_host_copies
from rllaunch.backends.embedded.model import model_config, quantisation_of
from rllaunch.backends.embedded.pool import open_pools
from rllaunch.backends.embedded.sizes import read_memory
from rllaunch.backends.embedded.trainer_memory import Backup, CopiedState, TrainerMemory
from rllaunch.backends.megatron import checkpoint
from rllaunch.backends.megatron.attention import drop_tables
from rllaunch.backends.megatron.batch import make_work
from rllaunch.backends.megatron.build import Built, build, set_num_steps, start_processes, stop_processes
from rllaunch.backends.megatron.ipc import IpcSender
from rllaunch.backends.megatron.lora import Adapters
from rllaunch.backends.megatron.passes import share_here
from rllaunch.backends.megatron.pieces import state_pieces
from rllaunch.backends.megatron.process_groups import ProcessGroups
from rllaunch.backends.megatron.regions import Reference, StorageRegion, parameter_tensors, regions_of
from rllaunch.backends.megatron.saver import SavedState
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.steps import Steps
from rllaunch.backends.megatron.update import BucketSender, as_engine_wants, bucket_bytes, require_fp8_fits
from rllaunch.backends.node_memory import GpuMemory
from rllaunch.errors import ConfigError, RunError
from rllaunch.plan.architecture import read_architecture
from rllaunch.plan.handoff import BACKED_UP, Region
from rllaunch.plan.sizes import sizes_of
from rllaunch.units import gib


class MegatronTrainer:
    """One trainer rank. See `rllaunch.backends.base.TrainerBackend` for the promises."""

    def __init__(self, context: LaunchContext, slot: Slot) -> None:
        torch.set_num_threads(context.config.run.torch_num_threads)
        # Megatron-core wants it so that sends and computation of a layer start in the order they were queued.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self.context, self.slot = context, slot
        self._is_cuda = slot.device.startswith("cuda")
        self._owner = f"trainer-{slot.index}"
        self._device_pool, self._host_pool = open_pools(context, slot)
        self._facts = model_config(context).to_dict()
        self._fp8 = engine_scheme(context.config, quantisation_of(context))
        shape = read_shape(self._facts)
        if self._fp8 is not None and shape.delta_net is not None:
            raise no_linear_attention(shape.model_type)
        self._bucket_bytes = bucket_bytes(context, shape, with_scales=self._fp8 is not None)
        self._sender = BucketSender(Path(slot.ledger_dir) / f"update-{slot.index}.bin", self._bucket_bytes)
        # An engine in a process of its own reads GPU memory of ours; the embedded one reads a file.
        self._uses_ipc = self._is_cuda and context.config.rollout.backend != "embedded"
        self._gpu: GpuMemory | None = None
        self.groups: ProcessGroups | None = None
        self._regions: dict[Region, StorageRegion] = {}
        self._memory = TrainerMemory(self._regions)
        self._reference: Reference | None = None
        self._where: dict[str, TensorSlice] = {}
        self._resident: dict[str, Tensor] = {}

    def region_bytes(self) -> Mapping[Region, int]:
        """Before `init` what the plan says, after it what is there."""
        sizes: dict[Region, int] = {r: region.nbytes for r, region in self._regions.items()}
        if not sizes:
            planned = self._planned()
            sizes = {"params": planned["params"], "optimizer": planned["optimizer"], "grads": planned["grads"]}
        return sizes | {"update_bucket": self._bucket_bytes}

    # -- life --------------------------------------------------------------------------------------

    def init(self, rank: RankInfo) -> None:
        if self._is_cuda:
            require_fp8_fits(self._fp8)
            self._gpu = GpuMemory(self.context.gpus_of(self.slot))
        if self.context.config.handoff.offload_train_process_groups and self.context.options.offload_train:
            self.groups = ProcessGroups(self.slot.device, self._gpu.used if self._gpu is not None else None)
        with self.groups.adopting() if self.groups is not None else nullcontext():
            start_processes(self.context.config, rank, self.slot.device)
            self.built: Built = build(self.context, self.slot.device)
        self._find_regions()
        self._memory.backup = self._backup()
        reference: Reference | Adapters | None = None
        if self.context.config.algorithm.kl_loss_coef > 0:
            reference = self.built.adapters or self._host_reference()
        self.steps = Steps(self.context, self.built, self.slot.device, reference)

    def _host_reference(self) -> Reference:
        params = self._regions["params"]
        size = params.end_of(parameter_tensors(self.built.ddp))
        self._reference = Reference(self._host_pool, params, size, is_pinned=self.slot.device != "cpu")
        return self._reference

    def _find_regions(self) -> None:
        built = self.built
        self._regions = regions_of(built.models, built.optimizer, self._device_pool, self._owner, self.slot.device)
        self._memory = TrainerMemory(self._regions)
        params, model = self._regions["params"], built.ddp.module
        self._where = {n: params.locate(n, p.data) for n, p in model.named_parameters()}
        self._resident = {n: p.data for n, p in model.named_parameters()} | dict(model.named_buffers())

    def _backup(self) -> Backup | None:
        options = self.context.options
        if not options.offload_train:
            return None
        if self._is_cuda and self.context.config.handoff.trainer_offload_backend == "torch_memory_saver":
            return SavedState(self._regions, is_retained=options.buffers == "retained")
        sizes: dict[Region, int] = {r: self._regions[r].nbytes for r in BACKED_UP}

        def arena_bytes() -> int:
            return max(sum(sizes.values()), self._mirror_bytes())

        copies = make_host_copies(options, self.slot, self._host_pool, self._owner, sizes, arena_bytes)
        return CopiedState(self._regions, copies)

    def _mirror_bytes(self) -> int:
        """What the arena must hold of the slot's engine: its weights as planned, and a bit."""
        if not self.context.options.has_mirror:
            return 0
        if self.context.config.rollout.backend == "embedded":
            raise ConfigError(
                "the megatron trainer shares no arena with embedded engines: these size it for an embedded trainer",
                ["handoff.offload_train_buffers = shared", "rollout.backend = embedded"],
                "use --offload-train-buffers fresh",
            )
        return self._planned()["weights"] * 11 // 10

    def _planned(self) -> Mapping[Region, int]:
        """Of one GPU, by the plan."""
        return sizes_of(self.context.config, read_architecture(self._facts, "model.architecture")).gpu

    # -- handoff -----------------------------------------------------------------------------------

    def offload(self) -> None:
        if not self._memory.can_offload:
            return
        if self.groups is not None:
            self.groups.tear_down()
        self._memory.offload()
        self._return_to_driver()

    def onload(self) -> None:
        if not self._memory.can_onload:
            return
        self._memory.onload()
        if self.groups is not None:
            self.groups.make_anew()

    def clear_memory(self) -> None:
        if self.groups is not None:
            self.groups.tear_down()
        self._memory.free_grads()
        self._return_to_driver()

    def _return_to_driver(self) -> None:
        """The slot's engine is another process: the caching allocator must hand freed memory over."""
        drop_tables()
        if self._is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def memory(self) -> MemoryReading:
        seconds, nbytes = self.groups.take_figures() if self.groups is not None else (None, None)
        return replace(self._reading(), communicator_seconds=seconds, communicator_bytes=nbytes)

    def _reading(self) -> MemoryReading:
        if self._gpu is not None:
            reading = self._gpu.reading(self._memory.take_moved(), [os.getpid()])
            # What the saver pins is in nobody's books.
            is_booked = not isinstance(self._memory.backup, SavedState)
            return replace(reading, pinned_bytes=self._host_pool.used()) if is_booked else reading
        return read_memory(self._device_pool, self._host_pool, self._memory.take_moved())

    def shutdown(self) -> None:
        self._memory.shutdown()
        if self._reference is not None:
            self._reference.shutdown()
        self._sender.close()
        if self._gpu is not None:
            self._gpu.stop()
        if self.groups is not None:
            self.groups.close()
        drop_tables()
        stop_processes()

    # -- training ----------------------------------------------------------------------------------

    def train(self, batch: TrainBatch) -> TrainMetrics:
        """Train on one rollout.

        Every rank is given all samples; data-parallel ranks take their share of each optimizer step's, and
        context-parallel ranks of each sample.
        """
        if self._memory.is_resident and not self._regions["grads"].is_resident:
            # Released by `clear_memory` without an offload after it; their content is made anew in each step.
            self._regions["grads"].allocate()
            if self.groups is not None:
                self.groups.make_anew()
        self._memory.require(*BACKED_UP, "grads", to="train")
        share = share_here(self.context.config, self.built.configs, self.slot.device)
        work = make_work(batch, self.context.config, self.slot.device, share)
        figures = self.steps.train(work, batch.rollout_id)
        if self._is_cuda and self._memory.backup is not None:
            # What is left of the activations is nobody's: the handoff would return it in a moment.
            del work
            self._return_to_driver()
        return TrainMetrics(figures)

    # -- weights -----------------------------------------------------------------------------------

    def update_weights(self, version: int, sink: WeightSink) -> int:
        if self._uses_ipc:
            return self._update_over_ipc(version, sink)
        named = self.built.placement.gather(self._local(self._gather_device()), self._gather_device())
        if dist.get_rank() != 0:
            for _ in named:
                raise AssertionError("only rank 0 gathers")
            return 0
        sink.begin_weight_update(version)
        self._device_pool.charge(self._owner, "update_bucket", self._bucket_bytes)
        try:
            sent = self._sender.send(as_engine_wants(named, self.context, self.built.shape, self._fp8), sink)
            sink.end_weight_update(version)
        finally:
            self._device_pool.release(self._owner, "update_bucket")
        return sent

    def _update_over_ipc(self, version: int, sink: WeightSink) -> int:
        is_first = dist.get_rank() == 0
        if is_first:
            sink.begin_weight_update(version)
        # The engines' weights are back only now: no rank may fill its GPU before.
        dist.barrier()
        named = self.built.placement.spread(self._local(self.slot.device), self.slot.device)
        wanted = as_engine_wants(named, self.context, self.built.shape, self._fp8, self.slot.device)
        limit = min(self.context.config.handoff.update_weight_buffer_size, self._bucket_bytes)
        try:
            sent = IpcSender(self.slot.device, limit).send(wanted, sink if is_first else None)
        except torch.OutOfMemoryError as err:
            raise self._no_room_for_buckets(limit, err) from err
        if is_first:
            sink.end_weight_update(version)
        return sent if is_first else 0

    def _no_room_for_buckets(self, limit: int, err: Exception) -> RunError:
        first_line = str(err).partition("\n")[0]
        fix = f"a smaller --update-weight-buffer-size than {gib(limit)}"
        if self._memory.is_resident and self._memory.backup is not None:
            fix += ", or --update-weights-from host, which offloads the trainer first"
        where = (
            f"handoff.update_weight_buffer_size = {limit}",
            f"handoff.update_weights_from = {self.context.options.update_from}",
        )
        return RunError(f"{self._owner}: the GPU has no room for an update's buckets: {first_line}", where, fix)

    def _local(self, device: str) -> Callable[[str], Tensor]:
        """This rank's tensor of a name: the parameter, or its host copy where it is offloaded.

        Args:
            device: where adapters are merged, if there are any.
        """
        adapters = self.built.adapters
        return adapters.merged(self._plain(), device) if adapters else self._plain()

    def _plain(self) -> Callable[[str], Tensor]:
        if self._memory.is_resident:
            return self._resident.__getitem__
        read = self._memory.reader("params")
        return lambda name: read(self._where[name]) if name in self._where else self._resident[name]

    def _gather_device(self) -> str:
        """A single rank needs no way over the device: an update from the host copy stays on the host."""
        return self.slot.device if dist.get_world_size() > 1 else "cpu"

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        self._memory.require(*BACKED_UP, to="save")
        state = state_pieces(self.built, with_copies=False)
        checkpoint.save_state(Path(directory), state, self._facts_of_state(), self.steps.num_steps)
        named = self.built.placement.gather(self._local(self._gather_device()), self._gather_device())
        checkpoint.export(named, self.context, Path(directory) / "hf")

    def load(self, directory: str) -> None:
        self._memory.require(*BACKED_UP, to="load")
        state = state_pieces(self.built, with_copies=True)
        self.steps.num_steps = checkpoint.load_state(Path(directory), state, self._facts_of_state())
        set_num_steps(self.built.optimizer, self.steps.num_steps)

    def _facts_of_state(self) -> dict[str, str]:
        return checkpoint.facts_of(self.context.config, self.built.shape)
