"""Kill random ranks of a live run, with a given mean time between failures and seed.

    python tools/punisher.py runs/mine --mtbf 20 --seconds 120 --seed 7

Waits for the run to train, then sends SIGKILL to one of its processes on this host again and again,
at times drawn from an exponential distribution, and prints what it did and what the run made of it:
its steps, its repairs, and the open files, threads and memory of the process that lived longest.
Ends with the run, at the latest; with ``--json FILE`` it leaves the same as JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

SCRIPTS = ("pretrain_llama_ft.py", "campaign_rank.py")
"""What a rank runs."""
LOOK_S = 2.0
"""Between two looks at what the processes hold."""


@dataclass(frozen=True)
class Sample:
    """What a process holds at a time."""

    time: float
    files: int
    threads: int
    resident: int
    """Bytes of memory that are its own and present."""


@dataclass
class Tally:
    """What was done and seen."""

    kills: int = 0
    skipped: int = 0
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    """By pid."""

    def look(self, ranks: list[psutil.Process]) -> None:
        for rank in ranks:
            try:
                with rank.oneshot():
                    sample = Sample(
                        time.monotonic(),
                        rank.num_fds(),
                        rank.num_threads(),
                        rank.memory_full_info().uss,
                    )
            except psutil.NoSuchProcess:
                continue  # it has just been killed, or has ended
            self.samples.setdefault(rank.pid, []).append(sample)

    def oldest(self) -> list[Sample]:
        """The samples of the process that was seen for the longest time."""
        return max(self.samples.values(), key=lambda s: s[-1].time - s[0].time, default=[])


def main() -> int:
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if not wait_for_training(options.run_dir, options.patience):
        print(f"no step in {options.run_dir} within {options.patience:g} s", file=sys.stderr)
        return 1
    tally = punish(options, console)
    result = report(options, tally)
    print_report(result, console)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="the --ft-run-dir of the run")
    parser.add_argument("--mtbf", type=float, default=20.0, help="mean seconds between failures")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--least", type=int, default=1, help="kill nobody when so few processes are left"
    )
    parser.add_argument(
        "--keep-replica",
        action="store_true",
        help="kill nobody while fewer than two replicas serve: the job would have nothing to go "
        "on with, whatever the strategies",
    )
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="leave the result as JSON")
    return parser.parse_args()


def punish(options: argparse.Namespace, console: Console) -> Tally:
    """Kill until the time is over or the run has ended."""
    chance = random.Random(options.seed)
    tally = Tally()
    end = time.monotonic() + options.seconds
    due = time.monotonic() + chance.expovariate(1 / options.mtbf)
    while time.monotonic() < end:
        time.sleep(max(0.0, min(due - time.monotonic(), LOOK_S, end - time.monotonic())))
        ranks = ranks_of(options.run_dir)
        if not ranks:
            break
        tally.look(ranks)
        if time.monotonic() < due:
            continue
        due = time.monotonic() + chance.expovariate(1 / options.mtbf)
        step = last_step(options.run_dir)
        if len(ranks) <= options.least or (options.keep_replica and step["live_replicas"] < 2):
            tally.skipped += 1
            continue
        victim = chance.choice(ranks)
        victim.kill()
        tally.kills += 1
        console.print(f"killed pid {victim.pid} of {len(ranks)} after step {step['iteration']}")
    return tally


def report(options: argparse.Namespace, tally: Tally) -> dict[str, Any]:
    """What was done, and what the run has made of it."""
    from megatron_ft.observe.jsonl import read_events
    from megatron_ft.observe.rundir import RunDirectory
    from megatron_ft.observe.summary import build_summary

    events = read_events(RunDirectory(options.run_dir)).events
    summary = build_summary(events)
    seconds = [float(e["seconds"]) for e in events if e["kind"] == "step"]
    oldest = tally.oldest()
    # The first half of its life holds what a process acquires once: imports, pools, caches.
    middle = oldest[len(oldest) // 2 :]
    return {
        "command": sys.argv,
        "seed": options.seed,
        "mtbf_s": options.mtbf,
        "kills": tally.kills,
        "spared": tally.skipped,
        "iterations": summary["iterations"],
        "missing_steps": len(summary["missing_steps"]),
        "steps_with_wrong_microbatches": summary["steps_with_wrong_microbatches"],
        "restarts": summary["restarts"],
        "repairs": summary["repairs"],
        "slots_filled": sum(e["kind"] == "slot_filled" for e in events),
        "repair_s_percentiles": summary["repair_s_percentiles"],
        "goodput": summary["goodput"],
        "longest_step_over_median": (max(seconds) / statistics.median(seconds) if seconds else 0.0),
        "oldest_process": {
            "seconds": oldest[-1].time - oldest[0].time if oldest else 0.0,
            "middle": asdict(middle[0]) if middle else None,
            "last": asdict(middle[-1]) if middle else None,
        },
    }


def print_report(result: dict[str, Any], console: Console) -> None:
    console.print(
        f"punisher: {result['kills']} kills ({result['spared']} spared), seed {result['seed']}, "
        f"mean {result['mtbf_s']:g} s between failures; {result['iterations']} iterations, "
        f"{result['missing_steps']} missing, {result['steps_with_wrong_microbatches']} wrong; "
        f"{result['repairs']} repairs, {result['slots_filled']} slots filled, "
        f"{result['restarts']} restarts",
        highlight=False,
        soft_wrap=True,
    )
    oldest = result["oldest_process"]
    if oldest["middle"] is None:
        return
    changes = ", ".join(
        f"{name} {oldest['middle'][name]} -> {oldest['last'][name]}"
        for name in ("files", "threads")
    )
    before, after = (oldest[when]["resident"] / 2**20 for when in ("middle", "last"))
    console.print(
        f"the oldest process, second half of {oldest['seconds']:.0f} s: {changes}, memory "
        f"{before:.1f} -> {after:.1f} MiB",
        highlight=False,
        soft_wrap=True,
    )


def ranks_of(run_dir: Path) -> list[psutil.Process]:
    """The training processes of this run on this host, by pid."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_rank = words[1:2] and Path(words[1]).name in SCRIPTS and "python" in words[0]
        if is_rank and str(run_dir) in words:
            found.append(process)
    return sorted(found, key=lambda process: process.pid)


def last_step(run_dir: Path) -> dict[str, Any]:
    """The newest `step` event; iteration 0 before the first."""
    events = run_dir / "events.jsonl"
    if events.exists():
        for line in reversed(events.read_text().splitlines()):
            if '"kind": "step"' in line:
                return dict(json.loads(line))
    return {"iteration": 0, "live_replicas": 0}


def wait_for_training(run_dir: Path, patience: float) -> bool:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if last_step(run_dir)["iteration"]:
            return True
        time.sleep(0.5)
    return False


if __name__ == "__main__":
    raise SystemExit(main())
