"""What an engine has on one node: a process with the ranks of its GPUs there, the files of its model, its books."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rllaunch.backends.base import LaunchContext, MemoryReading, Slot
from rllaunch.backends.embedded.host_copies import lies_in_arena
from rllaunch.backends.embedded.model import quantisation_of
from rllaunch.backends.embedded.pool import Pool, open_pools
from rllaunch.backends.embedded.sizes import read_memory
from rllaunch.backends.node_memory import GpuMemory, recorded_pss
from rllaunch.backends.sglang import guest
from rllaunch.backends.sglang.checkpoint import write_checkpoint
from rllaunch.backends.sglang.options import MAX_SLOTS_APART, Span, decided, find_ports, given, preferred
from rllaunch.backends.sglang.process import EngineProcess
from rllaunch.errors import ConfigError, RunError


class NodePart:
    """
    Args:
        slot: the first of the engine's on this node.
    Raises:
        ConfigError: the launch asks for what these engines do not do.
    """

    host_module = "rllaunch.backends.sglang.host"

    def __init__(self, context: LaunchContext, slot: Slot) -> None:
        config = context.config
        if config.sends_adapters:
            raise ConfigError(
                "the sglang engine takes whole weights, not LoRA adapters",
                f"algorithm.lora_rank = {config.algorithm.lora_rank}",
                "--lora-rank 0, or --trainer-backend megatron, which merges them",
            )
        self.context = context
        self.slot = slot
        self.engine_slots = slots_of_engine(context, slot)
        self.slots = [s for s in self.engine_slots if s.node == slot.node]
        first = self.engine_slots[0]
        self.num_nodes = len({s.node for s in self.engine_slots})
        self.node_rank = slot.node - first.node
        self.name = f"engine-{first.index}" + (f"-node-{self.node_rank}" if self.node_rank else "")
        self._process: EngineProcess | None = None
        self._is_abandoned = False
        self._directory: Path | None = None
        self._quantisation: Mapping[str, Any] | None = None
        self._gpus: GpuMemory | None = None
        self._pools: tuple[Pool, Pool] | None = None
        self._ports = range(0)

    # -- life ----------------------------------------------------------------------------------------

    def _find_ports(self) -> range:
        if not self._ports:
            index, count = self.slot.index, self.context.num_slots
            if count > MAX_SLOTS_APART:
                # Engines of different nodes may have the same ports.
                count = self.context.config.gpus_per_node
                index %= count
            self._ports = find_ports(index, count, self.slot.ledger_dir)
        return self._ports

    def _model_path(self) -> str:
        """Of the checkpoint; a model without one has the trainer's random weights, in a directory that ends with us."""
        self._quantisation = quantisation_of(self.context)
        if checkpoint := self.context.config.model.hf_checkpoint:
            return checkpoint
        self._directory = Path(tempfile.mkdtemp(prefix="rllaunch-model-"))
        write_checkpoint(self.context, self._directory)
        return str(self._directory)

    def _drop_weight_files(self) -> None:
        """The engine has them in memory; what describes the model stays, SGLang may read it again."""
        for file in self._directory.glob("*.safetensors") if self._directory else ():
            file.unlink()

    def _start_process(self, call: str, path: str, meeting_point: str) -> Any:
        """The answer of SGLang's process here to `call`, `start` or `follow`."""
        context = self.context
        span = Span(self.num_nodes, self.node_rank, meeting_point)
        arguments = decided(context, self.engine_slots[0], path, self._find_ports(), span, self._quantisation)
        self._process = EngineProcess(self.name, self._environment(), self.host_module)
        if self._is_abandoned:
            self._process.kill()
        return self._process.call(call, arguments, preferred(context, self.slot), given(context))

    def _environment(self) -> dict[str, str]:
        # Without it SGLang's part on a further node serves its health in the place of an answer, for ever.
        parts = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"} if self.node_rank else {}
        if self.slot.device == "cpu":
            return parts | {"OMP_NUM_THREADS": str(self.context.config.run.torch_num_threads)}
        shown = parts | ({"CUDA_VISIBLE_DEVICES": ",".join(self._gpu_ids)} if all(self._gpu_ids) else {})
        if self._shares_arena:
            return shown | guest.environment_of(self.engine_slots)
        keeps = self.context.options.has_mirror and self.context.options.buffers == "retained"
        # torch_memory_saver then pins the mirror's pages once and not at every release.
        return shown | {"TMS_RETAIN_CPU_BACKUP": str(int(keeps))}

    @property
    def _gpu_ids(self) -> tuple[str, ...]:
        return self.context.gpus_of(self.slot, len(self.slots))

    def check_health(self) -> bool:
        """Whether its process lives; a request that hangs is ended by SGLang's own watchdog."""
        return self._process is not None and self._process.is_alive()

    def abandon(self) -> None:
        """End what runs here at once, or as soon as it runs. A call under way fails."""
        self._is_abandoned = True
        if self._process is not None:
            self._process.kill()

    def _end(self) -> None:
        # First, because it takes SGLang longer to end than an actor may be given.
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
        if self._process is not None:
            self._process.shutdown()
        if self._gpus is not None:
            self._gpus.stop()

    def _call(self, name: str, *arguments: Any) -> Any:
        assert self._process is not None, "an engine that is up has a process"
        return self._process.call(name, *arguments)

    # -- memory --------------------------------------------------------------------------------------

    def _open_books(self) -> None:
        if self.slot.device == "cpu":
            self._pools = open_pools(self.context, self.slot)
        else:
            self._gpus = GpuMemory(self._gpu_ids)

    def memory(self) -> MemoryReading:
        pids = self._process.pids if self._process is not None else []
        return replace(self._reading(pids), pss_bytes=recorded_pss(self.context.config, pids))

    def _reading(self, pids: Sequence[int]) -> MemoryReading:
        if self._gpus is not None:
            return self._gpus.reading(pids=pids)
        assert self._pools is not None, "memory is read after the start"
        return read_memory(*self._pools, moved_bytes=0)

    @property
    def _shares_arena(self) -> bool:
        options = self.context.options
        return self.slot.device != "cpu" and options.has_mirror and options.buffers == "shared"

    def _require_mirror(self) -> None:
        """A guest that SGLang did not take in would leave weights released and nowhere kept."""
        for slot in self.slots if self._shares_arena else ():
            if not lies_in_arena(slot, guest.owner_of(slot), "weights"):
                raise RunError(
                    f"{self.name}: SGLang released its weights and left no copy in the arena of slot {slot.index}",
                    "handoff.offload_train_buffers = shared, handoff.engine_weights = mirror",
                    "install rllaunch with pip where SGLang runs, so that SGLang finds its plugin; or use "
                    "--offload-train-buffers fresh",
                )


def slots_of_engine(context: LaunchContext, slot: Slot) -> Sequence[Slot]:
    """All slots of the engine that has this one, on all its nodes."""
    size = context.config.rollout.rollout_num_gpus_per_engine
    per_node = context.config.gpus_per_node
    first = slot.index - slot.index % size
    node_of = {i: slot.node + i // per_node - slot.index // per_node for i in range(first, first + size)}
    return [replace(slot, index=index, node=node) for index, node in node_of.items()]
