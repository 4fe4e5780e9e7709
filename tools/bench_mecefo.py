"""What MeCeFO costs: a neighbour with two stages against one normal stage.

    python tools/bench_mecefo.py                 # time and memory of the neighbour
    python tools/bench_mecefo.py --what choice   # rank and interval: time and gradient error

CPU time of forward and backward of a step, on one thread. The ways alternate within a round, so
that a machine that slows down slows all; a ratio is the median over the rounds. Memory is what
tensors hold at the most during a microbatch, without parameters and gradients.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import logging
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mecefo_choice
import mecefo_model
import torch
from bench_collectives import machine
from mecefo_stage import Stage, cpu_seconds, ratio, rounds
from rich.console import Console
from rich.table import Table

from megatron_ft.mecefo.options import DEFAULT_RANK, DEFAULT_SVD_INTERVAL, MecefoOptions

ROOT = Path(__file__).resolve().parent.parent
TIME_GOAL = 1.30
MEMORY_GOAL = 1.1


# -- the neighbour ---------------------------------------------------------------------------------


def neighbour(args: argparse.Namespace) -> dict[str, Any]:
    """One normal stage, two of them, and two degraded ones, whole and by technique."""
    options = {
        "mecefo": MecefoOptions(rank=args.rank),
        "mecefo, memory 0.7": MecefoOptions(rank=args.rank, memory=0.7),
        "all FFNs recomputed": MecefoOptions(rank=args.rank, memory=0),
        "no FFN recomputed": MecefoOptions(rank=args.rank, recompute_ffn=False),
        "only skip-MHA": MecefoOptions(rank=args.rank, recompute_ffn=False, low_rank=False),
        "only recomputation": MecefoOptions(
            rank=args.rank, skip_attention=False, low_rank=False, memory=0
        ),
        "only low rank": MecefoOptions(rank=args.rank, skip_attention=False, recompute_ffn=False),
    }
    one, two = Stage(args, args.layers), Stage(args, 2 * args.layers)
    degraded = {name: Stage(args, 2 * args.layers) for name in options}
    for name, stage in degraded.items():
        stage.degrade(options[name])
    found = rounds(
        {
            "one stage": one.step,
            "naive": two.step,
            **{name: stage.step for name, stage in degraded.items()},
        },
        args.rounds,
    )
    stages = {"one stage": one, "naive": two, **degraded}
    peaks = {name: stage.peak_bytes() for name, stage in stages.items()}
    rows = [
        {
            "way": name,
            "seconds": statistics.median(found[name]),
            "time": ratio(found, name, "one stage"),
            "peak_bytes": peaks[name],
            "memory": peaks[name] / peaks["one stage"],
        }
        for name in stages
    ]
    wgrads = [w for state in degraded["mecefo"].degraded._on.values() for w in state.wgrads]
    svd = statistics.median(svd_seconds(wgrads, args.rank) for _ in range(3))
    held = degraded["mecefo"].degraded.memory()
    for stage in degraded.values():
        stage.degraded.close()
    step = statistics.median(found["one stage"])
    return {
        "rows": rows,
        "svd_seconds": svd,
        "svd_share": svd / args.interval / step,
        "basis_bytes": held.basis_bytes,
        "factor_bytes": held.factor_bytes,
    }


def svd_seconds(wgrads: list[Any], rank: int) -> float:
    from megatron_ft.mecefo.basis import right_singular_vectors

    def refresh() -> None:
        for wgrad in wgrads:
            right_singular_vectors(wgrad.weight, rank)

    return cpu_seconds(refresh)


def show_neighbour(console: Console, args: argparse.Namespace, found: dict[str, Any]) -> None:
    table = Table(title="two stages on one process, in units of one normal stage")
    for column in ("", "CPU time", "goal", "peak memory", "goal"):
        table.add_column(column, justify="left" if not column else "right")
    for row in found["rows"]:
        goals = row["way"] == "mecefo"
        table.add_row(
            row["way"],
            f"{row['time']:.3f}",
            f"<= {TIME_GOAL:.2f}" if goals else "",
            f"{row['memory']:.3f}",
            f"<= {MEMORY_GOAL:.2f}" if goals else "",
        )
    console.print(table)
    console.print(
        f"singular vectors, all layers: {found['svd_seconds']:.3f} s of CPU time beside training, "
        f"every {args.interval} steps: {found['svd_share']:.4f} of a step; "
        f"{found['basis_bytes']:,} bytes of V1, {found['factor_bytes']:,} of factors"
    )


# -- rank and interval -----------------------------------------------------------------------------


def choice(args: argparse.Namespace) -> dict[str, Any]:
    """What rank and interval cost in time, at the sizes given, and in a small model's gradient."""
    low = {rank: MecefoOptions(rank=rank) for rank in args.ranks}
    one = Stage(args, args.layers)
    stages = {rank: Stage(args, 2 * args.layers) for rank in args.ranks}
    for rank, stage in stages.items():
        stage.degrade(low[rank])
    ways = {"one stage": one.step, **{str(rank): stage.step for rank, stage in stages.items()}}
    found = rounds(ways, args.rounds)
    step = statistics.median(found["one stage"])
    svd = {}
    for rank, stage in stages.items():
        wgrads = [w for state in stage.degraded._on.values() for w in state.wgrads]
        svd[rank] = statistics.median(svd_seconds(wgrads, rank) for _ in range(3))
        stage.degraded.close()

    ages = (0, *args.intervals)
    corpus = mecefo_choice.Corpus(ROOT / "data")
    exact = mecefo_choice.train(corpus, args.steps, None, ages)

    @functools.cache
    def trained_loss(rank: int, interval: int) -> float:
        return mecefo_choice.train(corpus, args.steps, (rank, interval), ()).loss

    by_rank = [
        {
            "rank": rank,
            "time": ratio(found, str(rank), "one stage"),
            "svd_seconds": svd[rank],
            **mecefo_choice.gradient_error(exact, rank, 0),
            "loss": trained_loss(rank, args.interval),
        }
        for rank in args.ranks
    ]
    by_interval = [
        {
            "interval": interval,
            "svd_share": svd[args.rank] / interval / step,
            "error": mecefo_choice.gradient_error(exact, args.rank, interval)["error"],
            "loss": trained_loss(args.rank, interval),
        }
        for interval in args.intervals
    ]
    return {"loss_exact": exact.loss, "by_rank": by_rank, "by_interval": by_interval}


