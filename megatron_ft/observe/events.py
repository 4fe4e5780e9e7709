"""Writing events: one line of JSON each, in the file before the call returns.

The elected writer appends to events.jsonl, every other process to its own part file. When the
writer dies, `elect` makes another process go on in the same file.
"""

from __future__ import annotations

import collections
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_ft.observe.event_table import Event, check
from megatron_ft.observe.jsonl import (
    EventsRead,
    decode,
    encode,
    events_of_kind,
    merge_events,
    read_events,
)
from megatron_ft.observe.rundir import RunDirectory

logger = logging.getLogger(__name__)

Listener = Callable[[Event], None]

# Agreed events that a process remembers, in case it has to write them in the writer's place. The
# writer is at most one step behind or ahead of the others, and a step has a handful of events.
NUM_REMEMBERED = 64
TAIL_BYTES = 4 << 20
# Events that are kept while the disk is full; a step has a handful.
MAX_UNWRITTEN = 100_000


class AppendFile:
    """A file that lines are appended to, each by one write, so that lines never interleave."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write_line(self, line: bytes) -> None:
        """Append a line; what a killed writer left unfinished is closed with a newline first."""
        size = os.fstat(self.fd).st_size
        if size and os.pread(self.fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        view = memoryview(line)
        while view:
            view = view[os.write(self.fd, view) :]

    def sync(self) -> None:
        os.fsync(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class EventLog:
    """The events of one process, and through the run directory those of all.

    Args:
        run_dir: the run directory.
        process: this process's number, which no other process of this start of the job has.
        elected: whether this process writes events.jsonl.
        job: a name for this start of the job, the same in all its processes and different after a
            restart (the launcher's restart counter will do). It keeps the `agreed` events of two
            starts apart.
        clock: Unix seconds.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        process: int,
        *,
        elected: bool = False,
        job: str = "0",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run_dir = run_dir
        self.process = process
        self._elected = elected
        self.job = job
        self._clock = clock
        self._token = secrets.token_hex(6)
        self._count = 0
        self._last_time = 0.0
        self._lock = threading.RLock()
        self._main: AppendFile | None = None
        self._part: AppendFile | None = None
        self._remembered: collections.deque[Event] = collections.deque(maxlen=NUM_REMEMBERED)
        self._unwritten: collections.deque[Event] = collections.deque()
        self._said = False
        self._listeners: list[Listener] = []

    @property
    def elected(self) -> bool:
        return self._elected

    def add_listener(self, listener: Listener) -> None:
        """Call `listener` with each event that this process writes as the elected writer."""
        self._listeners.append(listener)

    def emit(
        self,
        kind: str,
        *,
        iteration: int,
        epoch: int,
        durable: bool = False,
        agreed: str | None = None,
        **fields: Any,
    ) -> Event:
        """Write one event; it outlives this process, and with `durable` the machine.

        Args:
            kind: one of `event_table.KINDS`.
            iteration: Megatron's iteration, from 1.
            epoch: the world epoch.
            durable: write to this process's own file and sync it to disk before returning: for
                what must be known although this process is about to die.
            agreed: a name, unique in this start of the job, under which several processes report
                one and the same thing (`step-17`). Only the elected writer writes it; the others
                remember it and write it if they are elected and find that the writer died first.
            fields: see `event_table.KINDS`.

        Raises:
            ValueError: kind or fields are not those of the table.
        """
        checked = check(kind, fields)
        assert not (durable and agreed), "agreed is written by one process, durable by each"
        with self._lock:
            self._last_time = max(self._last_time, self._clock())
            event: Event = {
                "id": f"{self.job}:{agreed}" if agreed else f"{self._token}.{self._count}",
                "time": self._last_time,
                "iteration": iteration,
                "epoch": epoch,
                "kind": kind,
                "process": self.process,
                **checked,
            }
            self._count += 1
            if durable:
                part = self._own_part()
                part.write_line(encode(event))
                part.sync()
            elif agreed and not self._elected:
                self._remembered.append(event)
                self._write_waiting()
                return event
            else:
                self._write(event)
        if self._elected:
            self._tell(event)
        return event

    def elect(self, elected: bool = True) -> None:
        """Become the elected writer, or stop being it.

        A new writer first writes the agreed events that its predecessor died before writing.
        """
        with self._lock:
            if elected == self._elected:
                return
            self._elected = elected
            missing: list[Event] = []
            if elected and self._remembered:
                written = self._written_ids()
                missing = [event for event in self._remembered if event["id"] not in written]
                for event in missing:
                    self._write(event)
            self._remembered.clear()
            self._close(main=True)
        for event in missing:
            self._tell(event)

    def read(self) -> list[Event]:
        """The events of all processes so far, in time order."""
        return read_events(self.run_dir).events

    def of_kind(self, kind: str) -> list[Event]:
        """As ``read``, of one kind only: without decoding the steps of a long run."""
        return events_of_kind(self.run_dir, kind)

    def merge(self) -> EventsRead:
        """`jsonl.merge_events`, to be called by the elected writer when the others are done."""
        with self._lock:
            self._write_waiting()
            # The merge replaces the file, and an open descriptor would go on in the old one.
            self._close(main=True)
            return merge_events(self.run_dir)

    def close(self) -> None:
        """Sync and close the files; a later event opens them again."""
        with self._lock:
            self._write_waiting()
            if self._unwritten:
                logger.error("%d events are lost: they could not be written", len(self._unwritten))
            for file in (self._main, self._part):
                if file is not None:
                    file.sync()
            self._close(main=True)
            self._close(main=False)

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)

    def _write(self, event: Event) -> None:
        """Write, or keep it to be written with the next event: training goes on meanwhile."""
        if len(self._unwritten) == MAX_UNWRITTEN:
            lost = self._unwritten.popleft()
            logger.error("an event is lost, %d others wait: %s", MAX_UNWRITTEN - 1, encode(lost))
        self._unwritten.append(event)
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._unwritten and self._try(encode(self._unwritten[0])):
            self._unwritten.popleft()

    def _try(self, line: bytes) -> bool:
        """Whether the line is in a file: events.jsonl of the elected writer, or the own part."""
        errors = []
        for main in (True, False) if self._elected else (False,):
            try:
                (self._own_main() if main else self._own_part()).write_line(line)
            except OSError as error:
                errors.append(str(error))
                self._close(main=main)
            else:
                if errors and not self._said:
                    logger.warning(
                        "events.jsonl cannot be written, using the part file: %s", errors
                    )
                self._said = bool(errors)
                return True
        if not self._said:
            logger.error("no event can be written; they wait until one can: %s", errors)
        self._said = True
        return False

    def _written_ids(self) -> set[str]:
        """Ids of the events at the end of events.jsonl, far more than a process remembers."""
        try:
            with open(self.run_dir.events, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return set()
        return {event["id"] for line in lines if (event := decode(line)) is not None}

    def _own_main(self) -> AppendFile:
        if self._main is None:
            self._main = AppendFile(self.run_dir.events)
        return self._main

    def _own_part(self) -> AppendFile:
        if self._part is None:
            self._part = AppendFile(self.run_dir.part(self.process))
        return self._part

    def _close(self, *, main: bool) -> None:
        file = self._main if main else self._part
        if main:
            self._main = None
        else:
            self._part = None
        if file is not None:
            file.close()
