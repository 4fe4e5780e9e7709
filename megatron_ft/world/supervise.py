"""Run one mpirun to its end: output relayed, signals passed on, no process left behind."""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import psutil

from megatron_ft.world.environment import FROM_OPEN_MPI
from megatron_ft.world.relay import Relay

# Numbers of <sys/prctl.h>.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

POLL_SECONDS = 0.1
RANKS_POLL_SECONDS = 1.0
MPIRUN_KILL_SECONDS = 10.0
"""How long mpirun gets to kill its ranks before it is killed itself."""
LEFTOVER_SECONDS = 5.0
"""How long a process that outlives the ranks (an upload, say) gets to end by itself."""

FORGOTTEN_SECONDS = 15.0
"""How long mpirun gets to end by itself when all ranks have."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""mpirun passes these to the ranks of every host; batch systems warn of the end by one of them."""


@dataclass(frozen=True)
class End:
    """How mpirun ended."""

    returncode: int
    """mpirun's own code, negative for the signal that killed it."""
    stopped_by: signal.Signals | None
    """The signal that asked for the end, if one did."""
    death_notices: bytes
    """What mpirun said of dead processes."""


def supervise(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    grace: float,
    ends_with_ranks: Callable[[], bool] = lambda: False,
) -> End:
    """Start mpirun and wait for it, from the main thread.

    Args:
        ends_with_ranks: Whether nothing is left to wait for once this host's ranks have ended.
            mpirun can lose count of ranks that other ranks have started, and then stays for ever.

    SIGINT, SIGTERM and SIGHUP go to this host's ranks at once; after ``grace`` seconds, or at the
    second such signal, the whole job is killed. Whatever the job left on this host is killed at
    the end. Should this process be killed itself, mpirun ends the job.
    """
    libc = ctypes.CDLL(None)
    # Orphans of the job become children of this process, where they are found.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def die_with_parent() -> None:
        # Sent at the death of each thread of the parent, and mpirun takes a second SIGTERM as the
        # order to leave at once, without killing its ranks: so this process has one thread only.
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    not_ours = {child.pid for child in psutil.Process().children(recursive=True)}
    with (
        _caught(STOP_SIGNALS + PASSED_SIGNALS) as pending,
        subprocess.Popen(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A Ctrl-C in the terminal must reach the ranks one way only: through this process.
            start_new_session=True,
            preexec_fn=die_with_parent,
        ) as mpirun,
        selectors.DefaultSelector() as streams,
    ):
        assert mpirun.stdout is not None and mpirun.stderr is not None
        errors = Relay(sys.stderr.buffer)
        streams.register(mpirun.stdout, selectors.EVENT_READ, Relay(sys.stdout.buffer))
        streams.register(mpirun.stderr, selectors.EVENT_READ, errors)
        stop = _Stop(mpirun, grace)
        leftovers = _Leftovers(mpirun, not_ours, ends_with_ranks)
        while mpirun.poll() is None:
            _relay(streams)
            stop.act(pending)
            leftovers.end_when_ranks_have()
        leftovers.end(patience=LEFTOVER_SECONDS if stop.by is None else 0.0)
        while streams.get_map():  # to the end: no one is left to hold them open
            _relay(streams)
        # Who asks for the end while leftovers are killed does not want the job started again.
        asked = next((number for number in pending if number in STOP_SIGNALS), None)
    return End(mpirun.returncode, stop.by or asked, errors.notices)


@contextmanager
def _caught(signals: Sequence[signal.Signals]) -> Iterator[list[signal.Signals]]:
    """Collect these signals in the yielded list instead of obeying them.

    One that is ignored stays so: nohup ignores SIGHUP, a shell SIGINT for what runs behind it.
    """
    pending: list[signal.Signals] = []
    before = {s: signal.getsignal(s) for s in signals}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, lambda n, _: pending.append(signal.Signals(n)))
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _relay(streams: selectors.BaseSelector) -> None:
    """Relay what has come, or wait for it shortly."""
    ready = streams.select(POLL_SECONDS)
    if not streams.get_map():
        time.sleep(POLL_SECONDS)  # mpirun has closed its output and is about to end
    for key, _ in ready:
        data = os.read(key.fd, 1 << 16)
        key.data.feed(data)
        if not data:
            streams.unregister(key.fileobj)


