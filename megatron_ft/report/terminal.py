"""The report in a terminal: the digest of each run, where its time went, and a comparison."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ft.observe.digest import rows as digest_rows
from megatron_ft.report import wording
from megatron_ft.report.compare import change, differences, side_by_side
from megatron_ft.report.figures import headline, status_of, survived
from megatron_ft.report.load import RunData
from megatron_ft.report.rows import rows_of
from megatron_ft.report.timeline import Timeline
from megatron_ft.report.times import parts_of

_STYLES = {"good": "green", "warn": "yellow", "bad": "red", "plain": ""}


def print_report(runs: Sequence[RunData], console: Console, now: float | None = None) -> None:
    """Print what the page's head lines and tables say.

    Args:
        now: Unix seconds, for the age of a run that has not ended.
    """
    when = time.time() if now is None else now
    for run in runs:
        _print_run(run, console, when, alone=len(runs) == 1)
    if len(runs) > 1:
        _print_comparison(runs, console)


def _print_run(run: RunData, console: Console, now: float, *, alone: bool) -> None:
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    if not alone:
        table.add_row("run", Text(run.name, style="bold"))
    _, tone = status_of(run)
    table.add_row("result", Text(headline(run, now), style=_STYLES[tone]))
    for name, value in digest_rows(run.summary):
        if name != "result":
            table.add_row(name, value)
    table.add_row("survived", Text(survived(run, rows_of(run, Timeline(run.events)))))
    wall = run.summary["wall_s"]
    shown = [part for part in parts_of(run.events, run.accounts) if part.seconds > 0]
    for number, part in enumerate(shown):
        share = f"{part.seconds / wall:6.1%}  {wording.seconds(part.seconds):>12}  {part.label}"
        table.add_row("" if number else "time", Text(share))
    for note in run.notes:
        table.add_row("note", Text(note, style="yellow"))
    console.print(table)
    if not alone:
        console.print()


def _print_comparison(runs: Sequence[RunData], console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for run in runs:
        table.add_column(Text(run.name), overflow="fold")
    table.add_row("status", *(Text(status_of(run)[0]) for run in runs))
    for line in side_by_side(runs):
        cells = []
        for figure in line:
            changed = change(figure, line[0])
            cells.append(Text(f"{figure.text} ({changed})" if changed else figure.text))
        table.add_row(Text(line[0].name), *cells)
    console.print(table)
    for found in differences(runs):
        console.print(Text(f"{found.name} against {runs[0].name}: {found.text}"))
