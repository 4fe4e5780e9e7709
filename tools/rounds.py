"""Kill and rejoin, round after round: does the world grow back each time?

    python tools/rounds.py --rounds 100 --jobs 5 --spares 1 --seed 3
    python tools/rounds.py --rounds 100 --jobs 5 --seed 4           # new processes only

Starts a small job with ``--ft-recover --ft-respawn`` and ``--max-restarts``, kills one of its
processes at a random moment (in some rounds a second one while the first is being replaced), waits
until every slot is served again and every spare waits again, and does so again. A round is survived
if that comes about without a restart of the job. A job that is lost is started again by the
launcher, from its newest checkpoint; then the steps that are done again are counted.

Prints a line for each job and the count of survived rounds; with ``--json FILE`` the same as JSON.
Ends with code 1 if a round was not answered at all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from bench_collectives import machine
from punisher import last_step, ranks_of
from rich.console import Console

from megatron_ft.control.protocol import ControlError, ask

ROOT = Path(__file__).resolve().parent.parent
SAVE_INTERVAL = 50
QUIET_S = 1.0
"""A round begins at most so long after the world is whole, drawn at random."""
DOUBLE_S = 8.0
"""A second kill of a round comes at most so long after the first."""
START_S, END_S = 300.0, 60.0

MODEL = (
    *("--num-layers", "4", "--hidden-size", "48", "--ffn-hidden-size", "128"),
    *("--num-attention-heads", "4", "--seq-length", "32", "--max-position-embeddings", "32"),
    *("--micro-batch-size", "1", "--lr", "1e-3", "--lr-decay-style", "constant"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257", "--split", "98,1,1"),
    *("--eval-iters", "0", "--eval-interval", "1000000", "--log-interval", "100"),
    *("--train-iters", "1000000", "--exit-signal-handler"),
)


@dataclass
class Round:
    """One kill, or two, and what came of it."""

    kills: int = 0
    survived: bool = False
    restarted: bool = False
    seconds: float = 0.0
    """From the kill until the world was whole again."""


@dataclass
class Job:
    """A job and its rounds."""

    seed: int
    rounds: list[Round] = field(default_factory=list)
    restarts: int = 0
    lost_steps: int = 0
    """Committed steps that were done again after restarts."""
    too_many_lost: int = 0
    """Restarts that went back behind the newest checkpoint."""
    other_deaths: int = 0
    """Processes that died without having been killed, at the end of the job for instance."""
    exit_code: int | None = None
    missing_steps: int = 0
    wrong_steps: int = 0


def main() -> int:
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    sizes = [options.rounds // options.jobs] * options.jobs
    sizes[-1] += options.rounds - sum(sizes)
    jobs = []
    for number, rounds in enumerate(sizes):
        jobs.append(run_job(options, options.seed + number, rounds, console))
    result = summed_up(options, jobs)
    console.print(
        f"rounds: {result['survived']} of {result['rounds']} survived ({result['kills']} kills), "
        f"{result['restarted']} "
        f"answered by a restart, {result['unanswered']} not at all; {result['spares']} spares; "
        f"median {result['median_s']:.1f} s from kill to a whole world; {result['lost_steps']} "
        f"steps done again, {result['too_many_lost']} restarts behind the newest checkpoint",
        highlight=False,
        soft_wrap=True,
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return 1 if result["unanswered"] or result["too_many_lost"] else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=5, help="that share the rounds")
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--spares", type=int, default=0, help="waiting processes from the start")
    parser.add_argument("--double", type=float, default=0.25, help="share of rounds with two kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--patience", type=float, default=90.0, help="seconds for each round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="leave the result as JSON")
    return parser.parse_args()


def run_job(options: argparse.Namespace, seed: int, rounds: int, console: Console) -> Job:
    """Start a job, kill and wait ``rounds`` times, and end it."""
    job, chance = Job(seed), random.Random(seed)
    directory = Path(tempfile.mkdtemp(prefix="ft-rounds-"))
    run_dir = directory / "run"
    with (directory / "output.log").open("w") as output:
        process = subprocess.Popen(
            command(options, directory),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if not trains(run_dir, process):
                raise SystemExit(f"the job does not train: see {directory}/output.log")
            for _ in range(rounds):
                job.rounds.append(one_round(options, run_dir, process, chance))
                if not (job.rounds[-1].survived or job.rounds[-1].restarted):
                    console.print(f"a round was not answered: see {directory}", highlight=False)
                    break
            end_job(run_dir, process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(END_S)
    job.exit_code = process.returncode
    count_steps(job, run_dir)
    survived = sum(r.survived for r in job.rounds)
    console.print(
        f"job of seed {seed}: {survived} of {len(job.rounds)} rounds survived, {job.restarts} "
        f"restarts, exit code {job.exit_code}, {job.missing_steps} steps missing, "
        f"{job.wrong_steps} wrong ({directory})",
        highlight=False,
        soft_wrap=True,
    )
    return job


def command(options: argparse.Namespace, directory: Path) -> list[str]:
    from megatron_ft.data import prepare_default

    slots = options.replicas * options.stages
    return [
        *(sys.executable, "-m", "megatron_ft.launcher", "-n", str(slots + options.spares)),
        *("--max-restarts", "20", "pretrain_llama_ft.py"),
        *("--tensor-model-parallel-size", "1"),
        *("--pipeline-model-parallel-size", str(options.stages)),
        *("--global-batch-size", str(4 * options.replicas)),
        *("--data-path", prepare_default(ROOT / "data"), "--ft-run-dir", str(directory / "run")),
        *("--save", str(directory / "checkpoints"), "--load", str(directory / "checkpoints")),
        *("--save-interval", str(SAVE_INTERVAL), "--ckpt-format", "torch"),
        *("--ft-recover", "--ft-respawn", "--ft-spares", str(options.spares)),
        *("--ft-respawn-nice", "0"),  # many rounds, rather than steps that nothing disturbs
        *MODEL,
    ]


def trains(run_dir: Path, launcher: subprocess.Popen[bytes]) -> bool:
    """Wait for the first step; whether it came."""
    end = time.monotonic() + START_S
    while time.monotonic() < end and launcher.poll() is None:
        if last_step(run_dir)["iteration"]:
            return True
        time.sleep(0.2)
    return False


def one_round(
    options: argparse.Namespace,
    run_dir: Path,
    launcher: subprocess.Popen[bytes],
    chance: random.Random,
) -> Round:
    """Kill one process once the world is whole, sometimes two, and wait until it is so again."""
    if not wait_until_whole(options, run_dir, launcher, after=0, killed=[]):
        return Round()
    starts = count_starts(run_dir)
    time.sleep(chance.uniform(0, QUIET_S))
    iteration, began = last_step(run_dir)["iteration"], time.monotonic()
    killed = kill_one(run_dir, chance)
    if chance.random() < options.double:
        # While the first one's replacement is started, builds or takes its slot.
        time.sleep(chance.uniform(0, DOUBLE_S))
        killed += kill_one(run_dir, chance)
    whole = wait_until_whole(options, run_dir, launcher, after=iteration + 1, killed=killed)
    restarted = count_starts(run_dir) > starts
    return Round(
        kills=len(killed),
        survived=whole and not restarted,
        restarted=whole and restarted,
        seconds=time.monotonic() - began,
    )


def kill_one(run_dir: Path, chance: random.Random) -> list[int]:
    """Kill any process of the job, one that is just being started too.

    Returns:
        Its pid; nothing where the job has just ended and the launcher has not started it again yet.
    """
    ranks = ranks_of(run_dir)
    if not ranks:
        return []
    victim = chance.choice(ranks)
    try:
        victim.kill()
    except psutil.NoSuchProcess:
        return []
    return [victim.pid]


def wait_until_whole(
    options: argparse.Namespace,
    run_dir: Path,
    launcher: subprocess.Popen[bytes],
    after: int,
    killed: list[int],
) -> bool:
    """Whether, within the patience, all slots are served and all spares wait.

    Args:
        after: A step at least as late must have been committed, unless the job started again.
        killed: Pids that must not count among those that serve.
    """
    end = time.monotonic() + options.patience
    starts = count_starts(run_dir)
    while time.monotonic() < end and launcher.poll() is None:
        time.sleep(0.1)
        try:
            now = ask(run_dir, {"order": "status"}, 10.0)
        except (ControlError, OSError):
            continue  # nobody is elected at this moment
        late = now["iteration"] > after or count_starts(run_dir) > starts
        known = {now["pids"].get(str(row["process"])) for row in now["slots"]}
        known |= {now["pids"].get(str(process)) for process in now["pool"]}
        if (
            late
            and len(now["whole_replicas"]) == options.replicas
            and len(now["pool"]) >= options.spares
            and known.isdisjoint(killed)
        ):
            return True
    return False


def end_job(run_dir: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Ask the ranks to end, as a scheduler would; Megatron saves and leaves."""
    for rank in ranks_of(run_dir):
        rank.send_signal(signal.SIGTERM)
    try:
        launcher.wait(END_S)
    except subprocess.TimeoutExpired:
        print("the job does not end when asked to", file=sys.stderr)


