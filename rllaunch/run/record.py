"""The run directory: config, events, metrics, checkpoints. Whatever is in it is whole.

config.json      the resolved config, as every process got it
launch.json      origins, the explicit command, versions
events.jsonl     one object a step of the schedule
metrics.jsonl    one object a rollout
checkpoints/     rollout_000050/ …, each renamed into place when it is complete
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from rllaunch.errors import ConfigError, EnvironmentProblem, RunError
from rllaunch.resolve.origins import Origin
from rllaunch.resolve.profiles import flatten
from rllaunch.resolve.resolve import Layer, Setting
from rllaunch.resolve.schema import LaunchConfig

CHECKPOINT = "rollout_{:06d}"
_CHECKPOINT_NAME = re.compile(r"rollout_(\d{6,})")


@dataclass
class RunDirectory:
    """The files of one run; open once a run starts or resumes."""

    path: Path
    observers: list[tuple[str, Any]] = field(default_factory=list)
    complain: Callable[[str], None] = lambda text: None
    _lock: IO[bytes] | None = None
    _events: IO[str] | None = None
    _metrics: IO[str] | None = None

    @property
    def config_file(self) -> Path:
        return self.path / "config.json"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def create(self, config: LaunchConfig, launch: Mapping[str, Any]) -> None:
        """Make the directory and write what the run is.

        Raises:
            EnvironmentProblem: it cannot be written.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._take()
            for left in self.checkpoints.glob(".rollout_*"):
                shutil.rmtree(left, ignore_errors=True)
            write_atomically(self.config_file, json.dumps(config.model_dump(mode="json"), indent=2))
            write_atomically(self.path / "launch.json", json.dumps(launch, indent=2))
        except (OSError, ValueError) as err:
            if isinstance(err, BlockingIOError):
                raise EnvironmentProblem(
                    f"another process is running in {self.path}",
                    "run.run_dir",
                    "wait for it, or choose another --run-dir",
                ) from None
            raise EnvironmentProblem(
                f"the run directory cannot be written: {self.path}: {getattr(err, 'strerror', None) or err}",
                "run.run_dir",
                "choose another --run-dir",
            ) from None

    def resume(self, config: LaunchConfig, launch: Mapping[str, Any]) -> list[str]:
        """Take the directory again; its config is now this one. What changed since that may change numbers.

        Raises:
            EnvironmentProblem: another process runs in it, or it cannot be written.
        """
        file = self.path / "launch.json"
        before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        resumed = {"command": launch.get("command"), "versions": launch.get("versions")}
        if self.config_file.exists():
            saved = json.loads(self.config_file.read_text(encoding="utf-8"))
            resumed["changed"] = [text for _, text in _differences(saved, config)]
        history = [*before.get("resumed", []), resumed]
        was = (history[-2] if len(history) > 1 else before).get("versions") or {}
        now = launch.get("versions") or {}
        first = {
            "versions": before.get("versions"),
            "first_command": before.get("first_command", before.get("command")),
        }
        self.create(config, dict(launch) | first | {"resumed": history})
        return [f"{name} was {was[name]}, is {now.get(name)}" for name in was if was[name] != now.get(name)]

    def _take(self) -> None:
        """Hold the directory until `close` or the end of this process; BlockingIOError if another one does."""
        self._lock = (self.path / ".lock").open("ab")
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unfinished(self, first_rollout: int) -> Mapping[str, Any] | None:
        """Metrics up to its save of the rollout before `first_rollout`, if its row was never written."""
        checkpoints = self.list_checkpoints()
        if not checkpoints or checkpoints[-1][0] + 1 != first_rollout:
            return None
        file = self.path / "metrics.jsonl"
        rows = [_parsed(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        if any(row.get("rollout_id") == first_rollout - 1 for row in rows):
            return None
        meta: dict[str, Any] = json.loads((checkpoints[-1][1] / "meta.json").read_text(encoding="utf-8"))
        metrics: dict[str, Any] = meta["metrics"]
        return metrics

    def open(self, first_rollout: int) -> None:
        """Open events and metrics for appending, cut back to what lies before `first_rollout`."""
        for name in ("events.jsonl", "metrics.jsonl"):
            _cut(self.path / name, first_rollout)
        self._events = (self.path / "events.jsonl").open("a", encoding="utf-8")
        self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")

    def event(self, row: Mapping[str, Any]) -> None:
        assert self._events is not None, "events are written between open and close"
        _append(self._events, row)
        self._tell("on_event", row)

    def metrics(self, row: Mapping[str, Any]) -> None:
        assert self._metrics is not None, "metrics are written between open and close"
        _append(self._metrics, row)
        self._tell("on_metrics", row)

    def close(self, summary: Mapping[str, Any]) -> None:
        for stream in (self._events, self._metrics):
            if stream:
                stream.close()
        self._tell("on_end", summary)
        if self._lock:
            # Closing it would not do while a process that is being started still has a copy of the descriptor.
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            self._lock.close()
            self._lock = None

    def _tell(self, moment: str, row: Mapping[str, Any]) -> None:
        for label, observer in list(self.observers):
            try:
                getattr(observer, moment, lambda _: None)(row)
            except Exception as err:
                self.observers.remove((label, observer))
                self.complain(
                    f"warning: observer of plugin {label} failed and is left out: {type(err).__name__}: {err}"
                )

    @contextmanager
    def new_checkpoint(self, rollout_id: int, meta: Mapping[str, Any], keep: int) -> Iterator[Path]:
        """A directory to fill; it gets its name when the block ends well, and older ones beyond `keep` go."""
        name = CHECKPOINT.format(rollout_id)
        staging = self.checkpoints / f".{name}.{os.getpid()}"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            staging.mkdir(parents=True)
            yield staging
            write_atomically(staging / "meta.json", json.dumps(dict(meta) | {"rollout_id": rollout_id}, indent=2))
            _sync_tree(staging)
            final = self.checkpoints / name
            if final.exists():
                shutil.rmtree(final)
            staging.rename(final)
            _sync(self.checkpoints)
        except OSError as err:
            raise RunError(
                f"the checkpoint of rollout {rollout_id} cannot be written: {err.strerror or err}",
                str(self.checkpoints),
                "free some space; --resume goes on from the checkpoint before",
            ) from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        for _, old in self.list_checkpoints()[:-keep]:
            shutil.rmtree(old, ignore_errors=True)

    def list_checkpoints(self) -> list[tuple[int, Path]]:
        """Complete checkpoints, oldest first."""
        if not self.checkpoints.is_dir():
            return []
        found = []
        for entry in self.checkpoints.iterdir():
            # Only our own names: a copy that somebody made beside them is not ours to prune or to resume.
            name = _CHECKPOINT_NAME.fullmatch(entry.name)
            if name and (entry / "meta.json").is_file():
                found.append((int(name.group(1)), entry))
        return sorted(found)


def default_run_dir(config: LaunchConfig, now: datetime) -> Path:
    """A new directory for a run, made here, so that two runs started in one second get two."""
    stem = f"{Path(config.model.name).name}-{config.hardware.name}-{now:%Y%m%d-%H%M%S}"
    for number in range(1, 1000):
        path = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as err:
            what = f"no run directory can be made: {path}: {err.strerror}"
            raise EnvironmentProblem(what, "", "choose one with --run-dir") from None
        return path
    raise EnvironmentProblem(f"no free name for a run directory like {stem}", "", "choose one with --run-dir")


def saved_layer(run_dir: Path, hardware: str = "") -> Layer:
    """The config of a run that is resumed, as a layer below the flags.

    What followed from the layout is left out: it follows again, from another layout if flags set one.

    Args:
        hardware: the profile that is asked for; another one than the run's brings its own facts.

    Raises:
        ConfigError: there is no run in that directory, or its config cannot be read.
    """
    file = run_dir / "config.json"
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"no run to resume in {run_dir}", str(file), "name the directory of a run with --run-dir"
        ) from None
    except (OSError, ValueError) as err:
        raise ConfigError(f"the run's config cannot be read: {err}", str(file), "restore the file") from None
    if not isinstance(saved, dict) or not all(isinstance(v, dict) for v in saved.values()):
        raise ConfigError("the run's config is not one that rllaunch wrote", str(file), "restore the file")
    derived = {key for key, origin in kept_origins(run_dir).items() if origin.layer == "derived"}
    left_out = derived & set(_LAYOUT_KEYS)
    settings = [Setting(k, v, str(file)) for k, v in flatten(saved) if v != {} and k not in left_out]
    if hardware and hardware != saved.get("hardware", {}).get("name"):
        settings = [s for s in settings if not s.key.startswith("hardware.")]
    return Layer("run", tuple(settings))


def kept_origins(run_dir: Path) -> dict[str, Origin]:
    """The origin that decided each key when the run was started; none where the run did not keep them."""
    try:
        origins = json.loads((run_dir / "launch.json").read_text(encoding="utf-8"))["origins"]
        return {key: Origin(**given[-1]) for key, given in origins.items()}
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError):
        return {}


