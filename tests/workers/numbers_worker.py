"""The rank that has made the most communicators dies; do the others use a name once more?"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from mpi4py import MPI

from megatron_ft.world import numbers
from megatron_ft.world.comms import agreed, free, quiet

AGREEMENTS, OF_ITS_OWN, AT_ONCE = 3, 20, 3


def stuck() -> None:
    print("waits for ever", flush=True)
    os._exit(0)


def agree_and_free(comm: MPI.Intracomm, flag: int) -> int:
    """Agreements in some new communicators; returns how many had another outcome."""
    some, wrong = [quiet(comm.Dup()) for _ in range(AT_ONCE)], 0
    for one in some:
        for _ in range(AGREEMENTS):
            end = time.monotonic() + (0.005 if one.rank == 0 else 0.0)
            while time.monotonic() < end:
                one.Iprobe()  # it hears the others before it says its own word
            wrong += one.Agree(flag) != flag
    while some:
        free(some.pop())
    return wrong


def main() -> None:
    world = quiet(MPI.COMM_WORLD.Dup())
    if world.rank == 0:
        for _ in range(OF_ITS_OWN):
            MPI.COMM_SELF.Dup().Free()
    if "plain" not in sys.argv:  # as in each repair
        numbers.catch_up(world.allreduce(numbers.made(), MPI.MAX) + numbers.SLACK)
        before = numbers.made()
        assert numbers.made() == before + 1 == world.allreduce(before + 1, MPI.MAX)
    # The last rank takes no part, as a process that comes later. What all have had they forget.
    old = quiet(world.Split(world.rank // 3, 0))
    assert sum(agree_and_free(old, 1) for _ in range(10)) == 0
    if world.rank == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    while world.size > 3:
        agreed(world, True)
        world, old = quiet(world.Shrink()), world
        free(old)
    threading.Timer(6.0, stuck).start()
    wrong = 0
    for number in range(OF_ITS_OWN):
        wrong += agree_and_free(world, 2)
        if number % 2:  # so that indices and epochs come together in all ways
            MPI.COMM_SELF.Dup().Free()
    print(f"{wrong} wrong decisions", flush=True)
    os._exit(0)


main()
