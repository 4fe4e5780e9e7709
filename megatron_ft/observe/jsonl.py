"""Reading and merging the event files of a run directory, whatever state a crash left them in.

The event id decides what is the same event, so reading twice, merging twice, and a crash between
two steps of a merge neither lose an event nor double it. A line that a killed writer left half
written is no event: reading returns it apart, merging keeps it in `events.torn.jsonl`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_ft.observe.event_table import COMMON, Event, is_number_field, spell_float
from megatron_ft.observe.rundir import RunDirectory, write_atomic


@dataclasses.dataclass(frozen=True)
class Torn:
    """A line that is no whole event."""

    file: str
    """Name of the file it was found in."""
    text: str
    """What there was of it; bytes that are no UTF-8 are escaped."""


@dataclasses.dataclass(frozen=True)
class EventsRead:
    """All events of a run directory, each once, in the order of their times."""

    events: list[Event]
    torn: list[Torn]


def encode(event: Event) -> bytes:
    """One line of strict JSON. Floats keep every digit; NaN and infinities become strings."""
    return json.dumps(_spell(event), allow_nan=False).encode() + b"\n"


def decode(line: bytes) -> Event | None:
    """The event of one line, None if the line is no whole event."""
    try:
        event = json.loads(line)
        if not isinstance(event, dict) or any(name not in event for name in COMMON):
            return None
        for name, value in event.items():
            if isinstance(value, str) and is_number_field(name):
                event[name] = float(value)
    except ValueError:
        return None
    return event


def events_of_kind(run_dir: RunDirectory, kind: str) -> list[Event]:
    """As ``read_events``, of one kind only: without decoding the steps of a long run."""
    mark = f'"kind": "{kind}"'.encode()
    events: dict[str, Event] = {}
    for path in run_dir.event_files():
        with open(path, "rb") as file:
            for line in file:
                event = decode(line) if mark in line else None
                if event is not None and event["kind"] == kind:
                    events.setdefault(event["id"], event)
    return sorted(events.values(), key=lambda event: float(event["time"]))


def read_events(run_dir: RunDirectory) -> EventsRead:
    """Read events.jsonl and every part file; works at any moment, merged or not."""
    events: dict[str, Event] = {}
    torn = list(_read_torn(run_dir.torn))
    for file in run_dir.event_files():
        for line in file.read_bytes().split(b"\n"):
            if not line:
                continue
            event = decode(line)
            if event is None:
                torn.append(Torn(file.name, line.decode(errors="backslashreplace")))
            else:
                events.setdefault(event["id"], event)
    # The sort is stable and a writer's times never go back, so events of one writer keep their
    # order even where the clock did not move between them.
    ordered = sorted(events.values(), key=lambda event: float(event["time"]))
    return EventsRead(ordered, list(dict.fromkeys(torn)))


def merge_events(run_dir: RunDirectory) -> EventsRead:
    """Make events.jsonl hold the events of all part files too, in time order; return them.

    Part files stay where they are: a process that still writes to its own loses nothing, and the
    next merge finds what came later. The torn lines are put aside first, so that a crash between
    the two writes repeats work and drops nothing.
    """
    read = read_events(run_dir)
    if read.torn:
        lines = (json.dumps(dataclasses.asdict(torn)).encode() + b"\n" for torn in read.torn)
        write_atomic(run_dir.torn, b"".join(lines))
    write_atomic(run_dir.events, b"".join(map(encode, read.events)))
    return read


def _read_torn(path: Path) -> Iterable[Torn]:
    if path.exists():
        for line in path.read_bytes().splitlines():
            yield Torn(**json.loads(line))


def _spell(value: Any) -> Any:
    if isinstance(value, float):
        return spell_float(value)
    if isinstance(value, dict):
        return {key: _spell(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_spell(item) for item in value]
    return value
