"""What an iteration costs, in units of one without failures: measured, simulated or stated.

Where processes outnumber cores, idle processes cost nothing and a pipeline's bubble cannot be seen
in the time of an iteration. So the simulator of ``megatron_ft/schedule`` says what it would be with
a device for each stage.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from fractions import Fraction

from megatron_ft.schedule.compiler import compile_schedule
from megatron_ft.schedule.placement import adopted, normal
from megatron_ft.schedule.routes import routes
from megatron_ft.schedule.simulator import Simulation, simulate

STEPS = 16
"""Steps over which the simulator's times are averaged: a small share swaps in some of them only."""

SIMULATED = (4, 16)
"""Stages and microbatches of the pipeline that costs are simulated for: four microbatches a stage.
The studies' jobs have one, which would show the bubble more than anything else."""

MECEFO_STAGE_COST = 1.13
"""Two stages on one process, in units of one normal stage: what ``tools/bench_mecefo.py`` measured
with the default rank (docs/mecefo.md)."""


def simulated(
    num_stages: int, microbatches: int, share: Fraction, forward: float = 1.0, backward: float = 2.0
) -> list[Simulation]:
    """Consecutive steps of one replica in which a share of the microbatches is swapped."""
    return [
        simulate(
            compile_schedule(
                routes(num_stages, share, range(microbatches), start=step * microbatches),
                normal(num_stages),
            ),
            forward,
            backward,
        )
        for step in range(STEPS)
    ]


def swap_cost(
    num_stages: int, microbatches: int, share: Fraction, forward: float = 1.0, backward: float = 2.0
) -> float:
    """Iteration time of CheckFree+ over that of 1F1B, by the simulator."""
    plain = simulated(num_stages, microbatches, Fraction(0), forward, backward)[0].makespan
    steps = simulated(num_stages, microbatches, share, forward, backward)
    return statistics.fmean(step.makespan for step in steps) / plain


def bubble(
    num_stages: int, microbatches: int, share: Fraction, forward: float = 1.0, backward: float = 2.0
) -> float:
    """The share of the processes' time in which they wait, by the simulator."""
    return statistics.fmean(
        step.bubble for step in simulated(num_stages, microbatches, share, forward, backward)
    )


def adoption_cost(
    num_stages: int, microbatches: int, stage: int, cost: float = MECEFO_STAGE_COST
) -> float:
    """Iteration time while a neighbour runs ``stage`` too, over that of 1F1B, by the simulator.

    Args:
        cost: Both stages in MeCeFO's mode, in units of one normal stage.
    """
    neighbour = stage + 1 if stage == 0 else stage - 1
    placement = adopted(num_stages, {stage: neighbour})
    forwards = [cost / 2 if s in (stage, neighbour) else 1.0 for s in range(num_stages)]
    straight = routes(num_stages, Fraction(0), range(microbatches))
    degraded = simulate(compile_schedule(straight, placement), forwards).makespan
    return degraded / simulate(compile_schedule(straight, normal(num_stages))).makespan


def redundant_cost(step_s: float, forward_only_s: float) -> float:
    """Redundant computation: each process also does the forward passes of the next stage.

    Args:
        step_s: A step, measured.
        forward_only_s: The forward passes of as many microbatches alone, measured.
    """
    if step_s <= 0 or forward_only_s < 0:
        raise ValueError(f"a step of {step_s} s, forward passes of {forward_only_s} s")
    return (step_s + forward_only_s) / step_s


def quota_cost(max_quota: int, microbatches: int) -> float:
    """Iteration time with uneven quotas: the busiest replica decides.

    Args:
        max_quota: The most microbatches that a replica had in the step.
        microbatches: Of each replica without failures.
    """
    return max_quota / microbatches


def of_degraded(
    iterations: int, during: Sequence[tuple[int, int, float]], normal_cost: float = 1.0
) -> list[float]:
    """Costs of all iterations where some are dearer: the dearest of those that overlap counts.

    Args:
        during: (first iteration, how many, cost).
    """
    costs = [normal_cost] * iterations
    for first, duration, cost in during:
        for at in range(first - 1, min(first - 1 + duration, iterations)):
            costs[at] = max(costs[at], cost)
    return costs
