"""Where an event lies on the two axes of the plots: steps, and time since the run began.

Step i takes the places i - 0.5 to i + 0.5: what happened between the commits of steps i - 1 and i
lies at i - 0.5, where step i begins. Time is in seconds since the first event. After a restart of
the job from a checkpoint some steps are done twice; on the axis of steps the first attempt ends
where the second begins, on the axis of time both are seen.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from megatron_ft.observe.event_table import Event


class Timeline:
    """Numbers the instants at which something changes, so that the page names each place once.

    Args:
        events: all events of a run, in the order of time; at least one.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.begin = float(events[0]["time"])
        self.wall_s = float(events[-1]["time"]) - self.begin
        self._start_of: dict[str, int] = {}
        self._times: list[list[float]] = [[]]
        self._iterations: list[list[int]] = [[]]
        start = 0
        for position, event in enumerate(events):
            if event["kind"] == "run_started" and position:
                start += 1
                self._times.append([])
                self._iterations.append([])
            self._start_of[event["id"]] = start
            if event["kind"] == "step":
                self._times[start].append(float(event["time"]))
                self._iterations[start].append(int(event["iteration"]))
        self._limits = self._find_limits()
        self.steps: list[float] = []
        """Of each instant, its place on the axis of steps."""
        self.seconds: list[float] = []
        """Of each instant, seconds since the first event."""
        self._known: dict[tuple[float, float], int] = {}

    def start_of(self, event: Event) -> int:
        """Which start of the job the event belongs to, from 0."""
        return self._start_of[event["id"]]

    def place(self, event: Event) -> tuple[float, float]:
        """Place on the axis of steps, and seconds since the run began."""
        start, time = self.start_of(event), float(event["time"])
        done = bisect.bisect_right(self._times[start], time)
        step = self._iterations[start][done - 1] + 0.5 if done else self._first(start) - 0.5
        return min(step, self._limits[start]), time - self.begin

    def instant(self, event: Event) -> int:
        """Number of the instant at which this event happened."""
        place = self.place(event)
        if place not in self._known:
            self._known[place] = len(self.steps)
            self.steps.append(place[0])
            self.seconds.append(place[1])
        return self._known[place]

    def _first(self, start: int) -> int:
        """The first iteration of a start of the job; the next one if it committed none."""
        if self._iterations[start]:
            return self._iterations[start][0]
        before = [its[-1] for its in self._iterations[:start] if its]
        return before[-1] + 1 if before else 1

    def _find_limits(self) -> list[float]:
        limits = [float("inf")] * len(self._iterations)
        for start in range(len(limits) - 2, -1, -1):
            limits[start] = min(limits[start + 1], self._first(start + 1) - 0.5)
        return limits
