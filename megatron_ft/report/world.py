"""Which process served each slot, and when: a lane for each slot, and the epochs above them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from megatron_ft.observe.event_table import Event
from megatron_ft.observe.incidents import describe
from megatron_ft.report.timeline import Timeline
from megatron_ft.topology import Topology, initial_assignment

State = Literal["first", "other", "adopted", "dark", "vacant"]
Mark = Literal["died", "filled", "adopted", "rebuilt", "role", "barred"]
# A page with more lanes would take long to open and longer to read.
MAX_LANES = 96


@dataclasses.dataclass(frozen=True)
class Span:
    """How a slot was served between two instants of the timeline."""

    begin: int
    end: int
    state: State
    """`first`: by the process that it began with; `other`: by one that came later; `adopted`: by
    the process of another slot; `dark`: not at all, its replica is dark; `vacant`: not at all."""
    process: int | None


@dataclasses.dataclass
class Lane:
    """The history of a slot."""

    slot: int
    replica: int | None
    stage: int | None
    spans: list[Span] = dataclasses.field(default_factory=list)
    marks: list[tuple[int, Mark, str]] = dataclasses.field(default_factory=list)
    """Instant, what happened, and in words."""

    @property
    def changed(self) -> bool:
        return bool(self.marks) or any(span.state != "first" for span in self.spans)


@dataclasses.dataclass(frozen=True)
class Epochs:
    """Epoch numbers: each begins at an instant and ends at another."""

    spans: list[tuple[int, int, int]]


@dataclasses.dataclass(frozen=True)
class World:
    """What became of all slots."""

    lanes: list[Lane]
    epochs: Epochs
    topology: Topology | None
    """None where the sizes in `run_started` do not fit together."""


def topology_of(start: Event) -> Topology | None:
    """The topology of a job, from its `run_started` event.

    Context-parallel slots count as tensor-parallel ones, which numbers replicas and stages right.
    """
    per_replica = start["num_replicas"] * start["num_stages"]
    if per_replica < 1 or start["num_slots"] < 1 or start["num_slots"] % per_replica:
        return None
    arguments = start["flags"].get("argv", ())
    swapped = isinstance(arguments, list) and "--use-tp-pp-dp-mapping" in arguments
    return Topology(
        tensor=start["num_slots"] // per_replica,
        pipeline=start["num_stages"],
        data=start["num_replicas"],
        order="tp-cp-ep-pp-dp" if swapped else "tp-cp-ep-dp-pp",
    )


def world_of(events: Sequence[Event], timeline: Timeline) -> World:
    """Follow all slots through a run."""
    history = _History(timeline)
    for event in events:
        history.take(event)
    history.close(events[-1])
    lanes = [history.lanes[slot] for slot in sorted(history.lanes)]
    return World(lanes, Epochs(history.epochs), history.topology)


def shown_lanes(lanes: Sequence[Lane]) -> tuple[list[Lane], str]:
    """The lanes to draw, and what a reader must know of those that are not drawn."""
    if len(lanes) <= MAX_LANES:
        return list(lanes), ""
    changed = [lane for lane in lanes if lane.changed]
    shown = changed[:MAX_LANES]
    note = f"{len(lanes) - len(changed)} of {len(lanes)} slots kept their process all the time"
    if len(changed) > len(shown):
        note += f"; {len(changed) - len(shown)} others had changes too, and are left out"
    return shown, f"{note}."


class _History:
    """Reads events and keeps how each slot is served now."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self.topology: Topology | None = None
        self.lanes: dict[int, Lane] = {}
        self.epochs: list[tuple[int, int, int]] = []
        self._epoch: tuple[int, int] | None = None
        self._now: dict[int, tuple[int, State, int | None]] = {}
        """Slot -> instant since when, state and process."""
        self._first: dict[int, int | None] = {}
        self._previous: Event | None = None

    def take(self, event: Event) -> None:
        kind = event["kind"]
        if kind == "run_started":
            self._begin(event)
        elif kind == "repaired" and (self._epoch is None or event["epoch"] > self._epoch[1]):
            self._end_epoch(event)
            self._epoch = (self._timeline.instant(event), event["epoch"])
        elif kind == "fault_detected":
            self._die(event)
        elif kind == "replica_dark":
            self._go_dark(event)
        elif kind == "slot_filled":
            same = self._first.get(event["slot"]) == event["by_process"]
            self._set(event, event["slot"], "first" if same else "other", event["by_process"])
            self._mark(event, event["slot"], "filled")
        elif kind == "stage_adopted":
            _, _, process = self._now.get(event["by_slot"], (0, "vacant", None))
            self._set(event, event["slot"], "adopted", process)
            self._mark(event, event["slot"], "adopted")
        elif kind == "stage_rebuilt":
            for slot in self._slots_of(event):
                self._mark(event, slot, "rebuilt")
        elif kind == "role_changed" and event.get("slot") is not None:
            self._mark(event, event["slot"], "role")
        elif kind == "slot_barred":
            self._mark(event, event["slot"], "barred")
        self._previous = event

    def close(self, event: Event) -> None:
        """The run, or a start of the job, ends here."""
        for slot, (since, state, process) in self._now.items():
            self.lanes[slot].spans.append(
                Span(since, self._timeline.instant(event), state, process)
            )
        self._now.clear()
        self._end_epoch(event)
        self._epoch = None

    def _begin(self, event: Event) -> None:
        if self._previous is not None:
            self.close(self._previous)
        self.topology = topology = topology_of(event)
        num_slots, num_processes = event["num_slots"], event["num_processes"]
        process_of: Sequence[int | None]
        if topology is not None and num_processes >= topology.replica_size:
            process_of = initial_assignment(topology, range(num_processes)).process_of
        else:
            process_of = [slot if slot < num_processes else None for slot in range(num_slots)]
        now = self._timeline.instant(event)
        for slot, process in enumerate(process_of):
            lane = self._lane(slot)
            if topology is not None:
                lane.replica, lane.stage = topology.replica_of(slot), topology.stage_of(slot)
            self._now[slot] = (now, "dark" if process is None else "first", process)
        self._first = dict(enumerate(process_of))
        self._epoch = (now, event["epoch"])

    def _end_epoch(self, event: Event) -> None:
        if self._epoch is not None:
            self.epochs.append((self._epoch[0], self._timeline.instant(event), self._epoch[1]))

    def _lane(self, slot: int) -> Lane:
        return self.lanes.setdefault(slot, Lane(slot, None, None))

    def _set(self, event: Event, slot: int, state: State, process: int | None) -> None:
        now = self._timeline.instant(event)
        lane = self._lane(slot)
        if event.get("replica") is not None:
            lane.replica = event["replica"]
        since, before, served = self._now.get(slot, (now, "vacant", None))
        if (before, served) != (state, process):
            if since != now:
                lane.spans.append(Span(since, now, before, served))
            since = now
        self._now[slot] = (since, state, process)

    def _mark(self, event: Event, slot: int, mark: Mark) -> None:
        self._lane(slot).marks.append((self._timeline.instant(event), mark, describe(event)))

    def _die(self, event: Event) -> None:
        slot, process = event["slot"], event.get("failed_process")
        if process is None and slot is not None and slot in self._now:
            process = self._now[slot][2]
        served = {s for s, (_, _, p) in self._now.items() if p is not None and p == process}
        for lost in sorted(served | ({slot} if slot is not None else set())):
            self._set(event, lost, "vacant", None)
        if slot is not None:
            self._mark(event, slot, "died")

    def _go_dark(self, event: Event) -> None:
        slots = event.get("slots")
        if slots is None:
            slots = [s for s, lane in self.lanes.items() if lane.replica == event["replica"]]
        for slot in slots:
            self._set(event, slot, "dark", None)

    def _slots_of(self, event: Event) -> list[int]:
        if event.get("slot") is not None:
            return [event["slot"]]
        replica = event.get("replica")
        return [
            slot
            for slot, lane in sorted(self.lanes.items())
            if lane.stage == event["stage"] and replica in (None, lane.replica)
        ]
