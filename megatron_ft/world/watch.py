"""Watch and fencing: whatever is not dead but should be is made dead.

ULFM reports deaths reliably and nothing else. So each process keeps a record in the shared memory
of its host: *alive*, stamped by a thread of its own, and *progress*, stamped by the main loop. A
sibling that sees one unchanged for longer than its timeout kills that process. A stopped process, a
held GIL and an endless loop in user code all become a death. A main thread that waits for others in
MPI makes no progress through no fault of its own, says so, and is left alone; if that lasts longer
than the collective timeout its own thread revokes what it waits in. An agreement or a shrinking
cannot be revoked: who still waits then ends itself, one after another, and the others go on.

Until a process trains for the first time it may hold its GIL for long (loading torch's libraries),
and nothing could be mended yet: it is killed early only if it is stopped, as the kernel says.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

logger = logging.getLogger("megatron_ft.watch")

# One record of 64-bit words per process: who, and three stamps of the host's monotonic clock.
_PROCESS, _PID, _BORN, _ALIVE, _PROGRESS, _STATE = range(6)
_WORDS = 8
_CAPACITY = 1024
_FREE, _STARTING, _QUIET, _ARMED, _SLOW, _WAITING = range(6)


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds after which something that does not move is given up.

    Raises:
        ValueError: They are not in order, so that the wrong one would strike first.
    """

    alive: float = 10.0
    """A process whose watch thread does not run: stopped, or its GIL is held."""
    progress: float = 120.0
    """A process whose main loop does not move and does not wait for others."""
    collective: float = 600.0
    """A process that waits for others in one call, or saves a checkpoint."""
    setup: float = 0.0
    """A process that waits for others before it trains, if that is longer."""

    def __post_init__(self) -> None:
        if not 0 < self.alive < self.progress < self.collective:
            raise ValueError(
                "timeouts must grow: --ft-watch-timeout "
                f"({self.alive:g} s) < --ft-progress-timeout ({self.progress:g} s) < "
                f"--ft-collective-timeout ({self.collective:g} s)"
            )


@dataclass
class _Seen:
    """What a watcher has seen of a stamp: its value, since when, and at how many checks."""

    stamp: int
    since: float
    checks: int = 0
    fenced: bool = field(default=False)