# What may differ between a run and its resumption without changing what it computes.
_FREE_ON_RESUME = (
    "run.num_rollout",
    "run.save_interval",
    "run.save_total_limit",
    "run.eval_interval",
    "run.run_dir",
    "run.record_pss",
    "run.allow",
    "run.disk_reserve_bytes",
    "cluster.ray_address",
)
_FREE_SECTIONS = ("handoff.", "pools.")
# Where a trainer's checkpoints fit any layout: how the same sums are shared out, which rounds them otherwise.
_LAYOUT_KEYS = (
    *(f"trainer.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context", "expert_model")),
    "trainer.expert_tensor_parallel_size",
    "trainer.sequence_parallel",
    "trainer.decoder_first_pipeline_num_layers",
    "trainer.decoder_last_pipeline_num_layers",
    "trainer.micro_batch_size",
    "trainer.max_tokens_per_gpu",
    "trainer.recompute_granularity",
    "trainer.optimizer_cpu_offload",
    "cluster.num_nodes",
    "cluster.num_gpus_per_node",
    "cluster.actor_num_nodes",
    "cluster.actor_num_gpus_per_node",
    "rollout.rollout_num_gpus",
    "rollout.rollout_num_gpus_per_engine",
)
# Of sections that pass through what decides how much fits and how fast it goes; in `env` how ranks find each other.
_LAYOUT_OPTIONS = ("mem_fraction_static", "ep_size", "max_running_requests", "max_total_tokens", "chunked_prefill_size")
_LAYOUT_PREFIXES = ("hardware.", "sglang.cuda_graph_", "env.NCCL_", "env.GLOO_")


