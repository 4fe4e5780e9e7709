"""What a study says: tables, numbers and figures, written as Markdown, JSON and PNG."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cells import Cell
from .results import Result

Draw = Callable[[Path], None]


@dataclass(frozen=True)
class Table:
    """A table of text."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.headings, ["---"] * len(self.headings), *self.rows]
        body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"**{self.title}**\n\n{body}\n"


@dataclass
class Report:
    """What a study says of the cells that are done."""

    name: str
    """Of the subcommand and the files."""
    title: str
    setting: list[str]
    """What was run and how the papers' hours became iterations: sentences."""
    tables: list[Table] = field(default_factory=list)
    findings: list[str] = field(default_factory=list)
    """What follows from the tables, orders that are not reproduced among it."""
    numbers: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, Draw] = field(default_factory=dict)
    """Name -> what draws it into a PNG file."""


@dataclass(frozen=True)
class Origin:
    """Where a report comes from."""

    command: str
    seeds: Sequence[int]
    cells_done: int
    cells_left: int
    skipped: Sequence[str]
    """Cells that this version of the product cannot run, and why."""
    failed: Sequence[str]


def write(
    report: Report,
    origin: Origin,
    cells: Mapping[str, Cell],
    results: Mapping[str, Result],
    directory: Path,
) -> list[Path]:
    """Write a report's files; returns them.

    Args:
        cells: The study's cells by their keys.
        results: Those that are done.
    """
    directory.mkdir(parents=True, exist_ok=True)
    done = [results[key] for key in cells if key in results]
    pictures = []
    for name, draw in report.figures.items():
        path = directory / f"{report.name}-{name}.png"
        draw(path)
        pictures.append(path)
    text = directory / f"{report.name}.md"
    text.write_text(markdown(report, origin, done, [path.name for path in pictures]))
    data = directory / f"{report.name}.json"
    content = {
        "study": report.name,
        "command": origin.command,
        "seeds": list(origin.seeds),
        "setting": report.setting,
        "findings": report.findings,
        "numbers": report.numbers,
        "tables": [
            {"title": t.title, "headings": t.headings, "rows": [list(row) for row in t.rows]}
            for t in report.tables
        ],
        "skipped": list(origin.skipped),
        "failed": list(origin.failed),
        "versions": done[0].versions if done else {},
        "machine": done[0].machine if done else {},
        "cells": [_kept(cells[key], results[key]) for key in cells if key in results],
    }
    data.write_text(json.dumps(content, indent=1, default=str) + "\n")
    return [text, data, *pictures]


def _kept(cell: Cell, result: Result) -> dict[str, Any]:
    return {
        "name": cell.name,
        "seed": cell.seed,
        "command": result.command,
        "perplexity": result.perplexity,
        "validation": [[at, round(loss, 6)] for at, loss in result.validation],
        "faults": list(cell.faults),
        "faults_fired": result.faults_fired,
        "rebuilt": result.rebuilt,
        "median_step_s": result.median_step_s(),
        "wall_s": result.wall_s,
        "code": result.code,
    }


def markdown(
    report: Report, origin: Origin, done: Sequence[Result], pictures: Sequence[str]
) -> str:
    """The page of a study."""
    parts = [f"# {report.title}", " ".join(report.setting)]
    if origin.cells_left:
        parts.append(
            f"**Not complete:** {origin.cells_left} of {origin.cells_done + origin.cells_left} "
            "jobs have not run yet; the same command goes on with them."
        )
    parts += [table.markdown().rstrip() for table in report.tables]
    if report.findings:
        parts.append("\n".join(f"* {finding}" for finding in report.findings))
    parts += [f"![{name}]({name})" for name in pictures]
    if origin.skipped:
        parts.append("Skipped: " + "; ".join(origin.skipped) + ".")
    if origin.failed:
        parts.append("Failed: " + "; ".join(text.splitlines()[0] for text in origin.failed) + ".")
    parts.append("## How it was made")
    parts.append(f"```bash\n{origin.command}\n```")
    seeds = ", ".join(map(str, origin.seeds))
    lines = [f"Seeds {seeds} (of training 1234 plus the seed, and of the failures)."]
    if done:
        first = done[0]
        machine, versions = first.machine, first.versions
        minutes = sum(result.wall_s for result in done) / 60
        codes = len({result.code for result in done})
        lines += [
            f"{len(done)} jobs in {minutes:.0f} minutes on {machine.get('cores')} cores of "
            f"{machine.get('cpu')}, {machine.get('memory_gib')} GiB;",
            ", ".join(f"{name} {version}" for name, version in versions.items()) + ".",
            *([f"They ran with {codes} states of megatron_ft's code."] if codes > 1 else []),
            f"Commands, seeds and curves of all jobs are in `{report.name}.json`; the first is",
        ]
    parts.append("\n".join(lines))
    if done:
        parts.append(f"```bash\n{done[0].command}\n```")
    return "\n\n".join(parts) + "\n"
