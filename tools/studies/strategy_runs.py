"""The jobs of the study of strategies, and what their iterations cost.

A job of four stages for checkpoint and restart, redundant computation, CheckFree and CheckFree+;
four replicas of one stage for ReCoVer; 2 x 2 for the ladder; 2 x 4 for MeCeFO. All see the same
samples. What an iteration takes on this machine says little (four processes share its cores), so
time is counted in iterations of the paper, 91.3 s, each times what it costs with the strategy:
measured, from the simulator, or by counting. How each is counted is in the table.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from megatron_ft.checkfree.options import DEFAULT_SWAP_SHARE

from . import failures, timing
from .cells import Cell, Setup, cell_of, setup_of
from .grid import Found, Grid
from .options import Options
from .results import Result
from .statistics import Curve, elapsed, spread, value_at
from .swap_share import flags_of

NAME = "strategies"
RATES = (0.05, 0.10, 0.16)
SAVE_INTERVAL = 100
"""The paper's."""
DRAWN = 40
"""Attempts drawn for with checkpoints, in runs."""
OUTAGE_H = 2.0
"""MeCeFO: hours until a node is back, as in the paper's high scenario."""

STAGES, REPLICAS, LADDER, NODES = "4 x 1", "1 x 4", "2 x 2", "2 x 4"
"""The jobs: stages x replicas."""


@dataclass(frozen=True)
class Strategy:
    """A row of the table."""

    name: str
    job: str
    how: str
    """How its time is counted."""
    real: bool = True
    """Whether it has runs of its own; else its losses are those without failures."""


CHECKPOINT = Strategy(
    "checkpoint and restart",
    STAGES,
    f"a checkpoint every {SAVE_INTERVAL} iterations; what is done again counts, restarts take no "
    "time; real restarts with the first seed, whose losses are those without failures",
)
REDUNDANT = Strategy(
    "redundant computation",
    STAGES,
    "computed: losses of no failure, a step and its forward passes once more (measured)",
    real=False,
)
CHECKFREE = Strategy("CheckFree", STAGES, "1 for each iteration; losses of middle stages only")
PLUS = Strategy(
    "CheckFree+", STAGES, "the simulator's time of its routes, 4 stages and 16 microbatches"
)
VERSATILE = Strategy("ReCoVer versatile", REPLICAS, "the largest quota of a replica")
ADAPTIVE = Strategy("ReCoVer adaptive", REPLICAS, "1; the batch shrinks")
MECEFO = Strategy(
    "MeCeFO",
    NODES,
    "the simulator's time while a neighbour runs two stages in "
    f"{timing.MECEFO_STAGE_COST} of the time of one, 4 stages and 16 microbatches",
)
ALL = Strategy("all together", LADDER, "as CheckFree+, times the largest quota")
STRATEGIES = (CHECKPOINT, REDUNDANT, CHECKFREE, PLUS, VERSATILE, ADAPTIVE, MECEFO, ALL)


def setups(options: Options) -> dict[str, Setup]:
    return {
        STAGES: setup_of(options),
        REPLICAS: setup_of(options, pipeline=1, data=4, micro_batch=4),
        LADDER: setup_of(options, pipeline=2, data=2, micro_batch=4),
        NODES: setup_of(options, pipeline=2, data=4, micro_batch=4),
    }


BASELINE_FLAGS = {
    STAGES: ("--ft-checkfree",),
    REPLICAS: ("--ft-recover",),
    LADDER: ("--ft-recover",),
    NODES: ("--ft-recover",),
}


def none_of(job: str) -> str:
    return f"no failure, {job}"


def name_of(strategy: Strategy, rate: float) -> str:
    return f"{strategy.name}, {100 * rate:g} %"


def seconds_of(options: Options) -> float:
    """What an iteration stands for."""
    return options.seconds(failures.PAPER_ITERATION_S)


def draw(
    options: Options, rate: float, seed: int, setup: Setup, runs: int = 1
) -> tuple[failures.Loss, ...]:
    """Losses of the slots of a job, or of the stages where it has one replica."""
    return failures.draw(
        rate,
        seed=seed,
        iterations=setup.iterations * runs,
        num_stages=setup.slots,
        iteration_s=seconds_of(options),
    )


def starts(options: Options, rate: float, seed: int) -> tuple[failures.Start, ...]:
    """How checkpoint and restart goes."""
    setup = setups(options)[STAGES]
    return failures.starts(
        draw(options, rate, seed, setup, DRAWN),
        drawn=setup.iterations * DRAWN,
        iterations=setup.iterations,
        save_interval=SAVE_INTERVAL,
    )


def grid(options: Options) -> Grid:
    jobs, found = setups(options), Grid()
    for seed in options.seeds:
        for job, setup in jobs.items():
            found[none_of(job), seed] = cell_of(
                none_of(job), setup, seed, flags=BASELINE_FLAGS[job]
            )
        for rate in RATES:
            for strategy in STRATEGIES:
                # Restarts change no loss; that is checked with one seed, and costs minutes.
                if strategy.real and (strategy != CHECKPOINT or seed == options.seeds[0]):
                    found[name_of(strategy, rate), seed] = _cell(options, strategy, rate, seed)
    return found


