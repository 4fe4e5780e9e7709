"""Start processes that die before MPI_Init, and one that does not, from a job of one rank."""

from __future__ import annotations

import os
import sys
import time

from mpi4py import MPI

from megatron_ft.rejoin import attempt
from megatron_ft.rejoin.spawn import Order, Spawner, parent, wait_for_boot, wait_for_order
from megatron_ft.topology import Topology

AT_ONCE = "at-once" in sys.argv
"""Before anybody can have looked at it."""
DIES = [sys.executable, "-c", "import os, time; time.sleep(1); os.kill(os.getpid(), 9)"]
if AT_ONCE:
    DIES = ["/bin/sh", "-c", "kill -KILL $$"]


def child() -> None:
    bridge = parent()
    assert bridge is not None
    print("ordered to build for", wait_for_order(bridge, 30.0).slot, flush=True)
    print("booted with", wait_for_boot(bridge, 30.0), flush=True)
    os._exit(0)


def main() -> None:
    if MPI.Comm.Get_parent() != MPI.COMM_NULL:
        child()
    look = "blind" not in sys.argv
    if not look:
        attempt.Attempt._exists = lambda self: True  # type: ignore[method-assign]
    program = iter([DIES])
    original = attempt.Attempt.__init__

    def init(self: attempt.Attempt, *args: object) -> None:
        original(self, *args, program=next(program, None))  # type: ignore[arg-type]

    attempt.Attempt.__init__ = init  # type: ignore[method-assign]
    order = Order(
        process=1,
        slot=3,
        topology=Topology(tensor=1, pipeline=2, data=2),
        iteration=5,
        job="0",
        run_dir="",
        watch=None,
    )
    spawner = Spawner(10, lambda: 1, lambda process: order)
    end = time.monotonic() + (60 if look and "short" not in sys.argv else 10)
    while not spawner.ready() and time.monotonic() < end:
        spawner.want(1)
        spawner.go_on()
        time.sleep(0.1)
    print("started", spawner.started, "ready", spawner.bridge is not None, flush=True)
    if spawner.bridge is not None:
        spawner.bridge.send("the world", dest=1, tag=7202)
        spawner.parted(True)
        print("pending", spawner.pending, flush=True)
        time.sleep(1)
    os._exit(0)


main()
