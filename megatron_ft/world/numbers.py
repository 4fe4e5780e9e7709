"""Numbers of communicators never come again.

Open MPI 5.0 names a communicator in agreements and revocations by its index, which is used again
once it is freed, and by an epoch: one more than the most communicators that any of its members has
made. That is unique while the member that has made the most lives. When it dies, the others go on
from a lower count, and after a while a new communicator has the name of an old one. Its agreements
are then answered with what was decided under that name long ago: some return a wrong decision, and
the others wait for ever. (``coll_ftagree_earlyreturning.c`` keeps the last decision of each
communicator for those who ask late; ``comm_cid.c`` counts.)

So in each repair all agree on the highest count and catch up with it, by making communicators of
their own: a few microseconds each. New processes do so while they are still alone.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import struct
from pathlib import Path

from mpi4py import MPI

logger = logging.getLogger("megatron_ft.world")

SLACK = 32
"""Communicators that one process may make for itself between two repairs: bridges to processes
that it starts."""
_HEAD = 1024
"""Bytes of Open MPI's communicator in which the epoch is looked for."""
_GAPS = (0, 2, 1, 4, 0, 3)
"""Communicators made between the samples that tell the epoch from everything else."""
_UNKNOWN = -1
_offset: int | None = None


def made() -> int:
    """How many communicators this process has made, as Open MPI counts; 0 where that is not known.

    Makes one.
    """
    offset = _epoch_offset()
    if offset == _UNKNOWN:
        return 0
    return int(struct.unpack_from("<I", _sample(), offset)[0])


def catch_up(target: int) -> None:
    """Make communicators until this process has made as many as ``target``."""
    for _ in range(target - made() if _epoch_offset() != _UNKNOWN else 0):
        MPI.COMM_SELF.Dup().Free()


def _sample() -> bytes:
    """What Open MPI keeps of a communicator that is made for this."""
    comm = MPI.COMM_SELF.Dup()
    try:
        handle = ctypes.c_void_p.from_address(MPI._addressof(comm)).value
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            memory.seek(handle or 0)
            # Where the memory ends before that, so does what is read.
            return memory.read(_HEAD).ljust(_HEAD, b"\0")
    finally:
        comm.Free()


def _epoch_offset() -> int:
    """Where in a communicator its epoch is: what grows by one with each that is made."""
    global _offset
    if _offset is None:
        counts = [struct.unpack(f"<{_HEAD // 4}I", _sample())]
        for gap in _GAPS:
            for _ in range(gap):
                MPI.COMM_SELF.Dup().Free()
            counts.append(struct.unpack(f"<{_HEAD // 4}I", _sample()))
        steps = [gap + 1 for gap in _GAPS]
        found = [
            4 * place
            for place in range(_HEAD // 4)
            if [b[place] - a[place] for a, b in itertools.pairwise(counts)] == steps
        ]
        _offset = found[0] if len(found) == 1 else _UNKNOWN
        if _offset == _UNKNOWN:
            logger.warning(
                "this MPI does not say how many communicators a process has made: after many "
                "deaths two may get one name, and the job may wait for ever"
            )
    return _offset
