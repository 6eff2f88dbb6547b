"""`python benchmarks/handoff_gpu.py`: the handoff of Megatron-core and SGLang on one GPU, every way there is.

    python benchmarks/handoff_gpu.py --size 0.6b [--size 2.6b …] [--only TEXT] [--json FILE] [--sglang KEY=VALUE …]

{cpu, gpu} order × {mirror, discard} × {arena retained, fresh, shared; torch_memory_saver fresh, retained}, gpu order
with the update before the trainer's offload ("from gpu") and after it ("from host"): the adapters of the loop, one step
of its schedule after the other, without Ray between them. Engines of all kinds and a trainer live in processes of their
own; who is not measured sleeps. Weights are random and equal in all cells, so after the update of every cell all
engines must have the same checksum.

Seconds are of the second cycle where something is retained (the first pins its pages), of the only one otherwise.
Memory is what comes on top of the sleeping processes, beside the same difference in the plan.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rllaunch.backends.base import Bucket, LaunchContext, RankInfo, Slot
from rllaunch.backends.node_memory import GpuMemory, gpu_of_process, node_bytes
from rllaunch.plan.architecture import read_architecture
from rllaunch.plan.forecast import Limits, forecast
from rllaunch.plan.handoff import BACKED_UP, ENGINE_REGIONS, HandoffOptions, Region, build_schedule
from rllaunch.plan.sizes import sizes_of
from rllaunch.resolve.schema import LaunchConfig

GIB = 2**30
QWEN3 = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "attention_bias": False,
}
_NAMES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SIZES: dict[str, dict[str, Any]] = {
    name: QWEN3 | dict(zip(_NAMES, values, strict=True))
    for name, values in {
        "tiny": (256, 512, 2, 8, 2048, False),
        "0.6b": (1024, 3072, 28, 16, 151936, True),
        "2.6b": (2560, 9728, 24, 32, 32000, False),
        "4b": (2560, 9728, 36, 32, 151936, True),
        "5b": (4096, 12288, 20, 32, 151936, False),
    }.items()
}
NUM_ENGINES = 8


@dataclass(frozen=True)
class Cell:
    order: str
    weights: str
    backend: str
    buffers: str
    update_from: str

    @property
    def options(self) -> HandoffOptions:
        ways = {"engine_weights": self.weights, "buffers": self.buffers, "update_from": self.update_from}
        return HandoffOptions(self.order, **ways)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        return f"{self.order} {self.weights} {self.backend} {self.buffers} from {self.update_from}"

    @property
    def engine(self) -> str:
        return "discard" if self.weights == "discard" else f"mirror {self.buffers}"


def cells() -> list[Cell]:
    """In an order that starts each trainer once; shared last, because an engine keeps its mapping of the arena."""
    found = []
    for backend, held in (("arena", ("fresh", "retained", "shared")), ("torch_memory_saver", ("fresh", "retained"))):
        for buffers in held:
            for weights in ("discard", "mirror"):
                for order, source in (("cpu", "host"), ("gpu", "host"), ("gpu", "gpu")):
                    cell = Cell(order, weights, backend, buffers, source)
                    if not cell.options.illegal():
                        found.append(cell)
    return found


# -- the trainer, in a process of its own ------------------------------------------------------------------------------


class ParentSink:
    """The engines are the parent's: what the trainer tells them goes there and back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def _ask(self, *words: Any) -> None:
        self._connection.send(("sink", *words))
        if (error := self._connection.recv()) is not None:
            raise RuntimeError(error)

    def begin_weight_update(self, version: int) -> None:
        self._ask("begin_weight_update", version)

    def load_bucket(self, bucket: Any) -> None:
        self._ask("load_bucket", bucket)

    def end_weight_update(self, version: int) -> None:
        self._ask("end_weight_update", version)


def trainer_process(fd: int) -> None:
    connection = Connection(fd)
    context, slot = pickle.loads(connection.recv_bytes())
    import torch

    from rllaunch.backends.megatron import build, trainer

    torch.manual_seed(0)
    build.starting_weights = _random_weights(context)  # type: ignore[assignment]
    backend = trainer.MegatronTrainer(context, slot)
    while True:
        name, *arguments = connection.recv()
        answer: Any = None
        if name == "init":
            backend.init(RankInfo(0, 1, "", 0))
            backend.train(_batch(context))
            answer = {region: backend.region_bytes()[region] for region in BACKED_UP}
        elif name == "hold":
            _hold(backend, *arguments)
        elif name == "update_weights":
            answer = backend.update_weights(arguments[0], ParentSink(connection))
        elif name == "ceiling":
            answer = _ceiling()
        elif name == "shutdown":
            backend.shutdown()
        else:
            getattr(backend, name)()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        connection.send(("done", answer))
        if name == "shutdown":
            return