def _cell(options: Options, strategy: Strategy, rate: float, seed: int) -> Cell:
    setup = setups(options)[strategy.job]
    losses = draw(options, rate, seed, setup)
    share = flags_of(str(DEFAULT_SWAP_SHARE))
    make = functools.partial(cell_of, f"strategies: {name_of(strategy, rate)}", setup, seed)
    if strategy == CHECKPOINT:
        plan = starts(options, rate, seed)
        return make(flags=("--ft-checkfree",), starts=plan, save_interval=SAVE_INTERVAL)
    if strategy == CHECKFREE:
        kept = failures.of_stages(losses, failures.middle(setup.pipeline))
        return make(flags=("--ft-checkfree",), faults=failures.lose_stages(kept))
    if strategy == PLUS:
        kept, _ = failures.survivable(losses, setup.pipeline)
        return make(flags=share, faults=failures.lose_stages(kept))
    if strategy in (VERSATILE, ADAPTIVE):
        policy = strategy.name.rpartition(" ")[2]
        return make(
            flags=("--ft-recover", "--ft-recover-policy", policy),
            faults=failures.kills(failures.shrinking(losses, setup.data)),
        )
    if strategy == MECEFO:
        return make(
            flags=("--ft-recover", "--ft-mecefo"),
            faults=failures.degrades(outages(options, rate, seed)),
        )
    assert strategy == ALL
    mecefo = ("--ft-mecefo",) if "--ft-mecefo" in options.flags_known else ()
    return make(
        # A new process takes hundreds of these iterations to start, of the paper's less than one:
        # a spare is there at once, and the new one becomes the next spare.
        flags=("--ft-recover", *share, *mecefo, "--ft-respawn", "--ft-spares", "1"),
        faults=failures.kills(losses),
        may_miss=True,
    )


def outages(options: Options, rate: float, seed: int) -> tuple[failures.Outage, ...]:
    """MeCeFO: slots that are lost, each for ``OUTAGE_H``."""
    setup = setups(options)[NODES]
    seconds = seconds_of(options)
    return failures.outages_of(
        draw(options, rate, seed, setup),
        round(OUTAGE_H * 3600 / seconds),
        iterations=setup.iterations,
        pipeline=setup.pipeline,
        data=setup.data,
    )


# -- time ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """The course of one training: its validation, and what its iterations cost."""

    validation: Curve
    elapsed: Callable[[float], float]
    """Iteration -> iterations of the paper until then."""


def course(
    options: Options, strategy: Strategy, rate: float, seed: int, found: Found
) -> Course | None:
    """None where the runs that it needs are not there."""
    base = found.of(none_of(strategy.job)).get(seed)
    own = found.of(name_of(strategy, rate)).get(seed)
    setup = setups(options)[strategy.job]
    if strategy in (CHECKPOINT, REDUNDANT):
        if base is None:
            return None
        validation = base.validation if own is None else own.validation
        if strategy == CHECKPOINT:
            plan = starts(options, rate, seed)
            return Course(validation, lambda until: failures.attempts_until(plan, until))
        factor = redundant_factor(base)
        return Course(validation, lambda until: factor * until)
    if own is None:
        return None
    costs = costs_of(options, strategy, rate, seed, own, setup)
    return Course(own.validation, lambda until: elapsed(costs, until))


def costs_of(
    options: Options, strategy: Strategy, rate: float, seed: int, own: Result, setup: Setup
) -> list[float]:
    """What each iteration costs, in units of a normal one."""
    quotas = [max(1.0, timing.quota_cost(q, setup.microbatches)) for q in own.max_quotas]
    if strategy == VERSATILE:
        return quotas
    if strategy in (PLUS, ALL):
        factor = timing.swap_cost(*timing.SIMULATED, Fraction(DEFAULT_SWAP_SHARE))
        return [factor * quota for quota in quotas]
    if strategy == MECEFO:
        # The first stage of two stands for an end of the pipeline, the second for what is not one.
        costs = [timing.adoption_cost(*timing.SIMULATED, stage) for stage in (0, 1)]
        during = [
            (outage.iteration, outage.duration, costs[outage.slot // setup.data])
            for outage in outages(options, rate, seed)
        ]
        return timing.of_degraded(setup.iterations, during)
    return [1.0] * setup.iterations


def redundant_factor(base: Result) -> float:
    """From the steps and the evaluations of a run."""
    eval_iters = int(base.cell["setup"]["eval_iters"])
    return timing.redundant_cost(base.median_step_s(10), base.forward_only_s(eval_iters))


def target_of(options: Options, found: Found) -> float | None:
    """The validation loss that is to be reached."""
    if options.target_loss is not None:
        return options.target_loss
    base = found.of(none_of(STAGES)).values()
    at = 0.75 * options.iterations
    return spread([value_at(r.validation, at) for r in base]).mean if base else None
