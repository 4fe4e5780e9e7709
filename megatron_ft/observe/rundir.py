"""The run directory: where a job leaves what it did, whatever dies and however often it restarts.

All processes of a job, and every later start of the same job, share one directory. Nobody owns it:
whoever comes first creates it. See docs/run_directory.md for the layout.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import secrets
import time
from pathlib import Path
from typing import Any

EVENTS = "events.jsonl"
TORN = "events.torn.jsonl"
SUMMARY = "summary.json"
EXIT_STATUS = "exit_status.json"
WANDB_ID = "wandb_id"

_PART = re.compile(r"events\.part-(\d+)\.jsonl")
_WANDB_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


def default_path(now: float | None = None) -> Path:
    """`runs/<timestamp>-<six hex digits>` in local time, for a job that was given no directory.

    Two jobs may start in one second. Two processes get two different answers, so one of them (the
    launcher) must ask and pass the answer on.
    """
    moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path("runs") / f"{moment}-{secrets.token_hex(3)}"


@dataclasses.dataclass(frozen=True)
class ExitStatus:
    """How one start of the job ended."""

    code: int
    """The job's exit code: 0 finished, 75 the plan ran out of ways, 64 bad flags."""
    message: str
    """One paragraph for a person: which rule failed and what to do. Empty when all went well."""
    time: float
    """Unix seconds."""


class RunDirectory:
    """One run's directory; creating the object creates the directory if nobody has yet.

    Args:
        path: the directory, or None for `default_path()`.

    Raises:
        ValueError: the path exists and is not a directory.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path is not None else default_path()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"run directory {self.path} exists and is not a directory")
        self.path.mkdir(parents=True, exist_ok=True)

    @property
    def events(self) -> Path:
        return self.path / EVENTS

    @property
    def torn(self) -> Path:
        return self.path / TORN

    @property
    def summary(self) -> Path:
        return self.path / SUMMARY

    def part(self, process: int) -> Path:
        """The event file that only this process writes."""
        return self.path / f"events.part-{process}.jsonl"

    def event_files(self) -> list[Path]:
        """Every file that may hold events: events.jsonl first, then the parts by process number."""
        parts = [(int(m[1]), p) for p in self.path.iterdir() if (m := _PART.fullmatch(p.name))]
        return [p for p in [self.events] if p.exists()] + [p for _, p in sorted(parts)]

    def wandb_id(self, preferred: str | None = None) -> str:
        """The one wandb run id of this job; all callers get the same, whoever asks first.

        Args:
            preferred: the id to take if the directory has none yet, as when a job in a new
                directory goes on from a checkpoint that carries the id of its run.

        Raises:
            ValueError: `preferred` is no valid wandb run id.
        """
        if preferred is not None and not _WANDB_ID.fullmatch(preferred):
            raise ValueError(f"not a wandb run id (letters, digits, - and _): {preferred!r}")
        target = self.path / WANDB_ID
        if not target.exists():
            candidate = _write_temporary(target, (preferred or secrets.token_hex(5)).encode())
            # A link, unlike a rename, fails when somebody was faster: the first id stays.
            with contextlib.suppress(FileExistsError):
                os.link(candidate, target)
            candidate.unlink()
        return target.read_text()

    def write_exit_status(self, code: int, message: str = "") -> None:
        """Leave the job's exit code and reason for the launcher and the user."""
        status = ExitStatus(code, message, time.time())
        write_json(self.path / EXIT_STATUS, dataclasses.asdict(status))

    def read_exit_status(self) -> ExitStatus | None:
        """The status left by the last start of the job, None if it left none (it was killed)."""
        try:
            text = (self.path / EXIT_STATUS).read_text()
        except FileNotFoundError:
            return None
        return ExitStatus(**json.loads(text))

    def clear_exit_status(self) -> None:
        """Called at each start, or a killed job would show the status of the start before it."""
        (self.path / EXIT_STATUS).unlink(missing_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` so that a reader, or a crash at any moment, sees the old or the new whole."""
    temporary = _write_temporary(path, data)
    os.replace(temporary, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of indented JSON; NaN and infinities are refused (ValueError)."""
    write_atomic(path, (json.dumps(value, indent=2, allow_nan=False) + "\n").encode())


def _write_temporary(path: Path, data: bytes) -> Path:
    """A synced file beside `path`, with a name that no other process or thread uses."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return temporary
