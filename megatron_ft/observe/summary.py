"""summary.json: what a run came to, computed from its events and from nothing else.

`python -m megatron_ft.observe.summary RUN_DIR` builds it again and prints it, in a few lines or,
with `--all`, field by field; this also works for a run that was killed before it could write one.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_ft.observe.accounting import Accounts, account
from megatron_ft.observe.digest import print_digest
from megatron_ft.observe.event_table import Event, spell_float
from megatron_ft.observe.jsonl import read_events
from megatron_ft.observe.rundir import RunDirectory, write_json

Summary = dict[str, Any]


def build_summary(events: Sequence[Event]) -> Summary:
    """Compute every field of docs/run_directory.md.

    Args:
        events: all events of the run in time order, as `read_events` returns them.

    Returns:
        A mapping that `rundir.write_json` accepts; fields that the run never got to are None.
    """
    by_kind: dict[str, list[Event]] = {}
    start: Event = {}
    end: Event = {}
    for event in events:
        by_kind.setdefault(event["kind"], []).append(event)
        if event["kind"] == "run_started":
            start, end = event, {}
        elif event["kind"] == "run_finished":
            end = event
    accounts = account(events)
    steps = accounts.steps
    num_microbatches = start.get("global_microbatches")
    tokens = sum(e["microbatches"] for e in steps) * _tokens_per_microbatch(start)
    per_process = accounts.wall_s * start.get("num_processes", 0)
    detect = [i.detect_s for i in accounts.incidents if i.detect_s is not None]
    repair = [i.repair_s for i in accounts.incidents]
    validation = [e for e in by_kind.get("eval", []) if e.get("split") in (None, "validation")]
    return {
        "status": end.get("status", "stopped"),
        "exit_code": end.get("exit_code"),
        "message": end.get("message", ""),
        "iterations": steps[-1]["iteration"] if steps else 0,
        "missing_steps": _missing(steps),
        "starts": len(by_kind.get("run_started", [])),
        "steps_redone": accounts.num_redone,
        "restarts": len(by_kind.get("run_restarted", [])),
        "restart_down_s": [e["down_s"] for e in by_kind.get("run_restarted", []) if "down_s" in e],
        "num_replicas": start.get("num_replicas"),
        "live_replicas": steps[-1]["live_replicas"] if steps else None,
        "first_lm_loss": _number(steps[0]["lm_loss"] if steps else None),
        "final_lm_loss": _number(steps[-1]["lm_loss"] if steps else None),
        "validation_lm_loss": _number(validation[-1]["lm_loss"] if validation else None),
        "tokens": tokens,
        "global_microbatches": num_microbatches,
        "steps_with_wrong_microbatches": sum(
            e["microbatches"] != e.get("planned_microbatches", num_microbatches) for e in steps
        ),
        **_faults(by_kind),
        "repairs": len(accounts.incidents),
        "detect_s": detect,
        "repair_s": repair,
        "downtime_s": accounts.downtime_s,
        "recomputed_microbatches": _recomputed(by_kind, accounts),
        "wall_s": accounts.wall_s,
        "goodput": accounts.goodput,
        "effective_tokens_per_second_per_process": tokens / per_process if per_process else 0.0,
        "step_seconds": percentiles([float(e["seconds"]) for e in steps]),
        "detect_s_percentiles": percentiles(detect),
        "repair_s_percentiles": percentiles(repair),
        "downtime_s_percentiles": percentiles(accounts.downtime_s),
        "checkpoints": len(by_kind.get("checkpoint", [])),
        "overhead_bytes": _overhead(events),
        "incidents": [
            {"iteration": i.iteration, "epoch": i.epoch, "time": i.time, "text": i.text}
            for i in accounts.incidents
        ],
        "versions": start.get("versions", {}),
        "flags": start.get("flags", {}),
    }


def write_summary(run_dir: RunDirectory) -> Summary:
    """Build the summary from the events in the run directory and replace summary.json."""
    summary = build_summary(read_events(run_dir).events)
    write_json(run_dir.summary, summary)
    return summary


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, 90th and 99th percentile and maximum; empty for no values."""
    if not values:
        return {}
    if len(values) == 1:
        return dict.fromkeys(("p50", "p90", "p99", "max"), values[0])
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {"p50": cuts[49], "p90": cuts[89], "p99": cuts[98], "max": max(values)}


def _tokens_per_microbatch(start: Event) -> int:
    return int(start["micro_batch_size"] * start["seq_length"]) if start else 0


def _missing(steps: Sequence[Event]) -> list[int]:
    """Iterations between the first and the last committed that left no `step` event."""
    if not steps:
        return []
    present = {event["iteration"] for event in steps}
    return [i for i in range(steps[0]["iteration"], steps[-1]["iteration"]) if i not in present]


def _number(value: float | None) -> float | str | None:
    return None if value is None else spell_float(value)


def _faults(by_kind: dict[str, list[Event]]) -> dict[str, Any]:
    """Distinct specs: asked for by name, or drawn from a rate and carried out."""
    asked = {spec for event in by_kind.get("run_started", []) for spec in event.get("faults", [])}
    fired = {event["fault"] for event in by_kind.get("fault_injected", [])}
    return {
        "faults_injected": len(asked | fired),
        "faults_fired": len(fired),
        "faults_unfired": sorted(asked - fired),
    }


def _recomputed(by_kind: dict[str, list[Event]], accounts: Accounts) -> int:
    """Reported with the step or with the repair, by whichever part of the runtime knows."""
    in_steps = sum(e.get("recomputed_microbatches", 0) for e in by_kind.get("step", []))
    in_repairs = sum(i.events[-1].get("recomputed_microbatches", 0) for i in accounts.incidents)
    return int(in_steps or in_repairs)


def _overhead(events: Sequence[Event]) -> dict[str, int]:
    """The most that any event reported, for each use of memory."""
    most: dict[str, int] = {}
    for event in events:
        for use, size in event.get("overhead_bytes", {}).items():
            most[use] = max(int(size), most.get(use, 0))
    return most


def print_summary(summary: Summary, console: Console) -> None:
    """Print every field: numbers, then incidents."""
    table = Table(show_header=False, box=None)
    for name, value in summary.items():
        if name not in ("incidents", "versions", "flags"):
            table.add_row(name, _cell(value))
    for name, version in summary["versions"].items():
        table.add_row(f"version of {name}", str(version))
    console.print(table)
    for incident in summary["incidents"]:
        line = f"iteration {incident['iteration']}, epoch {incident['epoch']}: {incident['text']}"
        console.print(line, style="red", highlight=False, markup=False)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}" if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list):
        shown = ", ".join(map(_cell, value[:8])) or "-"
        return shown + (f", ... ({len(value)} in all)" if len(value) > 8 else "")
    return "-" if value in (None, "") else str(value)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_ft.observe.summary",
        description="Build summary.json of a run again from its events, and print it.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    parser.add_argument("--all", action="store_true", help="every field, not the few lines")
    args = parser.parse_args(argv)
    if not args.run_dir.is_dir() or not RunDirectory(args.run_dir).event_files():
        parser.error(f"{args.run_dir} holds no events; is it a run directory?")
    summary = write_summary(RunDirectory(args.run_dir))
    (print_summary if args.all else print_digest)(summary, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
