"""How long a job stands still when a stage is lost that exists nowhere else (CheckFree+).

    python tools/bench_rebuild.py --out rebuild.json

One replica, and one spare process that has Megatron imported and no model built. For each stage a
job of its own, in which the process of that stage is killed. Counted is from the kill until the
interrupted step is committed: notice, repair, the spare builds the stage, it is rebuilt from its
neighbours, the step is done again. The rebuild itself is counted alone too, beside a normal step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench_collectives import machine
from bench_overhead import ROOT, launch
from rich.console import Console
from rich.table import Table

GOAL_S = 3.0
"""From the kill to the next committed step."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--stages", type=int, default=4, help="of the pipeline (default: %(default)s)")
    add("--runs", type=int, default=1, help="jobs for each stage (default: %(default)s)")
    add("--kill-at", type=int, default=15, metavar="I", help="iteration (default: %(default)s)")
    add("--out", type=Path, help="write the results as JSON")
    add("--timeout", type=float, default=300, help="seconds for each job (default: %(default)g)")
    add("flags", nargs="*", help="further flags, after --")
    options = parser.parse_args()
    if options.stages < 2:
        parser.error("--stages must be at least 2: a stage is rebuilt from a neighbour")
    if options.kill_at < 5:
        parser.error("--kill-at must be at least 5: a normal step is measured before it")
    return options


@dataclasses.dataclass(frozen=True)
class Loss:
    """One stage lost and rebuilt."""

    stage: int
    stopped_s: float
    """From the kill to the next committed step."""
    rebuild_s: float
    """Until the stage is made from what its neighbours send, as the new process sees it."""
    step_s: float
    """Median of the steps before the loss, without the first two."""
    versions: dict[str, str]


def lose(options: argparse.Namespace, stage: int) -> Loss:
    """Run a job that loses a stage.

    Raises:
        RuntimeError: It does not end well, or was not struck.
    """
    with tempfile.TemporaryDirectory(prefix="bench-rebuild-") as folder:
        output = launch(command(options, stage, folder), options.timeout)
        lines = (Path(folder) / "events.jsonl").read_text().splitlines()
    events = sorted((json.loads(line) for line in lines), key=lambda event: event["time"])
    kills = [event["time"] for event in events if event["kind"] == "fault_injected"]
    rebuilt = [event for event in events if event["kind"] == "stage_rebuilt"]
    steps = [event for event in events if event["kind"] == "step"]
    if len(kills) != 1 or [event["stage"] for event in rebuilt] != [stage]:
        raise RuntimeError(f"stage {stage} was not lost and rebuilt once:\n{output[-4000:]}")
    return Loss(
        stage=stage,
        stopped_s=min(step["time"] for step in steps if step["time"] > kills[0]) - kills[0],
        rebuild_s=rebuilt[0]["transfer_s"],
        step_s=statistics.median(
            step["seconds"] for step in steps if 2 < step["iteration"] < options.kill_at
        ),
        versions=next(event["versions"] for event in events if event["kind"] == "run_started"),
    )


def command(options: argparse.Namespace, stage: int, folder: str) -> list[str]:
    from megatron_ft.data import prepare_default

    stages = options.stages
    return [
        *(sys.executable, "-m", "megatron_ft.launcher", "-n", str(stages + 1)),
        *("pretrain_llama_ft.py", "--ft-run-dir", folder, "--ft-checkfree-plus"),
        *("--ft-spares", "1", "--ft-fault", f"kill@{options.kill_at}:slot={stage}:point=backward"),
        *("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", str(stages)),
        *("--num-layers", str(2 * stages), "--hidden-size", "128", "--ffn-hidden-size", "344"),
        *("--num-attention-heads", "4", "--seq-length", "64", "--max-position-embeddings", "64"),
        *("--micro-batch-size", "1", "--global-batch-size", str(2 * stages)),
        *("--train-iters", str(options.kill_at + 5), "--lr", "1e-3", "--clip-grad", "1.0"),
        *("--data-path", prepare_default(ROOT / "data"), "--split", "98,1,1"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", "257"),
        *("--eval-iters", "0", "--eval-interval", "1000", "--log-interval", "1", "--seed", "1234"),
        *options.flags,
    ]


def table(losses: Sequence[Loss]) -> Table:
    made = Table(title="A stage is lost and rebuilt, seconds")
    for heading in ("stage", "kill to next step", "rebuild", "a step", "rebuild / step"):
        made.add_column(heading, justify="right")
    for loss in losses:
        made.add_row(
            str(loss.stage),
            f"{loss.stopped_s:.2f}",
            f"{loss.rebuild_s:.3f}",
            f"{loss.step_s:.3f}",
            f"{loss.rebuild_s / loss.step_s:.2f}",
        )
    return made


def main() -> int:
    options = arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    stages = [stage for _ in range(options.runs) for stage in range(options.stages)]
    losses = [lose(options, stage) for stage in stages]
    console.print(table(losses))
    slowest = max(loss.stopped_s for loss in losses)
    longest = max(loss.rebuild_s / loss.step_s for loss in losses)
    met = slowest <= GOAL_S and longest <= 1.0
    console.print(
        f"slowest from kill to next step: {slowest:.2f} s (goal {GOAL_S:g}); longest rebuild: "
        f"{longest:.2f} steps (goal 1): {'met' if met else 'MISSED'}",
        highlight=False,
        soft_wrap=True,
    )
    if options.out is not None:
        report: dict[str, Any] = {
            "machine": machine(),
            "versions": losses[0].versions,
            "command": shlex.join(sys.argv),
            "time": time.time(),
            "losses": [dataclasses.asdict(loss) for loss in losses],
            "slowest_s": slowest,
            "longest_rebuild_steps": longest,
            "met": met,
        }
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if met else 1


if __name__ == "__main__":
    raise SystemExit(main())
