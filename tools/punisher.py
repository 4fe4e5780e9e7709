"""Kill random ranks of a live run, with a given mean time between failures and seed.

    python tools/punisher.py runs/mine --mtbf 20 --seconds 120 --seed 7

Waits for the run to train, then sends SIGKILL to one of its processes again and again, at times
drawn from an exponential distribution, and prints what it did. Ends with the run, at the latest.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console


@dataclass
class Tally:
    """What was done."""

    kills: int = 0
    skipped: int = 0


def main() -> int:
    options = parse_arguments()
    console = Console()
    chance = random.Random(options.seed)
    if not wait_for_training(options.run_dir, options.patience):
        print(f"no step in {options.run_dir} within {options.patience:g} s", file=sys.stderr)
        return 1
    end = time.monotonic() + options.seconds
    tally = Tally()
    while True:
        time.sleep(min(chance.expovariate(1 / options.mtbf), max(0.0, end - time.monotonic())))
        ranks = ranks_of(options.run_dir)
        if time.monotonic() >= end or not ranks:
            break
        if len(ranks) <= options.least:
            tally.skipped += 1
            continue
        victim = chance.choice(ranks)
        victim.kill()
        tally.kills += 1
        console.print(
            f"killed pid {victim.pid} of {len(ranks)} after step {last_step(options.run_dir)}"
        )
    console.print(
        f"punisher: {tally.kills} kills, {tally.skipped} spared because {options.least} or fewer "
        f"were left, seed {options.seed}, mean {options.mtbf:g} s between failures"
    )
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
    parser.add_argument("--patience", type=float, default=300.0, help="seconds to wait for a step")
    return parser.parse_args()


def ranks_of(run_dir: Path) -> list[psutil.Process]:
    """The training processes of this run on this host, by pid."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        is_rank = "pretrain_llama_ft.py" in " ".join(words[:2]) and "python" in words[0]
        if is_rank and str(run_dir) in words:
            found.append(process)
    return sorted(found, key=lambda process: process.pid)


def last_step(run_dir: Path) -> int:
    """The newest committed iteration, 0 before the first."""
    events = run_dir / "events.jsonl"
    if not events.exists():
        return 0
    for line in reversed(events.read_text().splitlines()):
        if '"kind": "step"' in line:
            return int(json.loads(line)["iteration"])
    return 0


def wait_for_training(run_dir: Path, patience: float) -> bool:
    end = time.monotonic() + patience
    while time.monotonic() < end:
        if last_step(run_dir):
            return True
        time.sleep(0.5)
    return False


if __name__ == "__main__":
    raise SystemExit(main())
