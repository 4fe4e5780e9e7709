"""What the ranks of test_launcher do: ``launch_rank.py CASE FOLDER``. Imports no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

import psutil
from mpi4py import MPI

from megatron_ft.world.environment import FROM_OPEN_MPI, rank_environment, write_exit_code

CASE, FOLDER = sys.argv[1], Path(sys.argv[2])


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def report(name: str, **values: object) -> None:
    """Write atomically, so that the test never reads half a file."""
    part = FOLDER / f".{name}"
    part.write_text(json.dumps({"pid": os.getpid(), **values}))
    part.replace(FOLDER / name)


def survivors() -> MPI.Intracomm:
    """The world without rank 1, which is killed."""
    world = MPI.COMM_WORLD
    world.Set_errhandler(MPI.ERRORS_RETURN)
    world.Barrier()
    if world.Get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            world.Barrier()
    except MPI.Exception:
        world.Revoke()
    shrunk = world.Shrink()
    shrunk.Set_errhandler(MPI.ERRORS_RETURN)
    return shrunk


def lose_one() -> NoReturn:
    rank_environment()
    names = [*FROM_OPEN_MPI, "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "GREETING"]
    report(os.environ["RANK"], env={name: os.environ.get(name) for name in names})
    print("hello", end="", flush=True)  # no newline: the rank may die in mid-line
    world = survivors()
    print(f"\n{world.Get_size()} survivors")
    print("to stderr", file=sys.stderr)
    if world.Get_rank() == 0:
        write_exit_code(3)
        write_exit_code(0)
    world.Barrier()
    time.sleep(0.2)
    leave(0)


def give_up() -> NoReturn:
    world = survivors()
    if world.Get_rank() == 0:
        write_exit_code(75)
    world.Barrier()
    leave(0)


def exit_without_word() -> NoReturn:
    MPI.COMM_WORLD.Barrier()
    leave(3)


def wait(stop_politely: bool) -> NoReturn:
    rank = MPI.COMM_WORLD.Get_rank()
    got: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda n, _: got.append(n))
    # A helper process in a session of its own, as an uploader would be.
    helper = subprocess.Popen(["sleep", "120"], start_new_session=True)
    mpirun = next(p.pid for p in psutil.Process().parents() if p.name() == "prterun")
    report(str(rank), helper=helper.pid, mpirun=mpirun)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.05)
        for number in got:
            report(f"{signal.Signals(number).name}-{rank}")
        if stop_politely and signal.SIGTERM in got:
            if rank == 0:
                write_exit_code(0)
            leave(0)
    leave(9)


if __name__ == "__main__":
    {
        "lose-one": lose_one,
        "give-up": give_up,
        "exit-without-word": exit_without_word,
        "wait": lambda: wait(stop_politely=False),
        "wait-for-sigterm": lambda: wait(stop_politely=True),
    }[CASE]()
