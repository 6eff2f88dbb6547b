"""The megatron trainer: one rank of a model that Megatron-core builds, shares out and optimizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from rllaunch.backends.block_fp8 import engine_scheme
from rllaunch.backends.embedded.host_copies import Arena, ArenaCopies, HostCopies, OwnCopies
from rllaunch.backends.embedded.layout import dtype_of, nbytes_of
from rllaunch.backends.embedded.model import model_config, quantisation_of
from rllaunch.backends.embedded.pool import open_pools
from rllaunch.backends.embedded.sizes import read_memory
from rllaunch.backends.megatron import checkpoint
from rllaunch.backends.megatron.attention import drop_tables
from rllaunch.backends.megatron.batch import make_work
from rllaunch.backends.megatron.build import Built, build, set_num_steps, start_processes, stop_processes
from rllaunch.backends.megatron.ipc import IpcSender
from rllaunch.backends.megatron.lora import Adapters
from rllaunch.backends.megatron.passes import share_here
from rllaunch.backends.megatron.pieces import Piece, pieces
from rllaunch.backends.megatron.process_groups import ProcessGroups
from rllaunch.backends.megatron.regions import (
    Reference,
    StorageRegion,
    gradient_tensors,
    optimizer_tensors,
    parameter_tensors,
)
from rllaunch.backends.megatron.saver import SavedState
from rllaunch.backends.megatron.shape import read_shape
from rllaunch.backends.megatron.steps import Steps
from rllaunch.backends.megatron.update import BucketSender, as_engine_wants, bucket_bytes, require_fp8_fits
from rllaunch.backends.node_memory import GpuMemory
from rllaunch.errors import ConfigError, RunError
from rllaunch.plan.architecture import read_architecture
from rllaunch.plan.handoff import BACKED_UP, Region
from rllaunch.plan.sizes import sizes_of


def _view(host_bytes: Tensor, piece: TensorSlice) -> Tensor:
    flat = host_bytes[piece.offset : piece.offset + nbytes_of(piece)]
    typed: Tensor = flat.view(dtype_of(piece)).view(piece.shape)
    return typed


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
        self._bucket_bytes = bucket_bytes(context, shape, with_scales=self._fp8 is not None)
        self._sender = BucketSender(Path(slot.ledger_dir) / f"update-{slot.index}.bin", self._bucket_bytes)
        # An engine in a process of its own reads GPU memory of ours; the embedded one reads a file.
        self._uses_ipc = self._is_cuda and context.config.rollout.backend != "embedded"
        self._gpu: GpuMemory | None = None
        self.groups: ProcessGroups | None = None
        self._regions: dict[Region, StorageRegion] = {}
        self._copies: HostCopies | None = None
        self._saved: SavedState | None = None
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
        if self._is_cuda and self.context.config.handoff.trainer_offload_backend == "torch_memory_saver":
            self._saved = self._saved_state()
        else:
            self._copies = self._host_copies()
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
        # The policy's before a critic's, in every region: the reference is of the first part.
        params = self._region("params", (t for m in built.models for t in parameter_tensors(m)))
        own = [t for t in optimizer_tensors(built.optimizer, self.slot.device) if t not in params]
        self._regions = {
            "params": params,
            "optimizer": self._region("optimizer", own),
            "grads": self._region("grads", (t for m in built.models for t in gradient_tensors(m))),
        }
        model = built.ddp.module
        self._where = {n: params.locate(n, p.data) for n, p in model.named_parameters()}
        self._resident = {n: p.data for n, p in model.named_parameters()} | dict(model.named_buffers())

    def _region(self, region: Region, tensors: Iterable[Tensor]) -> StorageRegion:
        return StorageRegion(self._device_pool, self._owner, region, tensors)

    def _saved_state(self) -> SavedState | None:
        options = self.context.options
        if not options.offload_train:
            return None
        return SavedState([self._regions[r] for r in BACKED_UP], is_retained=options.buffers == "retained")

    def _host_copies(self) -> HostCopies | None:
        options = self.context.options
        if not options.offload_train:
            return None
        sizes: dict[Region, int] = {r: self._regions[r].nbytes for r in BACKED_UP}
        is_pinned = self.slot.device != "cpu"
        if options.buffers == "shared":
            if options.has_mirror and self.context.config.rollout.backend == "embedded":
                raise ConfigError(
                    "the megatron trainer shares no arena with embedded engines: these size it for an embedded trainer",
                    ["handoff.offload_train_buffers = shared", "rollout.backend = embedded"],
                    "use --offload-train-buffers fresh",
                )
            nbytes = max(sum(sizes.values()), self._mirror_bytes())
            arena = Arena(self.slot, self._host_pool, nbytes, is_pinned=is_pinned)
            return ArenaCopies(arena, self._owner, sizes)
        is_retained = options.buffers == "retained"
        return OwnCopies(self._host_pool, self._owner, sizes, is_retained=is_retained, is_pinned=is_pinned)

    def _mirror_bytes(self) -> int:
        """What the arena must hold of the slot's engine: its weights as planned, and a bit."""
        if not self.context.options.has_mirror:
            return 0
        return self._planned()["weights"] * 11 // 10

    def _planned(self) -> Mapping[Region, int]:
        """Of one GPU, by the plan."""
        return sizes_of(self.context.config, read_architecture(self._facts, "model.architecture")).gpu

    # -- handoff -----------------------------------------------------------------------------------

    def offload(self) -> None:
        if not self._offloads or not self._regions["params"].is_resident:
            return
        if self.groups is not None:
            self.groups.tear_down()
        if self._regions["grads"].is_resident:
            self._regions["grads"].free()
        if self._saved is not None:
            self._saved.pause()
        elif self._copies is not None:
            for region in BACKED_UP:
                self._copies.store(region, self._regions[region].pieces())
                self._regions[region].free()
        self._return_to_driver()

    def onload(self) -> None:
        if not self._offloads or self._regions["params"].is_resident:
            return
        if self._saved is not None:
            self._saved.resume()
        elif self._copies is not None:
            for region in BACKED_UP:
                self._regions[region].allocate()
                self._copies.restore(region, self._regions[region].pieces())
        if not self._regions["grads"].is_resident:
            self._regions["grads"].allocate()
        if self.groups is not None:
            self.groups.make_anew()

    @property
    def _offloads(self) -> bool:
        return self._saved is not None or self._copies is not None

    def clear_memory(self) -> None:
        if self.groups is not None:
            self.groups.tear_down()
        if self._regions["grads"].is_resident:
            self._regions["grads"].free()
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
            holder = self._saved or self._copies
            reading = self._gpu.reading(holder.take_moved() if holder is not None else 0, [os.getpid()])
            return reading if self._saved is not None else replace(reading, pinned_bytes=self._host_pool.used())
        return read_memory(self._device_pool, self._host_pool, self._copies)

    def shutdown(self) -> None:
        if self._copies is not None:
            self._copies.shutdown()
        for region in self._regions.values():
            if region.is_resident:
                region.free()
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
        if not self._regions["grads"].is_resident and self._regions["params"].is_resident:
            # Released by `clear_memory` without an offload after it; their content is made anew in each step.
            self._regions["grads"].allocate()
            if self.groups is not None:
                self.groups.make_anew()
        for region in ("params", "optimizer", "grads"):
            self._require(region, "train")
        share = share_here(self.context.config, self.built.configs, self.slot.device)
        work = make_work(batch, self.context.config, self.slot.device, share)
        figures = self.steps.train(work, batch.rollout_id)
        if self._is_cuda and self._offloads:
            # What is left of the activations is nobody's: the handoff would return it in a moment.
            del work
            self._return_to_driver()
        return TrainMetrics(figures)

    def _require(self, region: Region, what: str) -> None:
        if not self._regions[region].is_resident:
            raise RunError(f"{self._owner}: {what} while {region} is offloaded", "", "onload first")

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
        sent = IpcSender(self.slot.device, limit).send(wanted, sink if is_first else None)
        if is_first:
            sink.end_weight_update(version)
        return sent if is_first else 0

    def _local(self, device: str) -> Callable[[str], Tensor]:
        """This rank's tensor of a name: the parameter, or its host copy where it is offloaded.

        Args:
            device: where adapters are merged, if there are any.
        """
        adapters = self.built.adapters
        return adapters.merged(self._plain(), device) if adapters else self._plain()

    def _plain(self) -> Callable[[str], Tensor]:
        if self._regions["params"].is_resident:
            return self._resident.__getitem__
        if (saved := self._saved) is not None:
            return lambda name: saved.host_copy(self._resident[name]) if name in self._where else self._resident[name]
        assert self._copies is not None, "offloaded parameters have a host copy"
        host_bytes = self._copies.read("params")

        def from_host(name: str) -> Tensor:
            if name not in self._where:
                return self._resident[name]
            piece = self._where[name]
            return _view(host_bytes, piece)

        return from_host

    def _gather_device(self) -> str:
        """A single rank needs no way over the device: an update from the host copy stays on the host."""
        return self.slot.device if dist.get_world_size() > 1 else "cpu"

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self, directory: str) -> None:
        for region in BACKED_UP:
            self._require(region, "save")
        state = self._pieces(with_copies=False)
        checkpoint.save_state(Path(directory), state, self._facts_of_state(), self.steps.num_steps)
        named = self.built.placement.gather(self._local(self._gather_device()), self._gather_device())
        checkpoint.export(named, self.context, Path(directory) / "hf")

    def load(self, directory: str) -> None:
        for region in BACKED_UP:
            self._require(region, "load")
        state = self._pieces(with_copies=True)
        self.steps.num_steps = checkpoint.load_state(Path(directory), state, self._facts_of_state())
        set_num_steps(self.built.optimizer, self.steps.num_steps)

    def _pieces(self, *, with_copies: bool) -> Iterator[Piece]:
        built = self.built
        yield from pieces("policy", built.placement, built.ddp.module, built.optimizer, with_copies=with_copies)
        if (placement := built.critic_placement) is not None:
            yield from pieces("critic", placement, built.critic.module, built.optimizer, with_copies=with_copies)

    def _facts_of_state(self) -> dict[str, str]:
        config = self.context.config
        lora = config.algorithm
        on = f"rank {lora.lora_rank}, alpha {lora.lora_alpha:g}, on {', '.join(lora.lora_target_modules)}"
        return {
            "model": repr(self.built.shape),
            "precision": config.trainer.precision,
            "adapters": on if config.has_lora else "none",
            "critic": str(config.has_critic),
        }
