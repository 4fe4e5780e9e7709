"""Talk to a running job: who serves what, let a replica leave, start processes, list incidents.

    python tools/ft_ctl.py runs/mine status
    python tools/ft_ctl.py runs/mine drain 2        replica 2 leaves at the next step; its
                                                    processes end, so its hosts can be serviced
    python tools/ft_ctl.py runs/mine respawn        fill all vacant slots with new processes
    python tools/ft_ctl.py runs/mine incidents      works after the job has ended, too

Orders go to the socket ``control.sock`` in the run directory, on the host of the process that
writes the events. Exit codes: 0 done, 1 refused or nobody answers, 64 wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from megatron_ft.control.protocol import ControlError, ask
from megatron_ft.observe.incidents import incidents
from megatron_ft.observe.jsonl import read_events
from megatron_ft.observe.rundir import RunDirectory

EXIT_USAGE = 64


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"ft_ctl: {message}\n{self.format_usage()}")


def arguments() -> argparse.Namespace:
    parser = _Parser(
        prog="ft_ctl", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the job's --ft-run-dir")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="wait so long (default 120)"
    )
    orders = parser.add_subparsers(dest="order", required=True, parser_class=_Parser)
    orders.add_parser("status", help="who serves which slot")
    drain = orders.add_parser("drain", help="let a replica leave; its processes end")
    drain.add_argument("replica", type=int)
    orders.add_parser("respawn", help="fill all vacant slots with new processes")
    orders.add_parser("incidents", help="what died, and what was done")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        if options.order == "incidents":
            return print_incidents(options, console)
        message: dict[str, Any] = {"order": options.order}
        if options.order == "drain":
            message["replica"] = options.replica
        answer = ask(options.run_dir, message, options.timeout)
    except (ControlError, OSError) as error:
        print(f"ft_ctl: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(answer))
    elif options.order == "status":
        print_status(answer, console)
    elif options.order == "drain":
        ended = ", ".join(map(str, answer["processes"]))
        console.print(
            f"replica {options.replica} left after iteration {answer['iteration']}: "
            f"processes {ended} end"
        )
    else:
        console.print(
            f"asked after iteration {answer['iteration']}: new processes take their slots when "
            "they have built their stages (status shows them)"
        )
    return 0


def print_status(answer: dict[str, Any], console: Console) -> None:
    """One row a slot, then the pool."""
    table = Table(box=None, pad_edge=False)
    for name in ("slot", "replica", "stage", "tp", "process", "pid"):
        table.add_column(name, justify="right")
    table.add_column("")
    drained, barred = set(answer["drained_replicas"]), set(answer["barred_slots"])
    for row in answer["slots"]:
        process = row["process"]
        note = "writes for all" if process == answer["elected"] else ""
        if process is None:
            note = "vacant"
            if row["slot"] in barred:
                note += ", its replacements keep dying"
            elif row["replica"] in drained:
                note += ", asked to leave"
        table.add_row(
            *(str(row[name]) for name in ("slot", "replica", "stage", "tp")),
            "-" if process is None else str(process),
            str(answer["pids"].get(str(process), "-")),
            note,
        )
    console.print(table)
    for process in map(str, answer["pool"]):
        if process in answer["building"]:
            state = f"builds for slot {answer['building'][process]}"
        elif process in answer["ready"]:
            state = f"ready, has built slot {answer['ready'][process]}"
        else:
            state = "waits"
        pid = answer["pids"].get(process, "-")
        console.print(f"pool: process {process} (pid {pid}) {state}", highlight=False)
    console.print(
        f"iteration {answer['iteration']} committed, epoch {answer['epoch']}, "
        f"{len(answer['whole_replicas'])} replicas serve, {len(answer['dark_replicas'])} dark",
        highlight=False,
    )


def print_incidents(options: argparse.Namespace, console: Console) -> int:
    """From the event log, so that it works for a job that has ended."""
    if not options.run_dir.is_dir():
        raise ControlError(f"no run directory at {options.run_dir}")
    run_dir = RunDirectory(options.run_dir)
    if not run_dir.event_files():
        raise ControlError(f"{options.run_dir} holds no events; is it a run directory?")
    found = incidents(read_events(run_dir).events)
    if options.json:
        keys = ("time", "iteration", "epoch", "repair_s", "text")
        print(json.dumps([{key: getattr(i, key) for key in keys} for i in found]))
        return 0
    for incident in found:
        when = time.strftime("%H:%M:%S", time.localtime(incident.time))
        line = f"{when} iteration {incident.iteration}, epoch {incident.epoch}: {incident.text}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(found)} incidents", highlight=False)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
