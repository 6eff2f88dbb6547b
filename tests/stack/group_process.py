"""A rank whose communicators come and go, in a process of its own: what it sees goes to a file."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from rig import CollectedUpdate, make_batch, make_context

from rllaunch.backends.base import RankInfo, Slot
from rllaunch.backends.megatron.process_groups import ProcessGroups
from rllaunch.errors import RunError
from rllaunch.plan.handoff import HandoffOptions, build_schedule


def rollouts_rank(
    rank: int, world: int, ports: list[int], directory: str, launches: dict[str, dict[str, Any]], device: str = "cpu"
) -> None:
    """Each launch one after the other: three rollouts, with the trainer's steps of its order of the handoff.

    Args:
        device: `cuda`: each rank sees a GPU of its own.
    """
    if device == "cpu":
        from megatron_cpu import use_cpu

        use_cpu()
    else:
        # Before anything counts the GPUs, which importing Megatron-core does.
        os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
    from rllaunch.backends.megatron.trainer import MegatronTrainer

    results = {}
    for port, (name, sections) in zip(ports, launches.items(), strict=True):
        options = HandoffOptions(sections["handoff"]["colocate_memory_peak_device"])
        context = make_context("grpo", options, num_slots=world, **sections)
        trainer = MegatronTrainer(context, Slot(rank, 0, device, f"{directory}/ledgers-{name}"))
        trainer.init(RankInfo(rank, world, "127.0.0.1", port))
        schedule = build_schedule(options)
        seen: list[dict[str, Any]] = []
        figures, sink = [], CollectedUpdate()
        trainer.memory()
        cycles = [(i, schedule.steps(save=i == 2, evaluate=False)) for i in range(3)]
        for rollout_id, steps in ((0, schedule.init), *cycles):
            for step in steps:
                if step.name == "train":
                    figures.append(dict(trainer.train(make_batch(context, rollout_id)).values))
                elif step.name == "update_weights":
                    trainer.update_weights(0, sink)
                elif step.name == "save":
                    checkpoint = Path(directory) / name
                    checkpoint.mkdir(exist_ok=True)
                    trainer.save(str(checkpoint))
                elif step.name.startswith("trainer.") and step.name != "trainer.init":
                    before = num_connections()
                    dist.barrier()  # whoever is first must not close what the other still counts
                    getattr(trainer, step.name.removeprefix("trainer."))()
                    seen.append(look_at(trainer, step.name, before))
        results[name] = (figures, sink.tensors, seen)
        trainer.shutdown()
    torch.save(results, Path(directory) / f"rank-{rank}.pt")


def device_of(trainer: Any) -> torch.device:
    return torch.device(trainer.slot.device)


def look_at(trainer: Any, step: str, before: int) -> dict[str, Any]:
    """A step of the trainer, seen from its groups and its reading.

    Args:
        before: connections before it.
    """
    from megatron.core import parallel_state

    gc.collect()
    said = ""
    try:
        zero = torch.zeros(1, device=device_of(trainer))
        dist.all_reduce(zero, group=parallel_state.get_data_parallel_group())
    except RunError as err:
        said = err.what
    reading = trainer.memory()
    return {
        "step": step,
        "said": said,
        "closed": before - num_connections(),
        "seconds": reading.communicator_seconds,
        "bytes": reading.communicator_bytes,
    }


@contextmanager
def group_of_two(rank: int, world: int, port: int) -> Iterator[tuple[ProcessGroups, Any]]:
    """A group that may go, beside the default group."""
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    groups = ProcessGroups("cpu")
    with groups.adopting():
        group = dist.new_group([0, 1], timeout=timedelta(seconds=3), group_desc="PAIR")
        dist.new_group([0, 1], timeout=timedelta(seconds=3), group_desc="ROOTED")
        dist.new_group([1], timeout=timedelta(seconds=3))
    try:
        yield groups, group
    finally:
        dist.destroy_process_group()


def calls_rank(rank: int, world: int, ports: list[int], directory: str) -> None:
    torch.save((reloaded(rank, world, ports[0]), lonely(rank, world, ports[1])), Path(directory) / f"calls-{rank}.pt")


def reloaded(rank: int, world: int, port: int) -> list[dict[str, Any]]:
    """What torch.distributed's functions give over the same group: before, and after each of two reloads."""
    answers = []
    with group_of_two(rank, world, port) as (groups, group):
        assert len(groups.groups) == 2 + rank, "a rank has the groups it is in"
        rooted = groups.groups[1]
        for _ in range(3):
            answers.append(all_calls(rank, group) | rooted_calls(rank, rooted))
            assert rooted.has_met, "on the rank that only gives or only takes, too"
            connections = num_connections()
            dist.barrier()  # whoever is first must not close what the other still counts
            groups.tear_down()
            groups.tear_down()
            gc.collect()
            closed = connections - num_connections()
            dist.barrier()  # of the default group
            time.sleep(rank / 2)  # who comes first must not meet what the other left in the store the last time
            groups.make_anew()
            groups.make_anew()
            answers[-1]["closed"] = closed
    return answers


