"""The thread that talks to wandb, so that nobody else ever waits for it.

Opening a run takes half a second offline and far longer when the network is slow; a repair takes
milliseconds. What is logged meanwhile waits in a queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.observe.event_table import Event
from megatron_ft.observe.incidents import incidents
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.wandb_rows import Row, RowBuilder

logger = logging.getLogger(__name__)

# A successor logs this much of the past again. wandb sends history every 15 s or more often.
REPLAY_SECONDS = 30.0
# wandb's default is 15 s; what is not flushed is lost when the writer is killed.
FLUSH_SECONDS = 1.0
# Rows of one iteration that come within this time become one row.
GATHER_SECONDS = 0.5
# A writer that hands over while it lives has this long to finish before its successor goes on.
HANDOVER_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class WandbSettings:
    """What `wandb.init` is told, apart from the run id."""

    project: str
    name: str | None = None
    entity: str | None = None
    directory: Path | None = None
    """Where wandb makes its folder `wandb`; None for the run directory."""
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mode: str | None = None
    """`online`, `offline`, `disabled`, or None for what WANDB_MODE and wandb's own settings say."""


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Queue item: a row that did not come from an event."""

    row: Row


@dataclasses.dataclass(frozen=True)
class Finish:
    """Queue item: the last one."""

    summary: Mapping[str, Any]
    exit_code: int


class WandbThread(threading.Thread):
    """Opens the run, logs the recent past and then what comes through `put`, finishes the run.

    Args: those of `WandbLog`; `run_id` is the job's.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        settings: WandbSettings,
        run_id: str,
        history: Callable[[], Sequence[Event]],
        process: int,
    ) -> None:
        super().__init__(name="wandb", daemon=True)
        self._run_dir = run_dir
        self._settings = settings
        self._run_id = run_id
        self._history = history
        self._process = process
        self._queue: queue.SimpleQueue[Event | Numbers | Finish] = queue.SimpleQueue()
        self._rows = RowBuilder()
        self._gathered: Row = {}
        self._run: Any = None
        self._opened = threading.Event()
        self.failed = False

    def put(self, item: Event | Numbers | Finish) -> None:
        self._queue.put(item)

    def wait_for_run(self) -> Any:
        """The open run; one that does nothing if opening failed."""
        self._opened.wait()
        return self._run

    def run(self) -> None:
        try:
            past = list(self._history())
            with _exclusive(self._run_dir.path / "wandb.lock"):
                self._run = self._open()
                self._opened.set()
                self._log_all(past)
        except Exception:
            # Whatever wandb raises, a chart is no reason to lose the training.
            self.failed = True
            logger.exception("wandb failed; training goes on without it")
            self._opened.set()

    def _open(self) -> Any:
        import wandb

        try:
            run = self._init()
        except Exception as error:
            # No key, no network, no such project, a full disk: reported, and training goes on.
            self.failed = True
            logger.error("wandb cannot open the run, going on without it: %s", error)
            return wandb.init(mode="disabled")
        # wandb drops rows whose own step number goes back; a metric of our own may repeat.
        run.define_metric("iteration")
        for names in ("*", "ft/*", "train/*", "validation/*"):
            run.define_metric(names, step_metric="iteration")
        return run

    def _init(self) -> Any:
        import wandb

        # Options that wandb calls experimental: use those that the installed version has.
        options: dict[str, Any] = {
            "x_transaction_log_flush_interval": FLUSH_SECONDS,
            "x_sync_dir_suffix": f"p{self._process}",
        }
        known = {key: value for key, value in options.items() if key in wandb.Settings.model_fields}
        directory = self._settings.directory or self._run_dir.path
        directory.mkdir(parents=True, exist_ok=True)
        return wandb.init(
            project=self._settings.project,
            name=self._settings.name,
            entity=self._settings.entity,
            dir=str(directory),
            config=dict(self._settings.config),
            mode=self._settings.mode,  # type: ignore[arg-type]
            id=self._run_id,
            resume="allow",
            settings=wandb.Settings(**known),
        )

    def _log_all(self, past: Sequence[Event]) -> None:
        for event in past:
            row = self._rows.row(event)
            if row and event["time"] >= past[-1]["time"] - REPLAY_SECONDS:
                self._log(row)
        # Events that happened while the history was read may be in the queue as well.
        known, news = {event["id"] for event in past}, True
        while True:
            try:
                item = self._queue.get(timeout=GATHER_SECONDS if self._gathered else None)
            except queue.Empty:
                self._flush()
                continue
            if isinstance(item, Finish):
                self._finish(item)
                return
            if isinstance(item, Numbers):
                self._log(item.row)
            elif item["id"] not in known:
                self._log(self._rows.row(item))
                if item["kind"] == "checkpoint" and news:
                    self._log_incidents()
                    news = False
                # The log of a long run is long: it is read again for new incidents only.
                news = news or item["kind"] in ("fault_detected", "repaired")

    def _log(self, row: Row) -> None:
        """Gather rows of one iteration into one, as long as no number would be overwritten."""
        shared = self._gathered.keys() & row.keys()
        if any(self._gathered[name] != row[name] for name in shared):
            self._flush()
        self._gathered |= row

    def _flush(self) -> None:
        if self._gathered:
            self._run.log(self._gathered)
        self._gathered = {}

    def _log_incidents(self) -> None:
        import wandb

        self._flush()
        columns: list[str | int] = [
            *("iteration", "epoch", "time", "detect_s", "repair_s", "incident"),
        ]
        rows = [
            [i.iteration, i.epoch, i.time, i.detect_s, i.repair_s, i.text]
            for i in incidents(self._history())
        ]
        if rows:
            table = wandb.Table(columns=columns, data=rows)
            self._run.log({"iteration": rows[-1][0], "ft/incidents": table})

    def _finish(self, item: Finish) -> None:
        self._flush()
        self._log_incidents()
        numbers = {k: v for k, v in item.summary.items() if isinstance(v, int | float | str)}
        self._run.summary.update({f"ft/{name}": value for name, value in numbers.items()})
        self._run.finish(exit_code=item.exit_code)


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Wait, but not for ever, until the writer before has finished; its death frees the lock too.

    Two processes that write to one run at a time would overwrite each other's rows.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    deadline = time.monotonic() + HANDOVER_SECONDS
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    logger.warning("the wandb writer before does not finish; not waiting longer")
                    break
                time.sleep(0.05)
        yield
    finally:
        os.close(fd)
