"""The handoff: the order in which trainer and engines change places on the same GPUs, as data.

A `Schedule` is two lists of steps, start-up and one cycle, each step a list of operations on memory
regions. Four readers share it: `check` proves it safe, `rllaunch.plan.memory` prices it, the driver
runs it, and the run's record compares it with what was measured. Nothing here touches a device.

The two orders (`colocate_memory_peak_device`) follow radixark/miles#2781: in `cpu` order the engine's
host mirror and the trainer's host backup coexist while they change places, in `gpu` order the engine's
weights and the trainer's state coexist on the GPU instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from rllaunch.errors import ScheduleError
from rllaunch.resolve.schema import LaunchConfig, RegionName

Order = Literal["cpu", "gpu"]
Weights = Literal["mirror", "discard", "resident"]
Buffers = Literal["retained", "fresh", "shared"]
UpdateFrom = Literal["host", "gpu"]
When = Literal["always", "save", "eval"]
Tier = Literal["gpu", "host"]
TIERS: tuple[Tier, ...] = ("gpu", "host")
Region = RegionName
REGIONS: tuple[Region, ...] = get_args(Region)
ENGINE_REGIONS: tuple[Region, ...] = ("weights", "kv_cache", "cuda_graph")
BACKED_UP: tuple[Region, ...] = ("params", "optimizer")

Action = Literal[
    "alloc",  # memory of a region on a tier; its content is undefined
    "free",
    "copy_out",  # GPU → host, both allocated
    "copy_in",  # host → GPU, both allocated
    "write",  # the content becomes what it should be (initialisation, an optimizer step, an update)
    "read",  # the GPU content is used
    "read_any",  # the content is used from the GPU or from the host backup
    "publish",  # every tensor an update sends reaches the engine: params → weights
    "empty_cache",  # the trainer's caching allocator returns its free blocks
    "pause_health",
    "resume_health",
]


@dataclass(frozen=True)
class Op:
    action: Action
    region: Region | None = None
    tier: Tier = "gpu"

    def __str__(self) -> str:
        return self.action if self.region is None else f"{self.action} {self.region}@{self.tier}"


@dataclass(frozen=True)
class Step:
    """One call on the trainer or the engines. `when` says on which rollouts it runs."""

    name: str
    ops: tuple[Op, ...]
    when: When = "always"

    def __str__(self) -> str:
        return self.name if self.when == "always" else f"{self.name} ({self.when} steps)"


@dataclass(frozen=True)
class HandoffOptions:
    """What decides the order of a handoff, with every `auto` already decided.

    Args:
        level: what an engine releases: `kv_cache`, `weight`, both or neither.
        engine_weights: what releasing the weights does; looked at only if they are released.
        buffers: how the host copies are held, the trainer's backup and the engine's mirror.
        update_from: where an update reads an offloaded trainer's parameters. `gpu`: it comes before the offload, which
            only `gpu` order allows.
    """

    order: Order = "cpu"
    offload_train: bool = True
    offload_rollout: bool = True
    level: frozenset[str] = frozenset({"kv_cache", "weight"})
    engine_weights: Literal["mirror", "discard"] = "discard"
    buffers: Buffers = "retained"
    critic: bool = False
    lora: bool = False
    update_from: UpdateFrom = "host"

    @property
    def updates_awake(self) -> bool:
        """Whether the trainer's parameters are on the GPU when they are sent."""
        return not self.offload_train or self.update_from == "gpu"

    @property
    def releases_weights(self) -> bool:
        return self.offload_rollout and "weight" in self.level

    @property
    def releases_kv(self) -> bool:
        return self.offload_rollout and "kv_cache" in self.level

    @property
    def has_mirror(self) -> bool:
        return self.releases_weights and self.engine_weights == "mirror"

    @property
    def weights_mode(self) -> Weights:
        return self.engine_weights if self.releases_weights else "resident"

    @property
    def may_be_gpu_order(self) -> bool:
        """Whether `gpu` order could run these offloads and models."""
        return self.offload_train and self.offload_rollout and not (self.critic or self.lora)

    def illegal(self) -> tuple[str, ...]:
        """Why no schedule exists for these options; empty when one does."""
        reasons = []
        if self.order == "gpu" and not (self.offload_train and self.offload_rollout):
            reasons.append("gpu order needs offload_train and offload_rollout")
        if self.order == "gpu" and self.critic:
            reasons.append("gpu order cannot run with a critic")
        if self.order == "gpu" and self.lora:
            reasons.append("gpu order cannot run with LoRA")
        if self.lora and self.weights_mode == "discard":
            reasons.append(
                "with LoRA an engine keeps its base weights: from an update of adapters they would never come back"
            )
        if self.order == "cpu" and self.offload_train and self.update_from == "gpu":
            reasons.append("in cpu order the trainer has left the GPU when the engines are updated")
        if self.order == "cpu" and self.buffers == "shared" and self.offload_train and self.has_mirror:
            reasons.append(
                "in cpu order the mirror and the backup are on the host together, so they cannot share one arena"
            )
        return tuple(reasons)


