"""The table of incidents: one row for each repair, and one for whatever belongs to none.

A row takes its repair from `megatron_ft.observe.incidents`. The processes that join report a filled
slot after the repair; such events are put into the row of their epoch. Deaths that nothing followed
(the job stopped there), changes without a death and faults without a repair get rows of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Literal

from megatron_ft.observe.accounting import DEADLY
from megatron_ft.observe.event_table import Event
from megatron_ft.observe.incidents import Incident, describe, quota_text
from megatron_ft.report.load import RunData
from megatron_ft.report.timeline import Timeline
from megatron_ft.report.times import interruptions

Tag = Literal[
    "died",
    "unrepaired",
    "dark",
    "filled",
    "rebuilt",
    "adopted",
    "degraded",
    "role",
    "barred",
    "restart",
    "fault",
]
TAGS: dict[Tag, str] = {
    "died": "a process died",
    "unrepaired": "not repaired",
    "dark": "a replica went dark",
    "filled": "slots were filled",
    "rebuilt": "a stage was rebuilt",
    "adopted": "a stage was adopted",
    "degraded": "stages were degraded, or exact again",
    "role": "a role changed",
    "barred": "a slot was given up",
    "restart": "the job was started again",
    "fault": "injected",
}
_TAG_OF: dict[str, Tag] = {
    "fault_detected": "died",
    "replica_dark": "dark",
    "slot_filled": "filled",
    "stage_rebuilt": "rebuilt",
    "stage_adopted": "adopted",
    "stages_degraded": "degraded",
    "stages_restored": "degraded",
    "role_changed": "role",
    "slot_barred": "barred",
    "run_restarted": "restart",
    "fault_injected": "fault",
}
_DEEDS = tuple(kind for kind in _TAG_OF if not kind.startswith("fault_"))


@dataclasses.dataclass
class Row:
    """What happened at once: events from the first notice to the new epoch, and what it cost."""

    start: int
    events: list[Event]
    repaired: Event | None
    faults: list[Event] = dataclasses.field(default_factory=list)
    detect_s: float | None = None
    downtime_s: float | None = None
    sharing: int = 1
    """How many rows share the downtime, because no step was committed between them."""
    recomputed: int | None = None

    @property
    def first(self) -> Event:
        return (self.events or self.faults)[0]

    @property
    def iteration(self) -> int:
        return int((self.repaired or self.first)["iteration"])

    @property
    def epoch(self) -> int:
        return int((self.repaired or self.first)["epoch"])

    @property
    def deaths(self) -> list[Event]:
        return [e for e in self.events if e["kind"] == "fault_detected"]

    @property
    def tags(self) -> list[Tag]:
        """What this row is found by."""
        kinds = [e["kind"] for e in (*self.events, *self.faults)]
        found = dict.fromkeys(_TAG_OF[kind] for kind in kinds if kind in _TAG_OF)
        if self.deaths and self.repaired is None:
            found["unrepaired"] = None
        return [tag for tag in TAGS if tag in found]

    @property
    def who(self) -> list[str]:
        return [_who(death) for death in self.deaths]

    @property
    def when(self) -> list[str]:
        """How it was noticed, and which injected faults were behind it."""
        noticed = dict.fromkeys(
            f"noticed at {e['how']}" + (f" in {e['point']}" if "point" in e else "")
            for e in self.deaths
        )
        return [*noticed, *(f"injected: {fault['fault']}" for fault in self.faults)]

    @property
    def deeds(self) -> list[str]:
        """What was done about it."""
        done = [e for e in self.events if e["kind"] in _DEEDS]
        words = list(dict.fromkeys(describe(e) for e in done))
        if self.repaired is not None:
            words.append(_went_on(self.repaired))
        elif self.deaths or not done:
            words.append("no repair followed")
        return words

    @property
    def cost(self) -> dict[str, float | None]:
        """Seconds and bytes; None where nothing was measured."""
        repaired = self.repaired or {}
        moved = [e for e in (*self.events, repaired) if "transfer_s" in e or "transfer_bytes" in e]
        sizes = [e["transfer_bytes"] for e in moved if "transfer_bytes" in e]
        return {
            "repair_s": repaired.get("repair_s"),
            "restore_s": repaired.get("restore_s"),
            "recompute_s": repaired.get("recompute_s"),
            "transfer_s": max((e.get("transfer_s", 0.0) for e in moved), default=None),
            "transfer_bytes": sum(sizes) if sizes else None,
        }

    @property
    def text(self) -> str:
        """All of it in a few lines."""
        return "\n".join([*self.who, *self.when, *self.deeds])


def rows_of(run: RunData, timeline: Timeline) -> list[Row]:
    """All rows of a run, in the order of time."""
    rows = _of_repairs(run, timeline)
    by_epoch = {(row.start, row.epoch): row for row in rows if row.repaired is not None}
    seen = {_identity(timeline.start_of(e), e) for row in rows for e in row.events}
    for event in run.events:
        if event["kind"] not in ("fault_detected", *_DEEDS):
            continue
        start = timeline.start_of(event)
        identity = _identity(start, event)
        if identity in seen:
            continue
        seen.add(identity)
        row = by_epoch.get((start, event["epoch"]))
        if row is None or not _is_of_repair(event, row):
            row = _loose(rows, start, event)
        row.events.append(event)
        row.downtime_s = event.get("down_s", row.downtime_s)
    _add_faults(rows, run.events, timeline)
    return sorted(rows, key=lambda row: float(row.first["time"]))


def _of_repairs(run: RunData, timeline: Timeline) -> list[Row]:
    row_of: dict[str, Row] = {}
    for incident in run.accounts.incidents:
        last = incident.events[-1]
        row_of[last["id"]] = Row(
            start=timeline.start_of(last),
            events=list(incident.events),
            repaired=last,
            detect_s=incident.detect_s,
            recomputed=last.get("recomputed_microbatches"),
        )
    for interruption in interruptions(run.events, run.accounts):
        together = [_row(row_of, incident) for incident in interruption.incidents]
        for row in together:
            row.downtime_s, row.sharing = interruption.downtime_s, len(together)
            if row.recomputed is None and interruption.step.get("recomputed_microbatches"):
                row.recomputed = interruption.step["recomputed_microbatches"]
    return list(row_of.values())


def _row(row_of: dict[str, Row], incident: Incident) -> Row:
    return row_of[incident.events[-1]["id"]]


def _is_of_repair(event: Event, row: Row) -> bool:
    """Whether an event that came after a repair tells what the repair did."""
    late = abs(event["iteration"] - row.iteration) > 1
    return not late and event["kind"] not in ("fault_detected", "run_restarted")


def _loose(rows: list[Row], start: int, event: Event) -> Row:
    """The row for events of this iteration and epoch that belong to no repair."""
    for row in rows:
        if row.repaired is None and row.start == start:
            first = row.first
            if (first["iteration"], first["epoch"]) == (event["iteration"], event["epoch"]):
                return row
    rows.append(Row(start, [], None))
    return rows[-1]


def _identity(start: int, event: Event) -> tuple[object, ...]:
    """The same for reports of the same thing by several processes."""
    names: tuple[str, ...] = ("slot", "replica", "stage", "role", "restart")
    if event["kind"] == "fault_detected":
        names = ("slot",) if event["slot"] is not None else ("slot", "failed_process")
    elif event["kind"] == "slot_filled":
        names = ("slot",)
    elif event["kind"] == "replica_dark":
        names = ("replica",)
    return (start, event["kind"], event["epoch"], *map(event.get, names))


def _add_faults(rows: list[Row], events: Sequence[Event], timeline: Timeline) -> None:
    """Put each injected fault into the first row after it that it explains."""
    own: list[Row] = []
    for fault in events:
        if fault["kind"] != "fault_injected":
            continue
        start = timeline.start_of(fault)
        behind = _explained(rows, fault, start) if fault["fault_kind"] in DEADLY else None
        if behind is None:
            own.append(Row(start, [], None, faults=[fault]))
        else:
            behind.faults.append(fault)
    rows += own


def _explained(rows: Iterable[Row], fault: Event, start: int) -> Row | None:
    """What was noticed next: deaths of the same slot (or, where that is not known, of any).

    After `lose-stage` nobody has died, and the next rebuild of that stage is what came of it.
    """
    after = [
        row
        for row in rows
        if row.start == start
        and (_rebuilds(row, fault) if fault["fault_kind"] == "lose-stage" else row.deaths)
        and float((row.repaired or row.first)["time"]) >= float(fault["time"])
        and row.iteration - fault["iteration"] in (0, 1)
        and (
            not row.deaths
            or fault.get("slot") is None
            or fault["slot"] in [d["slot"] for d in row.deaths]
        )
    ]
    return min(after, key=lambda row: float(row.first["time"]), default=None)


def _rebuilds(row: Row, fault: Event) -> bool:
    """Whether the stage that a fault has taken is made again here, or served by a neighbour."""
    made = ("stage_rebuilt", "stage_adopted", "slot_filled")
    return any(e["kind"] in made and e.get("stage") == fault.get("stage") for e in row.events)


def _who(death: Event) -> str:
    process, slot = death.get("failed_process"), death["slot"]
    named = [f"{n} {death[n]}" for n in ("replica", "stage") if death.get(n) is not None]
    where = f"slot {slot}" + (f" ({', '.join(named)})" if named else "")
    if slot is None:
        where = "which served no slot"
    return f"process {process}, {where}" if process is not None else where


def _went_on(repaired: Event) -> str:
    of_all = f" of {repaired['num_replicas']}" if "num_replicas" in repaired else ""
    quotas = repaired.get("quotas")
    share = f" with {quota_text(quotas)} microbatches" if quotas else ""
    verb = "goes" if repaired["live_replicas"] == 1 else "go"
    processes = repaired["live_processes"]
    served_by = f"{processes} process{'' if processes == 1 else 'es'}"
    return f"{repaired['live_replicas']}{of_all} replicas {verb} on{share}, {served_by}"
