"""Eight replicas fall to one, one death at a time, and training stays the same all the way.

Nothing may pile up with the repairs: torch groups, threads, open files and memory of the last
process are counted after every step.
"""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from harness import Run, assert_faults_fired, assert_same_training, launch

from megatron_ft.campaign.census import COUNTED, MEGABYTE, growth, new

DEATHS = (
    "kill@2:slot=3:point=forward:n=1",
    "kill@5:slot=0:point=backward",
    "kill@8:slot=7:point=reduce:n=1",
    "kill@11:slot=5:point=reduced",
    "kill@14:slot=1:point=voted",
    "kill@17:slot=6:point=optimizer",
    "kill@20:slot=2:point=logging",
)
SURVIVOR = 4
REPLICAS = {"tp": 1, "pp": 1, "dp": 8, "iters": 24, "per_replica": 2}
FLAGS = ("--ft-recover", "--overlap-grad-reduce", "--ddp-bucket-size", "20000")


@functools.cache
def reference() -> Run:
    return launch(*FLAGS, **REPLICAS)


def shrink(tmp_path: Path, *extras: str) -> tuple[Run, list[dict[str, Any]]]:
    """The run of all deaths, and what was counted on the survivor after each step."""
    specs = [part for fault in DEATHS for part in ("--ft-fault", fault)]
    run = launch(
        *FLAGS,
        *specs,
        **REPLICAS,
        script="tests/recover_entry.py",
        env={"RECOVER_TEST": ",".join(("census", *extras)), "RECOVER_CENSUS": str(tmp_path)},
    )
    assert run.returncode == 0, run.output[-4000:]
    lines = (tmp_path / f"census-{SURVIVOR}.jsonl").read_text().splitlines()
    census = [json.loads(line) for line in lines]
    assert {row["epoch"] for row in census} == set(range(len(DEATHS) + 1)), "all repairs counted"
    return run, census


def test_eight_replicas_fall_to_one(tmp_path: Path) -> None:
    run, census = shrink(tmp_path)
    assert_faults_fired(run, len(DEATHS))
    assert_same_training(run, reference())
    assert [e["replica"] for e in run.of_kind("replica_dark")] == [3, 0, 7, 5, 1, 6, 2]
    assert [e["live_replicas"] for e in run.of_kind("repaired")] == [7, 6, 5, 4, 3, 2, 1]
    assert run.steps[24]["quotas"] == [0, 0, 0, 0, 16, 0, 0, 0]
    assert run.summary["status"] == "degraded"

    repairs = [e["repair_s"] for e in run.of_kind("repaired")]
    print("repair_s:", " ".join(f"{s:.4f}" for s in repairs), "median", statistics.median(repairs))
    assert statistics.median(repairs) <= 1.0

    for what in COUNTED:
        assert growth(census, what) == 0, [row[what] for row in census]
    # The last one writes for all, and takes orders, when those of lower slots are gone.
    assert new(census, "threads") == {"ft-control": 1}
    events, listening = sorted(new(census, "files"))
    assert events == str(run.directory / "events.jsonl")
    assert listening.startswith("socket:")
    print("resident MB:", [row["resident"] // MEGABYTE for row in census])
    assert growth(census, "resident") <= 24 * MEGABYTE, [row["resident"] for row in census]


@pytest.mark.slow
def test_a_leak_is_noticed(tmp_path: Path) -> None:
    """The negative control: with a group and a file more at each repair the counts grow."""
    _, census = shrink(tmp_path, "leak")
    assert growth(census, "groups") == growth(census, "torch_groups") == len(DEATHS) - 1
    assert new(census, "files").total() >= len(DEATHS) - 1
