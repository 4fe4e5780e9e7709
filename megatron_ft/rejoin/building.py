"""A pool process builds for a slot by itself, while a thread takes its part in repairs."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

INTERVAL_S = 0.02
SWITCH_S = 0.0005


class Meanwhile:
    """A thread that does what is to be done every now and then while the main thread builds."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        # All who train wait for the thread's part in a repair: the main thread makes way sooner.
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="ft-build", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; returns when it has."""
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._switch_interval)

    def _serve(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            try:
                self._do()
            except BaseException:
                # The others wait for this thread in the repair: they must see a death.
                traceback.print_exc()
                sys.stderr.flush()
                os.kill(os.getpid(), signal.SIGKILL)
