"""How few nodes, and which layout? Every legal layout of a model on a kind of node, planned."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rllaunch.errors import ConfigError, RllaunchError
from rllaunch.flags import command_of
from rllaunch.plan.advice import changed
from rllaunch.plan.architecture import Architecture
from rllaunch.plan.choose import OPTIMIZER, TIGHT, Candidate, choose, least_room, told_break
from rllaunch.plan.forecast import limits_of
from rllaunch.plan.sizes import sizes_of
from rllaunch.resolve.origins import Resolved
from rllaunch.units import gib

MAX_TP = 8
# (TP, PP, EP) of the trainer, and the GPUs that an engine may have.
Way = tuple[tuple[int, int, int], list[int]]


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions on so many nodes.

    Args:
        last_stage: layers of the last pipeline stage, where they do not divide over all.
    """

    nodes: int
    tp: int
    pp: int
    cp: int
    ep: int
    engine_gpus: int
    optimizer_on_host: bool
    last_stage: int | None = None

    @property
    def label(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}"]
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        parts += ["optimizer on the host"] if self.optimizer_on_host else []
        return " ".join([*parts, f"engines of {self.engine_gpus}"])


@dataclass(frozen=True)
class Fitted:
    """A layout that fits.

    Args:
        values: `section.key` → value, what has to be set for it beside what was set.
    """

    layout: Layout
    candidate: Candidate
    values: Mapping[str, Any]

    @property
    def flags(self) -> str:
        return shlex.join(command_of(self.values))


@dataclass(frozen=True)
class FitAnswer:
    """The best layouts of the fewest nodes that do, and why one node count less does not.

    Args:
        found: best first: the fewest nodes, then what leaves the asked headroom, then the least communication.
        smaller: node count → what its closest layout lacks, for every count below.
        considered: layouts that were planned.
    """

    found: tuple[Fitted, ...]
    smaller: Mapping[int, str]
    considered: int


def fit(
    resolved: Resolved,
    architecture: Architecture,
    *,
    max_nodes: int,
    best: int = 10,
    is_sound: Callable[[Resolved], bool] = lambda _: True,
) -> FitAnswer:
    """Search upwards until a layout fits: from one node, or from the number of nodes that a user gave.

    Where nobody said where the optimizer lives, a layout that does not fit is tried with it on the host as well.

    Args:
        is_sound: whether nothing else is wrong with a launch; asked of what fits only.
    Raises:
        ConfigError: the launch is of a kind that cannot be planned.
    """
    if not resolved.config.handoff.colocate:
        raise ConfigError(
            "trainer and engines on GPUs of their own are not planned",
            resolved.describe("handoff.colocate"),
            "--colocate",
        )
    if resolved.config.trainer.backend == "embedded":
        raise ConfigError(
            "the embedded trainer has one layout, so there is none to look for",
            resolved.describe("trainer.backend"),
            "--hardware NAME, of a machine with GPUs; `rllaunch profiles list` shows them",
        )
    smaller: dict[int, str] = {}
    search = _Search(resolved, architecture)
    for nodes in _node_counts(resolved, max_nodes):
        found = list(islice(search.on(nodes, layouts(resolved, architecture, nodes), is_sound), best))
        if found:
            return FitAnswer(tuple(found), smaller, search.considered)
        smaller[nodes] = search.closest
    return FitAnswer((), smaller, search.considered)


def nearest_fit(
    resolved: Resolved, architecture: Architecture, *, is_sound: Callable[[Resolved], bool]
) -> Fitted | None:
    """A likely layout on as many nodes that fits: experts over as many GPUs as they go, then the least TP · PP.

    None where none of these does. A search of all layouts takes seconds on hundreds of GPUs; this is for a hint.
    """
    search, nodes = _Search(resolved, architecture), resolved.config.cluster.num_nodes
    widest: dict[tuple[int, int], int] = {}
    sizes: list[int] = []
    for (tp, pp, ep), engines in layouts(resolved, architecture, nodes):
        if pp in _LIKELY_STAGES and ep <= _MOST_EP:
            widest[tp, pp] = max(ep, widest.get((tp, pp), 0))
            sizes = engines
    engine = next((n for n in sizes if _engine_has_room(resolved, architecture, nodes, n)), None)
    if engine is None:
        return None
    least = sorted(widest, key=lambda way: (way[0] * way[1], way[1]))[:_MOST_WAYS]
    ways = (((tp, pp, widest[tp, pp]), [engine]) for tp, pp in least)
    found = next(search.on(nodes, ways, is_sound), None)
    return None if found is None or search.is_tight(found) else found


