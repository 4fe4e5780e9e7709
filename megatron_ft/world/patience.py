"""How a process waits for a message where there are more processes than cores.

MPI waits by looking again and again. With a core for each process that is fastest; with fewer, who
looks takes the core from who computes what is waited for. So there a process looks for a while, as
long as a short message takes, and then sleeps between looks.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable

LOOKS = 100
"""Before the first sleep: about as long as a short message takes."""
NAP_S = 100e-6


@functools.cache
def crowded() -> bool:
    """Whether this host has more processes of the job than cores that they may use."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > len(os.sched_getaffinity(0))


def wait(over: Callable[[], bool]) -> None:
    """Wait until ``over()`` is true."""
    for _ in range(LOOKS):
        if over():
            return
    while not over():
        time.sleep(NAP_S)