class _Stop:
    """Passes signals on, and ends the job when one has asked for it."""

    def __init__(self, mpirun: subprocess.Popen[bytes], grace: float) -> None:
        self.by: signal.Signals | None = None
        self._mpirun = mpirun
        self._grace = grace
        self._deadline = float("inf")
        self._told: set[int] = set()
        self._next_look = 0.0
        self._told_mpirun = False

    def act(self, pending: list[signal.Signals]) -> None:
        """Obey the signals that have come since, and the deadline that an earlier one has set."""
        overdue = time.monotonic() > self._deadline
        while pending:
            number = pending.pop(0)
            if number in PASSED_SIGNALS:
                self._mpirun.send_signal(number)
            elif self.by is None:
                self.by = number
                self._deadline = time.monotonic() + self._grace
                _say(
                    f"{number.name} passed to the ranks; they are killed "
                    f"at the next signal or in {self._grace:g} s"
                )
            else:
                overdue = True
        if self.by is not None and not self._told_mpirun:
            self._tell(self.by)
        if not overdue:
            return
        if self._told_mpirun:
            if time.monotonic() > self._deadline:
                self._mpirun.kill()
            return
        _say("killing the ranks")
        self._mpirun.terminate()  # on which it kills them, on every host
        self._told_mpirun = True
        self._deadline = time.monotonic() + MPIRUN_KILL_SECONDS

    def _tell(self, number: signal.Signals) -> None:
        """Pass the signal to each rank once, to those that are started after it came, too.

        mpirun would answer it by killing its ranks, so they get it from here. A guard that has not
        started its program yet would take the signal for itself.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + (RANKS_POLL_SECONDS if self._told else POLL_SECONDS)
        for rank in _local_ranks(self._mpirun.pid):
            if rank.pid not in self._told and _children(rank, recursive=False):
                self._told.add(rank.pid)
                _send_to_group(rank.pid, number)


class _Leftovers:
    """What outlives the ranks of this host: processes that they started, and mpirun itself."""

    def __init__(
        self,
        mpirun: subprocess.Popen[bytes],
        not_ours: set[int],
        ends_with_ranks: Callable[[], bool],
    ) -> None:
        self._mpirun = mpirun
        self._mpirun_pid = mpirun.pid
        self._ends_with_ranks = ends_with_ranks
        self._not_ours = not_ours
        self._next_look = 0.0
        self._had_ranks = False
        self._ranks_ended: float | None = None

    def end_when_ranks_have(self) -> None:
        """Kill leftovers some time after the last rank: mpirun waits for all who can print."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + RANKS_POLL_SECONDS
        if _local_ranks(self._mpirun_pid):
            self._had_ranks, self._ranks_ended = True, None
        elif self._had_ranks and self._ranks_ended is None:
            self._ranks_ended = now
        elif self._ranks_ended is not None and now > self._ranks_ended + LEFTOVER_SECONDS:
            self.end(patience=0)
            if now > self._ranks_ended + FORGOTTEN_SECONDS and self._ends_with_ranks():
                _say("mpirun has not noticed that all ranks have ended: ending it")
                self._mpirun.kill()

    def end(self, patience: float) -> None:
        """Kill what is running still after ``patience`` seconds; mpirun and its children stay."""
        orphans = [
            child
            for child in psutil.Process().children()
            if child.pid not in self._not_ours and child.pid != self._mpirun_pid
        ]
        left = orphans + [child for orphan in orphans for child in _children(orphan)]
        _, alive = psutil.wait_procs(left, timeout=patience)
        for process in alive:
            _say(f"killing process {process.pid}, which the job left running")
            _send(process, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=LEFTOVER_SECONDS)


def _local_ranks(mpirun_pid: int) -> list[psutil.Process]:
    """This host's ranks: mpirun's other children connect it to its daemons on other hosts."""
    ranks: list[psutil.Process] = []
    try:
        mpirun = psutil.Process(mpirun_pid)
    except psutil.NoSuchProcess:
        return ranks  # it has just ended, and has been waited for
    for child in _children(mpirun, recursive=False):
        try:
            if FROM_OPEN_MPI["RANK"] in child.environ():
                ranks.append(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it has just ended
    return ranks


def _children(process: psutil.Process, *, recursive: bool = True) -> list[psutil.Process]:
    try:
        return process.children(recursive=recursive)
    except psutil.NoSuchProcess:
        return []


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return  # it has ended already, which is what the signal asks for


def _send_to_group(leader: int, number: signal.Signals) -> None:
    """mpirun makes each rank the leader of a process group: the guard, the program, its workers."""
    try:
        os.killpg(leader, number)
    except ProcessLookupError:
        return


def _say(text: str) -> None:
    try:
        print(f"megatron-ft-run: {text}", file=sys.stderr, flush=True)
    except OSError:
        return  # the reader has gone or a disk is full, which is no reason to leave the job alone