def _random_weights(context: LaunchContext) -> Any:
    def starting(_context: Any, shape: Any) -> Any:
        import torch

        from rllaunch.backends.embedded.model import build_model
        from rllaunch.backends.megatron.weights import unstack_experts

        model = build_model(context, device="meta")
        shapes = {n: t.shape for n, t in unstack_experts(model.state_dict().items(), shape)}

        def tensor_of(name: str) -> Any:
            made = torch.empty(shapes[name], dtype=torch.bfloat16, device="cuda")
            return made.fill_(1.0) if "norm" in name else made.normal_(std=0.02)

        return tensor_of

    return starting


def _batch(context: LaunchContext) -> Any:
    import numpy as np

    from rllaunch.backends.base import TrainBatch

    config = context.config
    B, P, L = config.num_samples, context.max_prompt_tokens, config.rollout.rollout_max_response_len
    rng = np.random.default_rng(0)
    ids = rng.integers(5, 1000, (B, P + L))
    logp, mask = np.full((B, L), -7.0, np.float32), np.ones((B, L), np.float32)
    reward = rng.random(B).astype(np.float32)
    return TrainBatch(0, ids[:, :P], np.full(B, P), ids[:, P:], logp, mask, reward)


def _hold(backend: Any, options: HandoffOptions) -> None:
    """Hold host copies another way from now on; the trainer is awake."""
    from rllaunch.backends.megatron.saver import SavedState

    backend.context = replace(backend.context, options=options)
    memory = backend._memory
    if isinstance(memory.backup, SavedState):
        memory.backup._saver.retain_cpu_backup = options.buffers == "retained"
        return
    memory.backup.shutdown()
    memory.backup = backend._backup()


def _ceiling() -> tuple[float, float]:
    """Bytes a second of one pinned copy of 4 GiB: to the host, to the GPU."""
    import torch

    from rllaunch.backends.measure import measure_gpu

    rates = measure_gpu(0, 4 * GIB)
    torch.cuda.empty_cache()
    return rates["to_host"], rates["to_gpu"]


class Trainer:
    """The trainer's process, seen from here."""

    def __init__(self, context: LaunchContext, slot: Slot) -> None:
        from rllaunch.backends.megatron.saver import environment_of

        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--trainer", str(theirs.fileno())],
                env={**os.environ, **environment_of(context.config)},
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())
        self._connection.send_bytes(pickle.dumps((context, slot)))
        self.engine: Any = None

    def call(self, *words: Any) -> Any:
        self._connection.send(words)
        while True:
            kind, *answer = self._connection.recv()
            if kind == "done":
                return answer[0]
            error = None
            try:
                self._tell(*answer)
            except Exception as err:
                error = f"{type(err).__name__}: {err}"
            self._connection.send(error)

    def _tell(self, name: str, argument: Any) -> None:
        if isinstance(argument, Bucket):
            # Engines of any number are on the trainer's one GPU.
            argument = replace(argument, handle=argument.handle * NUM_ENGINES)
        getattr(self.engine, name)(argument)

    def stop(self) -> None:
        self.call("shutdown")
        self._process.wait(60)


# -- one size ------------------------------------------------------------------------------------------------------


