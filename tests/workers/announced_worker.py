"""A rank dies after it has announced a large message of a collective that nobody has received."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

import psutil
from mpi4py import MPI

from megatron_ft.world import mpi_fix, mpi_fix_send
from megatron_ft.world.comms import quiet
from megatron_ft.world.errors import is_failure

LARGE = 16 << 20


def look(comm: MPI.Intracomm, seconds: float) -> bool:
    """Let MPI make progress; whether a death is noticed meanwhile."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            comm.Iprobe(MPI.ANY_SOURCE, 7)
        except MPI.Exception as error:
            if not is_failure(error):
                raise
            return True
    return False


def launcher() -> int:
    """The process of mpirun that started this one."""
    process = psutil.Process()
    while "prte" not in process.name() and "mpirun" not in process.name():
        process = process.parent()
    return process.pid


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def main() -> None:
    mpi_fix.install()
    if "plain" not in sys.argv:
        assert mpi_fix_send.install()
        assert mpi_fix_send.install(), "twice does no harm"
    comm = quiet(MPI.COMM_WORLD.Dup())
    other = quiet(comm.Dup())
    victim = comm.bcast(os.getpid(), root=0)
    if comm.rank == 0:
        # As gradients are summed; rank 1 does not come.
        comm.Allreduce(MPI.IN_PLACE, [bytearray(LARGE), MPI.FLOAT])
        return
    assert not look(other, 1.0), "the message is announced by now"
    with stopped(launcher()):  # or its word may come before the end of the connection
        os.kill(victim, signal.SIGKILL)
        assert look(other, 10.0), "the death is not noticed"
    print("noticed the death and went on", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
