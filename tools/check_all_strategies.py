"""Whether the run of examples/all_strategies.sh did what the script says; exit code 1 if not."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# Works in a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ft.observe.event_table import Event
from megatron_ft.observe.jsonl import read_events
from megatron_ft.observe.rundir import RunDirectory
from megatron_ft.observe.summary import build_summary

STORY = {
    "dark": "replica 1 goes dark before the stage is lost",
    "adopted": "a neighbour adopts slot 3 then",
    "filled": "and slot 3 is filled by a new process before the stage is lost",
    "rebuilt": "the lost stage is rebuilt once",
    "back": "both of its slots are served again",
}


def problems(events: Sequence[Event], iterations: int, lost: int) -> Iterator[str]:
    """What did not happen, a sentence each."""
    summary = build_summary(events)
    if summary["status"] != "ok" or summary["exit_code"] != 0:
        yield f"status {summary['status']}, exit code {summary['exit_code']}"
    if summary["iterations"] != iterations or summary["missing_steps"]:
        yield f"{summary['iterations']} iterations of {iterations} were committed"
    if summary["steps_with_wrong_microbatches"]:
        yield f"{summary['steps_with_wrong_microbatches']} steps had a wrong batch"
    if summary["faults_unfired"]:
        yield f"did not strike: {', '.join(summary['faults_unfired'])}"

    # By time: who fills a slot may report it in the iteration that was committed last.
    struck = [e["kind"] == "fault_injected" and e["iteration"] == lost for e in events]
    at = struck.index(True) if any(struck) else len(events)

    def filled(part: Sequence[Event]) -> set[int]:
        return {e["slot"] for e in part if e["kind"] == "slot_filled"}

    happened = {
        "dark": [e["replica"] for e in events[:at] if e["kind"] == "replica_dark"] == [1],
        "adopted": [e["slot"] for e in events[:at] if e["kind"] == "stage_adopted"] == [3],
        "filled": 3 in filled(events[:at]),
        "rebuilt": [e["stage"] for e in events[at:] if e["kind"] == "stage_rebuilt"] == [1],
        "back": filled(events[at:]) >= {2, 3},
    }
    for name, text in STORY.items():
        if not happened[name]:
            yield f"this did not happen: {text}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--lost", type=int, required=True, help="iteration of the stage's loss")
    arguments = parser.parse_args(argv)
    events = read_events(RunDirectory(arguments.run_dir)).events
    found = list(problems(events, arguments.iters, arguments.lost))
    for problem in found:
        print(f"all strategies: {problem}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
