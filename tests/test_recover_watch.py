"""The watch in real jobs: how soon the silent are found, and that nobody else is taken for one."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from harness import Run, assert_faults_fired, assert_same_training, launch

# Minutes each: part of `make test-slow`.
pytestmark = pytest.mark.slow

REPLICAS = {"tp": 1, "pp": 1, "dp": 4, "iters": 10, "per_replica": 2}
ALIVE, PROGRESS, COLLECTIVE = 2.0, 5.0, 40.0
SHORT = (
    *("--ft-watch-timeout", str(ALIVE), "--ft-progress-timeout", str(PROGRESS)),
    *("--ft-collective-timeout", str(COLLECTIVE)),
)
SLACK = 5.0
"""Seconds that a busy machine may add; a quiet one adds less than one."""


@functools.cache
def reference() -> Run:
    return launch("--ft-recover", **REPLICAS)


def run_with(*faults: str, **launching: Any) -> Run:
    specs = [part for fault in faults for part in ("--ft-fault", fault)]
    run = launch("--ft-recover", *SHORT, *specs, **{**REPLICAS, **launching})
    assert run.returncode == 0, run.output[-4000:]
    assert_faults_fired(run, len(faults))
    return run


def found_after(run: Run) -> dict[str, float]:
    """Kind of each fault -> seconds until the survivors had a new world."""
    struck = {e["slot"]: e for e in run.of_kind("fault_injected")}
    found = {e["slot"]: e for e in run.of_kind("fault_detected")}
    assert found.keys() <= struck.keys(), "somebody died who was told nothing"
    return {
        struck[slot]["fault_kind"]: found[slot]["time"] - struck[slot]["time"] for slot in found
    }


def test_the_silent_are_found_in_time() -> None:
    run = run_with(
        "stop@3:slot=0:point=forward",
        "hold-gil@6:slot=1:point=reduced",
        "loop@10:slot=3:point=eval",  # after training
    )
    seconds = found_after(run)
    print("found after:", seconds)
    assert seconds.keys() == {"stop", "loop", "hold-gil"}
    for kind, limit in {"stop": ALIVE, "loop": PROGRESS, "hold-gil": ALIVE}.items():
        assert 0.9 * limit <= seconds[kind] <= limit + SLACK, (kind, seconds)
    assert_same_training(run, reference())


def test_the_continued_do_no_harm() -> None:
    """A pause below the timeout costs time only, also when another dies meanwhile and everybody
    else begins the repair; one above it is a death, and what is continued later is no more."""
    run = run_with(
        "stop@3:slot=1:cont=1.2",
        "stop@5:slot=0:point=reduce:cont=1.5",
        "kill@5:slot=2:point=reduce",
        f"stop@8:slot=3:point=backward:cont={ALIVE + 1}",
        "slow@9:slot=1:s=0.5:for=2",  # the job still runs when that one is continued
    )
    assert [e["slot"] for e in run.of_kind("fault_detected")] == [2, 3]
    assert_same_training(run, reference())
    by_the_dead = [e for e in run.of_kind("step") if e["process"] == 3 and e["iteration"] > 8]
    assert by_the_dead == []


def test_who_waits_for_nobody_is_let_go() -> None:
    run = run_with(script="tests/recover_entry.py", env={"RECOVER_TEST": "stray"})
    assert "broken off" in run.output
    assert run.of_kind("fault_detected") == []
    assert [e["live_replicas"] for e in run.of_kind("repaired")] == [4]
    assert COLLECTIVE <= run.steps[3]["seconds"] <= COLLECTIVE + SLACK, run.steps[3]
    assert run.summary["status"] == "ok"
    assert_same_training(run, reference())


@pytest.mark.slow
def test_an_idle_process_that_loops_keeps_nobody_waiting() -> None:
    pipeline = {"tp": 1, "pp": 2, "dp": 3, "iters": 8, "per_replica": 4}
    run = run_with("kill@2:slot=1", "loop@2:process=4:point=pool", **pipeline)
    assert {e["failed_process"] for e in run.of_kind("fault_detected")} <= {1, 4}
    assert_same_training(run, launch("--ft-recover", **pipeline))


@contextlib.contextmanager
def busy_machine(number: int) -> Iterator[None]:
    """Endless loops beside the job, of the same priority."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("minutes", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_no_false_alarm_on_a_busy_machine(minutes: int) -> None:
    with busy_machine(6):
        run = launch(
            "--ft-recover",
            *SHORT,
            *("--exit-duration-in-mins", str(minutes)),
            **{**REPLICAS, "iters": 20_000},
            timeout=300 + 60 * minutes,
        )
    assert run.returncode == 0, run.output[-4000:]
    assert run.of_kind("fault_detected") == run.of_kind("repaired") == []
    assert "killed" not in run.output
    assert run.summary["status"] == "ok"
    print(len(run.steps), "steps")