def update_rewrites_all(config: LaunchConfig) -> bool:
    """Whether a weight update brings every tensor of an engine back.

    With LoRA it may send the adapters only; expert-parallel engines hold tensors that no update re-sends
    (radixark/miles#835); a draft model's are not the trainer's.
    """
    has_draft = bool((config.sglang.model_extra or {}).get("speculative_algorithm"))
    return not (config.has_lora or has_draft or config.sglang.ep_size > 1)


def options_of(config: LaunchConfig) -> HandoffOptions:
    """The handoff a resolved config asks for, with `auto` decided by what is known without a plan.

    `engine_weights = auto`: discard where an update rewrites every tensor, else mirror.
    `offload_train_buffers = auto`: one shared arena where that keeps the promise of `gpu` order at full speed,
    else retained. `update_weights_from = auto`: the GPU wherever the order allows it.
    `colocate_memory_peak_device = auto` is `cpu` here.
    """
    handoff = config.handoff
    lora = config.has_lora
    engine_weights = handoff.engine_weights
    if engine_weights == "auto":
        engine_weights = "discard" if update_rewrites_all(config) else "mirror"
    order: Order = "gpu" if handoff.colocate_memory_peak_device == "gpu" else "cpu"
    options = HandoffOptions(
        order=order,
        offload_train=handoff.offload_train,
        offload_rollout=handoff.offload_rollout,
        level=frozenset(handoff.offload_rollout_level),
        engine_weights=engine_weights,
        critic=config.has_critic,
        lora=lora,
    )
    update_from = handoff.update_weights_from
    if update_from == "auto":
        update_from = "gpu" if order == "gpu" or not handoff.offload_train else "host"
    buffers = handoff.offload_train_buffers
    if buffers == "auto":
        buffers = "shared" if order == "gpu" and options.has_mirror else "retained"
    return replace(options, buffers=buffers, update_from=update_from)


@dataclass(frozen=True)
class Schedule:
    """Start-up and one cycle of a launch, step by step."""

    options: HandoffOptions
    init: tuple[Step, ...]
    cycle: tuple[Step, ...]

    def steps(self, *, save: bool, evaluate: bool) -> Iterator[Step]:
        """The cycle's steps on a rollout that saves and evaluates, or does not."""
        wanted = {"always"} | ({"save"} if save else set()) | ({"eval"} if evaluate else set())
        return (step for step in self.cycle if step.when in wanted)

    def to_json(self) -> dict[str, Any]:
        def rows(steps: Iterable[Step]) -> list[dict[str, Any]]:
            return [{"name": s.name, "when": s.when, "ops": [str(op) for op in s.ops]} for s in steps]

        return {
            "order": self.options.order,
            "engine_weights": self.options.weights_mode,
            "buffers": self.options.buffers if self.options.offload_train else None,
            "update_from": "gpu" if self.options.updates_awake else "host",
            "init": rows(self.init),
            "cycle": rows(self.cycle),
        }


