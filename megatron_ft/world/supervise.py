"""Run one mpirun to its end: readable output, signals passed on, no process left behind."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

import psutil

from megatron_ft.world.environment import FROM_OPEN_MPI

# Numbers of <sys/prctl.h>.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

POLL_SECONDS = 0.1
MPIRUN_KILL_SECONDS = 10.0
"""How long mpirun gets to kill its ranks before it is killed itself."""
LEFTOVER_SECONDS = 5.0
"""How long a process that outlives mpirun (an upload, say) gets to end by itself."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""mpirun passes these to the ranks of every host; batch systems warn of the end by one of them."""

TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>: ?")
RULE = re.compile(rb"-{70,}\n")
DEATH_NOTICE = re.compile(rb"\S+ (noticed that|has exited due to) process ")


@dataclass(frozen=True)
class End:
    """How mpirun ended."""

    returncode: int
    """mpirun's own code, negative for the signal that killed it."""
    stopped_by: signal.Signals | None
    """The signal that asked for the end, if one did."""
    death_notices: bytes
    """What mpirun said of dead processes: noise where the job went on without them."""


def supervise(command: Sequence[str], environment: Mapping[str, str], *, grace: float) -> End:
    """Start mpirun and wait for it, from the main thread.

    SIGINT, SIGTERM and SIGHUP go to this host's ranks at once; after ``grace`` seconds, or at the
    second such signal, the whole job is killed. Whatever the job left on this host is killed at
    the end. Should this process be killed itself, mpirun ends the job.
    """
    libc = ctypes.CDLL(None)
    # Orphans of the job become children of this process, where they are found.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def die_with_parent() -> None:
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
    ):
        assert mpirun.stdout is not None and mpirun.stderr is not None
        notices: list[bytes] = []
        pumps = [
            threading.Thread(target=_pump, args=(mpirun.stdout, sys.stdout.buffer)),
            threading.Thread(
                target=_pump, args=(_without_notices(mpirun.stderr, notices), sys.stderr.buffer)
            ),
        ]
        for pump in pumps:
            pump.start()
        stopped_by = _wait(mpirun, pending, grace)
        _end_leftovers(not_ours, patience=LEFTOVER_SECONDS if stopped_by is None else 0.0)
        for pump in pumps:
            pump.join()
    return End(mpirun.returncode, stopped_by, b"".join(notices))


@contextmanager
def _caught(signals: Sequence[signal.Signals]) -> Iterator[list[signal.Signals]]:
    """Collect these signals in the yielded list instead of obeying them."""
    pending: list[signal.Signals] = []
    before = {s: signal.signal(s, lambda n, _: pending.append(signal.Signals(n))) for s in signals}
    try:
        yield pending
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(
    mpirun: subprocess.Popen[bytes], pending: list[signal.Signals], grace: float
) -> signal.Signals | None:
    """Wait for mpirun's end, acting on signals; returns the first that asked for the end."""
    stopped_by: signal.Signals | None = None
    deadline = float("inf")
    last_resort = False
    while True:
        try:
            mpirun.wait(timeout=POLL_SECONDS)
            return stopped_by
        except subprocess.TimeoutExpired:
            pass
        overdue = time.monotonic() > deadline
        while pending:
            number = pending.pop(0)
            if number in PASSED_SIGNALS:
                mpirun.send_signal(number)
            elif stopped_by is None:
                stopped_by = number
                deadline = time.monotonic() + grace
                _say(
                    f"{number.name} passed to the ranks; they are killed "
                    f"at the next signal or in {grace:g} s"
                )
                _signal_local_ranks(mpirun.pid, number)
            else:
                overdue = True
        if overdue and not last_resort:
            _say("killing the ranks")
            mpirun.terminate()  # on which it kills them, on every host
            deadline = time.monotonic() + MPIRUN_KILL_SECONDS
            last_resort = True
        elif overdue:
            mpirun.kill()


def _signal_local_ranks(mpirun_pid: int, number: signal.Signals) -> None:
    """mpirun answers these signals by killing its ranks, so they get them from here."""
    try:
        children = psutil.Process(mpirun_pid).children()
    except psutil.NoSuchProcess:
        return
    for child in children:
        try:
            # mpirun's other children are the connections to its daemons on other hosts.
            if FROM_OPEN_MPI["RANK"] in child.environ():
                child.send_signal(number)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue  # it has ended already, which is what the signal asks for


def _end_leftovers(not_ours: set[int], patience: float) -> None:
    """Kill what the job left running on this host, after ``patience`` seconds."""
    left = [
        process
        for process in psutil.Process().children(recursive=True)
        if process.pid not in not_ours
    ]
    _, alive = psutil.wait_procs(left, timeout=patience)
    for process in alive:
        try:
            _say(f"killing process {process.pid} ({process.name()}), which the job left running")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(alive, timeout=LEFTOVER_SECONDS)


def _pump(lines: Iterable[bytes], sink: BinaryIO) -> None:
    """Copy lines as they come, mpirun's tags shortened to ``[rank] ``."""
    for line in lines:
        # A rank's last line may lack its newline, so that another's tag follows in mid-line.
        text = TAG.sub(rb"\n[\1] ", line).removeprefix(b"\n") if b"]<std" in line else line
        try:
            sink.write(text)
            sink.flush()
        except BrokenPipeError:
            # The reader has gone (`| head`): the job goes on, and its output must be drained.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sink.fileno())


def _without_notices(lines: Iterable[bytes], notices: list[bytes]) -> Iterator[bytes]:
    """Pass lines on, except mpirun's boxed messages of dead processes, which go to ``notices``."""
    source = iter(lines)
    for line in source:
        if RULE.fullmatch(line) is None:
            yield line
            continue
        title = next(source, b"")
        if DEATH_NOTICE.match(title) is None:
            yield line
            yield title
            continue
        notices += (line, title)
        for inside in source:
            notices.append(inside)
            if RULE.fullmatch(inside) is not None:
                break


def _say(text: str) -> None:
    print(f"megatron-ft-run: {text}", file=sys.stderr, flush=True)
