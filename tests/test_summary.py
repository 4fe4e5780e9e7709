"""What is said of events: incidents, progress, the summary and its digest."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from typing import Any

import pytest
from observe_child import start_fields, step_fields
from observe_runs import INCIDENT, a_run_with_a_death, emit_steps

from megatron_ft.observe.accounting import account
from megatron_ft.observe.digest import rows
from megatron_ft.observe.events import EventLog
from megatron_ft.observe.incidents import incidents, quota_text
from megatron_ft.observe.observer import Observer
from megatron_ft.observe.progress import Progress
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.summary import build_summary, write_summary


def event(kind: str, at: float, process: int, **fields: Any) -> dict[str, Any]:
    common = {"id": f"{kind}{at}", "time": at, "iteration": 3, "epoch": 1, "process": process}
    return {**common, "kind": kind, **fields}


def test_detection_is_from_the_fault_to_the_notice() -> None:
    """The notice is earlier than its event by the repair, after which it is written."""
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
    slowed = {**events[0], "fault": "slow@3:slot=1", "fault_kind": "slow"}
    (later,) = incidents([slowed, *events[1:]])
    assert later.detect_s is None, "it did not die of that"


def test_downtime_of_a_real_death_holds_the_repair() -> None:
    """Nobody knows when it struck; what is known is how long the repair took before it was told."""
    events = [
        event("step", 9.0, 3, seconds=1.0, iteration=1),
        event("fault_detected", 14.3, 3, slot=1, how="vote", failed_process=1),
        event("repaired", 14.3, 3, repair_s=4.0, live_replicas=1, live_processes=1),
        event("step", 15.3, 3, seconds=1.0, iteration=2),
    ]
    accounts = account(events)
    assert accounts.incidents[0].time == pytest.approx(10.3)
    assert accounts.downtime_s == [pytest.approx(4.0)]


def test_a_repair_before_a_restart_disturbs_no_step_after_it() -> None:
    """The time until the next start is counted as such, and not as the repair's as well."""
    repair = event("repaired", 10.3, 3, repair_s=0.3, live_replicas=1, live_processes=1)
    events = [
        event("step", 9.0, 3, seconds=1.0, iteration=1),
        repair,
        event("run_started", 70.0, 3, **start_fields()),
        event("step", 72.0, 3, seconds=1.0, iteration=2),
    ]
    assert account(events).downtime_s == []
    survived = [e for e in events if e["kind"] != "run_started"]
    assert account(survived).downtime_s == [pytest.approx(61.0)]


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
    assert summary["tokens"] == (4 + 4 + 3 + 3) * 2 * 8
    assert summary["steps_with_wrong_microbatches"] == 2


def test_steps_that_a_restart_threw_away_are_no_progress(run_dir: RunDirectory) -> None:
    """The second start has not come as far yet as the first one was."""
    log = EventLog(run_dir, 0, elected=True)
    log.emit("run_started", iteration=0, epoch=0, **start_fields())
    emit_steps(log, 1, 2, 3, 4, 5, lm_loss=2.0)
    log.emit("run_started", iteration=2, epoch=0, **start_fields())
    emit_steps(log, 3, lm_loss=3.0)
    summary = write_summary(run_dir)
    assert (summary["iterations"], summary["final_lm_loss"]) == (3, 3.0)
    assert summary["steps_redone"] == 3 and summary["missing_steps"] == []


def test_a_growing_batch_is_no_wrong_one(run_dir: RunDirectory) -> None:
    log = EventLog(run_dir, 0, elected=True)
    log.emit("run_started", iteration=0, epoch=0, **start_fields())
    emit_steps(log, 1, microbatches=8, planned_microbatches=8)
    emit_steps(log, 2, microbatches=12, planned_microbatches=16)
    summary = write_summary(run_dir)
    assert summary["steps_with_wrong_microbatches"] == 1
    assert summary["tokens"] == (8 + 12) * 2 * 8


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