def num_connections() -> int:
    return sum(c.status == psutil.CONN_ESTABLISHED for c in psutil.Process().net_connections())


def all_calls(rank: int, group: Any) -> dict[str, Any]:
    from torch.distributed.distributed_c10d import _coalescing_manager, _resolve_process_group

    ones, pair, out = torch.full((2,), 1.0 + rank), torch.arange(4.0) * (1 + rank), {}
    out["all_reduce"] = ones.clone()
    dist.all_reduce(out["all_reduce"], group=group)
    out["async"] = ones.clone()
    work = dist.all_reduce(out["async"], op=dist.ReduceOp.MAX, group=group, async_op=True)
    work.wait()
    out["broadcast"] = ones.clone()
    dist.broadcast(out["broadcast"], 1, group=group)
    out["all_gather_into_tensor"] = torch.zeros(4)
    dist.all_gather_into_tensor(out["all_gather_into_tensor"], ones, group=group)
    out["all_gather"] = [torch.zeros(2), torch.zeros(2)]
    dist.all_gather(out["all_gather"], ones, group=group)
    out["reduce_scatter_tensor"] = torch.zeros(2)
    dist.reduce_scatter_tensor(out["reduce_scatter_tensor"], pair, group=group)
    out["all_to_all_single"] = torch.zeros(4)
    dist.all_to_all_single(out["all_to_all_single"], pair, group=group)
    out["objects"] = [None, None]
    dist.all_gather_object(out["objects"], {"rank": rank}, group=group)
    out["received"] = torch.zeros(2)
    for work in dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, ones, 1 - rank, group=group),
            dist.P2POp(dist.irecv, out["received"], 1 - rank, group=group),
        ]
    ):
        work.wait()
    with _coalescing_manager(group, async_ops=True) as together:
        out["coalesced"] = [ones.clone(), pair.clone()]
        for tensor in out["coalesced"]:
            dist.all_reduce(tensor, group=group)
    together.wait()
    dist.barrier(group=group)
    name = group.group_name
    out["place"] = (
        dist.get_rank(group), dist.get_world_size(group), dist.get_backend(group), dist.get_process_group_ranks(group),
        group.group_desc, _resolve_process_group(name) is group, dist.get_group_rank(group, 1),
    )  # fmt: skip
    return out


def rooted_calls(rank: int, group: Any) -> dict[str, Any]:
    """Collectives in which one rank has lists of tensors, and the others none."""
    ones, out = torch.full((2,), 1.0 + rank), {}
    out["gather"] = [torch.zeros(2), torch.zeros(2)] if rank == 0 else None
    dist.gather(ones, out["gather"], dst=0, group=group)
    out["scatter"] = torch.zeros(2)
    dist.scatter(out["scatter"], [ones, 2 * ones] if rank == 0 else None, src=0, group=group)
    out["reduce"] = ones.clone()
    dist.reduce(out["reduce"], dst=1, group=group)
    return out if rank == 1 else out | {"reduce": None}


def lonely(rank: int, world: int, port: int) -> dict[str, str]:
    """Rank 0 brings its communicators back, rank 1 does not come; what is said."""
    said = {}
    with group_of_two(rank, world, port) as (groups, group):
        groups.tear_down()
        if rank == 0:
            try:
                dist.all_reduce(torch.zeros(1), group=group)
            except RunError as err:
                said["asleep"] = str(err)
            try:
                groups.make_anew()
            except RunError as err:
                said["alone"] = str(err)
        dist.barrier()
    return said
