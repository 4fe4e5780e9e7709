"""The watch: real processes that stop, loop, hold their GIL, wait, idle, or are starved."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ft.world.watch import Timeouts, Watch, born, fence, is_stopped

CHILD = Path(__file__).with_name("watch_child.py")
ALIVE, PROGRESS, COLLECTIVE = 1.0, 2.0, 4.0  # watch_child.TIMEOUTS
SLACK = 2.0
"""Seconds that a busy machine may add."""


class Children:
    """Started processes by number, each ended with the test."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "watch"
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, behaviour: str) -> int:
        number = len(self.processes)
        child = subprocess.Popen(
            [sys.executable, str(CHILD), str(self.path), str(number), behaviour],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return number

    def signal(self, number: int, what: signal.Signals) -> None:
        self.processes[number].send_signal(what)

    def dead(self) -> set[int]:
        return {i for i, child in enumerate(self.processes) if child.poll() == -signal.SIGKILL}

    def end(self) -> list[str]:
        """Kill all and return what each has said since it was ready."""
        processes, self.processes = self.processes, []
        for child in processes:
            child.kill()
        return [child.communicate()[0] for child in processes]


@pytest.fixture
def children(tmp_path: Path) -> Iterator[Children]:
    started = Children(tmp_path)
    yield started
    started.end()


def test_each_is_found_in_its_time(children: Children) -> None:
    limits = {
        "work": None,
        "stop": ALIVE,
        "hold-gil": ALIVE,
        "build-stop": ALIVE,
        "starting-stop": ALIVE,
        "loop": PROGRESS,
        "pool-loop": PROGRESS,
        "save": COLLECTIVE,
        "starting-hold-gil": COLLECTIVE,
        "wait": None,
        "pool": None,
        "build": None,
        "saved": None,
    }
    number: dict[str, int] = {}
    started: dict[str, float] = {}
    for behaviour in limits:
        number[behaviour] = children.start(behaviour)
        started[behaviour] = time.monotonic()
    died: dict[str, float] = {}
    end = time.monotonic() + COLLECTIVE + SLACK
    while time.monotonic() < end:
        for behaviour in limits.keys() - died.keys():
            if number[behaviour] in children.dead():
                died[behaviour] = time.monotonic() - started[behaviour]
        time.sleep(0.02)
    said = children.end()
    print({behaviour: round(seconds, 2) for behaviour, seconds in died.items()})
    assert died.keys() == {behaviour for behaviour, limit in limits.items() if limit}
    for behaviour, seconds in died.items():
        limit = limits[behaviour]
        assert limit is not None and limit * 0.9 <= seconds <= limit + SLACK, (behaviour, seconds)
    # One that waits is let go, once; and only those that were given up are named.
    assert [text.count("broke off") for text in said] == [
        int(behaviour == "wait") for behaviour in limits
    ]
    named = {
        int(line.split()[1]) for text in said for line in text.splitlines() if "fenced" in line
    }
    assert named == {number[behaviour] for behaviour in died}


def test_who_waits_in_vain_leaves_and_those_after_it_later(children: Children) -> None:
    first, second = children.start("wait"), children.start("wait")
    end = time.monotonic() + COLLECTIVE + 2 * ALIVE + SLACK
    while first not in children.dead() and time.monotonic() < end:
        time.sleep(0.02)
    assert children.dead() == {first}
    while second not in children.dead() and time.monotonic() < end + ALIVE:
        time.sleep(0.02)
    assert children.dead() == {first, second}
    assert all("broke off" in text for text in children.end())


def test_another_process_with_the_same_number_is_not_hit(children: Children) -> None:
    children.start("work")
    forged = children.start("forge")
    time.sleep(ALIVE + SLACK)
    assert children.dead() == set()
    assert is_stopped(children.processes[forged].pid)
    said = children.end()
    assert not any("fenced" in text for text in said)


def test_fence_asks_for_the_start_time() -> None:
    sleeper = subprocess.Popen(["sleep", "100"])
    started = born(sleeper.pid)
    assert started is not None
    assert not fence(sleeper.pid, started - 1)
    assert sleeper.poll() is None
    assert fence(sleeper.pid, started)
    assert sleeper.wait() == -signal.SIGKILL
    assert born(sleeper.pid) is None
    assert not fence(sleeper.pid, started)


def test_a_zombie_is_dead() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    with contextlib.suppress(TimeoutError):
        _until(lambda: born(child) is None)
    assert born(child) is None
    assert not fence(child, 0)
    os.waitpid(child, 0)


def test_a_starved_watcher_fences_nobody(children: Children) -> None:
    """Nothing runs for longer than the timeout, and the watcher is the first that runs again."""
    watcher, worker = children.start("work"), children.start("work")
    time.sleep(1.0)
    for number in (worker, watcher):
        children.signal(number, signal.SIGSTOP)
    time.sleep(3 * ALIVE)
    children.signal(watcher, signal.SIGCONT)
    time.sleep(ALIVE / 2)
    children.signal(worker, signal.SIGCONT)
    time.sleep(ALIVE)
    assert children.dead() == set()


def test_one_that_stays_stopped_after_that_is_found(children: Children) -> None:
    """The negative control of the one before: the watcher's patience has an end."""
    watcher, worker = children.start("work"), children.start("work")
    for number in (worker, watcher):
        children.signal(number, signal.SIGSTOP)
    time.sleep(3 * ALIVE)
    children.signal(watcher, signal.SIGCONT)
    _until(lambda: children.dead() == {worker}, seconds=ALIVE + SLACK)


def test_one_that_is_continued_in_time_goes_on(children: Children) -> None:
    children.start("work")
    paused = children.start("stop")
    time.sleep(ALIVE / 2)
    children.signal(paused, signal.SIGCONT)
    time.sleep(ALIVE + SLACK)
    assert children.dead() == set()


def test_what_is_left_of_the_dead_ends_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers may be those of threads by now, or none may be asked for."""
    beside = threading.Thread(target=time.sleep, args=(5,), daemon=True)
    beside.start()
    assert beside.native_id is not None
    assert not fence(beside.native_id, 1)
    done = subprocess.Popen(["true"])
    done.wait()
    assert not fence(done.pid, 1)

    def forbidden(pid: int) -> int:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "pidfd_open", forbidden)
    sleeping = subprocess.Popen(["sleep", "60"])
    assert not fence(sleeping.pid, 1) and sleeping.poll() is None, "another one of that number"
    assert fence(sleeping.pid, born(sleeping.pid) or 0)
    assert sleeping.wait(10) == -signal.SIGKILL


def test_a_record_of_one_that_lives_is_left_to_it(tmp_path: Path) -> None:
    first, later = (Watch(tmp_path / "watch", number, Timeouts()) for number in (3, 3 + 1024))
    first.start()
    later.start()
    assert (first._index, later._index) == (3, 4)
    later.close()
    first.close()


def test_waiting_in_the_set_up_may_take_longer(tmp_path: Path) -> None:
    broken_off: list[float] = []
    times = Timeouts(alive=0.2, progress=0.3, collective=0.4, setup=1.2)
    watch = Watch(tmp_path / "watch", 0, times, broken_off.append)
    watch.start()
    started = time.monotonic()
    with watch.waiting():
        _until(lambda: broken_off, seconds=20)
    assert time.monotonic() - started > 1.2
    watch.close()


def test_timeouts_must_grow() -> None:
    with pytest.raises(ValueError, match="--ft-watch-timeout"):
        Timeouts(alive=5, progress=5, collective=10)


def test_a_wait_costs_next_to_nothing(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "watch", 0, Timeouts())
    watch.start()
    number, best = 20_000, 1.0
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(number):
            watch.begin_wait()
            watch.end_wait()
        best = min(best, (time.perf_counter() - started) / number)
    watch.close()
    print(f"{best * 1e9:.0f} ns")
    assert best < 3e-6


def _until(true: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        if time.monotonic() > end:
            raise TimeoutError
        time.sleep(0.02)