class Bench:
    def __init__(self, size: str, options: argparse.Namespace) -> None:
        self.size, self.asked = size, options
        self.directory = Path(tempfile.mkdtemp(prefix="handoff-", dir="/dev/shm"))
        self.gpu = GpuMemory([gpu_of_process()])
        self.engines: dict[str, Any] = {}
        self.checksums: set[str] = set()
        self.rows: list[dict[str, Any]] = []
        self.mirror_at_rest: dict[str, int] = {}
        self.host_at_rest = 0
        self.wanted = [c for c in cells() if not options.only or any(text in c.name for text in options.only)]

    def config(self, backend: str) -> LaunchConfig:
        sglang = {name: as_json(value) for name, value in (item.split("=", 1) for item in self.asked.sglang)}
        return LaunchConfig.model_validate(
            {
                "model": {"architecture": SIZES[self.size]},
                "hardware": {
                    "accelerator": "cuda",
                    "gpus_per_node": 1,
                    "gpu_memory_bytes": 150754820096,
                    "host_memory_bytes": 135148564480,
                    "host_link_bytes_per_second": 63e9,
                },
                "cluster": {"num_gpus_per_node": 1},
                "handoff": {
                    "trainer_offload_backend": backend,
                    "update_weight_buffer_size": int(self.asked.bucket_gib * GIB),
                },
                "trainer": {"micro_batch_size": 4, "recompute_granularity": "full"},
                "rollout": {"rollout_batch_size": 4, "n_samples_per_prompt": 2, "rollout_max_response_len": 192},
                "sglang": {"mem_fraction_static": 0.5, "max_total_tokens": 65536, "load_format": "dummy", **sglang},
                "run": {"torch_num_threads": 8},
            }
        )

    def context(self, cell: Cell) -> LaunchContext:
        return LaunchContext(self.config(cell.backend), cell.options, "", 64, 1)

    def run(self) -> None:
        try:
            self.run_cells()
        finally:
            shutil.rmtree(self.directory, ignore_errors=True)

    def run_cells(self) -> None:
        slot = Slot(0, 0, "cuda", str(self.directory / "ledgers"))
        groups = [list(group) for _, group in groupby(self.wanted, key=lambda cell: cell.backend)]
        # Their modules are imported while the engines start.
        trainers = [Trainer(self.context(group[0]), slot) for group in groups]
        self.start_engines(slot)
        for its, trainer in zip(groups, trainers, strict=True):
            self.backup_bytes = sum(trainer.call("init").values())
            self.ceiling = trainer.call("ceiling")
            held = ""
            for cell in its:
                if cell.buffers != held:
                    trainer.call("hold", cell.options)
                    held, self.host_at_rest = cell.buffers, node_bytes()
                self.measure(cell, trainer)
            trainer.stop()
        for engine in self.engines.values():
            engine.shutdown()
        self.gpu.stop()

    def start_engines(self, slot: Slot) -> None:
        from rllaunch.backends.sglang import engine as module
        from rllaunch.backends.sglang import part

        def config_only(context: LaunchContext, directory: Path) -> None:
            from rllaunch.backends.embedded.model import model_config

            config = model_config(context)
            config.architectures, config.dtype = ["Qwen3ForCausalLM"], "bfloat16"
            config.save_pretrained(directory)

        part.write_checkpoint = config_only
        kinds = {cell.engine: cell for cell in sorted(self.wanted, key=lambda cell: cell.engine != "mirror shared")}
        started = time.perf_counter()
        for index, (kind, cell) in enumerate(kinds.items()):
            # Numbers keep their ports apart; all are on the one GPU, and the first mirrors in the arena of slot 0.
            context = replace(self.context(cell), num_slots=NUM_ENGINES, gpus=(gpu_of_process(),) * NUM_ENGINES)
            self.engines[kind] = module.SglangEngine(context, replace(slot, index=index))
        module.ids_of(context)  # transformers is imported here, before several threads want to
        with ThreadPoolExecutor(len(kinds)) as threads:
            list(threads.map(lambda engine: engine.start(), self.engines.values()))
        say(f"{self.size}: {len(kinds)} engines up in {time.perf_counter() - started:.0f} s")
        for kind, engine in self.engines.items():
            before = node_bytes()
            engine.release_memory_occupation(at_rest(kind))
            self.mirror_at_rest[kind] = node_bytes() - before if kind in ("mirror fresh", "mirror retained") else 0

    def measure(self, cell: Cell, trainer: Trainer) -> None:
        engine = trainer.engine = self.engines[cell.engine]
        schedule = build_schedule(cell.options)
        steps = [s.name for s in schedule.cycle if s.name not in ("generate", "train", "save", "eval")]
        host_before = self.host_at_rest - self.mirror_at_rest[cell.engine]
        # The cell begins where a cycle does: engine awake, trainer asleep.
        trainer.call("offload")
        awake = engine.region_bytes()["weights"] if "weights" in engine.state.resident else 0
        gpu_asleep = self.gpu.reading().gpu_bytes - awake
        engine.resume_memory_occupation([r for r in ENGINE_REGIONS if r not in engine.state.resident])
        trainer.call("update_weights", 1)
        cycles = 2 if cell.buffers != "fresh" else 1
        seconds: dict[str, float] = {}
        self.gpu.reading()
        peaks = []
        for _ in range(cycles):
            seconds = {}
            for step in steps:
                if step == "update_weights":
                    time.sleep(self.asked.settle)
                started = time.perf_counter()
                self.step(step, engine, trainer)
                seconds[step] = time.perf_counter() - started
            peaks.append(self.gpu.reading())
        self.checksums.add(engine.weights_checksum())
        # Asleep again, and the trainer awake with no host copy but what it retains.
        engine.release_memory_occupation(at_rest(cell.engine))
        trainer.call("onload")
        self.record(cell, seconds, peaks, host_before, gpu_asleep)

    def step(self, name: str, engine: Any, trainer: Trainer) -> None:
        match name:
            case "engine.offload_kv":
                engine.release_memory_occupation(["kv_cache", "cuda_graph"])
            case "engine.onload_kv":
                engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
            case "engine.offload_weights":
                engine.release_memory_occupation(["weights"])
            case "engine.onload_weights":
                engine.resume_memory_occupation(["weights"])
            case "update_weights":
                self.sent = trainer.call("update_weights", 1)
            case _:
                trainer.call(name.removeprefix("trainer."))

    def record(self, cell: Cell, seconds: dict[str, float], peaks: Sequence[Any], host: int, gpu: int) -> None:
        config = self.config(cell.backend)
        architecture = read_architecture(SIZES[self.size], "benchmark")
        sizes = sizes_of(config, architecture)
        plan = forecast(config, cell.options, sizes, Limits(None, None))
        handoff = [s for s in plan.steps if s.phase == "cycle" and s.name in seconds]
        static = {"gpu": sum(sizes.static_gpu.values()), "host": sum(sizes.static_host.values())}
        out, back = seconds["trainer.offload"], seconds["trainer.onload"]
        row = {
            "size": self.size,
            "parameters": sizes.parameters,
            "order": cell.order,
            "engine_weights": cell.weights,
            "backend": cell.backend,
            "buffers": cell.buffers,
            "update_from": cell.update_from,
            "seconds": seconds,
            "sum": sum(seconds.values()),
            "backup_gib": self.backup_bytes / GIB,
            "update_gib": self.sent / GIB,
            "offload_gib_s": self.backup_bytes / GIB / out,
            "onload_gib_s": self.backup_bytes / GIB / back,
            "update_gib_s": self.sent / GIB / seconds["update_weights"],
            "ceiling_gib_s": [rate / GIB for rate in self.ceiling],
            "host_gib": (max(p.host_peak_bytes for p in peaks) - host) / GIB,
            "planned_host_gib": (max(s.total("host") for s in handoff) - static["host"]) / GIB,
            "gpu_gib": (max(p.gpu_peak_bytes for p in peaks) - gpu) / GIB,
            "planned_gpu_gib": (max(s.total("gpu") for s in handoff) - static["gpu"]) / GIB,
            "planned_seconds": sum(s.seconds or 0.0 for s in handoff),
            "checksums": len(self.checksums),
        }
        self.rows.append(row)
        say(line(row))


