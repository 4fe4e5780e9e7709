"""How many microbatches CheckFree+ should swap (``--ft-checkfree-swap-share``; the paper: half).

Swapping makes the first two and the last two stages alike, so that one can be rebuilt as a copy of
the other, and costs quality while nothing fails. Runs without losses show the cost, runs that lose
the first and the last stage at 16 % per hour show what it buys.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from . import draws, failures, plots, timing
from .cells import Setup, cell_of, no_failure, setup_of
from .grid import Found, Grid, look_up
from .options import Options
from .report import Report, Table
from .results import Result
from .statistics import increases, spread
from .timing import SIMULATED
from .wording import begin, describe, gain_text, mean_text

NAME = "swap-share"
ITERATION_S = 2 * failures.PAPER_ITERATION_S
SHARES = ("0", "1/16", "1/8", "1/4", "1/2")
PLAIN = "1F1B, no failure"
WITHOUT, WITH = "no failure", "end stages lost"


def name_of(share: str, condition: str) -> str:
    return f"share {share}, {condition}"


def flags_of(share: str) -> tuple[str, ...]:
    return ("--ft-checkfree-plus", "--ft-checkfree-swap-share", share)


def grid(options: Options) -> Grid:
    setup = setup_of(options)
    found: Grid = {}
    for seed in options.seeds:
        faults = failures.lose_stages(losses(options, setup, seed))
        found[PLAIN, seed] = no_failure(setup, seed)
        for share in SHARES:
            for condition in (WITHOUT, WITH):
                name = name_of(share, condition)
                found[name, seed] = cell_of(
                    f"swap-share: {name}",
                    setup,
                    seed,
                    flags=flags_of(share),
                    faults=faults if condition == WITH else (),
                )
    return found


def losses(options: Options, setup: Setup, seed: int) -> tuple[failures.Loss, ...]:
    stages = failures.ends(setup.pipeline)
    return draws.losses(options, setup, seed, stages=stages, usual_s=ITERATION_S)


def choose(without: Mapping[str, float], with_losses: Mapping[str, float]) -> str:
    """The share with the lowest mean of the two perplexities; of equal ones the smaller.

    Raises:
        ValueError: No share has both.
    """
    both = {s: (without[s] + with_losses[s]) / 2 for s in without if s in with_losses}
    if not both:
        raise ValueError("no share has both perplexities")
    return min(both, key=lambda share: (both[share], Fraction(share)))


def report(options: Options, results: Mapping[str, Result]) -> Report:
    found = look_up(grid(options), results)
    made = Report(NAME, "Share of swapped microbatches", setting(options))
    made.tables.append(table(found))
    common = found.common(name_of(s, c) for s in SHARES for c in (WITHOUT, WITH))
    means = {
        condition: {
            share: spread([v for seed, v in values.items() if seed in (common or values)]).mean
            for share in SHARES
            if (values := found.perplexities(name_of(share, condition)))
        }
        for condition in (WITHOUT, WITH)
    }
    made.numbers["perplexity"] = means
    whole = [share for share in SHARES if all(share in means[c] for c in means)]
    if whole:
        chosen = choose(means[WITHOUT], means[WITH])
        both = {share: (means[WITHOUT][share] + means[WITH][share]) / 2 for share in whole}
        made.numbers["chosen"] = chosen
        made.findings.append(
            f"Lowest mean of the two perplexities, of {len(common)} seeds: share {chosen} ("
            + ", ".join(f"{share}: {value:.3f}" for share, value in both.items())
            + ")."
        )
    series = {
        condition: [list(found.perplexities(name_of(s, condition)).values()) for s in SHARES]
        for condition in (WITHOUT, WITH)
    }
    if found.results:
        plain = list(found.perplexities(PLAIN).values())
        made.figures["perplexity"] = lambda path: plots.bars(
            path,
            SHARES,
            series,
            title="CheckFree+: perplexity by the share of swapped microbatches",
            xlabel="share of swapped microbatches",
            ylabel="validation perplexity at the end",
            baseline=("1F1B, no failure", spread(plain).mean) if plain else None,
            from_zero=False,
        )
    return made


def setting(options: Options) -> list[str]:
    setup = setup_of(options)
    seconds = options.seconds(ITERATION_S)
    struck = ", ".join(str(len(losses(options, setup, seed))) for seed in options.seeds)
    return [
        *describe(setup),
        "Lost are the first and the last stage, each with a probability of 16 % per hour; an "
        f"iteration stands for {seconds:.1f} s, {seconds / failures.PAPER_ITERATION_S:.1f} of the "
        f"paper's. Drawn are {struck} losses, the same for all shares (`lose-stage` faults, no "
        "process dies).",
        *begin(options),
        f"The simulator's time is that of an iteration over 1F1B, {SIMULATED[0]} stages and "
        f"{SIMULATED[1]} microbatches.",
    ]


def table(found: Found) -> Table:
    base = found.perplexities(PLAIN)
    rows: list[tuple[str, ...]] = []
    if base:
        rows.append(("1F1B, no twins", mean_text(base.values()), *"-----"))
    for share in SHARES:
        cells = [share]
        for condition in (WITHOUT, WITH):
            values = found.perplexities(name_of(share, condition))
            cells += (mean_text(values.values()), gain_text(increases(values, base)))
        runs = found.of(name_of(share, WITH)).values()
        lost = sum(result.rebuilt for result in runs) if runs else "-"
        rows.append((*cells, str(lost), f"{timing.swap_cost(*SIMULATED, Fraction(share)):.3f}"))
    return Table(
        "Validation perplexity at the end, mean and standard deviation over seeds",
        ("share", WITHOUT, "over 1F1B", WITH, "over 1F1B", "rebuilt", "time, simulator"),
        rows,
    )
