"""The launcher's last resort: start the whole job again from its newest valid checkpoint.

Pure but for the environment: the launcher runs the job, this decides whether it runs again, and
says what the next start must know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import signal

EXIT_USAGE, EXIT_UNFIRED = 64, 65
FINAL = (0, EXIT_USAGE, EXIT_UNFIRED)
"""Codes after which another start would come to the same."""
EXIT_NO_PROGRESS = 76
"""The launcher's exit code when starting again has brought the job no further."""
MAX_IN_VAIN = 3
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 60.0

START = "MEGATRON_FT_START"
"""Set for the ranks: how many starts of the job there were before this one."""
RUN_DIR = "MEGATRON_FT_RUN_DIR"
"""Set for the ranks: the run directory, unless a flag names one."""
SKIP = "MEGATRON_FT_SKIP_CHECKPOINTS"
"""Set for the ranks: iterations, with commas, whose checkpoints earlier starts could not load."""
LAST_CODE = "MEGATRON_FT_LAST_CODE"
"""Set for the ranks: the exit code of the start before this one."""


@dataclass(frozen=True)
class Ended:
    """How one start of the job ended."""

    code: int
    stopped_by: signal.Signals | None = None
    """The signal that asked the launcher to end it."""
    checkpoint: int | None = None
    """Iteration of the newest checkpoint that this start completed."""
    loading: int | None = None
    """Iteration of the checkpoint that it was loading when it ended."""


@dataclass
class Restarts:
    """Decides after each start of a job whether there is another one.

    Args:
        limit: ``--max-restarts``.
    """

    limit: int
    done: int = 0
    in_vain: int = 0
    """Restarts in a row that completed no checkpoint newer than all before."""
    newest: int = -1
    last_code: int = 0
    suspect: int | None = None
    """The checkpoint with which the last start did not get as far as training."""
    skip: set[int] = field(default_factory=set)

    def again(self, end: Ended) -> bool:
        """Whether the job is to be started again; True counts the restart."""
        self.last_code = end.code
        if end.code in FINAL or end.stopped_by is not None:
            return False
        if end.checkpoint is not None and end.checkpoint > self.newest:
            self.newest, self.in_vain = end.checkpoint, 0
        elif self.done:
            self.in_vain += 1
        if end.checkpoint is not None:
            # Written anew, what could not be loaded before is another one now.
            self.skip = {iteration for iteration in self.skip if iteration > end.checkpoint}
        # Once may be a death of its own while the data were prepared; twice is the checkpoint.
        if end.loading is not None and end.loading == self.suspect:
            self.skip.add(end.loading)
            # What comes again after an older one is progress.
            self.newest = min(self.newest, end.loading - 1)
        self.suspect = end.loading
        if self.gave_up or self.done == self.limit:
            return False
        self.done += 1
        return True

    @property
    def gave_up(self) -> bool:
        """Whether there is no further restart because they bring the job no further."""
        return self.in_vain >= MAX_IN_VAIN

    @property
    def pause_s(self) -> float:
        """How long to wait before the next start, longer when the last ones were in vain."""
        return float(min(FIRST_PAUSE_S * 2**self.in_vain, LAST_PAUSE_S))

    @property
    def environment(self) -> Mapping[str, str]:
        """What the ranks of the next start must know."""
        told = {START: str(self.done)}
        if self.done:
            told[LAST_CODE] = str(self.last_code)
        if self.skip:
            told[SKIP] = ",".join(map(str, sorted(self.skip)))
        return told

    @property
    def message(self) -> str:
        """Why there is no further restart, for a person; empty where nobody needs to know."""
        if self.gave_up:
            return (
                f"{MAX_IN_VAIN} restarts in a row completed no new checkpoint, so another one "
                f"would not either (last exit code {self.last_code}). See the output above for "
                "the cause; save more often (--save, --save-interval) if failures are frequent"
            )
        if self.done and self.done == self.limit and self.last_code not in FINAL:
            return f"all {self.limit} restarts (--max-restarts) are used up"
        return ""
