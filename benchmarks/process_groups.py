"""`python benchmarks/process_groups.py`: what the communicators of Megatron-core's process groups hold, and what it
costs to destroy them and to make them anew (`--offload-train-process-groups`).

    python benchmarks/process_groups.py [--ranks 2] [--layout tp=2 --layout dp=2 …] [--cycles 3] [--cpu] [--json FILE]

One process a rank, over NCCL on as many GPUs, or over gloo with `--cpu`, where there are no bytes to read. Each layout
is made with Megatron-core's own `initialize_model_parallel`; `--layout plain=8` makes that many groups of all ranks
instead, and needs no Megatron-core. Every group of more than one rank is used once in each cycle.

Bytes are NVML's of rank 0's GPU; seconds those of the slowest rank. "gone" is after the communicators are destroyed,
"anew" after they are back and every group has had a collective.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """A cycle of a layout. Bytes are None where there is no GPU.

    Args:
        connected: of `groups` those with a communicator of more than one rank.
        before_bytes: with the default group connected, and no other.
        making_seconds: until the new groups are there and the first collective of each is done.
    """

    layout: str
    cycle: int
    groups: int
    connected: int
    before_bytes: int | None
    alive_bytes: int | None
    gone_bytes: int | None
    anew_bytes: int | None
    destroying_seconds: float
    making_seconds: float


def rank_process(rank: int, arguments: argparse.Namespace, layout: str, port: int, answer: Connection) -> None:
    import torch
    import torch.distributed as dist

    from rllaunch.backends.megatron.process_groups import ProcessGroups

    device, memory = "cpu", None
    if not arguments.cpu:
        from rllaunch.backends.node_memory import GpuMemory

        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
        memory = GpuMemory([f"GPU-{torch.cuda.get_device_properties(rank).uuid}"])
    dist.init_process_group(
        "gloo" if arguments.cpu else "cpu:gloo,cuda:nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=arguments.ranks,
    )
    groups = ProcessGroups(device, memory.used if memory else None)
    tensor = torch.ones(2**20, device=device)

    def used() -> int | None:
        if memory is not None:
            torch.cuda.synchronize()
        return memory.used() if memory is not None else None

    def use(group: Any) -> None:
        dist.all_reduce(tensor, group=group)

    use(None)
    before = used()
    with groups.adopting():
        make_groups(layout, arguments.ranks)
    several = [group for group in groups.groups if group.size() > 1]
    rows = []
    for cycle in range(arguments.cycles):
        for group in several:
            use(group)
        alive = used()
        groups.tear_down()
        destroying, _ = groups.take_figures()
        gone = used()
        dist.barrier()
        groups.make_anew()
        making, _ = groups.take_figures()
        row = Row(layout, cycle, len(groups.groups), len(several), before, alive, gone, used(), destroying, making)  # type: ignore[arg-type]
        rows.append(row)
    answer.send(rows)
    if memory is not None:
        memory.stop()
    dist.destroy_process_group()


def sizes_of(layout: str) -> dict[str, int]:
    """`tp=2,pp=2` as numbers; DP is what the ranks leave.

    Raises:
        ValueError: it names something else than tp, pp, ep, dp and plain, or a size that is no number.
    """
    sizes = {name: int(size) for name, _, size in (part.partition("=") for part in layout.split(","))}
    if unknown := sizes.keys() - {"tp", "pp", "ep", "dp", "plain"}:
        raise ValueError(f"{layout!r} names {', '.join(sorted(unknown))}; known: tp, pp, ep, dp, plain")
    return sizes


def make_groups(layout: str, ranks: int) -> None:
    import torch.distributed as dist

    sizes = sizes_of(layout)
    if "plain" in sizes:
        for _ in range(sizes["plain"]):
            dist.new_group(list(range(ranks)))
        return
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
    )


def measured(arguments: argparse.Namespace, layout: str) -> list[Row]:
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    pipes = [spawn.Pipe(duplex=False) for _ in range(arguments.ranks)]
    processes = [
        spawn.Process(target=rank_process, args=(rank, arguments, layout, port, theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()
    try:
        by_rank = [ours.recv() for ours, _ in pipes]
    except EOFError:
        sys.exit(f"{layout}: a rank ended before it answered; its error is above")
    finally:
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()
    return [slowest(rows) for rows in zip(*by_rank, strict=True)]


def slowest(rows: tuple[Row, ...]) -> Row:
    """Rank 0's figures, with the most seconds of all ranks."""
    values = asdict(rows[0])
    for name in ("destroying_seconds", "making_seconds"):
        values[name] = max(getattr(row, name) for row in rows)
    return Row(**values)


def table(rows: list[Row]) -> str:
    head = ["layout", "cycle", "groups", "connected", "before", "alive", "gone", "anew", "freed", "destroy s", "make s"]
    lines = [head]
    for row in rows:
        freed = None if row.alive_bytes is None or row.gone_bytes is None else row.alive_bytes - row.gone_bytes
        sizes = [row.before_bytes, row.alive_bytes, row.gone_bytes, row.anew_bytes, freed]
        lines.append(
            [
                row.layout, str(row.cycle), str(row.groups), str(row.connected),
                *("-" if n is None else f"{n / GIB:.3f} GiB" for n in sizes),
                f"{row.destroying_seconds:.3f}", f"{row.making_seconds:.3f}",
            ]
        )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layout", action="append", help="tp=2, dp=2, tp=2,pp=2, plain=8, …; several times")
    parser.add_argument("--cycles", type=int, default=3)
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU instead of NCCL on GPUs")
    parser.add_argument("--json", default="", help="write the rows to this file too")
    arguments = parser.parse_args()
    for layout in arguments.layout or []:
        try:
            sizes_of(layout)
        except ValueError as err:
            parser.error(f"--layout: {err}")
    rows = [row for layout in arguments.layout or ["tp=2", "dp=2"] for row in measured(arguments, layout)]
    print(table(rows))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as stream:
            json.dump([asdict(row) for row in rows], stream, indent=2)


if __name__ == "__main__":
    main()