def build_schedule(options: HandoffOptions) -> Schedule:
    """The steps of start-up and of one cycle for these options.

    Raises:
        ScheduleError: no schedule exists; the text names each reason.
    """
    if reasons := options.illegal():
        raise ScheduleError(
            "no handoff schedule exists for this configuration: " + "; ".join(reasons),
            fix="`rllaunch doctor` names the values and where each came from",
        )
    steps = _Steps(options)
    if options.order == "cpu":
        init = [*steps.engine_out(), steps.trainer_init(), *steps.trainer_out(), *steps.weights_in()]
        before_train = [*steps.engine_out(), *steps.trainer_in()]
        after_train = [*steps.trainer_out(), *steps.weights_in()]
        to_engine = [steps.update_weights()]
    else:
        # The engine's weights stay on the GPU through start-up: no mirror while the trainer loads.
        init = [*steps.kv_out(), steps.trainer_init()]
        before_train = [*steps.kv_out(), *steps.trainer_in(), *steps.weights_out()]
        after_train = [steps.clear_memory(), *steps.weights_in()]
        to_engine = [*steps.trainer_out(), steps.update_weights()]
        if options.update_from == "gpu":
            init.append(steps.clear_memory())
            to_engine.reverse()
    to_engine += steps.kv_in()
    cycle = [
        steps.generate("generate"),
        *before_train,
        steps.train(),
        steps.save(),
        *after_train,
        *to_engine,
        replace(steps.generate("eval"), when="eval"),
    ]
    return Schedule(options, (*init, *to_engine), tuple(cycle))


class _Steps:
    """Each step's operations under one set of options; a step that has nothing to do is absent."""

    def __init__(self, options: HandoffOptions) -> None:
        self.options = options

    def engine_out(self) -> list[Step]:
        return [*self.kv_out(), *self.weights_out()]

    def kv_out(self) -> list[Step]:
        if not self.options.offload_rollout:
            return []
        kv = [Op("free", "kv_cache")] if self.options.releases_kv else []
        return [Step("engine.offload_kv", (Op("pause_health"), Op("free", "cuda_graph"), *kv))]

    def kv_in(self) -> list[Step]:
        if not self.options.offload_rollout:
            return []
        kv = [Op("alloc", "kv_cache")] if self.options.releases_kv else []
        return [Step("engine.onload_kv", (*kv, Op("alloc", "cuda_graph"), Op("resume_health")))]

    def weights_out(self) -> list[Step]:
        if not self.options.releases_weights:
            return []
        mirror = [Op("alloc", "weights", "host"), Op("copy_out", "weights")] if self.options.has_mirror else []
        return [Step("engine.offload_weights", (*mirror, Op("free", "weights")))]

    def weights_in(self) -> list[Step]:
        if not self.options.releases_weights:
            return []
        mirror = [Op("copy_in", "weights"), *self._dropped("weights")] if self.options.has_mirror else []
        return [Step("engine.onload_weights", (Op("alloc", "weights"), *mirror))]

    def trainer_init(self) -> Step:
        state = [op for r in BACKED_UP for op in (Op("alloc", r), Op("write", r))]
        return Step("trainer.init", (*state, Op("alloc", "grads")))

    def trainer_out(self) -> list[Step]:
        if not self.options.offload_train:
            return []
        # Checker and planner take a second `alloc` of a retained copy for the same memory.
        moves = [op for r in BACKED_UP for op in (Op("alloc", r, "host"), Op("copy_out", r), Op("free", r))]
        return [Step("trainer.offload", (Op("free", "grads"), *moves))]

    def trainer_in(self) -> list[Step]:
        if not self.options.offload_train:
            return []
        moves = []
        for region in BACKED_UP:
            moves += [Op("alloc", region), Op("copy_in", region), *self._dropped(region)]
        return [Step("trainer.onload", (*moves, Op("alloc", "grads")))]

    def _dropped(self, region: Region) -> list[Op]:
        """The end of a host copy; a retained one is allocated at its first use and never freed."""
        return [] if self.options.buffers == "retained" else [Op("free", region, "host")]

    def clear_memory(self) -> Step:
        return Step("trainer.clear_memory", (Op("free", "grads"), Op("empty_cache")))

    def train(self) -> Step:
        use = [Op("read", r) for r in (*BACKED_UP, "grads")]
        writes = [Op("write", r) for r in BACKED_UP]
        return Step("train", (Op("alloc", "activations"), *use, *writes, Op("free", "activations")))

    def save(self) -> Step:
        return Step("save", tuple(Op("read", r) for r in BACKED_UP), when="save")

    def update_weights(self) -> Step:
        return Step(
            "update_weights",
            (
                Op("alloc", "update_bucket"),
                Op("read_any", "params"),
                Op("publish", "weights"),
                Op("free", "update_bucket"),
            ),
        )

    def generate(self, name: str) -> Step:
        return Step(name, tuple(Op("read", r) for r in ENGINE_REGIONS))