def at_rest(engine: str) -> list[Region]:
    """What an engine releases while others are measured; the shared arena is not always there for its weights."""
    return ["kv_cache", "cuda_graph"] if engine == "mirror shared" else list(ENGINE_REGIONS)


HEAD = (
    "| size | trainer's copies | engine | order | update from | kv out | trainer in | weights out | clear | weights in "
    "| trainer out | update | kv in | sum s (planned) | in GiB/s | out GiB/s | update GiB/s | host GiB (planned) "
    "| GPU GiB (planned) |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"
)
ORDERED = (
    "engine.offload_kv",
    "trainer.onload",
    "engine.offload_weights",
    "trainer.clear_memory",
    "engine.onload_weights",
    "trainer.offload",
    "update_weights",
    "engine.onload_kv",
)


def line(row: dict[str, Any]) -> str:
    times = " | ".join(f"{row['seconds'][s]:.3f}" if s in row["seconds"] else "" for s in ORDERED)
    host = f"{row['host_gib']:.1f} ({row['planned_host_gib']:.1f})"
    gpu = f"{row['gpu_gib']:.1f} ({row['planned_gpu_gib']:.1f})"
    rates = " | ".join(f"{row[rate]:.1f}" for rate in ("onload_gib_s", "offload_gib_s", "update_gib_s"))
    return (
        f"| {row['size']} | {row['backend']} {row['buffers']} | {row['engine_weights']} | {row['order']} "
        f"| {row['update_from']} | {times} "
        f"| **{row['sum']:.2f}** ({row['planned_seconds']:.2f}) | {rates} | {host} | {gpu} |"
    )


def as_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def say(text: str) -> None:
    print(text, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", action="append", choices=list(SIZES), default=[])
    parser.add_argument("--only", action="append", default=[], help="cells whose name contains this text")
    parser.add_argument("--sglang", action="append", default=[], help="KEY=VALUE for SGLang")
    parser.add_argument("--bucket-gib", type=float, default=0.5)
    parser.add_argument("--settle", type=float, default=0.0, help="seconds to wait, unmeasured, before an update")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--trainer", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trainer is not None:
        trainer_process(options.trainer)
        return
    rows: list[dict[str, Any]] = []
    say(HEAD)
    for size in options.size or ["0.6b", "4b", "5b"]:
        bench = Bench(size, options)
        try:
            bench.run()
        finally:
            rows += bench.rows
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        ceiling = " and ".join(f"{rate / GIB:.1f}" for rate in bench.ceiling)
        moved = f"{bench.backup_bytes / GIB:.2f} GiB backed up, {bench.sent / GIB:.2f} GiB sent"
        weights = "equal" if len(bench.checksums) == 1 else "DIFFERENT"
        say(f"{size}: {moved}; one pinned copy {ceiling} GiB/s; weights {weights} after {len(bench.rows)} cells")


if __name__ == "__main__":
    main()
