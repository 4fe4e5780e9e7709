"""How a process fails: one function for each kind that the process carries out on itself.

All but `slow`, and `stop` when it is continued, do not return.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from megatron_ft.faults import continue_later
from megatron_ft.faults.spec import FaultSpec


class InjectedFault(RuntimeError):
    """Raised by the fault kind `exception`; nothing but a test should catch it."""


def kill(spec: FaultSpec) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot be survived")


def stop(spec: FaultSpec) -> None:
    """Stop all threads of this process; with `cont`, a helper continues them later."""
    if spec.cont is None:
        os.kill(os.getpid(), signal.SIGSTOP)
        return
    deadline = time.monotonic() + spec.cont
    pid = os.getpid()
    born = continue_later.start_time(pid)
    assert born is not None, "this process is in /proc"
    # A session of its own and no inherited files: whoever waits for this process's output or kills
    # its group has nothing to do with the helper.
    helper = subprocess.Popen(
        [sys.executable, "-I", "-S", continue_later.__file__, str(pid), born, repr(deadline)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.kill(pid, signal.SIGSTOP)
    helper.wait()


def exception(spec: FaultSpec) -> NoReturn:
    raise InjectedFault(str(spec))


def exit_(spec: FaultSpec) -> NoReturn:
    os._exit(1)


def loop(spec: FaultSpec) -> NoReturn:
    while True:
        pass


def hold_gil(spec: FaultSpec) -> NoReturn:
    """Sleep in C without releasing the GIL: no other Python thread runs again."""
    sleep = ctypes.PyDLL(None).sleep
    sleep.argtypes = [ctypes.c_uint]
    while True:
        sleep(2**32 - 1)


def slow(spec: FaultSpec) -> None:
    assert spec.seconds is not None, "the grammar demands s"
    time.sleep(spec.seconds)


DEEDS: dict[str, Callable[[FaultSpec], None]] = {
    "kill": kill,
    "stop": stop,
    "exception": exception,
    "exit": exit_,
    "loop": loop,
    "hold-gil": hold_gil,
    "slow": slow,
}
