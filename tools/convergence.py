"""Convergence studies on a tiny LLaMA: real jobs with failures, tables and plots.

    python tools/convergence.py ablation          # average, copy or random re-initialisation
    python tools/convergence.py swap-share        # CheckFree+: how many microbatches to swap
    python tools/convergence.py mecefo            # three scenarios, each technique's ablation
    python tools/convergence.py strategies        # time to a target loss, all strategies
    python tools/convergence.py iteration-time    # out-of-order over plain 1F1B
    python tools/convergence.py swap-share --plan # what would run, and for how long

Jobs run one at a time. Finished ones are kept in --out, so that the same command goes on where it
stopped; with --budget-minutes it stops by itself. Tables and plots of what is there go to
--results: NAME.md, NAME.json, NAME-*.png.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from studies import ablation, iteration_time, mecefo, strategies, swap_share
from studies.cells import Cell
from studies.options import Options
from studies.report import Origin, write
from studies.results import Result, load
from studies.runner import ROOT, BusyError, Runner, guess_s

STUDIES: dict[str, Any] = {
    study.NAME: study for study in (ablation, swap_share, mecefo, strategies, iteration_time)
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("study", choices=STUDIES)
    add("--seeds", type=int, default=3, metavar="N", help="0 to N-1 (default: %(default)s)")
    add("--iterations", type=int, default=300, help="of a run (default: %(default)s)")
    add("--init-std", type=float, help="of the initial weights of all runs (default: 0.02)")
    add("--lr", type=float, help="learning rate of all runs (default: that of tools/studies/cells)")
    add(
        "--failures-from",
        type=int,
        default=1,
        metavar="I",
        help="ablation, swap-share: nothing is lost before this iteration (default: %(default)s)",
    )
    add(
        "--iteration-seconds",
        type=float,
        metavar="T",
        help="what an iteration stands for in the failure process 1 - (1-h)^(T/3600) (default: "
        "the paper's 91.3, three times that in ablation, twice in swap-share)",
    )
    add("--pairs", type=int, default=3, help="iteration-time: runs of each way (%(default)s)")
    add("--target-loss", type=float, metavar="L", help="strategies: validation loss to reach")
    add("--cluster-nodes", type=int, default=32, help="mecefo: nodes that the scenarios are of")
    add("--iterations-per-hour", type=float, default=10, help="mecefo: (default: %(default)g)")
    add("--out", type=Path, default=ROOT / "runs" / "convergence", help="where jobs are kept")
    add("--results", type=Path, default=ROOT / "docs" / "results", help="tables and plots")
    add("--budget-minutes", type=float, default=float("inf"), help="begin no job that ends later")
    add("--timeout", type=float, default=900, help="seconds for each launch (default: %(default)g)")
    add("--only", metavar="TEXT", help="run only jobs with this in their name")
    add("--plan", action="store_true", help="say what would run, and run nothing")
    add("--report", action="store_true", help="write tables and plots of what is there")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds must be 1 or more")
    if options.iterations < 20:
        parser.error("--iterations must be 20 or more")
    return options


def say(line: str) -> None:
    print(line, flush=True)


def flags_known() -> set[str]:
    """Our flags that this version of the product has."""
    from megatron_ft.arguments import add_ft_flags

    parser = argparse.ArgumentParser(add_help=False)
    add_ft_flags(parser)
    return {flag for flag in parser._option_string_actions if flag.startswith("--ft-")}


def main() -> int:
    given = arguments()
    # So that a job under way is ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    study = STUDIES[given.study]
    options = Options(
        seeds=range(given.seeds),
        iterations=given.iterations,
        lr=given.lr,
        init_std=given.init_std,
        failures_from=given.failures_from,
        iteration_s=given.iteration_seconds,
        pairs=given.pairs,
        target_loss=given.target_loss,
        cluster_nodes=given.cluster_nodes,
        iterations_per_hour=given.iterations_per_hour,
        flags_known=flags_known(),
    )
    grid: dict[Any, Cell] = study.grid(options)
    cells = list({cell.key: cell for cell in grid.values()}.values())
    skipped = skip(cells, options.flags_known)
    possible = [cell for cell in cells if cell.name not in skipped]
    runner = Runner(given.out.absolute(), 60 * given.budget_minutes, given.timeout, say)
    chosen = [cell for cell in possible if given.only is None or given.only in cell.name]
    for line in dict.fromkeys(skipped.values()):
        number = sum(reason == line for reason in skipped.values())
        say(f"skipped: {number} jobs, because {line}")
    if given.plan:
        plan(runner, chosen)
        return 0
    failed: list[str] = []
    if not given.report:
        try:
            _, failed = runner.run(chosen)
        except BusyError as busy:
            say(str(busy))
            return 1
    results: dict[str, Result] = {}
    for cell in possible:
        kept = load(runner.directory(cell))
        if kept is not None:
            results[cell.key] = kept
    origin = Origin(
        command=shlex.join(["python", "tools/convergence.py", *sys.argv[1:]]),
        seeds=list(options.seeds),
        cells_done=len(results),
        cells_left=len(possible) - len(results),
        skipped=[f"{name}, because {reason}" for name, reason in skipped.items()],
        failed=failed,
    )
    if not results:
        say("no job is done: no tables")
        return 1
    report = study.report(options, results)
    for path in write(report, origin, {c.key: c for c in possible}, results, given.results):
        say(f"wrote {path}")
    for table in report.tables:
        say("\n" + table.markdown())
    for finding in report.findings:
        say(f"* {finding}")
    return 1 if failed else 0


def skip(cells: list[Cell], known: Any) -> dict[str, str]:
    """Cells that this version cannot run: name -> why."""
    found = {}
    for cell in cells:
        missing = [flag for flag in cell.needs if flag not in known]
        if missing:
            found[cell.name] = f"there is no {', '.join(missing)} yet"
    return found


def plan(runner: Runner, cells: list[Cell]) -> None:
    """Say what would run; what is done tells how long the rest takes."""
    done = {cell.key: kept for cell in cells if (kept := load(runner.directory(cell)))}
    runner.ratios += [done[c.key].wall_s / guess_s(c) for c in cells if c.key in done]
    total = 0.0
    for cell in cells:
        seconds = 0.0 if cell.key in done else runner.guess_s(cell)
        total += seconds
        say(f"{f'{seconds:4.0f} s' if seconds else 'done':>6}  {cell.name}")
    say(f"{len(cells)} jobs, about {total / 60:.0f} minutes for those that are not done")


if __name__ == "__main__":
    raise SystemExit(main())
