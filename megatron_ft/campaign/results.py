"""What a case came to: kept as JSON, so that a campaign goes on where it was, and shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ft.observe.rundir import write_json


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A judged case, or a fault-free run."""

    campaign: str
    name: str
    passed: bool
    fingerprint: str
    """Of the command and the code that ran; another one means: run it again."""
    seconds: float
    """Of the launch."""
    problems: list[str] = field(default_factory=list)
    """`check: what is wrong`; of a passed control what it had to fail by."""
    control: bool = False
    faults: int = 0
    """That fired."""
    steps: int = 0
    repairs: int = 0
    difference: float | None = None
    """Largest relative difference of losses from the fault-free run, or that of the end."""
    doctorings: int = 0
    """Falsifications of the run, all of which turned a check red."""
    status: str = ""
    run_dir: str = ""
    kept: bool = False
    """Not run now but before."""


def write_outcome(path: Path, outcome: Outcome) -> None:
    write_json(path, dataclasses.asdict(outcome))


def read_outcome(path: Path, fingerprint: str) -> Outcome | None:
    """The outcome that was kept, if it passed and the same would be run now."""
    try:
        fields: Any = json.loads(path.read_text())
        outcome = Outcome(**{**fields, "kept": True})
    except (FileNotFoundError, ValueError, TypeError):
        return None  # never run, interrupted, or written by another version: run it
    return outcome if outcome.passed and outcome.fingerprint == fingerprint else None


def result_json(outcomes: Sequence[Outcome], references: Sequence[Outcome]) -> dict[str, Any]:
    """All results of a campaign tool's run."""
    return {
        "passed": all(o.passed for o in (*outcomes, *references)),
        "cases": len(outcomes),
        "failed": [f"{o.campaign}/{o.name}" for o in (*outcomes, *references) if not o.passed],
        "faults": sum(o.faults for o in outcomes),
        "launch_seconds": sum(o.seconds for o in (*outcomes, *references)),
        "results": [dataclasses.asdict(o) for o in outcomes],
        "references": [dataclasses.asdict(o) for o in references],
    }


def print_table(
    outcomes: Sequence[Outcome], references: Sequence[Outcome], console: Console
) -> None:
    """A line for each case, the problems below, and what it comes to."""
    table = Table(box=None, pad_edge=False)
    for name in ("campaign", "case"):
        table.add_column(name, overflow="fold")
    for name in ("faults", "repairs", "steps", "difference", "controls", "s"):
        table.add_column(name, justify="right")
    table.add_column("result")
    before = ""
    for o in outcomes:
        table.add_row(
            o.campaign if o.campaign != before else "",
            o.name,
            str(o.faults),
            str(o.repairs),
            str(o.steps),
            "-" if o.difference is None else f"{o.difference:.1e}",
            f"{o.doctorings} red" if o.doctorings else "-",
            f"{o.seconds:.0f}" + (" (kept)" if o.kept else ""),
            _verdict(o),
        )
        before = o.campaign
    console.print(table)
    for o in (*outcomes, *references):
        for problem in [] if o.passed else o.problems:
            console.print(Text(f"{o.campaign}/{o.name}: {problem}", style="red"), soft_wrap=True)
    failed = [o for o in (*outcomes, *references) if not o.passed]
    seconds = sum(o.seconds for o in (*outcomes, *references) if not o.kept)
    console.print(
        Text(
            f"{len(outcomes)} cases and controls, {len(references)} fault-free runs, "
            f"{sum(o.faults for o in outcomes)} faults fired, {seconds:.0f} s of launches: "
            + (f"{len(failed)} failed" if failed else "all passed"),
            style="red" if failed else "green",
        ),
        soft_wrap=True,
    )


def _verdict(outcome: Outcome) -> Text:
    if not outcome.passed:
        return Text("FAILED", style="bold red")
    return Text("red, as it must be" if outcome.control else "passed", style="green")
