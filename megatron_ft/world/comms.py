"""Communicators: their error handling, how they end, and how those of all groups are made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence

from mpi4py import MPI

from megatron_ft.world import agreement as words
from megatron_ft.world.derive import GroupKey, rounds
from megatron_ft.world.errors import is_failure

_BRIDGE_TAG = 7001

AGREEING = threading.RLock()
"""Held by a thread that agrees, and by any other one while it calls MPI.

Open MPI 5.0 hears the others' part of an agreement in whatever thread is inside MPI. If that is not
the one that agrees, words are garbled or lost (``coll_ftagree_earlyreturning.c``: what is put off
because the agreement is locked is overwritten with pointers, and tables are changed unlocked).
``tests/test_agreements.py`` shows both.
"""


def quiet(comm: MPI.Comm) -> MPI.Comm:
    """Make ``comm`` return errors instead of ending the job; returns it."""
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    return comm


def revoke(comm: MPI.Comm) -> None:
    """Free everyone who waits in ``comm``; once is enough and twice does no harm."""
    if comm != MPI.COMM_NULL and not comm.Is_revoked():
        comm.Revoke()


def free(comm: MPI.Comm | None) -> None:
    """Release a communicator that a repair has replaced, revoked or not."""
    if comm is None or comm == MPI.COMM_NULL:
        return
    try:
        comm.Free()
    except MPI.Exception as error:
        if not is_failure(error):
            raise


def agreed(comm: MPI.Comm, ok: bool) -> bool:
    """Whether all of ``comm`` say ``ok`` and none has died unnoticed; see ``agreement``."""
    return agreement(comm, 1 if ok else 0) == 1


def agreement(comm: MPI.Comm, said: int) -> int:
    """The bits that all of ``comm`` have said; none if somebody has died unnoticed.

    The same on every process, whether ``comm`` is revoked or not.
    """
    with AGREEING:
        return words.agreement(lambda word: _agree(comm, word), said)


def _agree(comm: MPI.Comm, word: int) -> int:
    try:
        return int(comm.Agree(word))
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        return words.WHOLE


def split_groups(
    comm: MPI.Comm,
    keys: Collection[GroupKey],
    process_of: Sequence[int | None],
    mine: Collection[int],
    made: dict[GroupKey, MPI.Intracomm],
    *,
    apart: Callable[[tuple[int, ...]], bool] = lambda slots: False,
    p2p: dict[tuple[int, ...], MPI.Intracomm] | None = None,
) -> None:
    """Give each group that needs one a communicator; groups of the same slots share theirs.

    Collective over ``comm``, and nothing else is waited in: who fails in one frees the others by
    revoking ``comm``.

    Args:
        comm: Holds all processes that serve slots.
        keys: The groups of all processes, the same everywhere.
        process_of: The process that serves each slot, None where it is vacant.
        mine: The slots of this process. It is placed by the first of them in a group's order.
        made: Filled with the communicators of this process's groups; what there is of them when a
            failure ends this.
        apart: Whether groups of these slots get a second communicator, for messages.
        p2p: Filled with those.
    """
    for batch in rounds(keys, process_of):
        color = batch.color(mine)
        slots = batch.parts[color] if color is not None else ()
        order = min((slots.index(slot) for slot in mine if slot in slots), default=0)
        one = comm.Split(MPI.UNDEFINED if color is None else color, order)
        if slots:
            made.update((key, quiet(one)) for key in sorted(set(keys)) if key.slots == slots)
        if p2p is not None and any(map(apart, batch.parts)):
            wants = bool(slots) and apart(slots)
            two = comm.Split(color if wants else MPI.UNDEFINED, order)
            if wants:
                p2p[slots] = quiet(two)


def merged_with(
    comm: MPI.Intracomm, leader: int, peer: MPI.Intracomm, remote: int, high: bool
) -> MPI.Intracomm | None:
    """``comm`` and the other side's in one, once all have it; None if somebody has died.

    Args:
        leader: Rank in ``comm`` of the process that is on the bridge.
        peer: On that one, the bridge.
        remote: Rank on the bridge of the other side's.
        high: Whether this side's ranks come last.
    """
    inter: MPI.Intercomm | None = None
    merged: MPI.Intracomm | None = None
    try:
        inter = quiet(comm.Create_intercomm(leader, peer, remote, tag=_BRIDGE_TAG))
        merged = quiet(inter.Merge(high))
        # A revocation that overtakes its making is lost; so nobody revokes it himself for a
        # moment afterwards (``World.repair``).
        with AGREEING:
            merged.Agree(1)
        merged.Barrier()
        inter.Free()
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        # Who waits for this process must not wait for ever. Of the newcomer's death only the leader
        # hears, and the others wait for the leader in ``comm``: a repair follows in any case.
        if comm.size > 1:
            revoke(comm)
        for one in (inter, merged):
            if one is not None:
                revoke(one)
                free(one)
        return None
    return merged
