"""One Weights & Biases run for the whole job, whatever dies.

The run id lies in the run directory. The elected writer opens the run with `resume="allow"`, and
whoever is elected next opens the same run again and goes on. What a killed writer had handed to
wandb but wandb had not yet written is logged a second time by its successor, from the events. A
failing wandb is reported and then left alone; training does not depend on it.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ft.observe.event_table import Event
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.wandb_thread import (
    HANDOVER_SECONDS,
    Finish,
    Numbers,
    WandbSettings,
    WandbThread,
)

__all__ = ["WandbLog", "WandbSettings"]

logger = logging.getLogger(__name__)


class WandbLog:
    """The job's wandb run, seen from one process; silent unless `start` was called.

    An instance is a listener for `EventLog.add_listener`.

    Args:
        run_dir: keeps the run id.
        settings: None when the user did not ask for wandb; then every call does nothing.
        history: all events so far (`EventLog.read`).
        process: this process's number, to keep the folders of two writers apart.
        checkpoint_id: the run id of the checkpoint that training goes on from, if it has one.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        settings: WandbSettings | None,
        *,
        history: Callable[[], Sequence[Event]],
        process: int,
        checkpoint_id: str | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._settings = settings
        self._history = history
        self._process = process
        self._checkpoint_id = checkpoint_id
        self._thread: WandbThread | None = None

    @property
    def active(self) -> bool:
        """Whether this process has the run open, or is opening it."""
        return self._thread is not None and not self._thread.failed

    @property
    def run_id(self) -> str | None:
        """To be kept in checkpoints; None when there is no run."""
        return self._run_dir.wandb_id(self._checkpoint_id) if self._settings else None

    @property
    def run(self) -> Any:
        """The `wandb.Run`; waits until it is open. A run that does nothing if that failed."""
        assert self._thread is not None, "only the elected writer has a run"
        return self._thread.wait_for_run()

    def start(self) -> None:
        """Open the run, or resume it, in the background: called on becoming the elected writer."""
        if self._settings is None or self._settings.mode == "disabled" or self._thread is not None:
            return
        if importlib.util.find_spec("wandb") is None:
            logger.warning("wandb was asked for and is not installed; going on without it")
            return
        run_id = self._run_dir.wandb_id(self._checkpoint_id)
        self._thread = WandbThread(
            self._run_dir, self._settings, run_id, self._history, self._process
        )
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Log an event; does nothing in a process that is not the writer."""
        if self._thread is not None and self.active:
            self._thread.put(event)

    def log(self, data: Mapping[str, Any], iteration: int) -> None:
        """Log further numbers of an iteration; one-element tensors and arrays become floats."""
        if self._thread is not None and self.active:
            row = {name: v.item() if hasattr(v, "item") else v for name, v in data.items()}
            self._thread.put(Numbers({**row, "iteration": iteration}))

    def close(
        self,
        summary: Mapping[str, Any] | None = None,
        *,
        exit_code: int = 0,
        timeout_s: float = HANDOVER_SECONDS,
    ) -> None:
        """Finish the run: at the end of the job, or when another process is elected.

        Args:
            summary: the fields of summary.json, shown as the run's summary.
            exit_code: not 0 marks the run as failed.
            timeout_s: how long to wait for wandb; 0 lets it finish by itself in the background.
        """
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        thread.put(Finish(summary or {}, exit_code))
        thread.join(timeout_s)
        if timeout_s and thread.is_alive():
            logger.warning("wandb did not finish within %g s; not waiting any longer", timeout_s)
