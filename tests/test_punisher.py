"""Random kills of a live run, again and again, while new processes take the slots of the dead."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from harness import ROOT, Run, launch, relative

TOPOLOGY = {"tp": 1, "pp": 1, "dp": 3}
MINUTES = float(os.environ.get("PUNISHER_MINUTES", "30"))
"""How long the campaign takes."""


ENDLESS = 1_000_000
"""Iterations of a job that ends when the punishment does."""


def launcher_of(run_dir: Path) -> psutil.Process:
    """The process that started a job, and passes signals on to all of it."""
    found = [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"megatron_ft.launcher", str(run_dir)} <= set(process.info["cmdline"] or ())
    ]
    assert len(found) == 1, found
    return found[0]


def punished(
    directory: Path, seconds: float, mtbf: float, iters: int, seed: int, **topology: int
) -> tuple[Run, dict[str, Any], str]:
    """A run that is punished for some time, what the punisher says as JSON, and in words."""
    result = directory / "punisher.json"
    run_dir = directory / "run"
    run_dir.mkdir()
    said: list[subprocess.CompletedProcess[str]] = []

    def punish() -> None:
        command = [
            *(sys.executable, "tools/punisher.py", str(run_dir), "--mtbf", str(mtbf)),
            *("--seconds", str(seconds), "--seed", str(seed), "--keep-replica"),
            *("--json", str(result)),
        ]
        said.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False))
        if iters == ENDLESS:
            launcher_of(run_dir).terminate()  # as a scheduler does

    punisher = threading.Thread(target=punish)
    punisher.start()
    run = launch(
        *("--ft-recover", "--ft-respawn", "--ft-respawn-nice", "0", "--exit-signal-handler"),
        run_dir=run_dir,
        iters=iters,
        timeout=2 * seconds + 300,
        **topology,
    )
    punisher.join()
    assert said[0].returncode == 0, said[0].stderr
    print(said[0].stdout)
    return run, json.loads(result.read_text()), said[0].stdout


def assert_unharmed(run: Run, result: dict[str, Any], least_kills: int) -> None:
    assert run.returncode == 0, run.output[-4000:]
    assert result["kills"] >= least_kills, "the punisher has done its work"
    assert sorted(run.steps) == list(range(1, max(run.steps) + 1)), "no step is missing"
    assert run.summary["steps_with_wrong_microbatches"] == 0
    assert run.summary["starts"] == 1, "no stop"
    assert len(run.of_kind("slot_filled")) >= least_kills // 2, "the world grows back"
    oldest = result["oldest_process"]
    middle, last = oldest["middle"], oldest["last"]
    # A process that merges newcomers holds a few files more while it does.
    assert last["files"] <= middle["files"] + 4, oldest
    assert last["threads"] <= middle["threads"] + 2, oldest
    assert last["resident"] <= 1.15 * middle["resident"], oldest


def test_two_minutes(tmp_path: Path) -> None:
    iters = 700
    run, result, _ = punished(tmp_path, 120, 12, iters, seed=3, **TOPOLOGY)
    assert_unharmed(run, result, least_kills=4)
    assert max(run.steps) == iters
    reference = launch("--ft-recover", iters=iters, **TOPOLOGY)
    for iteration, step in run.steps.items():
        other = reference.steps[iteration]
        assert step["samples_digest"] == other["samples_digest"]
        # Hundreds of steps amplify what another order of summation does in the last digit.
        bound = 1e-6 if iteration <= 60 else 1e-3
        assert relative(other["lm_loss"], step["lm_loss"]) <= bound, (step, other)


@pytest.mark.slow
def test_half_an_hour(tmp_path: Path) -> None:
    run, result, _ = punished(tmp_path, MINUTES * 60, 20, ENDLESS, seed=7, tp=1, pp=2, dp=3)
    assert_unharmed(run, result, least_kills=int(MINUTES))
    assert max(run.steps) > 60 * MINUTES, "it trains meanwhile"
