"""What a job left behind, reduced to what the studies need, and kept as JSON."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .statistics import Curve, perplexity

RESULT = "result.json"


class BrokenRun(RuntimeError):
    """A job that did not do what its cell says."""


@dataclass(frozen=True)
class Result:
    """One finished cell."""

    cell: Mapping[str, Any]
    """``Cell.describe``."""
    command: str
    losses: Curve
    """Training loss of each committed iteration, from the last time it was done."""
    validation: Curve
    """Validation loss; two evaluations of one iteration, as at the end, are averaged."""
    seconds: Sequence[float]
    """Of each committed iteration."""
    max_quotas: Sequence[int]
    """The most microbatches that a replica had in each iteration."""
    live_replicas: Sequence[int]
    eval_seconds: float | None
    """Median of an evaluation on the validation split."""
    faults_fired: int
    faults_unfired: Sequence[str]
    rebuilt: int
    """Stages that were rebuilt."""
    wall_s: float
    """The launches, start-up included."""
    versions: Mapping[str, Any]
    machine: Mapping[str, Any]
    code: str = ""
    """A digest of the product's code that the job ran with."""

    @property
    def final_loss(self) -> float:
        """Validation loss at the end."""
        return self.validation[-1][1]

    @property
    def perplexity(self) -> float:
        return perplexity(self.final_loss)

    @property
    def perplexities(self) -> Curve:
        """On the validation split, by iteration."""
        return [(at, perplexity(loss)) for at, loss in self.validation]

    def median_step_s(self, warmup: int = 0) -> float:
        """Median time of the steps after the first ``warmup``."""
        return statistics.median(self.seconds[warmup:])

    def forward_only_s(self, eval_iters: int) -> float:
        """The forward passes of one step, from the time of an evaluation."""
        if self.eval_seconds is None:
            raise BrokenRun("the evaluations left no times")
        return self.eval_seconds / eval_iters

    def save(self, directory: Path) -> None:
        """Write it whole or not at all: what is there counts as done."""
        draft = directory / f"{RESULT}.tmp"
        draft.write_text(json.dumps(self.__dict__) + "\n")
        draft.replace(directory / RESULT)


def load(directory: Path) -> Result | None:
    """The result kept in a cell's directory; None if the cell is not done."""
    path = directory / RESULT
    if not path.exists():
        return None
    kept = json.loads(path.read_text())
    for name in ("losses", "validation"):
        kept[name] = [(at, loss) for at, loss in kept[name]]
    return Result(**kept)


def from_events(
    events: Iterable[Mapping[str, Any]],
    *,
    cell: Mapping[str, Any],
    command: str,
    wall_s: float,
    machine: Mapping[str, Any],
    code: str = "",
) -> Result:
    """Read the events of all starts of a job, in their order.

    Raises:
        BrokenRun: Iterations are missing, or a loss is no number.
    """
    listed = list(events)
    steps = {event["iteration"]: event for event in listed if event["kind"] == "step"}
    iterations = cell["setup"]["iterations"]
    if sorted(steps) != list(range(1, iterations + 1)):
        raise BrokenRun(f"{len(steps)} of {iterations} iterations were committed: {command}")
    ordered = [steps[iteration] for iteration in sorted(steps)]
    evals = [e for e in listed if e["kind"] == "eval" and e.get("split", "validation") != "test"]
    curves: dict[int, list[float]] = {}
    for event in evals:
        curves.setdefault(event["iteration"], []).append(float(event["lm_loss"]))
    losses = [(i, float(steps[i]["lm_loss"])) for i in sorted(steps)]
    # What was evaluated again after a restart saw the same samples: the last time counts. The end
    # is evaluated twice, on other samples.
    last = {i: values[-2:] if i == iterations else values[-1:] for i, values in curves.items()}
    validation = [(i, statistics.fmean(last[i])) for i in sorted(last)]
    due = {*range(cell["setup"]["eval_interval"], iterations + 1, cell["setup"]["eval_interval"])}
    if set(curves) != due | {iterations}:
        raise BrokenRun(f"evaluated after {sorted(curves)} of {iterations} iterations: {command}")
    if not all(math.isfinite(loss) for _, loss in [*losses, *validation]):
        raise BrokenRun(f"a loss that is no number: {command}")
    times = [float(event["seconds"]) for event in evals if event.get("seconds") is not None]
    started = [event for event in listed if event["kind"] == "run_started"]
    fired = {event["fault"] for event in listed if event["kind"] == "fault_injected"}
    return Result(
        cell=cell,
        command=command,
        losses=losses,
        validation=validation,
        seconds=[float(step["seconds"]) for step in ordered],
        max_quotas=[max(step["quotas"], default=0) for step in ordered],
        live_replicas=[int(step["live_replicas"]) for step in ordered],
        eval_seconds=statistics.median(times) if times else None,
        faults_fired=len(fired),
        faults_unfired=[fault for fault in cell["faults"] if fault not in fired],
        rebuilt=sum(event["kind"] == "stage_rebuilt" for event in listed),
        wall_s=wall_s,
        versions=started[-1]["versions"] if started else {},
        machine=machine,
        code=code,
    )


def by_seed(results: Iterable[Result]) -> dict[int, Result]:
    return {int(result.cell["seed"]): result for result in results}
