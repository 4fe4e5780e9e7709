"""Events, their files and the summary, with writers that are really killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import io
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from observe_child import start_fields, step_fields

from megatron_ft.observe.digest import rows
from megatron_ft.observe.election import elected_writer
from megatron_ft.observe.event_table import FIELDS, KINDS, check
from megatron_ft.observe.events import EventLog
from megatron_ft.observe.incidents import incidents, quota_text
from megatron_ft.observe.jsonl import decode, encode, merge_events, read_events
from megatron_ft.observe.observer import Observer
from megatron_ft.observe.progress import Progress
from megatron_ft.observe.rundir import RunDirectory, write_json
from megatron_ft.observe.summary import build_summary, write_summary

CHILD = Path(__file__).with_name("observe_child.py")


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


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


# The run directory


def test_all_processes_get_one_wandb_id(tmp_path: Path) -> None:
    def ask(number: int) -> str:
        return RunDirectory(tmp_path / "run").wandb_id()

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        ids = set(pool.map(ask, range(200)))
    assert len(ids) == 1
    assert RunDirectory(tmp_path / "run").wandb_id("from-a-checkpoint") in ids
    assert RunDirectory(tmp_path / "other").wandb_id("from-a-checkpoint") == "from-a-checkpoint"
    assert not list((tmp_path / "run").glob(".*")), "temporary files are left"


def test_wandb_id_of_a_checkpoint_is_checked(run_dir: RunDirectory) -> None:
    with pytest.raises(ValueError, match="not a wandb run id"):
        run_dir.wandb_id("a/b")


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match="not a directory"):
        RunDirectory(tmp_path / "run")


def test_exit_status_is_of_the_last_start(run_dir: RunDirectory) -> None:
    assert run_dir.read_exit_status() is None
    run_dir.write_exit_status(75, "no replica is whole; start with --ft-checkfree")
    status = run_dir.read_exit_status()
    assert status is not None
    assert (status.code, status.message[:10]) == (75, "no replica")
    run_dir.clear_exit_status()
    run_dir.clear_exit_status()
    assert run_dir.read_exit_status() is None


def test_a_killed_writer_leaves_the_old_or_the_new_summary(run_dir: RunDirectory) -> None:
    write_json(run_dir.summary, {"numbers": []})
    for delay in (0.0, 0.003, 0.011, 0.027):
        with child("summary", run_dir.path) as process:
            assert line_of(process) == "ready"
            time.sleep(delay)
            process.kill()
            process.wait(30)
        numbers = json.loads(run_dir.summary.read_text())["numbers"]
        assert numbers == list(range(len(numbers)))
        assert len(numbers) % 5000 == 0


# Writing and reading events


def emit_steps(log: EventLog, *iterations: int, **changes: Any) -> None:
    for iteration in iterations:
        log.emit("step", iteration=iteration, epoch=0, **step_fields(**changes))


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


# Incidents, progress and summary


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


def test_detection_is_from_the_fault_to_the_notice() -> None:
    """The notice is earlier than its event by the repair, after which it is written."""

    def event(kind: str, at: float, process: int, **fields: Any) -> dict[str, Any]:
        common = {"id": f"{kind}{at}", "time": at, "iteration": 3, "epoch": 1, "process": process}
        return {**common, "kind": kind, **fields}

    injected = {"fault": "kill@3:slot=1", "fault_kind": "kill", "point": "forward"}
    events = [
        event("fault_injected", 100.0, 1, **injected),
        event("fault_detected", 100.7, 3, slot=1, how="vote", failed_process=1),
        event("fault_detected", 100.7, 3, slot=2, how="vote", failed_process=2),
        event("repaired", 100.7, 3, repair_s=0.2, live_replicas=1, live_processes=1),
    ]
    (incident,) = incidents(events)
    assert incident.detect_s == pytest.approx(0.5)
    assert [e.get("detect_s") is not None for e in incident.deaths] == [True, False]
    assert "detect_s" not in events[1], "what was written stays as it is"
    (unknown,) = incidents(events[1:])
    assert unknown.detect_s is None


def test_an_incident_is_one_readable_line(run_dir: RunDirectory) -> None:
    (incident,) = incidents(a_run_with_a_death(run_dir).read())
    assert incident.text == INCIDENT
    assert (incident.iteration, incident.epoch) == (4, 1)
    assert (incident.detect_s, incident.repair_s) == (0.25, 0.021)


def test_meeting_at_the_end_is_no_repair(run_dir: RunDirectory) -> None:
    """The end of a job takes all processes through a repair that changes nothing."""
    log = EventLog(run_dir, 0, elected=True)
    log.emit("run_started", iteration=0, epoch=0, **start_fields())
    emit_steps(log, 1)
    met = {"repair_s": 0.1, "live_replicas": 2, "live_processes": 4, "num_replicas": 2}
    log.emit("repaired", iteration=1, epoch=0, **met)
    assert incidents(log.read()) == []
    assert write_summary(run_dir)["repairs"] == 0
    # A new epoch without a death is one: a process took a slot.
    log.emit("repaired", iteration=1, epoch=1, **met)
    log.emit("repaired", iteration=1, epoch=1, **met)
    assert [(i.epoch, i.deaths) for i in incidents(log.read())] == [(1, [])]


def test_many_quotas_are_counted() -> None:
    assert quota_text([131] * 62 + [70]) == "62x131+70"
    assert quota_text([11, 0, 10]) == "11+10"


def test_progress_is_plain_text_in_a_file(run_dir: RunDirectory) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for event in a_run_with_a_death(run_dir).read():
        if event["process"] == 11:  # A listener hears the writer's own events only.
            progress(event)
    lines = stream.getvalue().splitlines()
    assert "\x1b" not in stream.getvalue()
    assert sum("loss 5.500000" in line and "tokens/s" in line for line in lines) == 6
    assert sum("replicas 3/4" in line for line in lines) == 3
    assert sum("32 microbatches (11+11+10)" in line for line in lines) == 3
    assert f"iteration      4 | {INCIDENT} (world epoch 1)" in lines
    assert not any("replica 2 goes dark" in line for line in lines if "died" not in line)


def test_summary_of_a_run_with_a_death(run_dir: RunDirectory) -> None:
    log = a_run_with_a_death(run_dir)
    summary = write_summary(run_dir)
    assert json.loads(run_dir.summary.read_text()) == summary
    assert summary["status"] == "stopped", "nobody reported an end"
    assert (summary["iterations"], summary["missing_steps"]) == (6, [])
    assert (summary["final_lm_loss"], summary["validation_lm_loss"]) == (5.5, 5.25)
    assert summary["tokens"] == 6 * 32 * 2 * 8
    assert summary["steps_with_wrong_microbatches"] == 0
    assert (summary["faults_injected"], summary["faults_fired"]) == (2, 1)
    assert summary["faults_unfired"] == ["kill@99:slot=1"]
    assert (summary["repairs"], summary["detect_s"], summary["repair_s"]) == (1, [0.25], [0.021])
    # From the kill to the commit 1.5 s, of which one step would have taken 1 s anyway.
    assert summary["downtime_s"] == [pytest.approx(0.5)]
    assert summary["wall_s"] == pytest.approx(7.0)
    assert summary["goodput"] == pytest.approx(6 / 7)
    assert summary["effective_tokens_per_second_per_process"] == pytest.approx(3072 / 7 / 12)

    log.emit("run_finished", iteration=6, epoch=1, status="degraded", exit_code=0)
    assert write_summary(run_dir)["status"] == "degraded"
    log.emit("run_started", iteration=6, epoch=0, **start_fields())
    assert write_summary(run_dir)["status"] == "stopped", "the second start has not ended"


@pytest.mark.parametrize("known", ["injected", "measured"])
def test_downtime_begins_with_the_fault_not_with_its_notice(
    run_dir: RunDirectory, known: str
) -> None:
    a_run_with_a_death(run_dir, injected=known == "injected", measured=known == "measured")
    assert write_summary(run_dir)["downtime_s"] == [pytest.approx(0.5)]


def test_summary_counts_an_iteration_that_was_done_again_once(run_dir: RunDirectory) -> None:
    log = EventLog(run_dir, 0, elected=True)
    log.emit("run_started", iteration=0, epoch=0, **start_fields())
    emit_steps(log, 1, 2, 3)
    log.emit("run_started", iteration=2, epoch=0, **start_fields())
    emit_steps(log, 3, 5, lm_loss=4.5, microbatches=3)
    summary = write_summary(run_dir)
    assert (summary["starts"], summary["steps_redone"]) == (2, 1)
    assert summary["missing_steps"] == [4]
    assert summary["tokens"] == 4 * 4 * 2 * 8
    assert summary["steps_with_wrong_microbatches"] == 2


def test_summary_of_nothing_and_of_nan(run_dir: RunDirectory) -> None:
    assert build_summary([])["status"] == "stopped"
    emit_steps(EventLog(run_dir, 0, elected=True), 1, lm_loss=math.nan)
    assert write_summary(run_dir)["final_lm_loss"] == "NaN"


def test_summary_command(run_dir: RunDirectory) -> None:
    a_run_with_a_death(run_dir)
    command = [sys.executable, "-m", "megatron_ft.observe.summary"]
    done = subprocess.run([*command, run_dir.path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "result stopped with 3 of 4 replicas, no end was reported" in said
    assert "32 microbatches in every step" in said
    assert "0.50 s lost in all" in said
    assert INCIDENT in said
    assert "2 injected, 1 struck; these never did: kill@99:slot=1" in said
    done = subprocess.run(
        [*command, "--all", run_dir.path], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "effective_tokens_per_second_per_proc" in done.stdout
    assert INCIDENT in " ".join(done.stdout.split())
    assert run_dir.summary.exists()
    done = subprocess.run(
        [*command, run_dir.path / "nothing"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert "is it a run directory?" in done.stderr


def test_the_digest_says_what_is_wrong(run_dir: RunDirectory) -> None:
    log = EventLog(run_dir, 0, elected=True)
    log.emit("run_started", iteration=0, epoch=0, **start_fields())
    emit_steps(log, 1, 3, microbatches=3, lm_loss=math.nan)
    stop = {"status": "stopped", "exit_code": 75, "message": "no replica is whole"}
    log.emit("run_finished", iteration=3, epoch=0, **stop)
    said = {name: str(value) for name, value in rows(write_summary(run_dir))}
    assert said["result"] == "stopped with 2 of 2 replicas, exit code 75: no replica is whole"
    assert said["batch"] == "2 steps did not sum 4 microbatches"
    assert said["training"].endswith("without a record of 1 steps")
    assert said["loss"].startswith("NaN at the first step, NaN at the last")
    assert "repairs" not in said and "faults" not in said
    assert dict(rows(build_summary([])))["result"].plain.startswith("stopped, no end was reported")


@pytest.mark.parametrize(("compatible", "colours"), [("1", True), ("0", False)])
def test_the_launcher_decides_on_colours(
    run_dir: RunDirectory, monkeypatch: pytest.MonkeyPatch, compatible: str, colours: bool
) -> None:
    """mpirun gives every rank a terminal, which says nothing of the job's own output."""
    monkeypatch.setenv("TTY_COMPATIBLE", compatible)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    rank, terminal = os.openpty()
    with open(terminal, "w") as stream:
        progress = Progress(stream)
        for event in a_run_with_a_death(run_dir).read()[:2]:
            progress(event)
            said = os.read(rank, 1 << 16)
    os.close(rank)
    assert b"loss 5.5" in said
    assert (b"\x1b[" in said) is colours


