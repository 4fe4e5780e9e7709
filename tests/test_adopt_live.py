"""A neighbour runs the stage of a dead process too, and training is the fault-free one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness import Run, assert_faults_fired, assert_same_training, launch

EXACT = (*("--ft-mecefo-no-skip-attention", "--ft-mecefo-no-recompute", "--ft-mecefo-no-low-rank"),)
"""Both stages keep their exact backward passes, so that training is the fault-free one."""
PP2: dict[str, Any] = {"tp": 1, "pp": 2, "dp": 2, "iters": 8}


def run_with(*faults: str, directory: Path, flags: tuple[str, ...] = (), **sizes: Any) -> Run:
    return launch(
        *("--ft-recover", "--ft-mecefo", *(flags or EXACT)),
        *(part for fault in faults for part in ("--ft-fault", fault)),
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": "weights", "RECOVER_CENSUS": str(directory)},
        **sizes,
    )


def digests(directory: Path, iters: int) -> dict[int, str]:
    """Slot -> digest of the weights and optimizer state that its process holds at the end."""
    found = {}
    for path in directory.glob("weights-*.json"):
        held = json.loads(path.read_text())
        assert held["committed"] == iters, (path, held)
        found[int(path.stem.partition("-")[2])] = held["digest"]
    return found


def assert_equal_replicas(held: dict[int, str], pp: int, dp: int) -> None:
    """All slots are there, and replicas of a stage hold the same bytes; numbered by stage first."""
    assert sorted(held) == list(range(pp * dp))
    for stage in range(pp):
        assert len({held[stage * dp + replica] for replica in range(dp)}) == 1, f"stage {stage}"
    assert len(set(held.values())) == pp


@pytest.fixture(scope="module")
def reference() -> Run:
    return launch("--ft-recover", **PP2)


def test_the_neighbour_runs_both_stages(reference: Run, tmp_path: Path) -> None:
    run = run_with("kill@3:slot=3:point=backward", directory=tmp_path, **PP2)
    assert run.returncode == 0, run.output[-6000:]
    assert_faults_fired(run, 1)
    (adopted,) = run.of_kind("stage_adopted")
    assert (adopted["slot"], adopted["by_slot"], adopted["stage"]) == (3, 1, 1)
    assert not run.of_kind("replica_dark")
    assert_same_training(run, reference)
    assert_equal_replicas(digests(tmp_path, 8), 2, 2)
