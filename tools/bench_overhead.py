"""What fault tolerance costs in a step: the ratio of iteration times of two ways to run one job.

    python tools/bench_overhead.py --compare backend     # ulfm over gloo, stock training
    python tools/bench_overhead.py --compare recover     # --ft-recover over without, both on ulfm
    python tools/bench_overhead.py --compare mecefo      # --ft-mecefo over without, both recover

Runs of the two ways alternate, so that a machine that slows down slows both. A run's time is the
median of its steps after the warm-up; the result is the median over the pairs of the ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_collectives import machine
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
Topology = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Way:
    """One of the two ways to run the job."""

    name: str
    flags: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is compared, and what the ratio of the first to the second should be at the most."""

    ways: tuple[Way, Way]
    goals: dict[Topology, float]
    """By (tensor, pipeline, data) parallel size."""


OVERLAP = ("--overlap-grad-reduce",)
COMPARISONS = {
    "backend": Comparison(
        ways=(Way("ulfm", ()), Way("gloo", ("--distributed-backend", "gloo"))),
        goals={(2, 2, 2): 0.90, (1, 2, 2): 1.00},
    ),
    "recover": Comparison(
        ways=(Way("recover", ("--ft-recover",)), Way("stock", ())),
        goals={(1, 2, 4): 1.02},
    ),
    "mecefo": Comparison(
        ways=(
            Way("mecefo", ("--ft-recover", "--ft-mecefo")),
            Way("recover", ("--ft-recover",)),
        ),
        goals={(1, 2, 2): 1.02},
    ),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--compare", choices=COMPARISONS, required=True)
    add(
        "--topology",
        type=topology,
        action="append",
        metavar="TP,PP,DP",
        help="repeatable (default: those that have a goal)",
    )
    add("--pairs", type=int, default=5, help="runs of each way (default: %(default)s)")
    add("--iters", type=int, default=25, help="iterations of a run (default: %(default)s)")
    add("--warmup", type=int, default=5, help="of them not counted (default: %(default)s)")
    add("--hidden-size", type=int, default=256)
    add("--num-layers", type=int, default=8)
    add("--seq-length", type=int, default=128)
    add("--microbatches", type=int, default=4, help="per replica and step (default: %(default)s)")
    add("--out", type=Path, help="write the results as JSON")
    add("--timeout", type=float, default=900, help="seconds for each run (default: %(default)g)")
    add("flags", nargs="*", help="further flags of both ways, after --")
    options = parser.parse_args()
    if options.iters < options.warmup + 3:
        parser.error("--iters must leave at least three iterations after --warmup")
    return options


def topology(text: str) -> Topology:
    sizes = tuple(int(part) for part in text.split(","))
    if len(sizes) != 3:
        raise ValueError(text)
    return sizes


# -- one run ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run gave."""

    seconds: float
    """Median of its steps."""
    steps: list[float]
    load_before: float
    """Of the machine, one minute's average; what else was running."""
    losses: list[float]
    snapshot_bytes: int | None
    """Of the process that reports, on the last stage."""
    gradient_bytes: int
    """Of the gradient buffer there."""
    versions: dict[str, str]


def run(options: argparse.Namespace, sizes: Topology, way: Way) -> Measured:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="bench-overhead-") as folder:
        output = launch(command(options, sizes, way, folder), options.timeout)
        lines = (Path(folder) / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    steps = [event for event in events if event["kind"] == "step"]
    assert len(steps) == options.iters, f"{len(steps)} steps:\n{output[-4000:]}"
    overhead = [step["overhead_bytes"] for step in steps if "overhead_bytes" in step]
    counted = [step["seconds"] for step in steps if step["iteration"] > options.warmup]
    return Measured(
        seconds=statistics.median(counted),
        steps=counted,
        load_before=load,
        losses=[step["lm_loss"] for step in steps],
        snapshot_bytes=overhead[0]["snapshots"] if overhead else None,
        gradient_bytes=4 * parameters_on_last_stage(output, sizes),
        versions=next(e["versions"] for e in events if e["kind"] == "run_started"),
    )


def command(options: argparse.Namespace, sizes: Topology, way: Way, folder: str) -> list[str]:
    from megatron_ft.data import prepare_default

    tensor, pipeline, data = sizes
    hidden, length = options.hidden_size, str(options.seq_length)
    heads = max(hidden // 32, 1)
    return [
        *(sys.executable, "-m", "megatron_ft.launcher", "-n", str(tensor * pipeline * data)),
        *("pretrain_llama_ft.py", "--ft-run-dir", folder),
        *("--tensor-model-parallel-size", str(tensor)),
        *("--pipeline-model-parallel-size", str(pipeline)),
        *("--num-layers", str(options.num_layers), "--hidden-size", str(hidden)),
        *("--ffn-hidden-size", str(hidden * 8 // 3 // 16 * 16)),
        *("--num-attention-heads", str(heads), "--group-query-attention"),
        *("--num-query-groups", str(max(heads // 2, 1))),
        *("--seq-length", length, "--max-position-embeddings", length),
        *("--micro-batch-size", "1", "--global-batch-size", str(options.microbatches * data)),
        *("--train-iters", str(options.iters), "--lr", "1e-3", "--clip-grad", "1.0"),
        *("--data-path", prepare_default(ROOT / "data"), "--split", "98,1,1"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257"),
        *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1", "--seed", "1234"),
        *OVERLAP,
        *way.flags,
        *options.flags,
    ]


def launch(words: Sequence[str], timeout: float) -> str:
    """Output of a job that ends well within the timeout.

    Raises:
        RuntimeError: It does not.
    """
    job = subprocess.Popen(
        words,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = job.communicate(timeout=timeout)
    except BaseException:
        os.killpg(job.pid, signal.SIGTERM)
        job.wait()
        raise
    if job.returncode != 0:
        raise RuntimeError(f"{shlex.join(words)} ended with {job.returncode}:\n{output[-4000:]}")
    return output


def parameters_on_last_stage(output: str, sizes: Topology) -> int:
    """What Megatron prints of the first tensor-parallel shard."""
    # (tensor, weight sharding of generalized tensor parallelism, pipeline)
    pattern = rf"number of parameters on .* rank \(0, (?:0, )?{sizes[1] - 1}\): *(\d+)"
    found = re.search(pattern, output)
    assert found is not None, pattern
    return int(found.group(1))


# -- the comparison --------------------------------------------------------------------------------


def compare(options: argparse.Namespace, sizes: Topology, console: Console) -> dict[str, Any]:
    comparison = COMPARISONS[options.compare]
    runs: dict[str, list[Measured]] = {way.name: [] for way in comparison.ways}
    for pair in range(options.pairs):
        # Turn and turn about, so that neither way always comes second.
        ways = comparison.ways if pair % 2 == 0 else comparison.ways[::-1]
        for way in ways:
            measured = run(options, sizes, way)
            runs[way.name].append(measured)
            console.print(
                f"{sizes} pair {pair + 1}/{options.pairs} {way.name}: {measured.seconds:.4f} s a "
                f"step (load before: {measured.load_before:.1f})",
                highlight=False,
            )
    first, second = (runs[way.name] for way in comparison.ways)
    ratios = [a.seconds / b.seconds for a, b in zip(first, second, strict=True)]
    goal = comparison.goals.get(sizes)
    ratio = statistics.median(ratios)
    return {
        "topology": list(sizes),
        "ratio": ratio,
        "ratios": ratios,
        "goal": goal,
        "met": None if goal is None else ratio <= goal,
        "seconds": {name: statistics.median(r.seconds for r in runs[name]) for name in runs},
        "snapshot_bytes": first[0].snapshot_bytes,
        "gradient_bytes": first[0].gradient_bytes,
        "runs": {name: [dataclasses.asdict(r) for r in runs[name]] for name in runs},
    }


def table(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Table:
    first, second = (way.name for way in COMPARISONS[options.compare].ways)
    made = Table(title=f"{first} over {second}, median of {options.pairs} pairs")
    headings = ("TP, PP, DP", f"{first} s", f"{second} s", "ratio", "lowest", "highest", "goal")
    for heading in (*headings, "snapshots / gradients"):
        made.add_column(heading, justify="right")
    for row in rows:
        goal, snapshots = row["goal"], row["snapshot_bytes"]
        copies = "-" if snapshots is None else f"{snapshots / row['gradient_bytes']:.2f}"
        made.add_row(
            ", ".join(map(str, row["topology"])),
            f"{row['seconds'][first]:.4f}",
            f"{row['seconds'][second]:.4f}",
            f"{row['ratio']:.3f}",
            f"{min(row['ratios']):.3f}",
            f"{max(row['ratios']):.3f}",
            "-" if goal is None else f"<= {goal:.2f}, {'met' if row['met'] else 'missed'}",
            copies,
        )
    return made


def main() -> int:
    options = arguments()
    # A pipe has no width of its own, and a table folded to 80 columns is hard to read.
    console = Console(width=None if sys.stdout.isatty() else 120)
    chosen = options.topology or list(COMPARISONS[options.compare].goals)
    rows = [compare(options, sizes, console) for sizes in chosen]
    console.print(table(options, rows))
    if options.out is not None:
        report = {
            "machine": machine(),
            "versions": rows[0]["runs"][COMPARISONS[options.compare].ways[0].name][0]["versions"],
            "command": shlex.join(sys.argv),
            "compare": options.compare,
            "time": time.time(),
            "rows": rows,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["met"] in (True, None) for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
