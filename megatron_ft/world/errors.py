"""What a failed process looks like to the code above MPI.

Open MPI's ULFM reports a death as one of three error classes; everything else that MPI complains
about is a mistake of the caller and stays an ordinary ``RuntimeError``, as from torch's own
backends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpi4py import MPI

FAILURE_CLASSES = frozenset(
    {
        MPI.ERR_PROC_FAILED,
        MPI.ERR_PROC_FAILED_PENDING,
        MPI.ERR_REVOKED,
        # What Open MPI's collectives make of a dead peer when one of its algorithms loses the
        # class on the way (seen in a barrier: "known error not in list").
        MPI.ERR_OTHER,
        MPI.ERR_INTERN,
    }
)


class WorldBroken(RuntimeError):
    """A process of the group died, or the group's communicator was revoked because one did.

    Attributes:
        op: Name of the operation that noticed.
        group: Name of the process group.
    """

    def __init__(self, op: str, group: str, detail: str) -> None:
        super().__init__(f"{op} on group {group!r}: {detail}")
        self.op = op
        self.group = group


class ReplicaLost(Exception):
    """This process's own replica lost a slot and cannot finish its pipeline.

    Not a ``RuntimeError``: code that handles errors of one operation must not catch it.
    """


def is_failure(error: MPI.Exception, comm: MPI.Comm | None = None) -> bool:
    """Whether ``error`` says that a process failed, rather than that the call was wrong.

    Args:
        comm: Where it happened, if known. Nonblocking collectives of Open MPI report a revoked
            communicator as MPI_ERR_OTHER, so an error on a broken one counts as its failure.
    """
    if error.Get_error_class() in FAILURE_CLASSES:
        return True
    return comm is not None and comm != MPI.COMM_NULL and is_broken(comm)


def is_broken(comm: MPI.Comm) -> bool:
    """Whether ``comm`` is revoked or has a member that is known here to have failed."""
    if comm.Is_revoked():
        return True
    failed = comm.Get_failed()
    try:
        return failed.size > 0
    finally:
        failed.Free()


def translate(
    error: MPI.Exception, op: str, group: str, comm: MPI.Comm | None = None
) -> RuntimeError:
    """The exception to raise for an MPI error: ``WorldBroken`` for a failed process."""
    text = error.Get_error_string()
    if is_failure(error, comm):
        return WorldBroken(op, group, text)
    return RuntimeError(f"{op} on group {group!r}: {text}")


@contextmanager
def guard(op: str, group: str) -> Iterator[None]:
    """Raise MPI errors of the enclosed calls as :func:`translate` says."""
    try:
        yield
    except MPI.Exception as error:
        raise translate(error, op, group) from error
