"""What a lost stage should become: average, copy or random (CheckFree, arXiv 2506.15461, ablation).

Stages in the middle are lost at 16 % per hour. Average: CheckFree. Copy: of the stage before.
Random: as at the start of a training. The optimizer's state begins anew in all three.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import failures, plots
from .cells import Cell, Rebuild, Setup, setup_of
from .grid import Found, Grid, look_up
from .options import Options
from .report import Report, Table
from .results import Result
from .statistics import check_order, increases, mean_excess, perplexity, spread

NAME = "ablation"
PER_HOUR = 0.16
ITERATION_S = 3 * failures.PAPER_ITERATION_S
"""Three of the paper's iterations in one: a run of 300 stands for its first 900, or 23 hours."""
NONE = "no failure"
METHODS: tuple[Rebuild, ...] = ("average", "copy", "random")
PAPER = {"average": 22.6, "copy": 29.2, "random": 121.0}


def grid(options: Options) -> Grid:
    setup = setup_of(options)
    found: Grid = {}
    for seed in options.seeds:
        faults = failures.lose_stages(losses(options, setup, seed))
        common = {"setup": setup, "seed": seed, "flags": ("--ft-checkfree",)}
        found[NONE, seed] = Cell(name=f"{NONE}, seed {seed}", **common)  # type: ignore[arg-type]
        for method in METHODS:
            found[method, seed] = Cell(
                name=f"ablation: {method}, seed {seed}",
                faults=faults,
                rebuild=method,
                **common,  # type: ignore[arg-type]
            )
    return found


def losses(options: Options, setup: Setup, seed: int) -> tuple[failures.Loss, ...]:
    """The losses of a seed's runs."""
    drawn = failures.draw(
        PER_HOUR,
        seed=seed,
        iterations=setup.iterations,
        num_stages=setup.pipeline,
        iteration_s=options.iteration_s or ITERATION_S,
    )
    late = failures.later(drawn, options.failures_from)
    return failures.of_stages(late, failures.middle(setup.pipeline))


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
    there = [name for name in (NONE, *METHODS) if found.has(name)]
    if there:
        made.figures["curves"] = lambda path: plots.curves(
            path,
            {name: [_perplexities(r) for r in found.of(name).values()] for name in there},
            title="A lost stage is rebuilt as ... (16 % per hour)",
            xlabel="iteration",
            ylabel="validation perplexity",
            logarithmic=True,
        )
        made.figures["final"] = lambda path: plots.bars(
            path,
            there,
            {"after the last iteration": [list(found.perplexities(n).values()) for n in there]},
            title="Validation perplexity at the end (16 % per hour)",
            ylabel="perplexity",
            from_zero=False,
        )
    return made


def setting(options: Options) -> list[str]:
    setup = setup_of(options)
    seconds = options.iteration_s or ITERATION_S
    number = failures.expected(
        PER_HOUR,
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


def begin(options: Options) -> list[str]:
    """When losses begin, where they do not from the start."""
    if options.failures_from <= 1:
        return []
    return [f"Nothing is lost before iteration {options.failures_from}."]


def excesses(options: Options, found: Found, name: str) -> dict[int, float]:
    """Seed -> validation loss over no failure, the mean of what was evaluated after a loss."""
    base = found.of(NONE)
    setup = setup_of(options)
    values = {}
    for seed, result in found.of(name).items():
        lost = losses(options, setup, seed)
        if seed in base and lost and lost[0].iteration < setup.iterations:
            values[seed] = mean_excess(
                result.validation, base[seed].validation, lost[0].iteration - 1
            )
    return values


def describe(setup: Setup) -> list[str]:
    """What is trained, in words."""
    return [
        f"A LLaMA of {setup.num_layers} layers, hidden size {setup.hidden}, on the default corpus "
        f"(bytes), {setup.pipeline} stages x {setup.data} replicas, {setup.iterations} iterations "
        f"of {setup.samples} sequences of {setup.sequence} tokens ({setup.tokens / 1e6:.2f}M "
        f"tokens), learning rate {setup.lr:g} "
        + ("constant." if setup.min_lr is None else f"falling to {setup.min_lr:g} (cosine)."),
        f"Validation is on {2 * setup.eval_iters * setup.samples} sequences at the end and on half "
        "as many before.",
    ]


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
                spread(list(values.values())).text(),
                f"{100 * spread(gains).mean:+.2f} %" if gains and name != NONE else "-",
                ", ".join(f"{value:.3f}" for value in values.values()),
                _excess(options, found, name),
                str(rebuilt),
                f"{PAPER[name]:g}" if name in PAPER else "-",
            )
        )
    headings = ("a lost stage becomes", "perplexity", "over no failure", "of each seed")
    more = ("loss over no failure, mean since the first loss", "rebuilt", "paper")
    return Table("Validation perplexity at the end", (*headings, *more), rows)


def _excess(options: Options, found: Found, name: str) -> str:
    values = excesses(options, found, name) if name != NONE else {}
    return spread(list(values.values())).text() if values else "-"


def _perplexities(result: Result) -> list[tuple[float, float]]:
    return [(at, perplexity(loss)) for at, loss in result.validation]
