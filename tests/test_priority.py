"""A process that prepares itself steps back, and takes its normal priority again, all threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

BEFORE = os.getpriority(os.PRIO_PROCESS, 0)
PROGRAM = """
import os, sys, threading, time
from megatron_ft.rejoin import priority
if len(sys.argv) > 1:
    os.setuid(int(sys.argv[1]))

def niceness():
    time.sleep(0.5)  # threads that have ended leave the list a little later
    return sorted({os.getpriority(os.PRIO_PROCESS, int(t)) for t in os.listdir("/proc/self/task")})

priority.lower(5)
done = threading.Event()
threading.Thread(target=done.wait).start()
print(niceness())
priority.restore()
print(niceness())
done.set()
"""


def lines(*arguments: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the privilege to raise a priority")
def test_it_steps_back_and_returns() -> None:
    low, normal = lines()
    assert low == f"[{BEFORE + 5}]" and normal == f"[{BEFORE}]"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_who_could_not_return_does_not_step_back() -> None:
    assert lines("65534") == [f"[{BEFORE}]"] * 2
