"""The negative control of every case: its run is falsified, and the checks must notice.

A check that cannot fail proves nothing. So once a case is green, what it left is changed here in
one place after another, as the fault would change it that a check is there for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

from megatron_ft.campaign.checks import Ended, judge
from megatron_ft.campaign.recorded import Run
from megatron_ft.campaign.spec import Case
from megatron_ft.observe.event_table import Event


@dataclass(frozen=True)
class Doctoring:
    """One falsification."""

    doc: str
    check: str
    """That must turn red."""
    change: Callable[[Case, Run], Run | None]
    """Returns None where there is nothing to falsify."""


def _edited(run: Run, edit: Callable[[list[Event]], list[Event] | None]) -> Run | None:
    events = edit(copy.deepcopy(run.events))
    return None if events is None else run.with_events(events)


def _last_steps(events: list[Event]) -> list[Event]:
    return [event for event in events if event["kind"] == "step"][-5:]


def _quota_dropped(case: Case, run: Run) -> Run | None:
    """The last replica that has a quota does not contribute it, and nobody else does."""

    def edit(events: list[Event]) -> list[Event] | None:
        steps = _last_steps(events)
        if not steps:
            return None
        quotas = steps[-1]["quotas"]
        steps[-1]["microbatches"] -= next(q for q in reversed(quotas) if q)
        return events

    return _edited(run, edit)


def _other_samples(case: Case, run: Run) -> Run | None:
    def edit(events: list[Event]) -> list[Event] | None:
        for step in _last_steps(events)[-1:]:
            step["samples_digest"] = step["samples_digest"][::-1] + "0"
            return events
        return None

    return _edited(run, edit)


def _loss_off(case: Case, run: Run) -> Run | None:
    """Twice the bound away from the fault-free run, at the least."""
    end = case.expect.end

    def edit(events: list[Event]) -> list[Event] | None:
        steps = _last_steps(events)
        if not steps or (case.expect.exit_code and not end.each_step):
            return None
        for step in steps:
            step["lm_loss"] *= 1 + 3 * end.bound_at(step["iteration"])
        return events

    return _edited(run, edit)


def _validation_off(case: Case, run: Run) -> Run | None:
    bound = max(case.expect.end.bound, case.expect.end.later_bound)

    def edit(events: list[Event]) -> list[Event] | None:
        evals = [event for event in events if event["kind"] == "eval"]
        if not evals or case.expect.exit_code:
            return None
        evals[-1]["lm_loss"] *= 1 + 3 * bound
        return events

    return _edited(run, edit)


def _step_missing(case: Case, run: Run) -> Run | None:
    def edit(events: list[Event]) -> list[Event] | None:
        steps = [event for event in events if event["kind"] == "step"]
        if len(steps) < 2:
            return None
        events.remove(steps[len(steps) // 2 - 1])
        return events

    return _edited(run, edit)


def _fault_silent(case: Case, run: Run) -> Run | None:
    def edit(events: list[Event]) -> list[Event] | None:
        if not case.faults:
            return None
        return [e for e in events if e.get("fault") != case.faults[-1]]

    return _edited(run, edit)


def _event_unseen(case: Case, run: Run) -> Run | None:
    kinds = [kind for kind, count in case.expect.events.items() if count.least > 0]

    def edit(events: list[Event]) -> list[Event] | None:
        return [event for event in events if event["kind"] not in kinds] if kinds else None

    return _edited(run, edit)


def _weights_differ(case: Case, run: Run) -> Run | None:
    shards = [case.setting.topology.shard_of(slot) for slot in run.weights]
    twice = next(
        (slot for slot, s in zip(run.weights, shards, strict=True) if shards.count(s) > 1), None
    )
    if not case.expect.weights_equal or twice is None:
        return None
    weights = copy.deepcopy(run.weights)
    weights[twice]["digest"] += "0"
    return run.with_weights(weights)


DOCTORINGS: dict[str, Doctoring] = {
    "quota-dropped": Doctoring(
        "a replica's quota is missing in a step", "microbatches", _quota_dropped
    ),
    "other-samples": Doctoring("a step consumed other samples", "samples", _other_samples),
    "loss-off": Doctoring("losses are off by three times the bound", "losses", _loss_off),
    "validation-off": Doctoring("so is an evaluation", "validation", _validation_off),
    "step-missing": Doctoring("a step was left out", "steps", _step_missing),
    "fault-silent": Doctoring("a fault did not strike", "faults", _fault_silent),
    "event-unseen": Doctoring("what was expected did not happen", "events", _event_unseen),
    "weights-differ": Doctoring("one replica holds other weights", "weights", _weights_differ),
}


def blind_spots(case: Case, run: Run, ended: Ended, reference: Run | None) -> tuple[int, list[str]]:
    """How many falsifications were tried on a green run, and which of them went unnoticed."""
    unnoticed, tried = [], 0
    for name, doctoring in DOCTORINGS.items():
        doctored = doctoring.change(case, run)
        if doctored is None or (reference is None and doctoring.check in ("samples", "losses")):
            continue
        if reference is None and doctoring.check == "validation":
            continue
        tried += 1
        red = {problem.check for problem in judge(case, doctored, ended, reference)}
        if doctoring.check not in red:
            unnoticed.append(name)
    return tried, unnoticed
