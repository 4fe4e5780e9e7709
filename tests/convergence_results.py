"""Results of jobs that never ran, for the tests of the convergence studies."""

from __future__ import annotations

import math
import sys
from typing import Any

from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import convergence
from studies.cells import Cell
from studies.results import Result, from_events

from megatron_ft.faults.spec import parse

KNOWN = (*convergence.flags_known(), "--ft-mecefo")


def events(cell: Cell, final: float = 1.0) -> list[dict[str, Any]]:
    """What a job leaves that learns towards `final`."""
    last = cell.setup.iterations
    made: list[dict[str, Any]] = [
        {"kind": "run_started", "iteration": 0, "versions": {"torch": "2"}}
    ]
    for i in range(1, last + 1):
        loss = final + 4 * math.exp(-5 * i / last)
        step = {"kind": "step", "iteration": i, "lm_loss": loss, "seconds": 0.1}
        made.append(step | {"quotas": [cell.setup.microbatches], "live_replicas": 1})
        if i % cell.setup.eval_interval == 0:
            evaluation = {"kind": "eval", "iteration": i, "lm_loss": loss, "seconds": 0.2}
            made.append(evaluation)
    made.append({"kind": "eval", "iteration": last, "lm_loss": final + 0.1, "seconds": 0.2})
    made.append({"kind": "eval", "iteration": last, "lm_loss": 9.0, "split": "test"})
    made += [
        {"kind": "fault_injected", "iteration": parse(f).iteration, "fault": f} for f in cell.faults
    ]
    return made


def result_of(cell: Cell, final: float = 1.0) -> Result:
    return from_events(
        events(cell, final),
        cell=cell.describe(),
        command="python job",
        wall_s=60.0,
        machine={"cores": 2, "cpu": "CPU", "memory_gib": 8},
    )