def _is_layout(key: str) -> bool:
    section, _, name = key.partition(".")
    return key in _LAYOUT_KEYS or key.startswith(_LAYOUT_PREFIXES) or (section == "sglang" and name in _LAYOUT_OPTIONS)


def refuse_changes(run_dir: Path, config: LaunchConfig, *, any_layout: bool = False) -> list[str]:
    """What of the layout differs from the run's own.

    It rounds sums otherwise, and engines of another number or size may draw other samples; what is trained stays.

    Args:
        any_layout: whether the trainer loads a checkpoint of another layout.

    Raises:
        ConfigError: something that decides the results differs.
    """
    saved = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    changed: list[str] = []
    moved: list[str] = []
    for key, text in _differences(saved, config):
        if key.startswith(_FREE_SECTIONS) or key in _FREE_ON_RESUME:
            continue
        (moved if any_layout and _is_layout(key) else changed).append(text)
    if changed:
        raise ConfigError(
            "a resumed run keeps what decides its results",
            (*changed, f"the run's own: {run_dir / 'config.json'}"),
            "leave these flags out, or start a new run",
        )
    return moved


def _differences(saved: Mapping[str, Any], config: LaunchConfig) -> Iterator[tuple[str, str]]:
    """Keys that have another value than before, and both values in words; an option that was dropped is one, too."""
    now = config.model_dump(mode="json")
    for section in now:
        before, after = saved.get(section, {}), now[section]
        for name in dict.fromkeys([*after, *before]):
            if before.get(name) != after.get(name):
                key = f"{section}.{name}"
                yield key, f"{key} was {before.get(name)!r}, is {after.get(name)!r}"


def write_atomically(path: Path, text: str) -> None:
    staging = path.with_name(f".{path.name}.{os.getpid()}")
    with staging.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    staging.replace(path)


def _append(stream: IO[str], row: Mapping[str, Any]) -> None:
    # One write a line: a reader, or a kill, never sees half of one.
    stream.write(json.dumps(row) + "\n")
    stream.flush()


def _parsed(line: str) -> dict[str, Any]:
    """A line's object; nothing for one that a kill cut short."""
    try:
        row: dict[str, Any] = json.loads(line)
    except ValueError:
        return {}
    return row


def _cut(path: Path, first_rollout: int) -> None:
    """Keep the rows of rollouts before `first_rollout`; start-up's rows go, it happens again."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        rollout_id = _parsed(line).get("rollout_id")
        if rollout_id is not None and rollout_id < first_rollout:
            kept.append(line + "\n")
    write_atomically(path, "".join(kept))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(root: Path) -> None:
    for file in root.rglob("*"):
        if file.is_file():
            _sync(file)
    _sync(root)
