"""examples/all_strategies.sh: what its check refuses; and the script itself (slow)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, _one_at_a_time
from report_runs import Writer
from test_examples import copy_of_the_repository

sys.path.insert(0, str(ROOT / "tools"))
import check_all_strategies

ITERS, LOST = 12, 8
FAULTS = ["kill@3:slot=3", f"kill@{LOST}:slot=2", f"kill@{LOST}:slot=3"]


def story(directory: Path, **without: bool) -> Path:
    """A run of three stages and two replicas as the script makes one, without what is named."""
    run = Writer(directory, data=2, pipeline=3, pool=0)
    run.begin(train_iters=ITERS, faults=FAULTS)

    def strike(fault: str) -> None:
        run.iteration += 1
        run.emit("fault_injected", fault=fault, fault_kind="kill", point="forward")
        run.iteration -= 1

    run.steps(2)
    strike(FAULTS[0])
    if not without.get("dark"):
        run.die(1, 1, 3)
    if not without.get("adopted"):
        run.emit("stage_adopted", slot=3, by_slot=1, replica=1, stage=1)
    run.steps(3)
    if not without.get("filled"):
        run.refill(1, [1, 6, 5])
    run.steps(2)
    for fault in FAULTS[1:]:
        strike(fault)
    if not without.get("rebuilt"):
        run.emit("stage_rebuilt", stage=1, method="copy", slot=2, replica=0)
    if not without.get("back"):
        run.refill(0, [0, 7, 4])
        run.refill(1, [1, 8, 5])
    run.steps(ITERS - LOST + (0 if without.get("step") else 1))
    return run.end("degraded" if without.get("all_live") else "ok")


def check(directory: Path) -> int:
    return check_all_strategies.main([str(directory), "--iters", str(ITERS), "--lost", str(LOST)])


def test_the_story_as_it_should_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(story(tmp_path / "run")) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("missing", "says"),
    [
        ("dark", "replica 1 goes dark"),
        ("adopted", "a neighbour adopts slot 3"),
        ("filled", "slot 3 is filled by a new process"),
        ("rebuilt", "the lost stage is rebuilt once"),
        ("back", "both of its slots are served again"),
        ("step", f"{ITERS - 1} iterations of {ITERS}"),
        ("all_live", "status degraded"),
    ],
)
def test_what_did_not_happen_is_said(
    missing: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(story(tmp_path / "run", **{missing: True})) == 1
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1


def script(cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "examples/all_strategies.sh"],
        cwd=cwd,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1000,
    )


@pytest.mark.slow
def test_the_script(tmp_path: Path) -> None:
    copy = copy_of_the_repository(tmp_path, with_venv=True)
    with _one_at_a_time():
        done = script(copy, RUN_DIR="runs/all")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "all strategies: ok"
    assert (copy / "runs" / "all" / "report.html").stat().st_size > 10_000
