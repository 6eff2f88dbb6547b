"""Two ranks over NCCL, each on a GPU of its own; what rank 0 sees goes to a file."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rllaunch.backends.megatron.process_groups import ProcessGroups
from rllaunch.backends.node_memory import GpuMemory
from rllaunch.errors import RunError


def nccl_rank(rank: int, world: int, port: int, directory: str) -> None:
    torch.cuda.set_device(rank)
    memory = GpuMemory([f"GPU-{torch.cuda.get_device_properties(rank).uuid}"])
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=where, rank=rank, world_size=world)
    groups, device = ProcessGroups(f"cuda:{rank}", memory.used), f"cuda:{rank}"
    with groups.adopting():
        made = [dist.new_group([0, 1], group_desc=f"GROUP-{i}") for i in range(4)]
        of_gloo = dist.new_group([0, 1], backend="gloo")
    assert [group in groups.groups for group in (*made, of_gloo)] == [True] * 4 + [False]
    seen: dict[str, Any] = {"freed": [], "taken": [], "seconds": [], "left": []}
    for _ in range(3):
        for group in made[:3]:
            collectives(rank, device, group)
        over_the_host(rank, made[0])
        groups.tear_down()
        gc.collect()
        down = groups.take_figures()
        seen["left"].append(memory.used())
        try:
            dist.all_reduce(torch.ones(1, device=device), group=made[1])
        except RunError:
            seen["said"] = True
        # What an update does while the trainer sleeps.
        weights = torch.full((8,), float(rank), device=device)
        dist.broadcast(weights, 1)
        assert weights.tolist() == [1.0] * 8
        over_the_host(rank, of_gloo)
        groups.make_anew()
        up = groups.take_figures()
        seen["freed"].append(-(down[1] or 0))
        seen["taken"].append(up[1])
        seen["seconds"].append((down[0], up[0]))
    for group in made:
        collectives(rank, device, group)
    if rank == 0:
        (Path(directory) / "seen.json").write_text(json.dumps(seen))
    memory.stop()
    dist.destroy_process_group()


def collectives(rank: int, device: str, group: Any) -> None:
    from torch.distributed.distributed_c10d import _coalescing_manager

    ones = torch.full((4,), 1.0 + rank, device=device)
    summed = ones.clone()
    work = dist.all_reduce(summed, group=group, async_op=True)
    work.wait()
    assert summed.tolist() == [3.0] * 4
    gathered = torch.empty(8, device=device)
    dist.all_gather_into_tensor(gathered, ones, group=group)
    assert gathered.tolist() == [1.0] * 4 + [2.0] * 4
    part = torch.empty(2, device=device)
    with _coalescing_manager(group, async_ops=True) as together:
        dist.reduce_scatter_tensor(part, ones, group=group)
    together.wait()
    assert part.tolist() == [3.0] * 2
    received = torch.empty(4, device=device)
    peer = 1 - rank
    pairs = [dist.P2POp(dist.isend, ones, peer, group=group), dist.P2POp(dist.irecv, received, peer, group=group)]
    for work in dist.batch_isend_irecv(pairs):
        work.wait()
    assert received.tolist() == [2.0 - rank] * 4


def over_the_host(rank: int, group: Any) -> None:
    objects: list[Any] = [None, None]
    dist.all_gather_object(objects, rank, group=group)
    assert objects == [0, 1]