_LIKELY_STAGES, _MOST_EP, _MOST_WAYS = (1, 2, 4, 8, 16), 64, 12


def _engine_has_room(resolved: Resolved, architecture: Architecture, nodes: int, gpus: int) -> bool:
    """Whether the weights of an engine on so many GPUs leave half of each for the rest."""
    made = laid_out(resolved, Layout(nodes, 1, 1, 1, 1, gpus, optimizer_on_host=False))
    limit = limits_of(made.config).gpu
    return limit is None or sizes_of(made.config, architecture).gpu["weights"] < limit / 2


class _Search:
    """Layouts of one number of nodes after the other, and what the closest of those that do not fit lacks."""

    def __init__(self, resolved: Resolved, architecture: Architecture) -> None:
        self.resolved = resolved
        self.architecture = architecture
        self.considered = 0
        self.closest = ""
        self._excess = math.inf
        # Where the optimizer may live, as asked for first.
        given = resolved.config.trainer.optimizer_cpu_offload
        self.placements = [given] if given or resolved.is_set(OPTIMIZER) else [False, True]
        self.headroom = max(TIGHT, resolved.config.handoff.memory_headroom)

    def rank(self, fitted: Fitted) -> tuple[Any, ...]:
        """What leaves headroom first; then fewer bubbles and less traffic between nodes; then more room."""
        layout, room = fitted.layout, least_room(fitted.candidate.plan)[0]
        ranks = layout.pp * layout.tp * layout.cp
        return self.is_tight(fitted), layout.optimizer_on_host, ranks, layout.pp, -room

    def is_tight(self, fitted: Fitted) -> bool:
        return least_room(fitted.candidate.plan)[0] < self.headroom

    def on(self, nodes: int, ways: Iterable[Way], is_sound: Callable[[Resolved], bool]) -> Iterator[Fitted]:
        """What fits on so many nodes and is sound otherwise, of each trainer layout its best engines; best first."""
        here: list[Fitted] = []
        self.closest, self._excess = "no layout divides", math.inf
        for (tp, pp, ep), engines in ways:
            for on_host in self.placements:
                fitting = list(self.fitting(nodes, tp, pp, ep, engines, on_host))
                if fitting:
                    best = min(fitting, key=self.engine_rank)
                    here.append(best)
                    if not self.is_tight(best):
                        break
        ranked = sorted(here, key=self.rank)
        return (fitted for fitted in ranked if is_sound(laid_out(self.resolved, fitted.layout)))

    def engine_rank(self, fitted: Fitted) -> tuple[bool, bool, int]:
        """The smallest engine whose KV cache holds its share of a rollout, else the largest; headroom before both."""
        config = self.resolved.config
        longest = config.rollout.rollout_max_context_len or config.rollout.rollout_max_response_len
        per_node = config.gpus_per_node
        engine = fitted.layout.engine_gpus
        share = config.num_samples * longest * engine / (fitted.layout.nodes * per_node)
        is_short = fitted.candidate.plan.sizes.tokens_in_kv < share
        return self.is_tight(fitted), is_short, -engine if is_short else engine

    def fitting(self, nodes: int, tp: int, pp: int, ep: int, engines: Sequence[int], on_host: bool) -> Iterator[Fitted]:
        """What fits of one trainer layout; none is planned whose state alone is too much for a GPU or a host."""
        cp = self.resolved.config.trainer.context_parallel_size
        for number, engine in enumerate(engines):
            layout = Layout(nodes, tp, pp, cp, ep, engine, on_host, _last_stage(len(self.architecture.layers), pp))
            made = laid_out(self.resolved, layout)
            try:
                if number == 0 and self._is_hopeless(made, layout):
                    return
                candidate = choose(made, self.architecture, compare=False).taken
            except RllaunchError:
                continue
            self.considered += 1
            plan = candidate.plan
            if plan.fits and (plan.sizes.gpu["kv_cache"] > 0 or plan.limits.gpu is None):
                yield Fitted(layout, candidate, needed_values(self.resolved, layout, self.architecture))
            else:
                self._note(-least_room(plan)[0], f"{_why(candidate)} (closest: {layout.label})")

    def _is_hopeless(self, made: Resolved, layout: Layout) -> bool:
        """Whether the trainer's state does not fit by itself, whatever the engines are and the order is."""
        sizes, limits = sizes_of(made.config, self.architecture), limits_of(made.config)
        state = sum(sizes.gpu[r] for r in ("params", "optimizer", "grads")) + sum(sizes.static_gpu.values())
        host = sum(sizes.static_host.values())
        for tier, needed in (("gpu", state), ("host", host)):
            limit = limits.gpu if tier == "gpu" else limits.host
            if limit is not None and needed > limit:
                name = "a GPU" if tier == "gpu" else "a node's host"
                takes = f"takes {gib(needed)} of {name}, {gib(needed - limit)} more than there are"
                text = f"the trainer's state alone {takes}"
                self._note(needed / limit - 1, f"{text} (closest: {layout.label})")
                self.considered += 1
                return True
        return False

    def _note(self, excess: float, why: str) -> None:
        if excess < self._excess:
            self.closest, self._excess = why, excess


