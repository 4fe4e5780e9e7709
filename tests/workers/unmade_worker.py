"""Make communicators without a pause while ranks die one after another, until two are left."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading

from mpi4py import MPI

from megatron_ft.world import mpi_fix
from megatron_ft.world.comms import free, quiet, revoke
from megatron_ft.world.errors import is_failure

LEFT = 2


def make_until_one_dies(world: MPI.Intracomm) -> None:
    made: list[MPI.Intracomm] = []
    try:
        while True:
            made = [quiet(world.Split(0, world.rank))]
            made.append(quiet(world.Split(world.rank % 2, world.rank)))
            while made:
                free(made.pop())
    except MPI.Exception as error:
        if not is_failure(error):
            raise
        for comm in made:
            revoke(comm)
            free(comm)


def repaired(world: MPI.Intracomm) -> MPI.Intracomm:
    while True:
        new = quiet(world.Shrink())
        try:
            held = new.Agree(1) == 1
        except MPI.Exception as error:
            if not is_failure(error):
                raise
            held = False
        free(world)
        world = new
        if held:
            return world


def main() -> None:
    if "plain" not in sys.argv:
        assert mpi_fix.install()
        assert mpi_fix.install(), "twice does no harm"
    chance = random.Random(int(sys.argv[1]) + MPI.COMM_WORLD.rank)
    world = quiet(MPI.COMM_WORLD.Dup())
    while world.size > LEFT:
        if world.rank == world.size - 1:
            pause = chance.uniform(0.05, 0.15)
            threading.Timer(pause, os.kill, (os.getpid(), signal.SIGKILL)).start()
        make_until_one_dies(world)
        revoke(world)
        world = repaired(world)
    for _ in range(20):
        world.Split(0, world.rank).Free()
    print(f"{world.size} are left", flush=True)
    os._exit(0)


main()
