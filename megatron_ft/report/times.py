"""Where the wall time of a run went: parts that add up to all of it.

Committed steps and goodput are those of `megatron_ft.observe.accounting`. What an interruption cost
(its downtime) is divided by what was measured of it: repairs, state that was moved, gradients that
were restored, microbatches that were computed again. What is left of it is the step that was lost
and the time until the death was noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ft.observe.accounting import Accounts, disturbed_steps
from megatron_ft.observe.event_table import Event
from megatron_ft.observe.incidents import Incident

LABELS = {
    "steps": "committed steps",
    "redone": "steps that a later start did again",
    "repair": "repair: from the notice to the new epoch",
    "transfer": "state moved to processes that joined",
    "restore": "gradients restored",
    "recompute": "microbatches computed again",
    "lost": "rest of the downtime: unnoticed, or work lost",
    "restart": "between two starts of the job",
    "checkpoint": "checkpoints",
    "eval": "evaluation",
    "other": "everything else: between steps, set-up, end",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """A share of the wall time."""

    key: str
    seconds: float

    @property
    def label(self) -> str:
        return LABELS[self.key]


@dataclasses.dataclass(frozen=True)
class Interruption:
    """A committed step before which something was repaired."""

    step: Event
    incidents: tuple[Incident, ...]
    downtime_s: float


def interruptions(events: Sequence[Event], accounts: Accounts) -> list[Interruption]:
    """The disturbed steps, each with its downtime as `summary.json` has it."""
    reports = [event for event in events if event["kind"] == "step"]
    found = disturbed_steps(events, accounts.incidents)
    return [
        Interruption(reports[index], tuple(repairs), downtime)
        for (index, repairs), downtime in zip(found.items(), accounts.downtime_s, strict=True)
    ]


def parts_of(events: Sequence[Event], accounts: Accounts) -> list[Part]:
    """Divide the wall time; the parts add up to `accounts.wall_s` and none is negative."""
    seconds = dict.fromkeys(LABELS, 0.0)
    seconds["steps"] = accounts.productive_s
    committed = {step["id"] for step in accounts.steps}
    beside: list[tuple[float, float]] = []
    moves: list[Event] = []
    previous = None
    for event in events:
        if event["kind"] == "step" and event["id"] not in committed:
            seconds["redone"] += float(event["seconds"])
        elif event["kind"] in ("checkpoint", "eval"):
            took = float(event.get("seconds", 0.0))
            seconds[event["kind"]] += took
            beside.append((float(event["time"]) - took, float(event["time"])))
        elif "transfer_s" in event:
            moves.append(event)
        elif event["kind"] in ("run_restarted", "run_started") and previous is not None:
            seconds["restart"] += float(event["time"]) - float(previous["time"])
        previous = event
    for interruption in interruptions(events, accounts):
        for key, share in _divide(interruption, beside, moves).items():
            seconds[key] += share

    # Overlaps (a death while a checkpoint is saved) must not make more of the time than there was.
    left = accounts.wall_s
    for key in seconds:
        seconds[key] = max(0.0, min(seconds[key], left))
        left -= seconds[key]
    seconds["other"] += left
    return [Part(key, value) for key, value in seconds.items()]


def measured(incidents: Sequence[Incident], name: str) -> float | None:
    """Sum of a time of `repaired` events, None where nobody measured it."""
    found = [float(i.events[-1][name]) for i in incidents if i.events[-1].get(name) is not None]
    return sum(found) if found else None


def _moved_s(moves: Sequence[Event], since: float, until: float) -> float:
    """Seconds in which state was moved; the slots of one epoch are filled at the same time."""
    longest: dict[int, float] = {}
    for move in moves:
        if since <= float(move["time"]) <= until:
            epoch = move["epoch"]
            longest[epoch] = max(longest.get(epoch, 0.0), float(move["transfer_s"]))
    return sum(longest.values())


def _divide(
    interruption: Interruption, beside: Sequence[tuple[float, float]], moves: Sequence[Event]
) -> dict[str, float]:
    """Shares of a downtime, less what an evaluation or a checkpoint took of it."""
    until = float(interruption.step["time"])
    since = interruption.incidents[0].time
    left = interruption.downtime_s
    for begin, end in beside:
        left -= max(0.0, min(end, until) - max(begin, since))
    left = max(0.0, left)
    wanted = {
        "repair": measured(interruption.incidents, "repair_s") or 0.0,
        "transfer": _moved_s(moves, since, until),
        "restore": measured(interruption.incidents, "restore_s") or 0.0,
        "recompute": measured(interruption.incidents, "recompute_s") or 0.0,
    }
    if not any(incident.deaths for incident in interruption.incidents):
        # Processes only took their slots, between two steps: what was measured is all there is.
        left = max(left, sum(wanted.values()))
    shares = {}
    for key, value in wanted.items():
        shares[key] = min(value, left)
        left -= shares[key]
    return {**shares, "lost": left}