def _last_stage(layers: int, pp: int) -> int | None:
    """Where layers do not divide over the stages, the last one has fewer."""
    if layers % pp == 0:
        return None
    return layers - (pp - 1) * -(-layers // pp)


def _node_counts(resolved: Resolved, max_nodes: int) -> Iterator[int]:
    key = "cluster.num_nodes"
    first = resolved.config.cluster.num_nodes if resolved.origin(key).layer in ("config", "env", "flag") else 1
    yield from range(first, max(first, max_nodes) + 1)


def _why(candidate: Candidate) -> str:
    plan = candidate.plan
    if (broken := plan.first_break) is not None:
        return told_break(broken, plan.limits)
    return "the engine's weights leave no room for a KV cache"


def layouts(resolved: Resolved, architecture: Architecture, nodes: int) -> Iterator[Way]:
    """The layouts that divide: GPUs by TP·PP·CP and EP·PP, heads by TP, experts by EP.

    Engines are whole parts of a node or whole nodes.
    """
    config = resolved.config
    per_node = config.gpus_per_node
    world = nodes * per_node
    cp = config.trainer.context_parallel_size
    experts, heads = architecture.num_experts, architecture.num_attention_heads
    engines = [g for g in _powers(world) if heads % g == 0 and (g <= per_node or g % per_node == 0)]
    layers, kv_heads = len(architecture.layers), architecture.num_kv_heads
    samples = config.trainer.global_batch_size or config.num_samples
    for tp in _powers(min(MAX_TP, per_node)):
        if heads % tp or world % tp or (kv_heads % tp and tp % kv_heads):
            continue
        for pp in _divisors(world // tp):
            last = _last_stage(layers, pp)
            if pp > layers or (last is not None and last < 1) or world % (tp * pp * cp):
                continue
            if samples % (world // (tp * pp * cp)):
                continue  # every data-parallel rank gets as many samples
            for ep in _divisors(world // pp) if experts else [1]:
                if not experts or experts % ep == 0:
                    yield (tp, pp, ep), engines


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(max(1, limit).bit_length()) if 2**i <= limit]


def laid_out(resolved: Resolved, layout: Layout) -> Resolved:
    """The launch with this layout."""
    world = layout.nodes * resolved.config.gpus_per_node
    derived = {"cluster.actor_num_nodes": layout.nodes, "rollout.rollout_num_gpus": world}
    return changed(resolved, _values(resolved, layout) | derived)


def needed_values(resolved: Resolved, layout: Layout, architecture: Architecture) -> dict[str, Any]:
    """What a layout sets that the launch does not have already; what follows from others would follow these."""
    values = _values(resolved, layout)
    etp = "trainer.expert_tensor_parallel_size"
    # It follows TP, which makes it 1 as planned, or cuts nothing.
    if resolved.origin(etp).layer == "derived" and (layout.tp == 1 or not architecture.num_experts):
        del values[etp]
    follows = {key for key in values if resolved.origin(key).layer == "derived"}
    return {key: value for key, value in values.items() if key in follows or resolved.value(key) != value}


def _values(resolved: Resolved, layout: Layout) -> dict[str, Any]:
    """A layout's keys; a split of layers that was set for another layout is dropped."""
    return {
        "cluster.num_nodes": layout.nodes,
        "trainer.tensor_model_parallel_size": layout.tp,
        "trainer.sequence_parallel": layout.tp > 1,
        "trainer.pipeline_model_parallel_size": layout.pp,
        "trainer.decoder_first_pipeline_num_layers": None,
        "trainer.decoder_last_pipeline_num_layers": layout.last_stage,
        "trainer.context_parallel_size": layout.cp,
        "trainer.expert_model_parallel_size": layout.ep,
        "trainer.expert_tensor_parallel_size": 1,
        "trainer.optimizer_cpu_offload": layout.optimizer_on_host,
        "rollout.rollout_num_gpus_per_engine": layout.engine_gpus,
        "sglang.ep_size": min(resolved.config.sglang.ep_size, layout.engine_gpus),
    }
