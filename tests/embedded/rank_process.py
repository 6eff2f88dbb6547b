"""One rank of a group of trainers, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from rig import make_batch, make_context

from rllaunch.backends.base import RankInfo, Slot
from rllaunch.backends.embedded.trainer import EmbeddedTrainer


def train_rank(rank: int, world_size: int, ports: dict[str, int], directory: str) -> None:
    """Two rollouts with each algorithm; the parameters and the figures go to a file a rank."""
    results = {}
    for algorithm, port in ports.items():
        context = make_context(algorithm, trainer={"adam_eps": 1e-4})
        trainer = EmbeddedTrainer(context, Slot(rank, 0, "cpu", f"{directory}/{algorithm}-{world_size}"))
        trainer.init(RankInfo(rank, world_size, "127.0.0.1", port))
        figures = [dict(trainer.train(make_batch(context, rollout_id)).values) for rollout_id in range(2)]
        parameters = {
            n: p.detach().clone() for n, p in trainer.layouts.params.views(trainer._buffers["params"]).items()
        }
        results[algorithm] = (parameters, figures)
        trainer.shutdown()
    torch.save(results, Path(directory) / f"rank-{rank}-of-{world_size}.pt")
