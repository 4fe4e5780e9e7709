"""The summary of a run in a few lines for a person; every word is from summary.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

Row = tuple[str, Text]
_MAX_INCIDENTS = 12


def print_digest(summary: Mapping[str, Any], console: Console) -> None:
    """Print how the run ended, what it came to, who died and what that cost."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows(summary):
        table.add_row(name, value)
    console.print(table)


def rows(summary: Mapping[str, Any]) -> Iterator[Row]:
    """Name and value of each line; a value that is not as it should be is red."""
    yield "result", _result(summary)
    if summary["iterations"]:
        yield "training", Text(_training(summary))
        yield "loss", Text(_loss(summary))
        yield "batch", _batch(summary)
    yield from _incidents(summary)
    if summary["repairs"]:
        yield "cost", Text(_cost(summary))
    if summary["faults_injected"]:
        yield "faults", _faults(summary)


def _result(summary: Mapping[str, Any]) -> Text:
    status, code = summary["status"], summary["exit_code"]
    of_all = ""
    if summary["num_replicas"]:
        of_all = f" with {summary['live_replicas']} of {summary['num_replicas']} replicas"
    words = {"ok": "finished", "degraded": "finished degraded", "stopped": "stopped"}[status]
    how = f"exit code {code}" if code is not None else "no end was reported: killed, or running"
    reason = f": {summary['message']}" if summary["message"] else ""
    style = {"ok": "green", "degraded": "yellow", "stopped": "red"}[status]
    return Text(f"{words}{of_all}, {how}{reason}", style=style)


def _training(summary: Mapping[str, Any]) -> str:
    missing, redone = summary["missing_steps"], summary["steps_redone"]
    extra = f", without a record of {len(missing)} steps" if missing else ""
    again = f", {redone} of them done again after a restart" if redone else ""
    return (
        f"{summary['iterations']} iterations, {summary['tokens']:,} tokens in "
        f"{summary['wall_s']:.1f} s{again}{extra}"
    )


def _loss(summary: Mapping[str, Any]) -> str:
    validation = summary["validation_lm_loss"]
    after = f", {_short(validation)} in validation" if validation is not None else ""
    return (
        f"{_short(summary['first_lm_loss'])} at the first step, "
        f"{_short(summary['final_lm_loss'])} at the last{after}"
    )


def _batch(summary: Mapping[str, Any]) -> Text:
    wrong = summary["steps_with_wrong_microbatches"]
    if wrong:
        return Text(
            f"{wrong} steps did not sum {summary['global_microbatches']} microbatches", style="red"
        )
    return Text(f"{summary['global_microbatches']} microbatches in every step, as configured")


def _incidents(summary: Mapping[str, Any]) -> Iterator[Row]:
    incidents = summary["incidents"]
    for number, incident in enumerate(incidents[:_MAX_INCIDENTS]):
        name = "repairs" if number == 0 else ""
        yield name, Text(f"iteration {incident['iteration']}: {incident['text']}")
    if len(incidents) > _MAX_INCIDENTS:
        yield "", Text(f"and {len(incidents) - _MAX_INCIDENTS} more")


def _cost(summary: Mapping[str, Any]) -> str:
    lost = sum(summary["downtime_s"])
    time = f"{lost:.2f} s lost in all" if lost >= 0.01 else "no time lost that can be measured"
    count = summary["recomputed_microbatches"]
    again = f"{count} microbatch{'' if count == 1 else 'es'} computed again"
    held = sum(summary["overhead_bytes"].values())
    memory = f", {held / 2**20:.1f} MiB held by each process for copies" if held else ""
    return f"{time}, {again}, goodput {summary['goodput']:.1%}{memory}"


def _faults(summary: Mapping[str, Any]) -> Text:
    unfired = summary["faults_unfired"]
    text = f"{summary['faults_injected']} injected, {summary['faults_fired']} struck"
    if unfired:
        return Text(f"{text}; these never did: {', '.join(unfired)}", style="red")
    return Text(text)


def _short(loss: float | str | None) -> str:
    return f"{loss:.4f}" if isinstance(loss, float) else str(loss)
