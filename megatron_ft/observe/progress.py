"""The lines that the elected writer prints while a job runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TextIO

from rich.console import Console
from rich.text import Text

from megatron_ft.observe.event_table import Event
from megatron_ft.observe.incidents import Incident, IncidentCollector, describe, step_line

_STYLES = {"run_finished": "bold", "fault_injected": "magenta", "eval": "cyan", "step": ""}


class Progress:
    """A listener of an `EventLog`: colours on a terminal, plain lines elsewhere.

    Under mpirun every rank's output looks like a terminal, whatever the job's is; the launcher
    says which it is through TTY_COMPATIBLE, which rich reads.

    Args:
        stream: where to print; standard output by default.
        every: print every n-th step; incidents are always printed.
    """

    def __init__(self, stream: TextIO | None = None, *, every: int = 1) -> None:
        self._console = Console(
            file=stream or sys.stdout, highlight=False, markup=False, emoji=False, soft_wrap=True
        )
        self._every = every
        self._collector = IncidentCollector()
        self._train_iters: int | None = None
        self._num_replicas: int | None = None

    def prepare(self, events: Iterable[Event]) -> None:
        """Learn the job's sizes from its events so far: for a writer elected in mid-run."""
        for event in events:
            if event["kind"] == "run_started":
                self._train_iters = event.get("train_iters")
                self._num_replicas = event["num_replicas"]

    def __call__(self, event: Event) -> None:
        self.prepare([event])
        item = self._collector.add(event)
        if item is None:
            return
        if isinstance(item, Incident):
            line = f"iteration {item.iteration:>6} | {item.text} (world epoch {item.epoch})"
            self._print(line, "red" if item.deaths else "blue")
        elif event["kind"] == "step":
            if event["iteration"] % self._every == 0:
                line = step_line(event, self._train_iters, self._num_replicas)
                lacking = self._num_replicas is not None and (
                    event["live_replicas"] < self._num_replicas
                )
                self._print(line, "yellow" if lacking else "green")
        else:
            style = _STYLES.get(event["kind"], "blue")
            self._print(f"iteration {event['iteration']:>6} | {describe(event)}", style)

    def _print(self, line: str, style: str) -> None:
        # One write of the whole line: other processes print to the same stream.
        self._console.print(Text(line, style=style))
