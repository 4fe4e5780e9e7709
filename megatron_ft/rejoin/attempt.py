"""One new process on its way: from Comm_spawn until it says that it can be taken in.

A process that dies before it has called MPI_Init leaves Comm_spawn waiting for ever (Open MPI
5.0.11). So one thread spawns, a second one looks whether the process still exists and what its
guard says, and when it is gone the first is left behind where it waits. A further Comm_spawn in
another thread works.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

import psutil
from mpi4py import MPI

from megatron_ft.world.comms import AGREEING, quiet
from megatron_ft.world.environment import is_gone
from megatron_ft.world.mpirun import GUARD

logger = logging.getLogger("megatron_ft.rejoin")

HERE_TAG, ORDER_TAG, READY_TAG = 7203, 7204, 7205
LOOK_S = 0.02
EXISTS_S = 0.5
"""Between two looks whether the process still exists."""
START_PATIENCE_S = 300.0
"""For a process that cannot be looked at, because it is on another host."""
PREPARE_PATIENCE_S = 1800.0
"""For its imports, and for Megatron's set-up of a large model."""


class Attempt:
    """A process that is being started, in threads of its own.

    Args:
        pause_s: Seconds before it is started.
        order: Called from a thread when the process has imported: what it is told to prepare.
        ended: Called once, from a thread: with the bridge to the process, or with None if it could
            not be started or has died.
        program: What to start.
    """

    def __init__(
        self,
        pause_s: float,
        order: Callable[[], Any],
        ended: Callable[[MPI.Intracomm | None], None],
        program: list[str] | None = None,
    ) -> None:
        self._pause_s = pause_s
        self._order = order
        self._ended = ended
        self._program = program or [sys.executable, *sys.argv]
        self._name = f"rank-{uuid.uuid4().hex}"
        """What the process's guard is called, to be found by."""
        self._lock = threading.Lock()
        self._claimed = False
        self.over = False
        """Whether ``ended`` has been called and has returned."""
        self._spawning = False
        threading.Thread(target=self._run, name="ft-spawn", daemon=True).start()

    def _run(self) -> None:
        time.sleep(self._pause_s)
        threading.Thread(target=self._look, name="ft-spawn-look", daemon=True).start()
        try:
            bridge = self._spawn()
        except Exception:  # whatever it is, the next one can still be started
            logger.warning("a process could not be started", exc_info=True)
            self._end(None)
        else:
            self._end(bridge)

    def _spawn(self) -> MPI.Intracomm:
        self._spawning = True
        inter = MPI.COMM_SELF.Spawn(
            "/bin/sh", ["-c", GUARD, self._name, *self._program], maxprocs=1
        )
        quiet(inter)
        bridge = quiet(inter.Merge(False))
        self._spawning = False  # from here on MPI tells of its death
        with AGREEING:
            inter.Free()
        # It imports for seconds, and builds; until it has said that it is ready, nobody asks it.
        _await(bridge, HERE_TAG)
        with self._lock:
            if self._claimed:
                raise TimeoutError("it came after it had been given up")
        with AGREEING:
            bridge.send(self._order(), dest=1, tag=ORDER_TAG)
        _await(bridge, READY_TAG)
        return bridge

    def _look(self) -> None:
        """End the attempt when the process is gone and Comm_spawn has not noticed."""
        seen, end = False, time.monotonic() + START_PATIENCE_S
        while not self.over:
            time.sleep(EXISTS_S)
            if self.over or not self._spawning:
                if seen:
                    return
                continue
            exists = self._exists()
            # Its guard tells of one that died before the first look.
            gone = is_gone(self._name) or (seen and not exists)
            if gone or (not seen and time.monotonic() > end):
                logger.warning("a process that was started died before it was up")
                self._end(None)
                return
            seen = seen or exists

    def _exists(self) -> bool:
        for process in psutil.process_iter(["cmdline"]):
            if self._name in (process.info["cmdline"] or []):
                return True
        return False

    def _end(self, bridge: MPI.Intracomm | None) -> None:
        with self._lock:
            if self._claimed:
                return  # given up before; who comes late leaves when nobody takes it in
            self._claimed = True
        self._ended(bridge)
        self.over = True


def _await(bridge: MPI.Intracomm, tag: int) -> None:
    end = time.monotonic() + PREPARE_PATIENCE_S
    while True:
        with AGREEING:
            if bridge.Iprobe(source=1, tag=tag):
                bridge.recv(source=1, tag=tag)
                return
        if time.monotonic() > end:
            raise TimeoutError(f"nothing was heard of it for {PREPARE_PATIENCE_S:g} s")
        time.sleep(LOOK_S)
