"""During the set-up nothing is survived yet: a death ends all, instead of leaving them waiting."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def guard_start(world: Any, over: Callable[[], bool]) -> None:
    """End this process if another one dies before training begins: nothing is survived yet.

    Some of MPI's calls of the set-up wait for a dead process for ever, so a thread looks after it.
    """

    def look() -> None:
        while not over():
            failed = world.comm.Get_failed()
            if failed.size and not over():
                print(
                    "megatron_ft: a process died during the set-up, before anything could be "
                    "survived: its own message says why",
                    file=sys.stderr,
                    flush=True,
                )
                os.kill(os.getpid(), signal.SIGKILL)
            failed.Free()
            time.sleep(0.5)

    threading.Thread(target=look, name="ft-start", daemon=True).start()
