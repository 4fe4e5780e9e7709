"""Messages from slot to slot, and the barrier that names who is missing.

Always nonblocking: torch's ``send`` waits for what is returned here, and a batch of sends and
receives must not depend on its order.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI
from torch.distributed.distributed_c10d import Work

from megatron_ft.world import staging
from megatron_ft.world.dtypes import copy_type
from megatron_ft.world.errors import WorldBroken, guard
from megatron_ft.world.pending import Pending, nothing

if TYPE_CHECKING:
    from megatron_ft.world.group import UlfmProcessGroup

# Tags that no caller of torch uses: MPI's largest.
_ARRIVED_TAG = 2**31 - 1
_RELEASE_TAG = 2**31 - 2


def send(group: UlfmProcessGroup, tensor: torch.Tensor, to: int, tag: int) -> Work:
    """Send to group rank ``to``.

    Raises:
        WorldBroken: That slot is vacant.
    """

    def body(_comm: MPI.Intracomm | None) -> Pending | None:
        peer = _peer(group, "send", to)
        host = staging.outgoing(tensor)
        request = group.messages().Isend(staging.view(host, copy_type(host)), peer, tag)
        return Pending([request], nothing, (tensor, host))

    return group.policy.run(group, "send", body, (), True, (tensor,))


def receive(group: UlfmProcessGroup, tensor: torch.Tensor, source: int | None, tag: int) -> Work:
    """Receive from group rank ``source``, or from any if that is None.

    Raises:
        WorldBroken: That slot is vacant.
    """

    def body(_comm: MPI.Intracomm | None) -> Pending | None:
        peer = MPI.ANY_SOURCE if source is None else _peer(group, "recv", source)
        host = staging.incoming(tensor)
        request = group.messages().Irecv(staging.view(host, copy_type(host)), peer, tag)
        return Pending([request], lambda: staging.land(host, tensor), (tensor, host))

    return group.policy.run(group, "recv", body, (tensor,), True, (tensor,))


def barrier(group: UlfmProcessGroup) -> Work:
    """Wait for all live slots.

    Never the blocking call of MPI, which the nonblocking one does not match: only some processes
    may have given torch's ``barrier`` a timeout.
    """

    def body(comm: MPI.Intracomm | None) -> Pending | None:
        return None if comm is None else Pending([comm.Ibarrier()], nothing)

    return group.policy.run(group, "barrier", body, (), True)


def monitored_barrier(group: UlfmProcessGroup, timeout: timedelta, wait_all_ranks: bool) -> None:
    """A barrier that says who did not come.

    The lowest live slot waits for a message of each other one and then releases them.

    Raises:
        RuntimeError: A process did not come within ``timeout``.
        WorldBroken: A process died.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    if group.link.comm is None:
        return
    comm = group.messages()
    with group.policy.watch.waiting(), guard("monitored_barrier", group.group_name):
        if comm.rank != 0:
            note = comm.Isend((b"", MPI.BYTE), 0, _ARRIVED_TAG)
            release = comm.Irecv((bytearray(0), MPI.BYTE), 0, _RELEASE_TAG)
            if not (_by(deadline, note) and _by(deadline, release)):
                release.Cancel()
                raise RuntimeError(
                    f"[Rank {group.rank()}]: rank {group.link.group_rank(0)} did not release the "
                    f"monitoredBarrier in {timeout}"
                )
            return
        missing = []
        for rank in range(1, comm.size):
            arrived = comm.Irecv((bytearray(0), MPI.BYTE), rank, _ARRIVED_TAG)
            if not _by(deadline, arrived):
                arrived.Cancel()
                missing.append(group.link.group_rank(rank))
                if not wait_all_ranks:
                    break
        if missing:
            names = ", ".join(map(str, missing))
            raise RuntimeError(
                f"[Rank {group.rank()}]: Ranks {names} failed to pass monitoredBarrier in {timeout}"
            )
        for rank in range(1, comm.size):
            comm.Send((b"", MPI.BYTE), rank, _RELEASE_TAG)


def _peer(group: UlfmProcessGroup, op: str, group_rank: int) -> int:
    link = group.link
    if not 0 <= group_rank < len(link.ranks):
        raise RuntimeError(f"{op}: invalid rank: {group_rank} (the group has {len(link.ranks)})")
    rank = link.ranks[group_rank]
    if rank is None:
        raise WorldBroken(op, group.group_name, f"slot {link.slots[group_rank]} is vacant")
    return rank


def _by(deadline: float, request: MPI.Request) -> bool:
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-3)
    return True
