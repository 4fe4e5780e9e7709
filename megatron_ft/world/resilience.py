"""How operations run when a strategy is on: what a failure inside one of them leads to.

* Inside the step transaction it breaks the attempt: the exception unwinds to the vote. An
  asynchronous operation that cannot even start says so when it is waited for.
* Outside, an operation across replicas is called by every active process in the same order (loss
  logging, timers, barriers). It is resilient: its outcome is agreed, and on a failure the world is
  repaired and the operation runs again on the same input.
* Outside, an operation within the replica can fail only if the replica lost a process.
* Before training begins nothing is survived: the launcher starts the job again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.distributed.distributed_c10d import Work

from megatron_ft.world.comms import quiet
from megatron_ft.world.errors import WorldBroken, guard
from megatron_ft.world.link import Link
from megatron_ft.world.policy import Body, PlainPolicy, _tag
from megatron_ft.world.watch import Watch
from megatron_ft.world.work import DoneWork
from megatron_ft.world.world import World

if TYPE_CHECKING:
    from megatron_ft.world.group import UlfmProcessGroup


class BrokenWork(DoneWork):
    """An operation that could not start because the world is broken; waiting for it says so."""

    def __init__(self, error: WorldBroken) -> None:
        super().__init__(())
        self._error = error

    def wait(self, *_args: object) -> bool:
        raise self._error

    def synchronize(self) -> None:
        raise self._error

    def source_rank(self) -> int:
        raise self._error

    _source_rank = source_rank

    def is_success(self) -> bool:
        return False

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[torch.Tensor]:
        raise self._error

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_exception(self._error)
        return future


class ResilientPolicy(PlainPolicy):
    """Operations over the processes that serve the slots now.

    Args:
        world: The processes.
        mend: Repairs the world and writes it down; raises ReplicaLost where this process's replica
            is dark afterwards.
        watch: Told when this process waits for others.
    """

    def __init__(self, world: World, mend: Callable[[str], object], watch: Watch | None) -> None:
        super().__init__(world.comm)
        self.processes = world
        self.mend = mend
        if watch is not None:
            self.watch = watch
        self.survives = False
        """Set once training has begun."""
        self.in_transaction = False
        self.entering = False
        """Between a process's filling a slot and its first step: the others are elsewhere, so
        barriers and sums over all of them are not for it."""
        self.before_unwinding: Callable[[], None] = lambda: None
        """Called when this process's replica has broken outside of a step, so that Megatron's loop
        is left: before the repair, in which others may get this process's state."""

    # -- groups ----------------------------------------------------------------------------------

    def link(self, slots: tuple[int, ...], name: str, number: int) -> Link:
        process_of = self.processes.shown.process_of
        members = list(dict.fromkeys(p for slot in slots if (p := process_of[slot]) is not None))
        if members == [self.processes.process]:
            return Link.make(slots, process_of, None)
        with guard("new_group", name):
            comm = self._create(members, _tag(slots, number))
            p2p = quiet(comm.Dup()) if self.processes.within_replica(slots) else None
        return Link.make(slots, process_of, comm, p2p)

    def _create(self, members: Sequence[int], tag: int) -> MPI.Intracomm:
        everyone = self.processes.comm.Get_group()
        chosen = everyone.Incl([self.processes.rank_of(process) for process in members])
        comm = self.processes.comm.Create_group(chosen, tag)
        chosen.Free()
        everyone.Free()
        quiet(comm)
        return comm

    def created(self, group: UlfmProcessGroup) -> None:
        # Replaced as a whole: a repair in another thread may be going through it.
        self.processes.groups = {**self.processes.groups, group.key: group}

    def destroyed(self, group: UlfmProcessGroup) -> None:
        super().destroyed(group)
        del self.processes.groups[group.key]

    # -- operations ------------------------------------------------------------------------------

    def run(
        self,
        group: UlfmProcessGroup,
        name: str,
        body: Body,
        buffers: Sequence[torch.Tensor],
        async_op: bool,
        results: Sequence[torch.Tensor] = (),
    ) -> Work:
        if group.link.comm is None or not self.survives:
            return super().run(group, name, body, buffers, async_op, results)
        if self.in_transaction:
            try:
                return super().run(group, name, body, buffers, async_op, results)
            except WorldBroken as broken:
                if async_op:
                    return BrokenWork(broken)
                raise
        if self.entering:
            assert name in ("barrier", "all_reduce"), f"{name} before the first step"
            return DoneWork(results)
        if self.processes.within_replica(group.key.slots):
            return self._within_replica(group, name, body, buffers, async_op, results)
        return self._across_replicas(group, name, body, buffers, async_op, results)

    def _within_replica(
        self,
        group: UlfmProcessGroup,
        name: str,
        body: Body,
        buffers: Sequence[torch.Tensor],
        async_op: bool,
        results: Sequence[torch.Tensor],
    ) -> Work:
        try:
            work = super().run(group, name, body, buffers, async_op, results)
            if name == "barrier":  # its caller waits at once, and would be told of a failure then
                work.wait()
            return work
        except WorldBroken:
            self.processes.revoke_active()
            self.processes.revoke_groups(pipeline=True)
            agreed = self.processes.agree(False)
            assert not agreed
            self.before_unwinding()
            self.mend(name)
            raise

    def _across_replicas(
        self,
        group: UlfmProcessGroup,
        name: str,
        body: Body,
        buffers: Sequence[torch.Tensor],
        async_op: bool,
        results: Sequence[torch.Tensor],
    ) -> Work:
        saved = [buffer.clone() for buffer in buffers]
        while True:
            work, ok = None, True
            try:
                work = super().run(group, name, body, buffers, async_op, results)
                work.wait()
            except WorldBroken:
                ok = False
                self.processes.revoke_active()
                # Only what this operation uses: whoever is still busy within its replica comes
                # here next and must not be torn out of a message that will arrive.
                self.processes.revoke_across()
            if self.processes.agree(ok):
                assert work is not None
                return work
            self.mend(name)
            for buffer, copy in zip(buffers, saved, strict=True):
                buffer.copy_(copy)
