"""Agreements of two ranks, while another thread of the first one receives messages of a third.

``plain``: the threads take no turns; it goes on until a word is wrong, or for 40 seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import sys
import threading
import time

from mpi4py import MPI

from megatron_ft.world.comms import AGREEING, quiet

COUNT, ENDS_S = 50_000, 40.0
YES, DONE = 3, 8


def main() -> None:
    world = quiet(MPI.COMM_WORLD)
    beside, pair = quiet(world.Dup()), quiet(world.Split(world.rank // 2, 0))
    over = threading.Event()
    plain = "plain" in sys.argv
    guard = contextlib.nullcontext() if plain else AGREEING
    end = time.monotonic() + ENDS_S
    if world.rank == 2:
        while time.monotonic() < end and not beside.Iprobe(source=0, tag=DONE):
            try:
                beside.send(b"x" * 5000, dest=0, tag=1)
            except MPI.Exception:  # nobody listens any more
                break
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
    for number in itertools.count() if plain else range(COUNT):
        word = YES if number % 7 or pair.rank else 1
        with guard:
            agreed = pair.Agree(word)
        if chance.random() < 0.05:  # now the one comes first, now the other
            time.sleep(chance.uniform(0, 0.0005))
        garbled += agreed != (YES if number % 7 else 1)
        if plain and (garbled or time.monotonic() > end):
            break
    print(f"{garbled} garbled", flush=True)
    over.set()
    if world.rank == 0:
        with guard:
            beside.send(None, dest=2, tag=DONE)
    time.sleep(0.2)
    os._exit(0)


main()
