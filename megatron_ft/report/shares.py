"""How many microbatches each replica computed, and in which role, over the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_ft.observe.event_table import Event
from megatron_ft.report.timeline import Timeline

MAX_LANES = 64


@dataclasses.dataclass
class ReplicaLane:
    """The history of a replica; instants are numbers of the timeline."""

    replica: int
    quotas: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    """Begin, end, microbatches of a step; -1 for a replica that was dark."""
    roles: list[tuple[int, int, str]] = dataclasses.field(default_factory=list)
    """Begin, end, role."""


def replica_lanes(events: Sequence[Event], timeline: Timeline) -> list[ReplicaLane]:
    """Quotas from the `step` events, roles from the `role_changed` events of replicas."""
    lanes: dict[int, ReplicaLane] = {}
    current: dict[int, tuple[int, int, int]] = {}
    roles: dict[int, tuple[int, str]] = {}
    dark: set[int] = set()
    previous: Event | None = None

    def end_start(event: Event) -> None:
        for replica, span in current.items():
            lanes[replica].quotas.append(span)
        current.clear()
        now = timeline.instant(event)
        for replica, (since, role) in roles.items():
            lanes[replica].roles.append((since, now, role))
        roles.clear()

    for event in events:
        kind = event["kind"]
        if kind == "run_started":
            if previous is not None:
                end_start(previous)
            dark.clear()
            previous = event
        elif kind == "replica_dark":
            dark.add(event["replica"])
        elif kind == "role_changed" and event.get("replica") is not None:
            replica, now = event["replica"], timeline.instant(event)
            lane = lanes.setdefault(replica, ReplicaLane(replica))
            if replica in roles:
                since, role = roles[replica]
                lane.roles.append((since, now, role))
            roles[replica] = (now, event["role"])
        elif kind == "step":
            begin = timeline.instant(previous if previous is not None else event)
            end = timeline.instant(event)
            for replica, quota in enumerate(event["quotas"]):
                lane = lanes.setdefault(replica, ReplicaLane(replica))
                if quota:
                    dark.discard(replica)
                value = -1 if replica in dark else quota
                last = current.get(replica)
                if last is not None and last[2] == value:
                    current[replica] = (last[0], end, value)
                    continue
                if last is not None:
                    lane.quotas.append(last)
                current[replica] = (begin, end, value)
            previous = event
    end_start(events[-1])
    return [lanes[replica] for replica in sorted(lanes)]


def shown_replicas(lanes: Sequence[ReplicaLane]) -> tuple[list[ReplicaLane], str]:
    """The lanes to draw, those that were dark first, and a note on the others."""
    if len(lanes) <= MAX_LANES:
        return list(lanes), ""
    order = sorted(lanes, key=lambda lane: not any(quota == -1 for *_, quota in lane.quotas))
    shown = sorted(order[:MAX_LANES], key=lambda lane: lane.replica)
    return shown, f"{len(lanes) - len(shown)} of {len(lanes)} replicas are left out."
