"""Processes and runs that the tests of events, run directory and summary share."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from observe_child import start_fields, step_fields

from megatron_ft.observe.events import EventLog
from megatron_ft.observe.rundir import RunDirectory

CHILD = Path(__file__).with_name("observe_child.py")


@contextlib.contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of observe_child.py, killed at the end of the block if it lives."""
    process = subprocess.Popen(
        [sys.executable, CHILD, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def emit_steps(log: EventLog, *iterations: int, **changes: Any) -> None:
    for iteration in iterations:
        log.emit("step", iteration=iteration, epoch=0, **step_fields(**changes))


def a_run_with_a_death(
    run_dir: RunDirectory, *, injected: bool = True, measured: bool = True
) -> EventLog:
    """Steps of one second; slot 5 dies in the middle of step 4, whose commit comes 1.5 s later.

    Two processes report death and repair. When it died is known because it was `injected`, or
    because the time to the notice was `measured`.
    """
    now = [100.0]
    log = EventLog(run_dir, 11, elected=True, clock=lambda: now[0])
    other = EventLog(run_dir, 1, clock=lambda: now[0])
    started = start_fields(
        num_processes=12,
        num_slots=12,
        num_replicas=4,
        num_stages=3,
        global_microbatches=32,
        faults=["kill@4:slot=5:point=reduce", "kill@99:slot=1"],
    )
    log.emit("run_started", iteration=0, epoch=0, **started)
    usual = step_fields(microbatches=32, live_replicas=4, live_processes=12, quotas=[8] * 4)
    for iteration in range(1, 7):
        fields = usual
        if iteration == 4:
            now[0] += 0.5
            fault = {"fault": "kill@4:slot=5:point=reduce", "fault_kind": "kill"}
            if injected:
                log.emit("fault_injected", iteration=4, epoch=0, point="reduce", slot=5, **fault)
            now[0] += 0.25
            detected: dict[str, Any] = {
                "slot": 5,
                "replica": 2,
                "stage": 1,
                "how": "SIGKILL",
                "point": "reduce",
            }
            if measured:
                detected["detect_s"] = 0.25
            log.emit("fault_detected", iteration=4, epoch=0, **detected)
            log.emit("replica_dark", iteration=4, epoch=1, replica=2, slots=[3, 4, 5])
            now[0] += 0.021
            repaired = {"live_replicas": 3, "live_processes": 11, "num_replicas": 4}
            for reporter in (log, other):
                quotas = [11, 11, 0, 10]
                where = {"iteration": 4, "epoch": 1}
                reporter.emit("repaired", repair_s=0.021, quotas=quotas, **repaired, **where)
            other.emit("fault_detected", iteration=4, epoch=0, **detected)
            now[0] += 1.5 - 0.271
        if iteration >= 4:
            fields = {**usual, "live_replicas": 3, "quotas": [11, 11, 0, 10]}
        seconds = 2.0 if iteration == 4 else 1.0
        now[0] = now[0] if iteration == 4 else now[0] + 1.0
        log.emit("step", iteration=iteration, epoch=0, **{**fields, "seconds": seconds})
    log.emit("eval", iteration=6, epoch=1, lm_loss=5.25)
    log.emit("eval", iteration=6, epoch=1, lm_loss=9.0, split="test")
    return log


INCIDENT = (
    "slot 5 (replica 2, stage 1) died, noticed at SIGKILL in reduce; replica 2 goes dark; "
    "3 of 4 replicas go on with 11+11+10 microbatches; repaired in 0.021 s"
)
