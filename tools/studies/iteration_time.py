"""What the routes of CheckFree+ cost in time: out-of-order over plain 1F1B, runs in turn.

With two stages each process has a core of a machine with two, and the pipeline's bubble is in the
measured time as the simulator has it. With four, idle processes cost nothing there: the bubble is
filled by others, and what is left is the work of the twins and the messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from . import plots, timing
from .cells import Cell, Setup
from .grid import Found, Grid, look_up
from .options import Options
from .report import Report, Table
from .results import Result
from .swap_share import flags_of
from .wording import mean_text

NAME = "iteration-time"
WARMUP = 10
ITERATIONS = 50
STAGES = (2, 4)
PLAIN = "1F1B"
SHARES = ("0", "1/8", "1/2")


def setup_of(stages: int) -> Setup:
    """Larger than the other studies' model, so that computing outweighs messages."""
    return Setup(
        pipeline=stages,
        iterations=ITERATIONS,
        hidden=128,
        ffn=344,
        sequence=128,
        micro_batch=4,
        eval_interval=1000,
        eval_iters=1,
    )


def ways(stages: int) -> dict[str, tuple[str, ...]]:
    """Name -> flags. CheckFree without plus needs three stages; stock training stands in."""
    plain = ("--ft-checkfree",) if stages >= 3 else ()
    return {PLAIN: plain} | {f"share {share}": flags_of(share) for share in SHARES}


def name_of(stages: int, way: str) -> str:
    return f"P={stages}, {way}"


def grid(options: Options) -> Grid:
    """Here the second part of a place is the number of the pair."""
    found: Grid = {}
    for pair in range(options.pairs):
        for stages in STAGES:
            # Turn and turn about, so that no way always comes after the same other one.
            listed = list(ways(stages).items())
            for way, flags in listed if pair % 2 == 0 else listed[::-1]:
                name = name_of(stages, way)
                found[name, pair] = Cell(
                    name=f"iteration-time: {name}, pair {pair}",
                    setup=setup_of(stages),
                    seed=0,
                    flags=flags,
                    repetition=pair,
                )
    return found


def step_s(result: Result) -> float:
    return result.median_step_s(WARMUP)


def report(options: Options, results: Mapping[str, Result]) -> Report:
    found = look_up(grid(options), results)
    setup = setup_of(STAGES[0])
    made = Report(
        NAME,
        "Iteration time of swapped microbatches",
        [
            f"Median of the steps after the first {WARMUP} of {ITERATIONS}, hidden size "
            f"{setup.hidden}, sequences of {setup.sequence}, {setup.microbatches} microbatches of "
            f"{setup.micro_batch}, no failures; each run of CheckFree+ against the run of 1F1B of "
            "the same pair. With four stages that one has `--ft-checkfree`, and with it the step "
            "transaction; with two it is stock training, so that the ratio holds the transaction "
            "too.",
            "The simulator's times are those of the compiled schedule with a device for each stage "
            "and messages that take no time, a backward pass twice a forward pass.",
        ],
    )
    rows, measured, predicted, groups = [], [], [], []
    for stages in STAGES:
        for share in SHARES:
            ratios = ratios_of(found, stages, share)
            if not ratios:
                continue
            expected = timing.swap_cost(stages, setup.microbatches, Fraction(share))
            bubble = timing.bubble(stages, setup.microbatches, Fraction(share))
            rows.append(
                (
                    *(str(stages), share, mean_text(ratios)),
                    *(f"{min(ratios):.3f}", f"{max(ratios):.3f}", f"{expected:.3f}"),
                    f"{100 * bubble:.1f} %",
                )
            )
            groups.append(f"P={stages}, share {share}")
            measured.append(ratios)
            predicted.append([expected])
            made.numbers[name_of(stages, f"share {share}")] = {
                "ratios": ratios,
                "simulator": expected,
                "bubble": bubble,
            }
    made.tables.append(
        Table(
            "Iteration time over that of 1F1B",
            ("stages", "share", "measured", "lowest", "highest", "simulator", "bubble, simulator"),
            rows,
        )
    )
    plain = ", ".join(
        f"{100 * timing.bubble(stages, setup.microbatches, Fraction(0)):.1f} % with {stages} stages"
        for stages in STAGES
    )
    made.findings.append(f"The bubble of 1F1B is {plain} in the simulator.")
    made.findings.append(
        "Where stages outnumber cores the bubble does not show in the measured time; share 0 is "
        "the cost of the twins and of our executor in place of Megatron's schedule."
    )
    if rows:
        made.figures["ratio"] = lambda path: plots.bars(
            path,
            groups,
            {"measured": measured, "simulator": predicted},
            title="CheckFree+: iteration time over 1F1B",
            xlabel="stages, share of swapped microbatches",
            ylabel="ratio",
            from_zero=False,
        )
    return made


def ratios_of(found: Found, stages: int, share: str) -> list[float]:
    """Of the pairs that are done."""
    plain = found.values(name_of(stages, PLAIN), step_s)
    swapped = found.values(name_of(stages, f"share {share}"), step_s)
    return [swapped[pair] / plain[pair] for pair in sorted(swapped) if pair in plain]
