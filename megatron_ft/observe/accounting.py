"""Where the time of a run went, computed from its events alone.

Definitions (see also docs/run_directory.md):

* A *committed step* is an iteration whose `step` event is the last one for that iteration, and not
  after the checkpoint that a later start went on from: what was done again counts once, what was
  lost not at all.
* A step is *disturbed* if a repair ended between the commit before it and its own.
* A *normal step* near a disturbed one is the median `seconds` of the nearest undisturbed steps.
* *Downtime*: from the fault to the next committed step, minus one normal step, at least 0.
* *Goodput*: time of committed steps over wall time. A disturbed step counts as one normal step, or
  the time lost in it would count as work.
"""

from __future__ import annotations

import bisect
import dataclasses
import statistics
from collections.abc import Sequence

from megatron_ft.observe.event_table import Event
from megatron_ft.observe.incidents import FATAL, Incident, incidents

# Faults after which something must be repaired; `slow` and `degrade` disturb nothing of that kind.
DEADLY = (*FATAL, "lose-stage")
# Undisturbed steps on each side that say what a normal step takes.
NUM_NEIGHBOURS = 10


@dataclasses.dataclass(frozen=True)
class Accounts:
    """Steps, incidents and times of a run; all times in seconds."""

    steps: list[Event]
    """Committed steps by iteration."""
    num_redone: int
    """Step events that a later start of the job did again."""
    incidents: list[Incident]
    downtime_s: list[float]
    """One per disturbed step; two repairs within one step are one interruption."""
    wall_s: float
    """First to last event, time between two starts of the job included."""
    productive_s: float
    """Time of committed steps, disturbed ones counted as normal ones."""

    @property
    def goodput(self) -> float:
        return self.productive_s / self.wall_s if self.wall_s > 0 else 0.0


def account(events: Sequence[Event]) -> Accounts:
    """Account for a run.

    Args:
        events: all events of the run in time order, as `read_events` returns them.
    """
    reports = [event for event in events if event["kind"] == "step"]
    last: dict[int, Event] = {}
    for event in events:
        if event["kind"] == "run_started":
            # It goes on from a checkpoint of this iteration: no model holds what came after.
            last = {i: step for i, step in last.items() if i <= event["iteration"]}
        elif event["kind"] == "step":
            last[event["iteration"]] = event
    steps = [last[iteration] for iteration in sorted(last)]
    repairs = incidents(events)
    disturbed = disturbed_steps(events, repairs)
    disturbed_ids = {reports[index]["id"] for index in disturbed}
    normal = _NormalStep([e for e in steps if e["id"] not in disturbed_ids])
    commits = [float(events[0]["time"]), *(float(e["time"]) for e in reports)] if events else []
    injected = [
        float(e["time"])
        for e in events
        if e["kind"] == "fault_injected" and e["fault_kind"] in DEADLY
    ]

    productive = 0.0
    for step in steps:
        seconds = float(step["seconds"])
        if step["id"] in disturbed_ids:
            seconds = min(seconds, normal.seconds_near(step["iteration"], default=seconds))
        productive += seconds
    downtime = []
    for index, step in enumerate(reports):
        if index in disturbed:
            usual = normal.seconds_near(step["iteration"], default=0.0)
            since = commits[index]
            downtime.append(_downtime(step, disturbed[index], since, injected, usual))
    return Accounts(
        steps=steps,
        num_redone=len(reports) - len(steps),
        incidents=repairs,
        downtime_s=downtime,
        wall_s=float(events[-1]["time"]) - float(events[0]["time"]) if events else 0.0,
        productive_s=productive,
    )


def disturbed_steps(
    events: Sequence[Event], repairs: Sequence[Incident]
) -> dict[int, list[Incident]]:
    """Which repairs disturbed which steps: those between the commit before and its own.

    A repair after which the job ended has disturbed no step; what it cost is between two starts.

    Args:
        events: All events of the run in time order.
        repairs: Its incidents.

    Returns:
        Place among the `step` events -> repairs, both in time order.
    """
    times = [float(event["time"]) for event in events if event["kind"] == "step"]
    starts = [float(event["time"]) for event in events if event["kind"] == "run_started"]
    found: dict[int, list[Incident]] = {}
    for repair in repairs:
        ended = float(repair.events[-1]["time"])
        index = bisect.bisect_left(times, ended)
        next_start = bisect.bisect_right(starts, ended)
        if index < len(times) and not (
            next_start < len(starts) and starts[next_start] <= times[index]
        ):
            found.setdefault(index, []).append(repair)
    return dict(sorted(found.items()))


class _NormalStep:
    def __init__(self, undisturbed: Sequence[Event]) -> None:
        self._iterations = [int(event["iteration"]) for event in undisturbed]
        self._seconds = [float(event["seconds"]) for event in undisturbed]

    def seconds_near(self, iteration: int, default: float) -> float:
        """Median seconds of the undisturbed steps around this one, `default` if there is none."""
        middle = bisect.bisect_left(self._iterations, iteration)
        near = self._seconds[max(0, middle - NUM_NEIGHBOURS) : middle + NUM_NEIGHBOURS]
        return statistics.median(near) if near else default


def _downtime(
    step: Event,
    repairs: Sequence[Incident],
    since: float,
    injected: Sequence[float],
    usual: float,
) -> float:
    measured = [r.events[-1]["downtime_s"] for r in repairs if "downtime_s" in r.events[-1]]
    if measured:
        return float(max(measured))
    # An injected fault tells when it struck; otherwise the first notice, less what was measured.
    struck = [time for time in injected if since <= time <= repairs[0].time]
    noticed = [repair.time - (repair.detect_s or 0.0) for repair in repairs]
    return max(0.0, float(step["time"]) - min([*struck, *noticed]) - usual)
