"""A finished job as its run directory tells of it."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ft.observe.event_table import Event
from megatron_ft.observe.jsonl import read_events
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.summary import Summary, build_summary

DUMPS = "dumps"
"""Folder in a run directory for what hooks write down in the ranks."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished job."""

    returncode: int
    output: str
    directory: Path

    @functools.cached_property
    def events(self) -> list[Event]:
        return read_events(RunDirectory(self.directory)).events

    @functools.cached_property
    def summary(self) -> Summary:
        return dict(json.loads((self.directory / "summary.json").read_text()))

    @functools.cached_property
    def weights(self) -> dict[int, dict[str, Any]]:
        """Slot -> `digest` of what it held at the end, and `committed`, the step it was after."""
        paths = (self.directory / DUMPS).glob("weights-*.json")
        return {int(p.stem.partition("-")[2]): json.loads(p.read_text()) for p in paths}

    def census(self, process: int) -> list[dict[str, Any]]:
        """What a process held after each step (`hooks.census`); empty if nobody looked."""
        path = self.directory / DUMPS / f"census-{process}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    @property
    def steps(self) -> dict[int, Event]:
        return {event["iteration"]: event for event in self.of_kind("step")}

    @property
    def losses(self) -> dict[int, float]:
        return {iteration: event["lm_loss"] for iteration, event in self.steps.items()}

    @property
    def validation(self) -> list[float]:
        return [event["lm_loss"] for event in self.of_kind("eval")]

    def with_events(self, events: Sequence[Event]) -> Run:
        """The same run, had this been what happened."""
        other = dataclasses.replace(self)
        vars(other).update(vars(self))
        vars(other).update(events=list(events), summary=build_summary(events))
        return other

    def with_weights(self, weights: dict[int, dict[str, Any]]) -> Run:
        other = dataclasses.replace(self)
        vars(other).update(vars(self))
        vars(other).update(weights=weights)
        return other


def relative(a: float, b: float) -> float:
    """Relative difference of two losses."""
    return abs(a - b) / abs(a)
