"""One process of a job that is watched: registers, says so, and then behaves as it is told.

    watch_child.py FILE PROCESS BEHAVIOUR

Prints ``ready``, and what its watch thread does: ``fenced PROCESS`` and ``broke off``.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ft.world import watch as module
from megatron_ft.world.watch import Timeouts, Watch

TIMEOUTS = Timeouts(alive=1.0, progress=2.0, collective=4.0)


def say(*words: object) -> None:
    print(*words, flush=True)


def work(watch: Watch) -> None:
    while True:
        watch.tick()
        time.sleep(0.05)


def stop(watch: Watch) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    work(watch)


def loop(watch: Watch) -> None:
    while True:
        pass


def hold_gil(watch: Watch) -> None:
    sleep = ctypes.PyDLL(None).sleep
    sleep.argtypes = [ctypes.c_uint]
    sleep(3600)


def wait(watch: Watch) -> None:
    with watch.waiting():
        time.sleep(3600)


def idle(watch: Watch) -> None:
    time.sleep(3600)


def save(watch: Watch) -> None:
    with watch.saving():
        idle(watch)


def saved(watch: Watch) -> None:
    """After a save that was not within training, nothing needs to tick either."""
    with watch.saving():
        time.sleep(0.1)
    idle(watch)


def forge(watch: Watch) -> None:
    """As if this process had got the number of one that died."""
    words = watch._words
    words[watch._base + module._BORN] -= 1
    stop(watch)


def pool(watch: Watch) -> None:
    with watch.working():
        work(watch)


def pool_loop(watch: Watch) -> None:
    with watch.working():
        loop(watch)


BEHAVIOURS: dict[str, tuple[str, Callable[[Watch], None]]] = {
    # name: (state, what the main thread does)
    "work": ("arm", work),
    "stop": ("arm", stop),
    "loop": ("arm", loop),
    "hold-gil": ("arm", hold_gil),
    "wait": ("arm", wait),
    "build": ("disarm", idle),
    "pool": ("disarm", pool),
    "pool-loop": ("disarm", pool_loop),
    "build-stop": ("disarm", stop),
    "save": ("arm", save),
    "saved": ("disarm", saved),
    "starting-hold-gil": ("", hold_gil),
    "starting-stop": ("", stop),
    "forge": ("arm", forge),
}


def main(path: str, process: str, behaviour: str) -> None:
    state, act = BEHAVIOURS[behaviour]
    watch = Watch(
        Path(path),
        int(process),
        TIMEOUTS,
        on_collective_timeout=lambda seconds: say("broke off"),
        on_fence=lambda process, reason: say("fenced", process),
    )
    watch.start()
    if state:
        getattr(watch, state)()
    say("ready")
    act(watch)


if __name__ == "__main__":
    main(*sys.argv[1:])
