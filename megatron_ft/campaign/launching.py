"""Run one command that starts several ranks: a hard timeout, and nothing left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_ft.campaign.job import ROOT

TERM_SECONDS = 20.0
"""How long a job gets to end when it is told to; the launcher ends its ranks meanwhile."""
LEAVE_SECONDS = 3.0
"""How long a process may outlive its job before it counts as left behind."""


@dataclass(frozen=True)
class Launched:
    """How a command ended."""

    returncode: int
    output: str
    """Standard output and error."""
    timed_out: bool


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for other launches on this machine: two at once on a few cores time out together."""
    with open(Path(tempfile.gettempdir()) / "megatron-ft-launch.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Launcher:
    """Runs commands and can end all that are running, from another thread."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._ending = False

    def run(
        self,
        command: Sequence[str],
        *,
        timeout: float,
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> Launched:
        """Run a command in a process group of its own and wait for it.

        Args:
            timeout: Seconds after which the group is ended.
            log: Where its output goes as it comes; a temporary file if not given.
            env: Added to this process's environment.
        """
        with contextlib.ExitStack() as stack:
            if log is None:
                file = stack.enter_context(tempfile.TemporaryFile("w+b"))
            else:
                file = stack.enter_context(open(log, "w+b"))
            with self._lock:
                if self._ending:
                    raise KeyboardInterrupt
                job = subprocess.Popen(
                    list(command),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, **(env or {})},
                )
                self._running.add(job)
            timed_out = False
            try:
                job.wait(timeout)
            except subprocess.TimeoutExpired:
                timed_out = True
            finally:  # an interrupted campaign leaves nothing running either
                end(job)
                with self._lock:
                    self._running.discard(job)
            file.seek(0)
            return Launched(job.returncode, file.read().decode(errors="replace"), timed_out)

    def end_all(self) -> None:
        """End what runs, and start nothing more."""
        with self._lock:
            self._ending = True
            running = list(self._running)
        for job in running:
            end(job)


def end(job: subprocess.Popen[bytes]) -> None:
    """End a job with all its processes, if it has not ended."""
    if job.poll() is not None:
        return
    os.killpg(job.pid, signal.SIGTERM)
    try:
        job.wait(TERM_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def left_behind(run_dir: Path) -> list[str]:
    """Command lines of processes of a job that has ended and which still run; they are killed."""
    deadline = time.monotonic() + LEAVE_SECONDS
    while (found := _of_run(run_dir)) and time.monotonic() < deadline:
        time.sleep(0.1)
    lines = []
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"{process.pid} {' '.join(process.cmdline()[:4])} ...")
            process.kill()
    return lines


def _of_run(run_dir: Path) -> list[psutil.Process]:
    """Live processes that were started with this run directory, whoever started them."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        alive = process.info["status"] != psutil.STATUS_ZOMBIE
        at = words.index("--ft-run-dir") if "--ft-run-dir" in words else -1
        if alive and at >= 0 and words[at + 1 : at + 2] == [str(run_dir)]:
            found.append(process)
    return found