def show_choice(console: Console, args: argparse.Namespace, found: dict[str, Any]) -> None:
    table = Table(
        title=f"rank: time of two stages at hidden size {args.hidden}; gradient and training of a "
        f"model of hidden size {mecefo_choice.HIDDEN}, V1 every {args.interval} steps"
    )
    for column in (
        *("rank", "CPU time", "SVD s", "gradient error", "random directions", "best directions"),
        *("loss", "- exact"),
    ):
        table.add_column(column, justify="right")
    for row in found["by_rank"]:
        table.add_row(
            str(row["rank"]),
            f"{row['time']:.3f}",
            f"{row['svd_seconds']:.3f}",
            *(f"{row[name]:.3f}" for name in ("error", "random", "best")),
            f"{row['loss']:.4f}",
            f"{row['loss'] - found['loss_exact']:+.4f}",
        )
    console.print(table)
    table = Table(title=f"interval, rank {args.rank}")
    for column in ("interval", "SVD share of a step", "gradient error", "loss", "- exact"):
        table.add_column(column, justify="right")
    for row in found["by_interval"]:
        table.add_row(
            str(row["interval"]),
            f"{row['svd_share']:.4f}",
            f"{row['error']:.3f}",
            f"{row['loss']:.4f}",
            f"{row['loss'] - found['loss_exact']:+.4f}",
        )
    console.print(table)
    console.print(f"held-out loss after {args.steps} steps, exact: {found['loss_exact']:.4f}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=("neighbour", "choice"), default="neighbour")
    parser.add_argument("--layers", type=int, default=4, help="of one stage")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=1376)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rank", type=int, default=DEFAULT_RANK)
    parser.add_argument("--interval", type=int, default=DEFAULT_SVD_INTERVAL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--intervals", type=int, nargs="+", default=[20, 100, 200])
    parser.add_argument("--steps", type=int, default=300, help="of the small model's training")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(mecefo_model.SEED)
    console = Console(width=120)
    measure, show = (
        (neighbour, show_neighbour) if args.what == "neighbour" else (choice, show_choice)
    )
    with mecefo_model.megatron():
        found = measure(args)
    show(console, args, found)
    if args.out is not None:
        report = {
            "machine": machine(),
            "versions": {"python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")},
            "command": sys.argv,
            "settings": {k: v for k, v in vars(args).items() if k != "out"},
            "time": time.time(),
            **found,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
