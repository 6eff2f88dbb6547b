"""How few nodes, and which layout? Every legal layout of a model on a kind of node, planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rllaunch.errors import RllaunchError
from rllaunch.plan.advice import changed
from rllaunch.plan.architecture import Architecture
from rllaunch.plan.choose import Candidate, choose, least_room, told_break
from rllaunch.resolve.origins import Resolved

MAX_TP = 8


@dataclass(frozen=True)
class Layout:
    """Sizes of the parallel dimensions on so many nodes."""

    nodes: int
    tp: int
    pp: int
    cp: int
    ep: int
    engine_gpus: int

    @property
    def label(self) -> str:
        parts = [f"TP{self.tp}", f"PP{self.pp}"]
        parts += [f"CP{self.cp}"] if self.cp > 1 else []
        parts += [f"EP{self.ep}"] if self.ep > 1 else []
        return " ".join([*parts, f"engines of {self.engine_gpus}"])

    @property
    def flags(self) -> str:
        parts = [f"--num-nodes {self.nodes}", f"--tensor-model-parallel-size {self.tp}"]
        parts += [f"--pipeline-model-parallel-size {self.pp}"] if self.pp > 1 else []
        parts += [f"--context-parallel-size {self.cp}"] if self.cp > 1 else []
        parts += [f"--expert-model-parallel-size {self.ep}"] if self.ep > 1 else []
        return " ".join([*parts, f"--rollout-num-gpus-per-engine {self.engine_gpus}"])


@dataclass(frozen=True)
class Fitted:
    layout: Layout
    candidate: Candidate


@dataclass(frozen=True)
class FitAnswer:
    """The best layouts of the fewest nodes that do, and why one node count less does not.

    Args:
        found: best first: the fewest nodes, then the least communication, then the most room.
        smaller: node count → what its best layout lacks, for every count below.
        considered: layouts that were planned.
    """

    found: tuple[Fitted, ...]
    smaller: Mapping[int, str]
    considered: int


def fit(resolved: Resolved, architecture: Architecture, *, max_nodes: int, best: int = 10) -> FitAnswer:
    """Search upwards from one node; stops one count after the first that fits, to show what more room buys."""
    found: list[Fitted] = []
    smaller: dict[int, str] = {}
    considered = 0
    for nodes in _node_counts(max_nodes):
        here: list[Fitted] = []
        least: tuple[float, str] | None = None
        for layout in layouts(resolved, architecture, nodes):
            candidate = _planned(resolved, architecture, layout)
            if candidate is None:
                continue
            considered += 1
            plan = candidate.plan
            if plan.fits and plan.sizes.gpu["kv_cache"] > 0:
                here.append(Fitted(layout, candidate))
                continue
            why = _why(candidate)
            excess = -least_room(plan)[0]
            if least is None or excess < least[0]:
                least = (excess, f"{why} (closest: {layout.label})")
        if here:
            found += sorted(here, key=_rank)
            if len(found) >= best or nodes * 2 > max_nodes:
                break
            if len({f.layout.nodes for f in found}) > 1:
                break
        else:
            smaller[nodes] = least[1] if least else "no layout divides"
    return FitAnswer(tuple(found[:best]), smaller, considered)


def _node_counts(max_nodes: int) -> Iterator[int]:
    count = 1
    while count <= max_nodes:
        yield count
        count *= 2


def _rank(fitted: Fitted) -> tuple[Any, ...]:
    """Fewer bubbles and less traffic between nodes first; then more room."""
    layout, plan = fitted.layout, fitted.candidate.plan
    room, _ = least_room(plan)
    return (layout.nodes, room < 0.05, layout.pp * layout.tp * layout.cp, layout.pp, -room)


def _why(candidate: Candidate) -> str:
    plan = candidate.plan
    if (broken := plan.first_break) is not None:
        return f"{told_break(broken, plan.limits)}"
    return "the engine's weights leave no room for a KV cache"


def layouts(resolved: Resolved, architecture: Architecture, nodes: int) -> Iterator[Layout]:
    """Sizes that divide: GPUs by TP·PP·CP and by EP·PP, heads by TP, experts by EP, whole engines on whole nodes."""
    config = resolved.config
    per_node = config.cluster.num_gpus_per_node or config.hardware.gpus_per_node
    world = nodes * per_node
    cp = config.trainer.context_parallel_size
    layers = len(architecture.layers)
    experts = architecture.num_experts
    heads = architecture.num_attention_heads
    engines = [g for g in _powers(world) if heads % g == 0 and (g <= per_node or g % per_node == 0)]
    for tp in _powers(min(MAX_TP, per_node)):
        if heads % tp:
            continue
        for pp in _powers(min(world // tp, layers)):
            if world % (tp * pp * cp) or pp > layers:
                continue
            for ep in _powers(world // pp) if experts else [1]:
                if experts and (experts % ep or world % (ep * pp)):
                    continue
                for engine in engines:
                    yield Layout(nodes, tp, pp, cp, ep, engine)


def _powers(limit: int) -> list[int]:
    return [2**i for i in range(max(1, limit).bit_length()) if 2**i <= limit]


def _planned(resolved: Resolved, architecture: Architecture, layout: Layout) -> Candidate | None:
    try:
        return choose(laid_out(resolved, layout), architecture, compare=False).taken
    except RllaunchError:
        return None


def laid_out(resolved: Resolved, layout: Layout) -> Resolved:
    """The launch with this layout; a split of layers that was set for another one is dropped."""
    world = layout.nodes * (resolved.config.cluster.num_gpus_per_node or resolved.config.hardware.gpus_per_node)
    values: dict[str, Any] = {
        "cluster.num_nodes": layout.nodes,
        "cluster.actor_num_nodes": layout.nodes,
        "rollout.rollout_num_gpus": world,
        "rollout.rollout_num_gpus_per_engine": layout.engine_gpus,
        "trainer.tensor_model_parallel_size": layout.tp,
        "trainer.sequence_parallel": layout.tp > 1,
        "trainer.pipeline_model_parallel_size": layout.pp,
        "trainer.decoder_first_pipeline_num_layers": None,
        "trainer.decoder_last_pipeline_num_layers": None,
        "trainer.context_parallel_size": layout.cp,
        "trainer.expert_model_parallel_size": layout.ep,
        "trainer.expert_tensor_parallel_size": 1,
    }
    ep_size = min(resolved.config.sglang.ep_size, layout.engine_gpus)
    return changed(resolved, values | {"sglang.ep_size": ep_size})
