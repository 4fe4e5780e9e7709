"""What is held against a finished case: the invariants of every run, and what it expects itself."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ft.campaign import compare
from megatron_ft.campaign.census import COUNTED, MEGABYTE, growth, leaked
from megatron_ft.campaign.recorded import Run
from megatron_ft.campaign.spec import Case, Growth

CHECKS = {
    "exit": "the exit code, within the time",
    "status": "status and message of the summary",
    "leftovers": "no process is left behind",
    "faults": "every fault fired",
    "steps": "every step is there, once",
    "microbatches": "every step has exactly B microbatches",
    "samples": "every step consumed the samples of the fault-free run",
    "losses": "losses equal the fault-free ones, or stay within the bound",
    "validation": "so do evaluations",
    "weights": "replicas of a stage hold the same bytes at the end",
    "events": "what was expected to happen happened as often",
    "growth": "groups, threads, files and memory do not grow with the repairs",
    "repair": "repairs are as short as expected",
}
COMPARING = ("microbatches", "samples", "losses", "validation", "weights")
"""A control that must fail one of these may fail the others of them too."""


@dataclass(frozen=True)
class Ended:
    """How a launch ended, besides what its run directory says."""

    timed_out: bool = False
    left_behind: Sequence[str] = ()
    """Command lines of processes that outlived the job."""
    kills: int | None = None
    """What the punisher did; None without one."""


@dataclass(frozen=True)
class Problem:
    """A check that is red."""

    check: str
    text: str


def judge(case: Case, run: Run, ended: Ended, reference: Run | None) -> list[Problem]:
    """All that is wrong with a case.

    Args:
        reference: The fault-free run; None when the case is that run itself.
    """
    found: list[Problem] = []

    def add(check: str, problems: Iterator[str]) -> None:
        assert check in CHECKS
        found.extend(Problem(check, text) for text in problems)

    expect, setting = case.expect, case.setting
    add("exit", _exit(case, run, ended))
    add("leftovers", (f"left behind: {line}" for line in ended.left_behind))
    add("faults", _faults(case, run, ended))
    if not (run.directory / "summary.json").exists() and not run.steps:
        return [*found, Problem("steps", "it left no step and no summary.json: see its output")]
    add("status", _status(case, run))
    # A job that is to stop early is held to the steps that it has done.
    last = max(run.steps, default=0) if expect.exit_code else setting.iterations
    add("steps", compare.step_problems(run, last))
    batch = setting.microbatches * setting.topology.data
    add("microbatches", compare.microbatch_problems(run, batch))
    add("events", _events(case, run))
    if reference is not None:
        add("samples", compare.sample_problems(run, reference))
        if expect.exit_code == 0 or expect.end.each_step:
            add("losses", compare.loss_problems(run, reference, expect.end))
        if expect.exit_code == 0:
            add("validation", compare.validation_problems(run, reference, expect.end))
    if expect.weights_equal:
        add("weights", _weights(case, run))
    if expect.growth is not None:
        census = run.census(expect.growth.process)
        # Apart: a control that must leak would pass without any count.
        add("exit", _uncounted(expect.growth, census))
        add("growth", _growth(expect.growth, census))
    if expect.repair_s is not None:
        add("repair", _repair(expect.repair_s, run))
    return found


def _exit(case: Case, run: Run, ended: Ended) -> Iterator[str]:
    if ended.timed_out:
        yield f"no end after {case.timeout:g} s"
    elif run.returncode != case.expect.exit_code:
        yield f"exit code {run.returncode}, expected {case.expect.exit_code}"


def _status(case: Case, run: Run) -> Iterator[str]:
    expect = case.expect
    if not (run.directory / "summary.json").exists():
        if expect.status is not None or expect.message is not None:
            yield "it left no summary.json: see its output"
        return
    if expect.status is not None and run.summary["status"] != expect.status:
        yield f"status {run.summary['status']}, expected {expect.status}"
    if expect.message is not None and expect.message not in run.summary["message"]:
        yield f"the message {run.summary['message']!r} does not say {expect.message!r}"


def _faults(case: Case, run: Run, ended: Ended) -> Iterator[str]:
    fired = {event["fault"] for event in run.of_kind("fault_injected")}
    if silent := [fault for fault in case.faults if fault not in fired]:
        yield f"did not fire: {', '.join(silent)}"
    drawn = len(fired - set(case.faults))
    if drawn < case.expect.drawn_faults:
        yield f"{drawn} drawn faults fired, expected at least {case.expect.drawn_faults}"
    if case.punisher is not None and (ended.kills or 0) < case.punisher.least_kills:
        yield f"{ended.kills or 0} kills from outside, expected {case.punisher.least_kills}"


def _events(case: Case, run: Run) -> Iterator[str]:
    for kind, count in case.expect.events.items():
        number = len(run.of_kind(kind))
        if number < count.least or (count.most is not None and number > count.most):
            yield f"{number} times {kind}, expected {count}"


def _weights(case: Case, run: Run) -> Iterator[str]:
    topology, iterations = case.setting.topology, case.setting.iterations
    if late := sorted(s for s, w in run.weights.items() if w["committed"] != iterations):
        yield f"slots {late} ended after another step than {iterations}"
    by_shard: dict[Any, dict[int, str]] = {}
    for slot, held in run.weights.items():
        by_shard.setdefault(topology.shard_of(slot), {})[slot] = held["digest"]
    for shard in topology.shards:
        digests = by_shard.get(shard, {})
        if not digests:
            yield f"stage {shard.pp}, tensor part {shard.tp}: nobody wrote down what it holds"
        elif len(set(digests.values())) > 1:
            yield f"stage {shard.pp}, tensor part {shard.tp}: slots {sorted(digests)} differ"
    if len(by_shard) > 1 and len({d for h in by_shard.values() for d in h.values()}) == 1:
        yield "all stages hold the same bytes, so that this could not fail"


def _uncounted(limit: Growth, census: Sequence[dict[str, Any]]) -> Iterator[str]:
    try:
        leaked(census)
    except ValueError as error:
        yield f"process {limit.process}: {error}"


def _growth(limit: Growth, census: Sequence[dict[str, Any]]) -> Iterator[str]:
    try:
        grown = {what: growth(census, what) for what in (*COUNTED, "resident")}
        more = leaked(census)
    except ValueError:  # see _uncounted
        return
    for what in COUNTED:
        if grown[what]:
            yield f"{grown[what]} more {what} than after the first repair"
    if more:
        yield f"{len(more)} more files or threads than after the first repair: {more[:3]}"
    if grown["resident"] > limit.resident_mb * MEGABYTE:
        yield f"{grown['resident'] / MEGABYTE:.0f} MB more than after the first repair"


def _repair(limit: float, run: Run) -> Iterator[str]:
    seconds = [event["repair_s"] for event in run.of_kind("repaired")]
    if not seconds:
        yield "nothing was repaired"
    elif statistics.median(seconds) > limit:
        yield f"the median of the repairs is {statistics.median(seconds):.3f} s, limit {limit:g} s"
