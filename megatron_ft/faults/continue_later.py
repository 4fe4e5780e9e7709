"""Helper of the `stop` fault: sends SIGCONT to a stopped process at a given time, then exits.

Usage: continue_later.py PID START_TIME DEADLINE

A stopped process cannot continue itself, so this is started just before it stops. START_TIME is
field 22 of /proc/PID/stat: if the process has been killed meanwhile and its number given to
another, nothing is sent. DEADLINE is on CLOCK_MONOTONIC, which all processes of a host share. Run
by its path with `python -I -S`, so that it is up in milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time


def start_time(pid: int) -> str | None:
    """When a process was started, in clock ticks after boot; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # The command, in parentheses, may hold spaces; two fields come before its end.
            return file.read().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return None


def main(pid: int, expected: str, deadline: float) -> None:
    time.sleep(max(0.0, deadline - time.monotonic()))
    if start_time(pid) == expected:
        os.kill(pid, signal.SIGCONT)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
