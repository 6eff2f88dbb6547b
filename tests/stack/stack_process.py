"""One rank of several, in a process of its own: what it computes goes to a file."""

from __future__ import annotations

import gc
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from rig import CollectedUpdate, make_batch, make_context
from stack_rig import critic_of

from rllaunch.backends.base import RankInfo, Slot


def train_rank(rank: int, world: int, ports: list[int], directory: str, launches: dict[str, dict[str, Any]]) -> None:
    """Each launch one after the other: two rollouts with a handoff between them, and an update from the backup."""
    from megatron_cpu import use_cpu

    from rllaunch.backends.megatron.trainer import MegatronTrainer

    use_cpu()
    results, updates = {}, {}
    for port, (name, sections) in zip(ports, launches.items(), strict=True):
        context = make_context(num_slots=world, **sections)
        trainer = MegatronTrainer(context, Slot(rank, 0, "cpu", f"{directory}/ledgers-{name}"))
        trainer.init(RankInfo(rank, world, "127.0.0.1", port))
        figures = []
        for rollout_id in range(2):
            batch = make_batch(context, rollout_id)
            batch.response_ids_BL[::3, 0] = 0  # the token that pads: an untrained policy samples it too
            figures.append(dict(trainer.train(batch).values))
            trainer.offload()
            sink = CollectedUpdate()
            sent = trainer.update_weights(rollout_id + 1, sink)
            both_ways = gathered_and_spread(trainer)
            trainer.onload()
        checkpoint = Path(directory) / f"checkpoint-{name}"
        checkpoint.mkdir(exist_ok=True)
        trainer.save(str(checkpoint))
        results[name] = (figures, sink.tensors | critic_of(trainer), sent)
        updates[name] = both_ways
        trainer.shutdown()
        del trainer
        gc.collect()  # its groups' threads poll as long as it is there
    torch.save(results, Path(directory) / f"rank-{rank}.pt")
    torch.save(updates, Path(directory) / f"updates-{rank}.pt")


def gathered_and_spread(trainer: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What an update sends: gathered on rank 0, as through a file, and made on every rank, as through GPUs."""
    placement = trainer.built.placement
    made = []
    for way in (placement.gather, placement.spread):
        made.append({name: tensor.clone() for name, tensor in way(trainer._local("cpu"), "cpu")})
    return made[0], made[1]


def same_on_every_rank(directory: Path, world: int) -> set[str]:
    """Launches in which every rank made the tensors that rank 0 gathered, bit for bit and in the same order."""
    ranks = [torch.load(directory / f"updates-{rank}.pt") for rank in range(world)]
    found = set()
    for launch, (gathered, _) in ranks[0].items():
        spread = [rank[launch][1] for rank in ranks]
        if all(list(s) == list(gathered) and all(torch.equal(s[n], gathered[n]) for n in s) for s in spread):
            found.add(launch)
    return found


def resume_rank(
    rank: int, world: int, ports: list[int], directory: str, launches: dict[str, tuple[str, dict[str, Any]]]
) -> None:
    """Each launch one after the other: resumed from its checkpoint, saved again at once, and trained on."""
    from megatron_cpu import use_cpu

    from rllaunch.backends.megatron.trainer import MegatronTrainer

    use_cpu()
    results = {}
    for port, (name, (source, sections)) in zip(ports, launches.items(), strict=True):
        context = make_context(num_slots=world, **sections)
        trainer = MegatronTrainer(context, Slot(rank, 0, "cpu", f"{directory}/ledgers-{name}"))
        trainer.init(RankInfo(rank, world, "127.0.0.1", port))
        trainer.load(f"{directory}/{source}")
        again = Path(directory) / name
        again.mkdir(exist_ok=True)
        trainer.save(str(again))
        results[name] = dict(trainer.train(make_batch(context, 1)).values)
        trainer.shutdown()
        del trainer
        gc.collect()
    torch.save(results, Path(directory) / f"resumed-{rank}.pt")


def logprob_rank(rank: int, world: int, port: int, directory: str) -> None:
    """Log-probabilities and their gradient from this rank's part of the logits of a file."""
    import torch.distributed as dist

    from rllaunch.backends.megatron.losses import vocab_parallel_logprobs

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    given = torch.load(Path(directory) / "given.pt")
    part = given["logits"].chunk(world, dim=1)[rank].clone().requires_grad_()
    logp, entropy = vocab_parallel_logprobs(
        part, given["rows"], given["tokens"], temperature=0.7, vocab_size=given["vocab_size"],
        group=dist.group.WORLD, chunk_tokens=5,
    )  # fmt: skip
    ((logp * given["weight"]).sum() + (entropy * given["entropy_weight"]).sum()).backward()
    torch.save((logp.detach(), entropy.detach(), part.grad), Path(directory) / f"logprob-{rank}.pt")
    dist.destroy_process_group()


def fp8_update_rank(rank: int, world: int, port: int, directory: str, launch: dict[str, Any]) -> None:
    """What this rank makes for engines in FP8 as through GPUs, and what rank 0 sends through a file."""
    import stack_rig
    from megatron_cpu import use_cpu

    from rllaunch.backends.megatron.trainer import MegatronTrainer
    from rllaunch.backends.megatron.update import as_engine_wants

    use_cpu()
    context = stack_rig.make_context(num_slots=world, **launch)
    trainer = MegatronTrainer(context, Slot(rank, 0, "cpu", f"{directory}/ledgers"))
    trainer.init(RankInfo(rank, world, "127.0.0.1", port))
    trainer.offload()
    sink = CollectedUpdate()
    trainer.update_weights(1, sink)
    spread = trainer.built.placement.spread(trainer._local("cpu"), "cpu")
    made = as_engine_wants(spread, context, trainer.built.shape, trainer._fp8, "cpu")
    torch.save({"spread": {n: t.clone() for n, t in made}, "sent": sink.tensors}, Path(directory) / f"rank-{rank}.pt")
    trainer.shutdown()


def run_ranks(world: int, target: Any, *args: Any) -> None:
    """`target(rank, world, *args)` in a process for each rank.

    Raises:
        AssertionError: one of them failed.
    """
    spawn = multiprocessing.get_context("spawn")
    processes = [spawn.Process(target=target, args=(rank, world, *args)) for rank in range(world)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 600  # a minute where nothing else runs
    # As soon as one has failed the others wait for it in vain.
    while time.monotonic() < deadline and any(p.is_alive() for p in processes):
        if any(p.exitcode for p in processes):
            break
        time.sleep(0.1)
    alive = [p for p in processes if p.is_alive()]
    for process in alive:
        process.kill()
    assert [p.exitcode for p in processes] == [0] * world
