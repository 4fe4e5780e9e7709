"""Agreements of two ranks, while another thread of the first one receives messages of a third."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time

from mpi4py import MPI

from megatron_ft.world.comms import AGREEING, quiet

COUNT, ENDS_S = 25_000, 40.0
YES, DONE = 3, 8


def main() -> None:
    world = quiet(MPI.COMM_WORLD)
    beside, pair = quiet(world.Dup()), quiet(world.Split(world.rank // 2, 0))
    over = threading.Event()
    guard = contextlib.nullcontext() if "plain" in sys.argv else AGREEING
    end = time.monotonic() + ENDS_S
    if world.rank == 2:
        while time.monotonic() < end and not beside.Iprobe(source=0, tag=DONE):
            beside.send(b"x" * 5000, dest=0, tag=1)
            time.sleep(0.0005)
        os._exit(0)

    def listen() -> None:
        while time.monotonic() < end and not over.is_set():
            with guard:
                while beside.Iprobe(source=2, tag=1):
                    beside.recv(source=2, tag=1)
            time.sleep(0.0002)

    def give_up() -> None:
        time.sleep(ENDS_S)
        print("waits for ever", flush=True)
        os._exit(0)

    threading.Thread(target=give_up, daemon=True).start()
    if world.rank == 0:
        threading.Thread(target=listen, daemon=True).start()
    garbled, chance = 0, random.Random(world.rank)
    for number in range(COUNT):
        word = YES if number % 7 or pair.rank else 1
        with guard:
            agreed = pair.Agree(word)
        if chance.random() < 0.3:  # now the one comes first, now the other
            time.sleep(chance.uniform(0, 0.0005))
        garbled += agreed != (YES if number % 7 else 1)
    print(f"{garbled} garbled", flush=True)
    over.set()
    if world.rank == 0:
        with guard:
            beside.send(None, dest=2, tag=DONE)
    time.sleep(0.2)
    os._exit(0)


main()