class NoWatch:
    """Where nobody watches."""

    def tick(self) -> None: ...

    def begin_wait(self) -> None: ...

    def end_wait(self) -> None: ...

    def saving(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def working(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around a call in which the main thread waits for others, where cost does not matter."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()


NO_WATCH = NoWatch()


class Watch(NoWatch):
    """This process's record and the thread that stamps it and looks after the siblings'.

    Args:
        path: The host's shared file, the same for all processes of the job on this host.
        process: Id of this process.
        timeouts: When to fence.
        on_collective_timeout: Called in the watch thread when the main thread has waited too long.
        on_fence: Called in the watch thread with the id of a process just killed and why.
    """

    def __init__(
        self,
        path: Path,
        process: int,
        timeouts: Timeouts,
        on_collective_timeout: Callable[[float], None] = lambda seconds: None,
        on_fence: Callable[[int, str], None] = lambda process, reason: None,
    ) -> None:
        self.process = process
        self.timeouts = timeouts
        self.on_collective_timeout = on_collective_timeout
        self.on_fence = on_fence
        self.path = path
        self._map = _open(path)
        self._handle = os.open(path, os.O_RDWR)
        """Keeps the file within reach of processes that come later: it has no name by then."""
        self._words = memoryview(self._map).cast("q")
        self._index = process % _CAPACITY
        self._base = self._index * _WORDS
        self._interval = min(0.5, timeouts.alive / 10)
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._state = _STARTING
        """What the main thread does while it does not wait."""
        self._waiting_since = 0.0
        self._broken_off = 0.0
        """The beginning of the last wait that was broken off: once is enough."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ft-watch", daemon=True)

    def shared(self) -> tuple[str, str]:
        """Host and path of the shared file, for a process that is started later."""
        return socket.gethostname(), f"/proc/{os.getpid()}/fd/{self._handle}"

    @staticmethod
    def path_for(shared: tuple[str, str], otherwise: Path) -> Path:
        """The file that another process has shared; ``otherwise`` on another host."""
        host, path = shared
        return Path(path) if host == socket.gethostname() else otherwise

    def start(self) -> None:
        """Register this process and begin to watch."""
        while self._is_taken():
            self._index = (self._index + 1) % _CAPACITY
            self._base = self._index * _WORDS
        now = time.monotonic_ns()
        record = (self.process, os.getpid(), born(os.getpid()) or 0, now, now)
        for word, value in enumerate(record):
            self._words[self._base + word] = value
        self._words[self._base + _STATE] = self._state
        self._thread.start()

    def _is_taken(self) -> bool:
        """Whether this record is of a process that lives: they are numbered for ever."""
        words = self._words[self._base : self._base + _WORDS]
        return words[_STATE] != _FREE and born(words[_PID]) == words[_BORN]

    def close(self) -> None:
        """Stop watching and take the record back."""
        self._stop.set()
        self._thread.join()
        self._words[self._base + _STATE] = _FREE
        self._words.release()
        self._map.close()
        os.close(self._handle)

    # -- the main thread -------------------------------------------------------------------------

    def tick(self) -> None:
        """The main loop moved: a microbatch, a bucket, a batch of set-up work."""
        self._words[self._base + _PROGRESS] = time.monotonic_ns()

    def arm(self) -> None:
        """From now on the main loop must tick."""
        self._enter(_ARMED)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """While the main loop saves: nothing ticks, but it ends within the collective timeout."""
        return self._during(_SLOW)

    def working(self) -> contextlib.AbstractContextManager[None]:
        """While the main loop must tick, in training or not: an evaluation, idling in the pool."""
        return self._during(_ARMED)

    def disarm(self) -> None:
        """The main loop does something that may last for ever, such as building a model."""
        self._enter(_QUIET)

    def begin_wait(self) -> None:
        """The main thread enters a call in which it waits for others; not to be nested.

        Called before every operation, so it does no more than it must.
        """
        self._waiting_since = time.monotonic()
        self._words[self._base + _STATE] = _WAITING

    def end_wait(self) -> None:
        """The main thread is back from such a call, well or not."""
        self._waiting_since = 0.0
        base = self._base
        # In this order: a watcher that sees the old state must not see an old stamp with it.
        self._words[base + _PROGRESS] = time.monotonic_ns()
        self._words[base + _STATE] = self._state

    @contextlib.contextmanager
    def _during(self, state: int) -> Iterator[None]:
        before = self._state
        self._enter(state)
        try:
            yield
        finally:
            self._enter(before)

    def _enter(self, state: int) -> None:
        self._state = state
        self._words[self._base + _PROGRESS] = time.monotonic_ns()
        self._words[self._base + _STATE] = state

    # -- the watch thread ------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(self._interval):
            self._words[self._base + _ALIVE] = time.monotonic_ns()
            since = self._waiting_since
            lasted = time.monotonic() - since
            limit = self.timeouts.collective
            if self._state in (_STARTING, _QUIET):  # another may build an index for long
                limit = max(limit, self.timeouts.setup)
            if since and since != self._broken_off and lasted > limit:
                self._broken_off = since
                logger.warning("waiting for others for %.1f s: broken off", lasted)
                self.on_collective_timeout(lasted)
            patience = limit + (2 + self._order()) * self.timeouts.alive
            if since and since == self._broken_off and lasted > patience:
                logger.error(
                    "waiting for others for %.1f s, and broken off in vain: leaving", lasted
                )
                os.kill(os.getpid(), signal.SIGKILL)
            for index in range(_CAPACITY):
                if index != self._index and self._words[index * _WORDS + _STATE] != _FREE:
                    self._check(index * _WORDS)

    def _order(self) -> int:
        """How many records there are before this process's."""
        states = (self._words[index * _WORDS + _STATE] for index in range(self._index))
        return sum(state != _FREE for state in states)

    def _check(self, base: int) -> None:
        state, times = self._words[base + _STATE], self.timeouts
        still = self._unchanged(base, _ALIVE)
        if still > times.alive and (
            state != _STARTING or still > times.collective or is_stopped(self._words[base + _PID])
        ):
            self._fence(base, f"gave no sign of life for {still:.1f} s")
            return
        limit = {_ARMED: times.progress, _SLOW: times.collective}.get(state)
        if limit is None:
            self._seen.pop((base, _PROGRESS), None)
        elif (still := self._unchanged(base, _PROGRESS)) > limit:
            self._fence(base, f"made no progress for {still:.1f} s")

    def _unchanged(self, base: int, word: int) -> float:
        """Seconds for which this watcher has seen the stamp stand still.

        By the watcher's own count of checks: on a machine so busy that the watcher does not run
        either, time passes for nobody.
        """
        stamp = self._words[base + word]
        seen = self._seen.get((base, word))
        if seen is None or seen.stamp != stamp:
            self._seen[base, word] = _Seen(stamp, time.monotonic())
            return 0.0
        seen.checks += 1
        return min(time.monotonic() - seen.since, seen.checks * self._interval * 1.5)

    def _fence(self, base: int, reason: str) -> None:
        seen = self._seen.setdefault((base, _STATE), _Seen(0, 0.0))
        pid = self._words[base + _PID]
        if seen.fenced and seen.stamp == pid:
            return
        seen.fenced, seen.stamp = True, pid
        process = self._words[base + _PROCESS]
        if fence(pid, self._words[base + _BORN]):
            logger.warning("process %d (pid %d) %s: killed", process, pid, reason)
            self.on_fence(process, reason)


def born(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None if it is no more."""
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether the kernel does not let the process run: SIGSTOP, or a debugger."""
    fields = _stat(pid)
    return bool(fields) and fields[0] in "Tt"


def _stat(pid: int) -> list[str]:
    """What the kernel says of a process, from its state on; empty if it is no more."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            # The command, in parentheses, may hold spaces.
            return stat.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError):  # hidden: another user's
        return []


def fence(pid: int, started: int) -> bool:
    """SIGKILL the process of that pid and start time; False if it is no more.

    The start time and the pidfd see to it that a reused pid is never hit.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            return False  # it is no more, or its number is a thread's now
        # An old kernel, or a container that forbids it: a moment remains for the pid to be reused.
        if born(pid) != started:
            return False
        os.kill(pid, signal.SIGKILL)
        return True
    try:
        if born(pid) != started:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)


def _open(path: Path) -> mmap.mmap:
    size = _CAPACITY * _WORDS * 8
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(handle).st_size < size:
            os.ftruncate(handle, size)
        return mmap.mmap(handle, size)
    finally:
        os.close(handle)
