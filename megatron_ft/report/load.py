"""Reading run directories, in whatever state they were left, and saying what is odd about them."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_ft.observe.accounting import Accounts, account
from megatron_ft.observe.event_table import FIELDS, KINDS, Event, check
from megatron_ft.observe.jsonl import read_events
from megatron_ft.observe.rundir import EVENTS, ExitStatus, RunDirectory
from megatron_ft.observe.summary import Summary, build_summary

_NUM_NAMED = 4


@dataclasses.dataclass(frozen=True)
class RunData:
    """What a run directory holds."""

    name: str
    """For a person: the end of its path, as long as it takes to tell the runs apart."""
    path: Path
    events: list[Event]
    """In the order of time; at least one."""
    summary: Summary
    """Computed from `events`."""
    exit_status: ExitStatus | None
    ended: bool
    """Whether the last start of the job reported its end."""
    notes: tuple[str, ...]
    """What a reader must know of the data, a sentence each."""

    @cached_property
    def accounts(self) -> Accounts:
        return account(self.events)

    @cached_property
    def start(self) -> Event:
        """The last `run_started`; empty if there is none."""
        started = [event for event in self.events if event["kind"] == "run_started"]
        return started[-1] if started else {}


def load_runs(paths: Sequence[Path]) -> list[RunData]:
    """Read run directories; see `load`.

    Raises:
        ValueError: one of them cannot be reported on, or is given twice.
    """
    resolved = [path.resolve() for path in paths]
    for path, count in Counter(resolved).items():
        if count > 1:
            raise ValueError(f"{path} is given {count} times")
    return [load(path, name) for path, name in zip(paths, names_of(resolved), strict=True)]


def names_of(paths: Sequence[Path]) -> list[str]:
    """The end of each path, of as many parts as make all of them different."""
    length = 1
    longest = max(len(path.parts) for path in paths)
    while True:
        names = ["/".join(path.parts[-length:]) for path in paths]
        if len(set(names)) == len(names) or length >= longest:
            return names
        length += 1


def load(path: Path, name: str | None = None) -> RunData:
    """Read one run directory; nothing in it is changed.

    Raises:
        ValueError: it is no directory, or holds no event; says what is missing.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is {'no directory' if path.exists() else 'not there'}")
    run_dir = RunDirectory(path)
    files = run_dir.event_files()
    if not files:
        held = sorted(entry.name for entry in path.iterdir())[:_NUM_NAMED]
        raise ValueError(
            f"{path} has no {EVENTS}, so it is no run directory, or the run ended before it "
            f"trained; it holds {', '.join(held) if held else 'nothing'}"
        )
    read = read_events(run_dir)
    events, refused = _whole(read.events)
    if not events:
        raise ValueError(f"{', '.join(file.name for file in files)} in {path} hold no whole event")

    notes: list[str] = []
    if not run_dir.events.exists():
        notes.append(
            f"There is no {EVENTS}; this is from the events that single processes wrote by "
            "themselves, so most are missing."
        )
    if read.torn:
        places = ", ".join(dict.fromkeys(torn.file for torn in read.torn))
        notes.append(
            f"{_count(len(read.torn), 'line')} of {places} {_is_are(len(read.torn))} not whole and "
            "left out: a writer was killed while it wrote, or is writing now."
        )
    if refused:
        notes.append(
            f"{_count(sum(refused.values()), 'event')} left out because the fields are not those "
            "of this version: " + ", ".join(f"{n} {kind}" for kind, n in refused.items()) + "."
        )
    kinds = [event["kind"] for event in events if event["kind"] in ("run_started", "run_finished")]
    if "run_started" not in kinds:
        notes.append("There is no run_started event, so the sizes of the job are not known.")
    summary = build_summary(events)
    notes += _compare_with_written(run_dir, summary)
    exit_status = _exit_status(run_dir, notes)
    return RunData(
        name=name or path.resolve().name,
        path=path,
        events=events,
        summary=summary,
        exit_status=exit_status,
        ended=bool(kinds) and kinds[-1] == "run_finished",
        notes=tuple(notes),
    )


def _whole(events: Sequence[Event]) -> tuple[list[Event], Counter[str]]:
    """The events that have the fields of the table, and how many of each kind have not.

    Fields that the table does not know stay: a later version may write more.
    """
    whole: list[Event] = []
    refused: Counter[str] = Counter()
    for event in events:
        kind = event["kind"]
        known = {name: value for name, value in event.items() if name in FIELDS}
        allowed = (*KINDS[kind].required, *KINDS[kind].optional, "detail") if kind in KINDS else ()
        try:
            check(kind, {name: value for name, value in known.items() if name in allowed})
            for name in ("iteration", "epoch", "process"):
                if not isinstance(event[name], int):
                    raise ValueError(f"{name} is {event[name]!r}")
            if not math.isfinite(event["time"]):
                raise ValueError(f"time is {event['time']!r}")
        except (ValueError, TypeError):  # counted, and said on the page
            refused[str(kind)] += 1
        else:
            whole.append(event)
    return whole, refused


def _compare_with_written(run_dir: RunDirectory, summary: Summary) -> list[str]:
    """Whether summary.json says what the events say."""
    try:
        written: Any = json.loads(run_dir.summary.read_text())
    except FileNotFoundError:
        return ["There is no summary.json: the numbers are from the events so far."]
    except ValueError:
        return ["summary.json cannot be read: the numbers are from the events."]
    if not isinstance(written, dict):
        return ["summary.json cannot be read: the numbers are from the events."]
    # A field that only one of the two has comes from another version of this program.
    differ = [name for name, value in summary.items() if written.get(name, value) != value]
    if not differ:
        return []
    more = "" if len(differ) <= _NUM_NAMED else f" and {len(differ) - _NUM_NAMED} more"
    return [
        f"summary.json was written from other events: it differs in "
        f"{', '.join(differ[:_NUM_NAMED])}{more}. The numbers here are from the events."
    ]


def _exit_status(run_dir: RunDirectory, notes: list[str]) -> ExitStatus | None:
    try:
        return run_dir.read_exit_status()
    except (ValueError, TypeError):
        notes.append("exit_status.json cannot be read.")
        return None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _is_are(number: int) -> str:
    return "is" if number == 1 else "are"