# Clearing memory drops the gradients, so the offload that follows finds none: `free grads` there is
# the one free that may meet an empty region.
_MAY_BE_ABSENT = {("trainer.offload", Op("free", "grads"))}


@dataclass
class _State:
    gpu: set[Region] = field(default_factory=set)
    host: set[Region] = field(default_factory=set)
    gpu_valid: set[Region] = field(default_factory=set)
    """Regions whose GPU content is what it should be."""
    host_valid: set[Region] = field(default_factory=set)
    params_version: int = 0
    weights_version: int | None = None
    host_params_version: int = -1
    saved_version: int | None = None
    health: bool = True

    def snapshot(self, *, has_retained: bool) -> tuple[object, ...]:
        """What must be the same at the start and at the end of a cycle.

        Args:
            has_retained: host copies stay from their first use on, which may be in the first cycle.
        """
        return (
            frozenset(self.gpu),
            frozenset() if has_retained else frozenset(self.host),
            frozenset(self.gpu_valid),
            self.health,
            self.weights_version == self.params_version,
        )


def initial_state() -> _State:
    """Engines are loaded and hold all their memory; the trainer does not exist yet."""
    return _State(gpu=set(ENGINE_REGIONS), gpu_valid=set(ENGINE_REGIONS))


def check(schedule: Schedule) -> list[str]:
    """Every way in which the schedule is unsafe; empty when it is safe.

    Walks start-up and then two cycles for each combination of saving and evaluating, operation by
    operation, and holds the state against the invariants. Knows nothing of how the steps were built.
    """
    problems: list[str] = []
    for save in (False, True):
        for evaluate in (False, True):
            walk = _Walk(schedule.options)
            walk.run("init", schedule.init)
            walk.start_cycle("init", None)
            for cycle in (1, 2):
                before = walk.snapshot()
                version = walk.state.params_version
                walk.run(f"cycle {cycle}", list(schedule.steps(save=save, evaluate=evaluate)))
                walk.start_cycle(f"cycle {cycle}", before)
                walk.expect_work(f"cycle {cycle}", version, save=save, evaluate=evaluate)
            problems += [p for p in walk.problems if p not in problems]
    return problems


