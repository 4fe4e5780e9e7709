"""Events and their files, with writers that are really killed."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import time
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_child import start_fields, step_fields
from observe_runs import child, emit_steps, line_of

from megatron_ft.observe.election import elected_writer
from megatron_ft.observe.event_table import FIELDS, KINDS, check
from megatron_ft.observe.events import EventLog
from megatron_ft.observe.jsonl import decode, encode, merge_events, read_events
from megatron_ft.observe.rundir import RunDirectory


@pytest.mark.parametrize("elected", ["elected", "other"])
def test_kill_inside_a_write(run_dir: RunDirectory, elected: str) -> None:
    """The half line is no event and no error; the next writer goes on in the same file."""
    file = run_dir.events if elected == "elected" else run_dir.part(1)
    with child("huge", run_dir.path, elected) as process:
        assert line_of(process) == "ready"
        before = file.stat().st_size
        deadline = time.monotonic() + 60
        while file.stat().st_size == before and time.monotonic() < deadline:
            pass
        process.kill()
        process.wait(30)
        assert line_of(process) == "", "the kill came after the write"
    size = file.stat().st_size
    assert before < size < 256 << 20, "the write was whole"

    # Enough of the half line to show what it is; 100 MiB of filler would only slow the test.
    os.truncate(file, before + 1000)
    read = read_events(run_dir)
    assert [event["kind"] for event in read.events] == ["run_started"]
    assert [torn.file for torn in read.torn] == [file.name]

    follower = EventLog(run_dir, 1, elected=elected == "elected")
    emit_steps(follower, 1, 2)
    for _ in range(2):
        read = follower.merge()
        assert [event["iteration"] for event in read.events] == [0, 1, 2]
        assert [torn.file for torn in read.torn] == [file.name]
        assert len(run_dir.events.read_bytes().splitlines()) == 3
    assert json.loads(run_dir.torn.read_text())["text"].startswith('{"id"')


@pytest.mark.parametrize("elected", ["elected", "other"])
def test_what_was_emitted_outlives_the_writer(run_dir: RunDirectory, elected: str) -> None:
    with child("many", run_dir.path, elected, 5) as process:
        while int(said := line_of(process)) < 200:
            pass
        process.kill()
        process.wait(30)
    iterations = [event["iteration"] for event in read_events(run_dir).events]
    assert iterations == list(range(1, len(iterations) + 1))
    assert len(iterations) >= int(said)


def test_a_durable_event_outlives_a_process_that_kills_itself(run_dir: RunDirectory) -> None:
    with child("durable", run_dir.path) as process:
        assert process.wait(60) == -signal.SIGKILL
    (event,) = read_events(run_dir).events
    assert (event["kind"], event["process"], event["fault"]) == (
        "fault_injected",
        3,
        "kill@4:slot=3",
    )
    assert run_dir.part(3).exists()


def test_two_writers_of_one_file_do_not_mix_lines(run_dir: RunDirectory) -> None:
    """As when a stopped writer is continued while its successor writes."""
    with (
        child("many", run_dir.path, "elected", 1) as one,
        child("many", run_dir.path, "elected", 2) as two,
    ):
        for process in (one, two):
            while int(line_of(process)) < 300:
                pass
        for process in (one, two):
            process.kill()
            process.wait(30)
    read = read_events(run_dir)
    assert not read.torn
    for number in (1, 2):
        own = [e["iteration"] for e in read.events if e["process"] == number]
        assert own == list(range(1, len(own) + 1))


def test_merge_orders_by_time_and_changes_nothing_the_second_time(run_dir: RunDirectory) -> None:
    clock = itertools.count(1000)
    logs = [
        EventLog(run_dir, n, elected=n == 2, clock=lambda: float(next(clock))) for n in range(4)
    ]
    for iteration in range(1, 9):
        emit_steps(logs[iteration % 4], iteration)
    assert [e["iteration"] for e in read_events(run_dir).events] == list(range(1, 9))
    logs[2].merge()
    first = run_dir.events.read_bytes()
    assert [json.loads(line)["iteration"] for line in first.splitlines()] == list(range(1, 9))
    emit_steps(logs[2], 9)
    emit_steps(logs[0], 10)
    logs[2].merge()
    second = run_dir.events.read_bytes()
    assert second.startswith(first)
    assert [json.loads(line)["iteration"] for line in second.splitlines()] == list(range(1, 11))
    assert merge_events(run_dir).events == read_events(run_dir).events
    assert run_dir.events.read_bytes() == second


def test_a_merge_killed_at_any_moment_loses_nothing(run_dir: RunDirectory) -> None:
    for number in range(3):
        emit_steps(EventLog(run_dir, number, elected=number == 0), *range(number * 100, 200))
    expected = {event["id"] for event in read_events(run_dir).events}
    for delay in (0.0, 0.002, 0.005, 0.017):
        with child("merge", run_dir.path) as process:
            assert line_of(process) == "ready"
            time.sleep(delay)
            process.kill()
            process.wait(30)
        ids = [event["id"] for event in read_events(run_dir).events]
        assert set(ids) == expected
        assert len(ids) == len(expected)


def test_the_clock_going_back_keeps_a_writers_order(run_dir: RunDirectory) -> None:
    times = iter([50.0, 40.0, 60.0])
    emit_steps(EventLog(run_dir, 0, clock=lambda: next(times)), 1, 2, 3)
    assert [e["iteration"] for e in read_events(run_dir).events] == [1, 2, 3]


def test_a_restarted_job_appends(run_dir: RunDirectory) -> None:
    for job in ("0", "1"):
        log = EventLog(run_dir, 0, elected=True, job=job)
        log.emit("run_started", iteration=0, epoch=0, **start_fields())
        log.emit("step", iteration=1, epoch=0, agreed="step-1", **step_fields())
        log.close()
    assert [e["kind"] for e in read_events(run_dir).events] == ["run_started", "step"] * 2


def test_events_fall_back_to_the_part_file(run_dir: RunDirectory) -> None:
    run_dir.events.mkdir()
    log = EventLog(run_dir, 7, elected=True)
    emit_steps(log, 1)
    run_dir.events.rmdir()
    emit_steps(log, 2)
    assert json.loads(run_dir.part(7).read_text())["iteration"] == 1
    assert [e["iteration"] for e in read_events(run_dir).events] == [1, 2]


@pytest.mark.parametrize("elected", [True, False])
def test_a_full_disk_stops_nothing_and_loses_nothing(
    run_dir: RunDirectory, elected: bool, caplog: pytest.LogCaptureFixture
) -> None:
    files = [run_dir.events, run_dir.part(7)]
    for file in files:
        file.symlink_to("/dev/full")
    log = EventLog(run_dir, 7, elected=elected)
    emit_steps(log, 1, 2, 3)
    assert [r.message for r in caplog.records if "they wait" in r.message] != []
    assert len(caplog.records) == 1, "said once"
    for file in files:
        file.unlink()
    assert read_events(run_dir).events == []
    emit_steps(log, 4)
    assert [e["iteration"] for e in read_events(run_dir).events] == [1, 2, 3, 4]
    assert [e["iteration"] for e in log.of_kind("step")] == [1, 2, 3, 4]
    assert log.of_kind("run_started") == []


def test_events_that_waited_are_written_when_the_log_is_closed(run_dir: RunDirectory) -> None:
    run_dir.part(7).symlink_to("/dev/full")
    log = EventLog(run_dir, 7)
    emit_steps(log, 1)
    run_dir.part(7).unlink()
    log.close()
    assert [e["iteration"] for e in read_events(run_dir).events] == [1]


# Changing the writer


def test_a_successor_writes_what_the_writer_died_before_writing(run_dir: RunDirectory) -> None:
    """All processes report step 1 to 3; the writer got as far as step 2."""
    writer, successor, third = (EventLog(run_dir, n, elected=n == 0) for n in range(3))
    seen: list[int] = []
    successor.add_listener(lambda event: seen.append(event["iteration"]))
    for iteration in (1, 2, 3):
        for log in (writer, successor, third):
            if log is writer and iteration == 3:
                continue
            fields = step_fields()
            log.emit("step", iteration=iteration, epoch=0, agreed=f"step-{iteration}", **fields)
    assert [e["iteration"] for e in read_events(run_dir).events] == [1, 2]
    successor.elect()
    assert [e["iteration"] for e in read_events(run_dir).events] == [1, 2, 3]
    assert seen == [3]
    # The successor dies in its turn, with nothing left to make up for.
    third.elect()
    assert [e["iteration"] for e in read_events(run_dir).events] == [1, 2, 3]
    assert not run_dir.part(1).exists()
    third.emit("step", iteration=4, epoch=0, agreed="step-4", **step_fields())
    assert [e["process"] for e in read_events(run_dir).events] == [0, 0, 1, 2]


def test_the_writer_serves_the_highest_live_slot() -> None:
    assert elected_writer({0: 4, 1: 5, 2: 6, 3: 7}) == 7
    assert elected_writer({0: 4, 1: 5, 2: 6, 3: None}) == 6
    with pytest.raises(ValueError, match="no slot"):
        elected_writer({0: None})


# The table and numbers


def test_the_table_names_only_fields_it_types() -> None:
    for kind in KINDS.values():
        assert set(kind.required + kind.optional) <= set(FIELDS)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        ("stepp", {}, "unknown event kind 'stepp'; there are run_started, run_restarted, step"),
        ("replica_dark", {}, "needs replica"),
        ("replica_dark", {"replica": 1, "colour": 2}, "no field colour; it has replica, slots"),
        ("replica_dark", {"replica": "1"}, "replica must be int"),
        ("replica_dark", {"replica": True}, "replica must be int"),
        ("replica_dark", {"replica": 1, "slots": [1, 2.5]}, "slots must be ints"),
        ("run_finished", {"status": "fine", "exit_code": 0}, "none of ok, degraded, stopped"),
    ],
)
def test_wrong_events_are_refused(kind: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(kind, fields)


@given(st.floats(width=64))
def test_every_float_comes_back_exactly(value: float) -> None:
    fields = check("step", step_fields(lm_loss=value, detail={"nested": [value]}))
    event = {"id": "a.0", "time": 1.0, "iteration": 1, "epoch": 0, "kind": "step", "process": 0}
    line = encode({**event, **fields})
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    decoded = decode(line)
    assert decoded is not None
    assert decoded["lm_loss"] == value or (math.isnan(value) and math.isnan(decoded["lm_loss"]))


def test_numbers_of_numpy_are_numbers(run_dir: RunDirectory) -> None:
    log = EventLog(run_dir, 0, elected=True)
    fields = step_fields(
        lm_loss=numpy.float32(0.1), microbatches=numpy.int64(4), quotas=(numpy.int32(2), 2)
    )
    log.emit("step", iteration=1, epoch=0, **fields)
    (event,) = log.read()
    assert event["lm_loss"] == float(numpy.float32(0.1))
    assert (event["microbatches"], event["quotas"]) == (4, [2, 2])