def read(run_dir: Path, *kinds: str) -> list[dict[str, Any]]:
    from megatron_ft.observe.jsonl import read_events
    from megatron_ft.observe.rundir import RunDirectory

    return [dict(e) for e in read_events(RunDirectory(run_dir)).events if e["kind"] in kinds]


def count_starts(run_dir: Path) -> int:
    return len(read(run_dir, "run_started"))


def count_steps(job: Job, run_dir: Path) -> None:
    """What restarts cost, and whether any step is missing or wrong."""
    from megatron_ft.observe.summary import build_summary

    events = read(run_dir, "run_started", "step", "checkpoint")
    newest = saved = 0
    started = False
    for event in events:
        if event["kind"] == "run_started":
            job.restarts += started
            started = True
        elif event["kind"] == "checkpoint":
            saved = max(saved, int(event["iteration"]))
        else:
            iteration = int(event["iteration"])
            if iteration <= newest:
                job.lost_steps += 1
                job.too_many_lost += iteration <= saved
            newest = max(newest, iteration)
    deaths = len({(e["failed_process"], e["epoch"]) for e in read(run_dir, "fault_detected")})
    job.other_deaths = max(0, deaths - sum(r.kills for r in job.rounds))
    everything = build_summary([dict(e) for e in read_all(run_dir)])
    job.missing_steps = len(everything["missing_steps"])
    job.wrong_steps = everything["steps_with_wrong_microbatches"]


def read_all(run_dir: Path) -> list[Any]:
    from megatron_ft.observe.jsonl import read_events
    from megatron_ft.observe.rundir import RunDirectory

    return read_events(RunDirectory(run_dir)).events


def summed_up(options: argparse.Namespace, jobs: list[Job]) -> dict[str, Any]:
    rounds = [r for job in jobs for r in job.rounds]
    survived = sum(r.survived for r in rounds)
    restarted = sum(r.restarted for r in rounds)
    return {
        "command": sys.argv,
        "machine": machine(),
        "spares": options.spares,
        "rounds": len(rounds),
        "kills": sum(r.kills for r in rounds),
        "survived": survived,
        "restarted": restarted,
        "unanswered": len(rounds) - survived - restarted,
        "median_s": statistics.median(r.seconds for r in rounds) if rounds else 0.0,
        "lost_steps": sum(job.lost_steps for job in jobs),
        "too_many_lost": sum(job.too_many_lost for job in jobs),
        "jobs": [asdict(job) for job in jobs],
    }


if __name__ == "__main__":
    raise SystemExit(main())