class _Walk:
    def __init__(self, options: HandoffOptions) -> None:
        self.options = options
        self.state = initial_state()
        self.problems: list[str] = []
        self.generated: dict[str, int] = {}
        self.at = ""

    def fail(self, text: str) -> None:
        self.problems.append(f"{self.at}: {text}")

    def run(self, phase: str, steps: Sequence[Step]) -> None:
        for step in steps:
            self.at = f"{phase}, {step.name}"
            for op in step.ops:
                self.apply(step, op)
                self.coexistence()
            if step.name in ("generate", "eval"):
                self.use_engine(step.name)
            if step.name == "save":
                self.state.saved_version = self.state.params_version
            if "update_bucket" in self.state.gpu or "activations" in self.state.gpu:
                self.fail("a transient region outlives its step")

    def start_cycle(self, phase: str, before: tuple[object, ...] | None) -> None:
        """A cycle may begin only with awake engines that hold the trainer's weights."""
        self.at = f"end of {phase}"
        missing = [r for r in ENGINE_REGIONS if r not in self.state.gpu]
        if missing:
            self.fail(f"the engine ends without {', '.join(missing)} on the GPU")
        if self.state.weights_version != self.state.params_version:
            self.fail("the engine ends with weights of another version than the trainer's")
        if before is not None and self.snapshot() != before:
            self.fail("the cycle does not end in the state it began in")

    def snapshot(self) -> tuple[object, ...]:
        return self.state.snapshot(has_retained=self.options.buffers == "retained")

    def expect_work(self, phase: str, version: int, *, save: bool, evaluate: bool) -> None:
        """A cycle generates with the old weights, trains once, saves and evaluates the new ones."""
        self.at = phase
        if self.state.params_version != version + 1:
            self.fail("does not train exactly once")
        if self.generated.get("generate") != version:
            self.fail("does not generate with the weights the cycle began with")
        if save and self.state.saved_version != version + 1:
            self.fail("saves another version than the one just trained")
        if evaluate and self.generated.get("eval") != version + 1:
            self.fail("evaluates another version than the one just trained")

    def use_engine(self, name: str) -> None:
        if self.state.weights_version != self.state.params_version:
            theirs, ours = self.state.weights_version, self.state.params_version
            self.fail(f"{name} with weights of version {theirs}, the trainer's is {ours}")
        if not self.state.health:
            self.fail(f"{name} while health checks are paused")
        if self.options.offload_train and any(r in self.state.gpu for r in BACKED_UP):
            self.fail(f"{name} while the trainer's state could be offloaded")
        if self.state.weights_version is not None:
            self.generated[name] = self.state.weights_version

    def apply(self, step: Step, op: Op) -> None:
        state, region = self.state, op.region
        if region is None:
            self.apply_global(op)
            return
        on = state.gpu if op.tier == "gpu" else state.host
        valid = state.gpu_valid if op.tier == "gpu" else state.host_valid
        match op.action:
            case "alloc":
                kept = op.tier == "host" and self.options.buffers == "retained"
                if region in on and not kept:
                    self.fail(f"{region} is allocated twice on the {op.tier}")
                if region == "kv_cache" and "update_bucket" in state.gpu:
                    self.fail("kv_cache comes back while the update's buffers are alive")
                if region == "kv_cache" and state.weights_version != state.params_version:
                    self.fail("kv_cache comes back before the update")
                if op.tier == "gpu":
                    self.company(step, region)
                on.add(region)
                valid.discard(region)
                if region in ("kv_cache", "cuda_graph", "grads", "activations", "update_bucket"):
                    valid.add(region)  # rebuilt or zeroed on allocation; their old content is never needed
            case "free":
                if region not in on:
                    if (step.name, op) not in _MAY_BE_ABSENT:
                        self.fail(f"{region} is released twice on the {op.tier}")
                    return
                if op.tier == "gpu" and region in ENGINE_REGIONS and state.health:
                    self.fail(f"{region} is released while health checks run")
                if op.tier == "gpu" and region in BACKED_UP and region not in state.host_valid:
                    self.fail(f"{region} is released without a copy that could bring it back")
                on.discard(region)
                valid.discard(region)
            case "copy_out":
                self.need(region, "copied out")
                if region not in state.host:
                    self.fail(f"{region} is copied to a host buffer that does not exist")
                state.host_valid.add(region)
                if region == "params":
                    state.host_params_version = state.params_version
            case "copy_in":
                if region not in state.gpu or region not in state.host_valid:
                    self.fail(f"{region} is copied in without both sides")
                state.gpu_valid.add(region)
            case "write":
                if region not in state.gpu:
                    self.fail(f"{region} is written while it is offloaded")
                state.gpu_valid.add(region)
                # A retained backup stays allocated, but what it holds is now stale.
                state.host_valid.discard(region)
                if step.name == "train" and region == "params":
                    state.params_version += 1
            case "read":
                self.need(region, f"used by {step.name}")
            case "read_any":
                on_host = region in state.host_valid and state.host_params_version == state.params_version
                if region not in state.gpu_valid and not on_host:
                    self.fail(f"{region} is read by {step.name}, but neither the GPU nor the host has it")
            case "publish":
                if "weights" not in state.gpu:
                    self.fail("an update writes weights that are offloaded")
                if not self.options.lora:
                    state.gpu_valid.add("weights")
                state.weights_version = state.params_version

    def apply_global(self, op: Op) -> None:
        state = self.state
        if op.action == "pause_health":
            if not state.health:
                self.fail("health checks are paused twice")
            state.health = False
        elif op.action == "resume_health":
            if missing := [r for r in ENGINE_REGIONS if r not in state.gpu]:
                self.fail(f"health checks resume while {', '.join(missing)} is offloaded")
            if state.weights_version != state.params_version:
                self.fail("health checks resume before the engine has the current weights")
            state.health = True
        elif op.action == "empty_cache" and any(r not in state.gpu for r in BACKED_UP):
            self.fail("the allocator's cache is emptied while regions are paused")

    def need(self, region: Region, use: str) -> None:
        if region not in self.state.gpu:
            self.fail(f"{region} is {use} while it is offloaded")
        elif region not in self.state.gpu_valid:
            self.fail(f"{region} is {use}, but its content was lost")

    def company(self, step: Step, region: Region) -> None:
        """Who may be on the GPU when `region` is allocated there: the peaks that offloading is for."""
        options, gpu = self.options, self.state.gpu
        releasable: set[Region] = {"cuda_graph"} if options.offload_rollout else set()
        releasable |= {"kv_cache"} if options.releases_kv else set()
        releasable |= {"weights"} if options.releases_weights else set()
        if region == "activations" and (awake := sorted(releasable & gpu)):
            self.fail(f"trains while {', '.join(awake)} could be offloaded")
        if step.name == "trainer.init":
            # gpu order: a mirror on the host while the trainer loads is what it avoids.
            releasable -= {"weights"} if options.order == "gpu" else set()
            if awake := sorted(releasable & gpu):
                self.fail(f"the trainer starts while {', '.join(awake)} could be offloaded")
        if region == "weights" and options.offload_train and "grads" in gpu:
            self.fail("the engine's weights return before the gradients are freed")
        if region == "update_bucket" and options.offload_train and "grads" in gpu:
            self.fail("the update's buffers come before the gradients are freed")

    def coexistence(self) -> None:
        """What each order promises never to hold at the same time."""
        state, options = self.state, self.options
        trainer_on_gpu = any(r in state.gpu for r in BACKED_UP)
        if options.offload_train and options.releases_kv and trainer_on_gpu and "kv_cache" in state.gpu:
            self.fail("the KV cache and the trainer's state are on the GPU together")
        if options.offload_train and options.offload_rollout and trainer_on_gpu and "cuda_graph" in state.gpu:
            self.fail("the engine's CUDA graphs and the trainer's state are on the GPU together")
        both_move = options.offload_train and options.releases_weights
        if options.order == "cpu" and both_move and trainer_on_gpu and "weights" in state.gpu:
            self.fail("cpu order holds the engine's weights and the trainer's state on the GPU together")
        backup = any(r in state.host for r in BACKED_UP)
        if options.order == "gpu" and options.buffers != "retained" and backup and "weights" in state.host:
            self.fail("gpu order holds the engine's mirror and the trainer's backup on the host together")
        if options.buffers == "shared" and backup and "weights" in state.host:
            self.fail("the mirror and the backup use the shared arena at the same time")
