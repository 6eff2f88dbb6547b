"""The trainer's process groups: the objects stay, their communicators are destroyed and made anew.

Megatron-core keeps groups in its parallel state, in buckets, optimizers and layers, so none of them can be replaced.
What it is given instead are groups that pass every call on to one of torch's own, which can go: NCCL frees a
communicator's memory only when the communicator is destroyed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as c10d

from rllaunch.errors import EnvironmentProblem, RunError

# What every rank of a group calls together: after one of these the communicator of its tensors' device is there on all.
_COLLECTIVES = (
    "_allgather_base", "_reduce_scatter_base", "all_gather_single", "all_gather_single_coalesced", "all_to_all_single",
    "allgather", "allgather_coalesced", "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced",
    "alltoall", "alltoall_base", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter",
)  # fmt: skip
_OTHER_CALLS = (
    "barrier",  # over gloo wherever a group has it
    "_end_coalescing", "_get_backend", "_get_backend_name", "_get_sequence_number_for_group", "_has_hooks",
    "_set_sequence_number_for_group", "_start_coalescing", "_wait_for_pending_works", "get_group_store",
    "monitored_barrier", "name", "recv", "recv_anysource", "send", "set_timeout", "split_group",
)  # fmt: skip


class LastingGroup(dist.ProcessGroup):
    """A process group that outlives its communicator.

    Args:
        inner: a new group of torch's, whose place in torch's tables this one takes.
        device_type: `cuda` or `cpu`: whose communicator goes. The group's other ones (gloo beside NCCL) stay.

    Raises:
        EnvironmentProblem: torch has put something between the group and its communicator.
    """

    def __init__(self, inner: dist.ProcessGroup, device_type: str) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self._inner: dist.ProcessGroup | None = inner
        self._name, self._description, self._devices = inner.group_name, inner.group_desc, inner._device_types
        self._device = torch.device(device_type)
        self._is_nccl = device_type == "cuda"
        self._generation = 0
        self.has_met = False
        """Whether a collective has gone over what goes, which is then so on all ranks."""
        communicator = inner._get_backend(self._device)
        expected = dist.ProcessGroupNCCL if self._is_nccl else dist.ProcessGroupGloo
        if not isinstance(communicator, expected):
            raise EnvironmentProblem(
                f"a process group's communicator is a {type(communicator).__name__}, which cannot be made anew",
                "handoff.offload_train_process_groups = true",
                "unset TORCH_DISTRIBUTED_DEBUG (DETAIL wraps every one), or --no-offload-train-process-groups",
            )
        self._options: Any = communicator.options
        backends = {device: inner._get_backend(device) for device in self._devices}
        self._kept = {d: b for d, b in backends.items() if not isinstance(b, expected)}
        self._store = c10d._world.pg_map[inner][1]
        self._take_the_place_of(inner)

    def _take_the_place_of(self, inner: dist.ProcessGroup) -> None:
        world = c10d._world
        tables: tuple[dict[dist.ProcessGroup, Any], ...] = (
            world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag,
        )  # fmt: skip
        for table in tables:
            table[self] = table.pop(inner)
        for tagged in world.tags_to_pg.values():
            tagged[:] = [self if group is inner else group for group in tagged]
        _unregister_process_group(self._name)
        _register_process_group(self._name, self)

    @property
    def inner(self) -> dist.ProcessGroup:
        """The group that communicates.

        Raises:
            RunError: it is torn down.
        """
        if self._inner is None:
            ranks = ", ".join(map(str, dist.get_process_group_ranks(self)))
            raise RunError(
                f"a collective of ranks {ranks} ({self._description}) while their communicator is torn down",
                "handoff.offload_train_process_groups = true",
                "onload the trainer first",
            )
        return self._inner

    @property
    def is_alive(self) -> bool:
        return self._inner is not None

    def goes_over(self, tensors: Any) -> bool:
        """Whether these are on the device whose communicator goes.

        Args:
            tensors: one, or lists of them, some of which a rank may leave empty.
        """
        if isinstance(tensors, list | tuple):
            return any(map(self.goes_over, tensors))
        return isinstance(tensors, torch.Tensor) and tensors.device.type == self._device.type

    def tear_down(self) -> None:
        """Destroy the communicator; what was queued on it must be finished."""
        if self._inner is None:
            return
        inner, self._inner = self._inner, None
        inner._get_backend(self._device).shutdown()

    def make_anew(self) -> None:
        """A new group in the place of the one torn down, on all its ranks at once; NCCL connects in its first call."""
        if self._inner is not None:
            return
        # Each time another corner of the store: what the ranks left for each other at the last meeting is still there.
        self._generation += 1
        store = PrefixStore(f"anew-{self._generation}/", self._store)
        group = dist.ProcessGroup(store, self.rank(), self.size())
        kind = dist.ProcessGroup.BackendType
        group._set_default_backend(kind.NCCL if self._is_nccl else kind.GLOO)
        communicator = self._new_communicator(PrefixStore(f"{self._device}/", store))
        for device in self._devices:
            kept = self._kept.get(device)
            is_nccl = self._is_nccl and kept is None
            group._register_backend(device, kind.NCCL if is_nccl else kind.GLOO, kept or communicator)
        group._set_group_name(self._name)
        group._set_group_desc(self._description)
        self._inner = group

    def _new_communicator(self, store: Store) -> Any:
        communicator: Any
        if self._is_nccl:
            communicator = dist.ProcessGroupNCCL(store, self.rank(), self.size(), self._options)
        else:
            timeout = self._options._timeout
            communicator = dist.ProcessGroupGloo(store, self.rank(), self.size(), timeout=timeout)
            communicator.options.global_ranks_in_group = self._options.global_ranks_in_group
            communicator.options.group_name = self._name
        communicator._set_sequence_number_for_group()
        return communicator

    @property
    def group_name(self) -> Any:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return self._devices

    def shutdown(self) -> None:
        """What torch calls when everything ends."""
        if self._inner is not None:
            self._inner.shutdown()

    def abort(self) -> None:
        if self._inner is not None:
            self._inner.abort()


def _passed_on(name: str, *, is_collective: bool) -> Callable[..., Any]:
    def call(self: LastingGroup, *args: Any, **kwargs: Any) -> Any:
        answer = getattr(self.inner, name)(*args, **kwargs)
        self.has_met = self.has_met or (is_collective and self.goes_over([*args, *kwargs.values()]))
        return answer

    call.__name__ = name
    return call


for _name in (*_COLLECTIVES, *_OTHER_CALLS):
    if hasattr(dist.ProcessGroup, _name):  # torch 2.13 has others than 2.11
        setattr(LastingGroup, _name, _passed_on(_name, is_collective=_name in _COLLECTIVES))


def _batched(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.distributed.batch_isend_irecv`, which sends and receives together only over torch's own class of group.

    One after the other, two ranks that both send first wait for each other.
    """

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Any]:
        group = ops[0].group if ops else None
        if not isinstance(group, LastingGroup) or not group._get_backend(ops[0].tensor.device).supports_coalescing:
            works: list[Any] = plain(ops)
            return works
        with c10d._coalescing_manager(group, ops[0].tensor.device, async_ops=True) as together:
            for op in ops:
                peer = {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}
                op.op(op.tensor, group=group, tag=op.tag, **peer)
        batched: list[Any] = together.works
        return batched

    return batch_isend_irecv