def test_the_launcher_says_whether_its_output_is_a_terminal() -> None:
    command = [sys.executable, "-m", "megatron_ft.launcher", "--dry-run", "-n", "2", "true"]
    environ = {k: v for k, v in os.environ.items() if k != "TTY_COMPATIBLE"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environ)
    assert "TTY_COMPATIBLE=0 " in done.stdout, done.stderr


def test_observers_of_a_job_whose_writer_dies(run_dir: RunDirectory) -> None:
    """Two processes: the writer is gone before it reports step 2, the other ends the job."""
    streams = [io.StringIO(), io.StringIO()]
    writer, other = (Observer(run_dir, n, stream=streams[n]) for n in range(2))
    assert writer.elect({0: 1, 1: 0})
    assert not other.elect({0: 1, 1: 0})
    for observer in (writer, other):
        observer.emit("run_started", iteration=0, epoch=0, agreed="start", **start_fields())
        observer.emit("step", iteration=1, epoch=0, agreed="step-1", **step_fields())
    other.emit("step", iteration=2, epoch=0, agreed="step-2", **step_fields(live_replicas=1))
    assert other.elect({0: 1, 1: None})
    assert "loss" in streams[0].getvalue()
    assert ["iteration      2" in line for line in streams[1].getvalue().splitlines()] == [True]
    assert "replicas 1/2" in streams[1].getvalue()

    where = {"iteration": 2, "epoch": 1}
    summary = other.finish("stopped", 75, "no replica is whole; add --ft-checkfree", **where)
    assert summary is not None
    assert (summary["iterations"], summary["exit_code"]) == (2, 75)
    assert json.loads(run_dir.summary.read_text()) == summary
    status = run_dir.read_exit_status()
    assert status is not None
    assert (status.code, status.message) == (75, "no replica is whole; add --ft-checkfree")
    kinds = [json.loads(line)["kind"] for line in run_dir.events.read_text().splitlines()]
    assert kinds == ["run_started", "step", "step", "run_finished"]
    # Given up in favour of another process, a writer writes and prints nothing any more.
    assert not writer.elect({0: 1, 1: None})
    assert writer.finish("ok", 0, **where) is None
    assert len(run_dir.events.read_text().splitlines()) == 4
