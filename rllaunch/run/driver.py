"""The driver: starts or joins Ray, places the actors, runs the loop, and ends what it started.

Nothing else is ended: no process is looked up by name, no cluster we joined is stopped.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rllaunch.backends.base import BackendSpec, LaunchContext, MemoryReading, Slot, StepResult, TrainBatch
from rllaunch.errors import EXIT_INTERRUPTED, EnvironmentProblem, RllaunchError
from rllaunch.plan.handoff import Region, Schedule
from rllaunch.plan.sizes import object_store_bytes
from rllaunch.resolve.schema import LaunchConfig
from rllaunch.run.data import Prompt
from rllaunch.run.ledgers import local_ledgers
from rllaunch.run.loop import Loop, Planned, Progress, Watcher
from rllaunch.run.record import RunDirectory
from rllaunch.run.signals import install_handlers, interruptible, quiet_signals
from rllaunch.run.steps import run_steps, timed
from rllaunch.run.told import told

# Time for an actor to end by itself before it is killed, and for a local Ray to go.
GRACE_SECONDS = 3.0
# Of a slot's GPU and CPU, for each actor on it.
SHARE = 0.3


@dataclass(frozen=True)
class RunInputs:
    """All a run needs, resolved and checked."""

    config: LaunchConfig
    schedule: Schedule
    trainer: BackendSpec
    rollout: BackendSpec
    prompts: Sequence[Prompt]
    eval_prompts: Sequence[Prompt]
    vocabulary: str
    max_prompt_tokens: int
    environment: Mapping[str, str]
    resume: bool
    plan: Planned | None = None


def run(inputs: RunInputs, record: RunDirectory, watcher: Watcher, say: Callable[[str], None]) -> Progress:
    """Run a launch to its end.

    Raises:
        RllaunchError: what went wrong, told in its own words wherever it happened.
        Interrupted: Ctrl-C or SIGTERM; everything we started has ended.
    """
    with interruptible(), local_ledgers() as ledgers, ray_session(inputs, say), actors() as started:
        workers = _start(inputs, record, ledgers, started, say)
        loop = Loop(
            inputs.config,
            inputs.schedule,
            workers,
            record,
            watcher,
            inputs.config.gpus_per_node,
            inputs.plan,
        )
        record.open(workers.first_rollout)
        with told():
            loop.start_up(workers.first_rollout)
            if (unfinished := record.unfinished(workers.first_rollout)) is not None:
                loop.finish_rollout(workers.first_rollout - 1, unfinished)
            return loop.run()


class RayWorkers:
    """Each step of the schedule as calls on the manager and the train group."""

    def __init__(self, inputs: RunInputs, manager: Any, group: Any, record: RunDirectory) -> None:
        import ray

        self._ray = ray
        self.inputs = inputs
        self.manager = manager
        self.group = group
        self.record = record
        self.first_rollout = 0
        self.checkpoint: Path | None = None
        self._batch: Any = None
        # The ranks' last steps: an update waits for all of them.
        self._under_way: Sequence[Any] = ()
        # Rank 0's last update, which is over when the engines have it: what the ranks do next waits for that.
        self._update: Sequence[Any] = ()
        # Steps that were sent off before the loop asked for them, and their answers to come.
        self._ahead: tuple[Sequence[str], Callable[[], Any]] | None = None
        if inputs.resume and (found := record.list_checkpoints()):
            rollout_id, self.checkpoint = found[-1]
            self.first_rollout = rollout_id + 1

    def region_bytes(self) -> Mapping[Region, int]:
        engine: Mapping[Region, int] = self._ray.get(self.manager.region_bytes.remote())
        return dict(engine) | dict(self.group.region_bytes())

    def call(
        self,
        steps: Sequence[str],
        rollout_id: int | None,
        version: int,
        metrics: Mapping[str, Any],
        then: Sequence[str] = (),
    ) -> tuple[Sequence[StepResult], RllaunchError | None]:
        match steps[0]:
            case "trainer.init":
                return [timed(lambda: (self.group.init(self.checkpoint), {}))], None
            case "save":
                assert rollout_id is not None, "start-up saves nothing"
                return [timed(lambda: (self._save(rollout_id, metrics), {}))], None
        ahead, self._ahead = self._ahead, None
        assert ahead is None or list(ahead[0]) == list(steps), "what follows is what was announced"
        answers = ahead[1] if ahead else self._send(steps, rollout_id, version)
        if self._may_follow(steps, then):
            self._ahead = then, self._send(then, rollout_id, version)
        results, error = answers()
        return results, error

    @staticmethod
    def _may_follow(steps: Sequence[str], then: Sequence[str]) -> bool:
        """Whether the ranks can be told the next steps before these have ended.

        Ray holds them back until what they wait for is there: the samples, or for an update the steps of all
        ranks before it (an engine's weights return to GPUs that every rank has left), and after one the word of rank 0
        that the engines have it (what it reads of a node's memory is the update's). A rank does nothing after an error.
        """
        if not then or "save" in then:
            return False
        if "generate" in steps or "update_weights" in steps:
            return _is_trainers(then)
        return _is_trainers(steps) and then[-1] == "update_weights"

    def _send(self, steps: Sequence[str], rollout_id: int | None, version: int) -> Callable[[], Any]:
        """Send the steps to the side they are for; what is returned waits for the results and the error."""
        if steps[-1] == "update_weights":
            answers = self.group.start_update(version, self.manager, steps[:-1], self._under_way)
            self._update = answers[:1]
            return lambda: self.group.finish_update(answers)
        if _is_trainers(steps):
            # From `generate` to `train` each call takes the samples along, if only to wait for them.
            after, self._update = self._update, ()
            answers = self._under_way = self.group.start(steps, self._batch, after)
            if "train" in steps:
                self._batch = None
            return lambda: self.group.finish(answers)
        batch, answer = self.manager.run.options(num_returns=2).remote(list(steps), rollout_id, version)
        if "generate" in steps:
            # The samples stay in the object store: the ranks read them there, the driver never does.
            self._batch = batch
        return lambda: self._ray.get(answer)

    def _save(self, rollout_id: int, metrics: Mapping[str, Any]) -> MemoryReading:
        meta = {"vocabulary": self.inputs.vocabulary, "seed": self.inputs.config.run.seed, "metrics": dict(metrics)}
        with self.record.new_checkpoint(rollout_id, meta, self.inputs.config.run.save_total_limit) as directory:
            memory: MemoryReading = self.group.save(directory)
        return memory


def _is_trainers(steps: Sequence[str]) -> bool:
    return steps[0] == "train" or steps[0].startswith("trainer.")


class ManagerActor:
    """The rollout manager as an actor: each answer carries the memory after it.

    Built in `start`, not in the constructor: what fails there reaches the driver in its own words.
    """

    def start(self, log: str, arguments: Sequence[Any], *built: None) -> None:
        """
        Args:
            arguments: of `make_manager`.
            built: of the engines' actors; Ray runs this once they are there.
        """
        from rllaunch.run.rollout_manager import make_manager

        # What a reward function prints is for whoever wrote it.
        sys.stdout = sys.stderr = Path(log).open("a", encoding="utf-8", buffering=1)  # noqa: SIM115

        self.manager = make_manager(*arguments)
        self.manager.start()

    def region_bytes(self) -> Mapping[Region, int]:
        return self.manager.engines[0].region_bytes()

    def run(
        self, steps: Sequence[str], rollout_id: int | None, version: int
    ) -> tuple[TrainBatch | None, tuple[list[StepResult], RllaunchError | None]]:
        """`generate`, `eval` and `engine.…` steps in order; the samples apart, so that they stay where they are."""
        batch: TrainBatch | None = None

        def one(step: str) -> tuple[MemoryReading, Mapping[str, Any]]:
            nonlocal batch
            report: Mapping[str, Any] = {}
            if step == "generate":
                assert rollout_id is not None, "start-up generates nothing"
                batch, stats = self.manager.generate(rollout_id, version)
                report = stats.to_json()
            elif step == "eval":
                report = self.manager.evaluate(version).to_json()
            else:
                getattr(self.manager, step.removeprefix("engine."))()
            return self.manager.memory(), report

        self.manager.memory()  # a peak belongs to the step in which it was
        results, error = run_steps(steps, one)
        # No samples, no training: the ranks may have been told already what comes next.
        return (batch if error is None else None), (results, error)

    def begin_weight_update(self, version: int, before: Sequence[str]) -> tuple[list[StepResult], RllaunchError | None]:
        """Open an update, after the `engine.…` steps that come right before it; theirs is the answer."""
        _, (results, error) = self.run(before, None, version)
        try:
            if error is None:
                self.manager.begin_weight_update(version)
        except RllaunchError as err:
            error = err
        return results, error

    def load_bucket(self, bucket: Any) -> None:
        self.manager.load_bucket(bucket)

    def end_weight_update(self, version: int) -> None:
        self.manager.end_weight_update(version)

    def shutdown(self) -> None:
        self.manager.shutdown()


def _start(
    inputs: RunInputs, record: RunDirectory, ledgers: str, started: list[Any], say: Callable[[str], None]
) -> RayWorkers:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from rllaunch.run.engines import engines_in_actors
    from rllaunch.run.placement import bundle_of, place
    from rllaunch.run.train_group import TrainerRank, TrainGroup

    config = inputs.config
    per_node = config.gpus_per_node
    group, bundles = place(config)
    started.append(group)
    on_gpu = "GPU" in bundle_of(config)
    slots = [Slot(index, index // per_node, "cuda" if on_gpu else "cpu", ledgers) for index in range(config.world_size)]

    def at(bundle: int, environment: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        # A trainer rank, the manager and an engine may meet on a slot: each asks for less than a third of it.
        strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
        share = {"num_gpus": SHARE} if on_gpu else {}
        more = {"runtime_env": {"env_vars": {**_environment(inputs), **environment}}} if environment else {}
        return {"scheduling_strategy": strategy, "num_cpus": SHARE, **share, **more}

    say(f"starting {len(slots)} trainer rank{'s' if len(slots) > 1 else ''} and the rollout engines")
    manager = ray.remote(ManagerActor).options(**at(bundles[0])).remote()
    started.append(manager)
    environment = inputs.trainer.environment_of(config)
    ranks = [ray.remote(TrainerRank).options(**at(bundle, environment)).remote() for bundle in bundles]
    started += ranks
    engine_environment = inputs.rollout.environment_of(config)
    engines = engines_in_actors(inputs.rollout, config, slots, lambda slot: at(bundles[slot.index], engine_environment))
    started += [part for engine in engines for part in engine.parts]
    task = (inputs.prompts, inputs.eval_prompts, config.task.reward)
    directory = record.path.absolute()
    with told():
        gpus = tuple(ray.get([rank.gpu.remote() for rank in ranks])) if on_gpu else ()
        made = (inputs.schedule.options, inputs.vocabulary, inputs.max_prompt_tokens, len(slots), gpus)
        context = LaunchContext(config, *made)
        built = [answer for engine in engines for answer in engine.build(context, inputs.rollout, directory)]
        arguments = (context, slots, inputs.rollout.target, *task, engines)
        waiting = [manager.start.remote(str(directory / "rollout.log"), arguments, *built)]
        for rank, slot in zip(ranks, slots, strict=True):
            waiting.append(rank.build.remote(context, slot, inputs.trainer.target))
        began = time.monotonic()
        ray.get(waiting)
        say(f"the rollout engines are up ({time.monotonic() - began:.1f} s)")
        if not ray.get(ranks[0].sees.remote(str(record.config_file.absolute()))):
            raise EnvironmentProblem(
                f"the node of trainer rank 0 does not see the run directory {record.path.absolute()}",
                "run.run_dir",
                "put it on a disk that all nodes share: --run-dir",
            )
    workers = RayWorkers(inputs, manager, TrainGroup(ranks), record)
    if inputs.resume:
        at_checkpoint = workers.checkpoint.name if workers.checkpoint else "the beginning (no checkpoint was saved)"
        say(f"resuming from {at_checkpoint}")
    return workers


def _environment(inputs: RunInputs) -> dict[str, str]:
    return {**inputs.environment, "PYTHONPATH": _python_path()}


@contextlib.contextmanager
def ray_session(inputs: RunInputs, say: Callable[[str], None]) -> Iterator[None]:
    """A Ray of our own on this machine, or the cluster we were told to join."""
    address = inputs.config.cluster.ray_address or os.environ.get("RAY_ADDRESS", "")
    # Ray prints about usage statistics and runs workers at niceness 15, which starves them on a busy machine.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")
    # The warning that a future Ray will hide GPUs from workers without one; nothing here depends on it.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A call without a Ray, after one was lost or shut down, is an error; it would start another on this machine.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    import ray

    local = address in ("", "local")
    common: dict[str, Any] = {
        "namespace": f"rllaunch-{uuid.uuid4().hex[:12]}",
        "log_to_driver": False,
        "logging_level": "ERROR",
        "runtime_env": {"env_vars": _environment(inputs)},
    }
    say("starting Ray on this machine" if local else f"joining the Ray cluster at {address}")
    try:
        if local:
            cpus = max(os.cpu_count() or 1, inputs.config.world_size + 1)
            with _ends_if_interrupted():
                ray.init(
                    address="local",
                    include_dashboard=False,
                    num_cpus=cpus,
                    object_store_memory=object_store_bytes(inputs.config),
                    **common,
                )
        else:
            ray.init(address=address, **common)
    except Exception as err:  # of a Ray that does not come up in time it is no class of its own (2.60)
        first = str(err).splitlines()[0] if str(err) else type(err).__name__
        where = f"RAY_ADDRESS={address}" if not local else "a local Ray"
        fix = "once more where the machine is less busy" if local else "check the address; `ray status`"
        raise EnvironmentProblem(f"Ray cannot be started or joined: {first}", where, fix) from None
    install_handlers()
    ours = _children()
    try:
        yield
    finally:
        with quiet_signals():
            ray.shutdown()
            if local:
                _end(ours)


@contextlib.contextmanager
def _ends_if_interrupted() -> Iterator[None]:
    """Ray half started: it ends what it knows by then, and its agents would stay for a minute without their parent."""
    try:
        yield
    except KeyboardInterrupt:
        import ray

        with quiet_signals():
            ours = set(_children())
            for _ in range(5):  # one that is being started is seen a moment later
                time.sleep(0.1)
                ours |= set(_children())
            ray.shutdown()
            _end(list(ours))
        # What of Ray is half connected in this process crashes when the interpreter takes it down (seen with 2.60).
        atexit.register(_leave)
        raise


def _leave() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_INTERRUPTED)


@contextlib.contextmanager
def actors() -> Iterator[list[Any]]:
    """Actors and placement groups that are ended with the block, in reverse order."""
    started: list[Any] = []
    try:
        yield started
    finally:
        with quiet_signals():
            import ray
            from ray.util.placement_group import PlacementGroup, remove_placement_group

            handles = [s for s in started if not isinstance(s, PlacementGroup)]
            with contextlib.suppress(Exception):
                ray.wait([h.shutdown.remote() for h in handles], num_returns=len(handles), timeout=GRACE_SECONDS)
            for thing in reversed(started):
                with contextlib.suppress(Exception):
                    if isinstance(thing, PlacementGroup):
                        remove_placement_group(thing)
                    else:
                        ray.kill(thing)


def _python_path() -> str:
    """The import path for workers: what the environment has, with the current directory, absolute."""
    given = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    return os.pathsep.join(dict.fromkeys(str(Path(p).resolve()) for p in [*given, "."]))


def _children() -> list[Any]:
    """Processes below this one: right after a local Ray started, its own."""
    import psutil

    found: list[Any] = psutil.Process().children(recursive=True)
    return found


def _end(processes: Sequence[Any]) -> None:
    """End processes of ours that did not end by themselves, by id (psutil knows a reused one)."""
    import psutil

    deadline = time.monotonic() + GRACE_SECONDS
    _, alive = psutil.wait_procs(processes, timeout=GRACE_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=max(0.5, deadline - time.monotonic()))