class ProcessGroups:
    """A rank's groups whose communicators come and go together, in the order in which they were made.

    All ranks make groups in one order, so ranks that share several meet in each of them in turn. The default group is
    not among them: updates of the engines' weights go over it while the trainer sleeps.

    Args:
        device: of this rank; on a GPU groups of gloo alone are left as they are.
        used_bytes: reads what is in use on this rank's GPU; None where there is none.
    """

    def __init__(self, device: str, used_bytes: Callable[[], int] | None = None) -> None:
        self._device = torch.device(device)
        self._used_bytes = used_bytes
        self._seconds: float | None = None
        self._taken_bytes: int | None = None
        self.groups: list[LastingGroup] = []
        self._plain_batch: Callable[..., Any] | None = None

    @contextmanager
    def adopting(self) -> Iterator[None]:
        """Within, `torch.distributed.new_group` gives groups that are among these."""
        new_group, goes = dist.new_group, "cuda:nccl" if self._device.type == "cuda" else "cpu:gloo"

        def new_lasting_group(*args: Any, **kwargs: Any) -> Any:
            group = new_group(*args, **kwargs)
            if isinstance(group, dist.ProcessGroup) and goes in dist.get_backend_config(group):
                group = LastingGroup(group, self._device.type)
                self.groups.append(group)
            return group

        dist.new_group = new_lasting_group
        if self._plain_batch is None:
            self._plain_batch, dist.batch_isend_irecv = dist.batch_isend_irecv, _batched(dist.batch_isend_irecv)
        try:
            yield
        except BaseException:
            self.close()
            raise
        finally:
            dist.new_group = new_group

    def close(self) -> None:
        """Give torch back the one function that was replaced for as long as the groups are used."""
        if self._plain_batch is not None:
            dist.batch_isend_irecv, self._plain_batch = self._plain_batch, None

    @property
    def are_alive(self) -> bool:
        return all(group.is_alive for group in self.groups)

    def tear_down(self) -> None:
        """Destroy every communicator, the last one first; nothing where they are torn down already."""
        if not any(group.is_alive for group in self.groups):
            return
        with self._measured():
            for group in reversed(self.groups):
                group.tear_down()

    def make_anew(self) -> None:
        """New communicators, and a first collective on every group that had one; nothing where they are there.

        Raises:
            RunError: ranks do not find each other.
        """
        if self.are_alive:
            return
        with self._measured():
            try:
                for group in self.groups:
                    group.make_anew()
                for group in self.groups:
                    # NCCL connects in the first collective, which would otherwise hide in the next training step.
                    # Who is alone in a group waits for nobody.
                    if group.has_met and group.size() > 1:
                        dist.all_reduce(torch.zeros(1, device=self._device), group=group)
            except RuntimeError as err:
                raise RunError(
                    f"the communicators of the trainer's process groups cannot be made anew: {err}",
                    "handoff.offload_train_process_groups = true",
                    "every rank must be there; --no-offload-train-process-groups keeps them",
                ) from err

    @contextmanager
    def _measured(self) -> Iterator[None]:
        # A communicator's memory comes back only once what was queued on it is done.
        self._synchronize()
        before, started = self._used_bytes and self._used_bytes(), time.perf_counter()
        yield
        self._synchronize()
        self._seconds = (self._seconds or 0.0) + time.perf_counter() - started
        if self._used_bytes is not None and before is not None:
            self._taken_bytes = (self._taken_bytes or 0) + self._used_bytes() - before

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def take_figures(self) -> tuple[float | None, int | None]:
        """Seconds that tearing down and making anew took since this was last asked, and the GPU bytes that the
        communicators took (negative: gave back); None where neither was done, or nothing reads them."""
        figures, self._seconds, self._taken_bytes = (self._seconds, self._taken_bytes), None, None
        return figures
