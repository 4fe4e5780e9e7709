"""A process that only prepares itself leaves the processors to those who train.

On a host where every core has its rank, what a newcomer computes is taken from the others, and all
of them wait for the slowest. So it imports and builds at a low priority and takes its normal one
again when it is about to be taken in. Linux lets a process lower its priority but, without a
privilege, not raise it: where it could not go back it is not lowered at all.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

_normal: int | None = None


def lower(by: int) -> None:
    """From now on leave the processors to others; of this thread and those that it starts.

    Args:
        by: So much nicer than now. With 5 it gets about a third of the share of one that trains.
    """
    global _normal
    if by and _normal is None and _can_go_back():
        _normal = os.getpriority(os.PRIO_PROCESS, 0)
        os.setpriority(os.PRIO_PROCESS, 0, _normal + by)


def restore() -> None:
    """Take the normal priority again, all threads."""
    global _normal
    if _normal is None:
        return
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.setpriority(os.PRIO_PROCESS, int(thread.name), _normal)
    _normal = None


def _can_go_back() -> bool:
    """Try it, in a thread that ends after it: privileges, limits and containers all have a say."""
    can = False

    def tries() -> None:
        nonlocal can
        before = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, before + 1)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        except PermissionError:
            return
        can = os.getpriority(os.PRIO_PROCESS, 0) == before

    thread = threading.Thread(target=tries)
    thread.start()
    thread.join()
    return can
