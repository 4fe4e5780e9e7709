"""Where groups get their communicators, and how operations run: the part that may be replaced.

``PlainPolicy`` is MPI as it comes: an operation that meets a failure raises. A policy that survives
failures subclasses it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.distributed.distributed_c10d import Work

from megatron_ft.world import registry
from megatron_ft.world.errors import guard, translate
from megatron_ft.world.link import Link
from megatron_ft.world.pending import Pending
from megatron_ft.world.watch import NO_WATCH, NoWatch
from megatron_ft.world.work import DoneWork, PendingWork

if TYPE_CHECKING:
    from megatron_ft.world.group import UlfmProcessGroup

type Body = Callable[[MPI.Intracomm | None], Pending | None]
"""One operation on a communicator (None: this process alone).

Returns what is in flight, or None when it is over. Reads ``group.link`` when called, and may be
called again, on a new communicator, once its buffers hold again what they held before.
"""

_MAX_TAG = 32767


class PlainPolicy:
    """Slot = rank in ``world``, for ever; failures are raised.

    Args:
        world: The processes of the job.

    Attributes:
        watch: Told when this process waits for others.
    """

    watch: NoWatch = NO_WATCH

    def __init__(self, world: MPI.Intracomm = MPI.COMM_WORLD) -> None:
        self.world = world

    def link(self, slots: tuple[int, ...], name: str, number: int) -> Link:
        """Connect a new group; called on its members only, by all of them.

        Args:
            slots: Members, in the order of their group ranks.
            name: torch's name of the group.
            number: Tells groups of the same slots apart; the same on every member.

        Raises:
            ValueError: A slot has no process.
        """
        if max(slots) >= self.world.size:
            raise ValueError(
                f"group {name!r} needs slot {max(slots)}, but the MPI job has {self.world.size} "
                "processes: start as many as world_size"
            )
        with guard("new_group", name):
            comm = self._communicator(slots, number)
        return Link.make(slots, range(self.world.size), comm)

    def created(self, group: UlfmProcessGroup) -> None:
        """A group has been made, on this member."""

    def destroyed(self, group: UlfmProcessGroup) -> None:
        """A group is about to be destroyed, on this member; frees what no other group uses."""
        others = [other.link for other in registry.live_groups() if other is not group]
        with guard("destroy", group.group_name):
            for comm in (group.link.comm, group.link.p2p):
                if comm is not None and not any(comm in (link.comm, link.p2p) for link in others):
                    comm.Free()

    def run(
        self,
        group: UlfmProcessGroup,
        name: str,
        body: Body,
        buffers: Sequence[torch.Tensor],
        async_op: bool,
        results: Sequence[torch.Tensor] = (),
    ) -> Work:
        """Run one operation.

        Args:
            group: Whose operation it is.
            name: What it is called in messages.
            body: Does it.
            buffers: Tensors that it both reads and writes: to run it again they must be put back.
            async_op: Whether ``body`` starts the operation only, and the work completes it.
            results: What the work's future holds.

        Raises:
            WorldBroken: A process of the group failed.
            RuntimeError: MPI refused the operation.
        """
        self.watch.begin_wait()
        comm = group.link.comm
        try:
            pending = body(comm)
        except MPI.Exception as error:
            raise translate(error, name, group.group_name, comm) from error
        finally:
            self.watch.end_wait()
        if pending is None:
            return DoneWork(results)
        work = group.track(PendingWork(group, name, pending, results))
        if pending.error is not None:
            raise translate(pending.error, name, group.group_name, comm) from pending.error
        return work

    def _communicator(self, slots: tuple[int, ...], number: int) -> MPI.Intracomm | None:
        if len(slots) == 1:
            return None
        if slots == tuple(range(self.world.size)):
            comm = self.world.Dup()
        else:
            everyone = self.world.Get_group()
            members = everyone.Incl(slots)
            comm = self.world.Create_group(members, _tag(slots, number))
            members.Free()
            everyone.Free()
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        return comm


def _tag(slots: tuple[int, ...], number: int) -> int:
    return zlib.crc32(repr((slots, number)).encode()) % (_MAX_TAG + 1)
