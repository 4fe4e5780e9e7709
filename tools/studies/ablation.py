"""What a lost stage should become: average, copy or random (CheckFree, arXiv 2506.15461, ablation).

Stages in the middle are lost at 16 % per hour. Average: CheckFree. Copy: of the stage before.
Random: as at the start of a training. The optimizer's state begins anew in all three.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import draws, failures, plots
from .cells import Rebuild, Setup, cell_of, no_failure, setup_of
from .grid import Found, Grid, look_up
from .options import Options
from .report import Report, Table
from .results import Result
from .statistics import check_order, increases, mean_excess
from .wording import begin, describe, gain_text, mean_text

NAME = "ablation"
ITERATION_S = 3 * failures.PAPER_ITERATION_S
"""Three of the paper's iterations in one: a run of 300 stands for its first 900, or 23 hours."""
NONE = "no failure"
METHODS: tuple[Rebuild, ...] = ("average", "copy", "random")
PAPER = {"average": 22.6, "copy": 29.2, "random": 121.0}


def grid(options: Options) -> Grid:
    setup = trained(options)
    found: Grid = {}
    for seed in options.seeds:
        faults = failures.lose_stages(losses(options, setup, seed))
        found[NONE, seed] = no_failure(setup, seed)
        for method in METHODS:
            flags = found[NONE, seed].flags
            found[method, seed] = cell_of(
                f"ablation: {method}", setup, seed, flags=flags, faults=faults, rebuild=method
            )
    return found


def trained(options: Options) -> Setup:
    """Weights as large at first, for their number, as those of 1000 hidden units, and a learning
    rate at which a stage is not learnt again at once.

    With Megatron's 0.02 the layers of this small model add next to nothing to what passes them, and
    a lost stage is best replaced by such layers.
    """
    return setup_of(options, lr=5e-4, init_std=0.08)


def losses(options: Options, setup: Setup, seed: int) -> tuple[failures.Loss, ...]:
    """The losses of a seed's runs."""
    stages = failures.middle(setup.pipeline)
    return draws.losses(options, setup, seed, stages=stages, usual_s=ITERATION_S)


def report(options: Options, results: Mapping[str, Result]) -> Report:
    found = look_up(grid(options), results)
    made = Report(NAME, "Average, copy or random", setting(options))
    made.tables.append(table(options, found))
    if found.has(*METHODS):
        check = check_order({m: found.perplexities(m) for m in METHODS}, METHODS)
        made.findings.append(f"{check.text()}. The paper's: 22.6 < 29.2 < 121, a model of 500M.")
        made.numbers["order_holds"] = check.holds
        over: dict[str, dict[int, float]] = {m: excesses(options, found, m) for m in METHODS}
        if all(over.values()):
            check = check_order(over, METHODS)
            made.findings.append(
                f"Loss over no failure, mean since the first loss: {check.text()}."
            )
            made.numbers["excess"] = over
            made.numbers["excess_order_holds"] = check.holds
    made.numbers["perplexity"] = {name: found.perplexities(name) for name in (NONE, *METHODS)}
    curves = found.perplexity_curves((NONE, *METHODS))
    if curves:
        made.figures["curves"] = lambda path: plots.curves(
            path,
            curves,
            title="A lost stage is rebuilt as ... (16 % per hour)",
            xlabel="iteration",
            ylabel="validation perplexity",
            logarithmic=True,
        )
        made.figures["final"] = lambda path: plots.bars(
            path,
            list(curves),
            {"after the last iteration": [list(found.perplexities(n).values()) for n in curves]},
            title="Validation perplexity at the end (16 % per hour)",
            ylabel="perplexity",
            from_zero=False,
        )
    return made


def setting(options: Options) -> list[str]:
    setup = trained(options)
    seconds = options.seconds(ITERATION_S)
    number = failures.expected(
        draws.PER_HOUR,
        iterations=setup.iterations + 1 - options.failures_from,
        stages=len(failures.middle(setup.pipeline)),
        iteration_s=seconds,
    )
    struck = ", ".join(str(len(losses(options, setup, seed))) for seed in options.seeds)
    return [
        *describe(setup),
        "Each stage in the middle loses its state with a probability of 16 % per hour; an "
        f"iteration stands for {seconds:.1f} s, {seconds / failures.PAPER_ITERATION_S:.1f} of the "
        f"paper's, so that p = 1 - 0.84^({seconds:.1f}/3600) in each and {number:.1f} losses are "
        f"expected in a run; drawn are {struck}.",
        "All three methods meet the same losses. No process dies (`lose-stage` faults).",
        *begin(options),
    ]


def excesses(options: Options, found: Found, name: str) -> dict[int, float]:
    """Seed -> validation loss over no failure, the mean of what was evaluated after a loss."""
    base = found.of(NONE)
    setup = trained(options)
    values = {}
    for seed, result in found.of(name).items():
        lost = losses(options, setup, seed)
        if seed in base and lost and lost[0].iteration < setup.iterations:
            values[seed] = mean_excess(
                result.validation, base[seed].validation, lost[0].iteration - 1
            )
    return values


def table(options: Options, found: Found) -> Table:
    rows = []
    base = found.perplexities(NONE)
    for name in (NONE, *METHODS):
        values = found.perplexities(name)
        if not values:
            continue
        gains = increases(values, base)
        rebuilt = sum(result.rebuilt for result in found.of(name).values())
        rows.append(
            (
                name,
                mean_text(values.values()),
                gain_text(gains) if name != NONE else "-",
                ", ".join(f"{value:.3f}" for value in values.values()),
                mean_text(excesses(options, found, name).values()) if name != NONE else "-",
                str(rebuilt),
                f"{PAPER[name]:g}" if name in PAPER else "-",
            )
        )
    headings = ("a lost stage becomes", "perplexity", "over no failure", "of each seed")
    more = ("loss over no failure, mean since the first loss", "rebuilt", "paper")
    return Table("Validation perplexity at the end", (*headings, *more), rows)
