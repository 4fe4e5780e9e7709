"""Kill and rejoin, round after round, and an end by a signal as a scheduler sends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import ROOT, run_alone

ROUNDS = int(os.environ.get("ROUNDS", "100"))


def rounds(
    directory: Path, count: int, jobs: int, spares: int, seed: int, double: float = 0.25
) -> dict[str, Any]:
    result = directory / "rounds.json"
    command = [
        *(sys.executable, "tools/rounds.py", "--rounds", str(count), "--jobs", str(jobs)),
        *(
            "--spares",
            str(spares),
            "--seed",
            str(seed),
            "--double",
            str(double),
            "--json",
            str(result),
        ),
    ]
    run = run_alone(command, directory, timeout=300 + 60 * count)
    print(run.output)
    assert run.returncode == 0, run.output
    return json.loads(result.read_text())


def assert_answered(result: dict[str, Any], count: int) -> None:
    assert result["rounds"] == count and result["unanswered"] == result["too_many_lost"] == 0
    for job in result["jobs"]:
        # --exit-signal-handler: all ranks learn of the signal, save and leave.
        assert job["exit_code"] == 0, job
        assert job["missing_steps"] == job["wrong_steps"] == job["other_deaths"] == 0, job


def test_two_rounds(tmp_path: Path) -> None:
    """Without a spare each victim serves, so that processes that came later end the job, too."""
    result = rounds(tmp_path, 2, jobs=1, spares=0, seed=3, double=0.0)
    assert_answered(result, 2)
    assert result["survived"] == 2 and result["lost_steps"] == 0


@pytest.mark.slow
def test_many_rounds_with_spares(tmp_path: Path) -> None:
    result = rounds(tmp_path, ROUNDS, jobs=max(1, ROUNDS // 20), spares=1, seed=11)
    assert_answered(result, ROUNDS)
    assert result["survived"] == ROUNDS


@pytest.mark.slow
def test_many_rounds_with_new_processes_only(tmp_path: Path) -> None:
    """Open MPI has a window of some milliseconds in which a death ends the job; see rejoin.md."""
    result = rounds(tmp_path, ROUNDS, jobs=max(1, ROUNDS // 20), spares=0, seed=12)
    assert_answered(result, ROUNDS)


def test_a_job_that_cannot_train_is_an_error(tmp_path: Path) -> None:
    """The negative control: without processes nothing is survived."""
    command = [sys.executable, "tools/rounds.py", "--rounds", "1", "--replicas", "0"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode != 0 and "survived" not in run.stdout
