"""Which stage is lost in which iteration, drawn before the job starts.

The process is CheckFree's (arXiv 2506.15461): a stage fails with probability h per hour, which is
1 - (1-h)^(t/3600) in an iteration of t seconds. An iteration of a study stands for one of the
paper's, 91.3 s, whatever it takes here. The draws are those of
``--ft-stage-failure-rate-per-hour``; they are made beforehand so that all strategies meet the same
failures, and so that what a strategy does not claim to survive can be left out and counted.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from megatron_ft.faults.rates import FaultRate, RateSchedule

PAPER_ITERATION_S = 91.3
"""CheckFree's 500M model: seconds of an iteration."""


@dataclass(frozen=True, order=True)
class Loss:
    """A stage that is lost in an iteration; both as Megatron counts them."""

    iteration: int
    """From 1."""
    stage: int
    """From 0."""


@functools.cache
def draw(
    per_hour: float,
    *,
    seed: int,
    iterations: int,
    num_stages: int,
    iteration_s: float = PAPER_ITERATION_S,
) -> tuple[Loss, ...]:
    """All losses of a run, ascending.

    Args:
        per_hour: Probability that a stage fails in an hour, 0.16 for 16 %.
        iteration_s: What an iteration stands for, in seconds.
    """
    schedule = RateSchedule(
        [FaultRate("lose-stage", per_hour, "h")],
        seed=seed,
        num_slots=num_stages,
        num_stages=num_stages,
        iteration_seconds=iteration_s,
    )
    return tuple(
        Loss(iteration, spec.stage)
        for iteration in range(1, iterations + 1)
        for spec in schedule.specs_at(iteration)
        if spec.stage is not None
    )


def expected(
    per_hour: float, *, iterations: int, stages: int, iteration_s: float = PAPER_ITERATION_S
) -> float:
    """How many losses ``draw`` gives on average, of so many stages."""
    rate = FaultRate("lose-stage", per_hour, "h")
    return rate.per_iteration(iteration_s) * iterations * stages


def of_stages(losses: Iterable[Loss], stages: Collection[int]) -> tuple[Loss, ...]:
    """Those of some stages only."""
    return tuple(loss for loss in losses if loss.stage in stages)


def later(losses: Iterable[Loss], first: int) -> tuple[Loss, ...]:
    """Those of iteration ``first`` and after."""
    return tuple(loss for loss in losses if loss.iteration >= first)


def middle(num_stages: int) -> range:
    """The stages that plain CheckFree can rebuild."""
    return range(1, num_stages - 1)


def ends(num_stages: int) -> tuple[int, int]:
    """The first and the last stage."""
    return (0, num_stages - 1)


def survivable(
    losses: Iterable[Loss], num_stages: int
) -> tuple[tuple[Loss, ...], tuple[Loss, ...]]:
    """What CheckFree+ can lose, and what is left out of it.

    Embedding and head are on two stages each. Of two losses in one iteration that would take both
    holders, the second is left out; the paper assumes that neighbours are not lost at once.
    """
    kept: list[Loss] = []
    left_out: list[Loss] = []
    pairs = ({0, 1}, {num_stages - 2, num_stages - 1})
    for loss in losses:
        now = {other.stage for other in kept if other.iteration == loss.iteration} | {loss.stage}
        impossible = any(pair <= now for pair in pairs)
        (left_out if impossible else kept).append(loss)
    return tuple(kept), tuple(left_out)


def lose_stages(losses: Iterable[Loss]) -> tuple[str, ...]:
    """As faults in which no process dies."""
    return tuple(f"lose-stage@{loss.iteration}:stage={loss.stage}" for loss in losses)


def kills(losses: Iterable[Loss]) -> tuple[str, ...]:
    """As real deaths, for a job with one slot for each stage drawn."""
    return tuple(f"kill@{loss.iteration}:slot={loss.stage}" for loss in losses)


def shrinking(losses: Iterable[Loss], num_replicas: int) -> tuple[Loss, ...]:
    """Deaths of replicas that nobody replaces: each once, and the last one is spared."""
    dead: set[int] = set()
    kept = []
    for loss in losses:
        if loss.stage not in dead and len(dead) < num_replicas - 1:
            dead.add(loss.stage)
            kept.append(loss)
    return tuple(kept)


# -- checkpoint and restart ------------------------------------------------------------------------


@dataclass(frozen=True)
class Start:
    """One start of a job that is started again from its newest checkpoint."""

    loaded: int
    """The iteration of the checkpoint, 0 for none."""
    dies_at: int | None
    """The iteration in which it dies; None: it reaches the end."""
    stage: int = 0
    """Who dies."""

    def steps(self, iterations: int) -> int:
        """Iterations that this start completes."""
        return (iterations if self.dies_at is None else self.dies_at - 1) - self.loaded


def starts(
    losses: Sequence[Loss], *, drawn: int, iterations: int, save_interval: int
) -> tuple[Start, ...]:
    """How a run with checkpoints goes if ``losses`` are of attempted iterations.

    Time goes on while work is done again, so the k-th attempt meets the draw of iteration k,
    whichever iteration it does. The interrupted one counts as an attempt.

    Args:
        drawn: How many attempts were drawn for.
        iterations: Of the run.
        save_interval: Iterations between two checkpoints.

    Raises:
        ValueError: The draws end before the run does.
    """
    found: list[Start] = []
    at = attempts = 0
    # Of two stages lost in one attempt the second makes no difference.
    for attempt in sorted({loss.iteration for loss in losses}):
        dies_at = at + attempt - attempts
        if dies_at > iterations:
            break
        stage = next(loss.stage for loss in losses if loss.iteration == attempt)
        found.append(Start(at, dies_at, stage))
        attempts = attempt
        at = (dies_at - 1) // save_interval * save_interval
    if attempts + iterations - at > drawn:
        raise ValueError(f"the run is not over after the {drawn} attempts that were drawn for")
    found.append(Start(at, None))
    return tuple(found)


def attempts_until(plan: Sequence[Start], iteration: float) -> float:
    """Iterations attempted before ``iteration`` was done for the first time, done-again included.

    Args:
        iteration: May lie between two, where a curve is interpolated.
    """
    done = 0
    for start in plan:
        if start.dies_at is None or iteration <= start.dies_at - 1:
            return done + iteration - start.loaded
        done += start.dies_at - start.loaded
    raise ValueError(f"iteration {iteration} is not reached")


# -- MeCeFO's scenarios ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """How often a node of the cluster fails, and for how long."""

    name: str
    every_h: float
    """Hours between two failures in the whole cluster."""
    back_h: float
    """Hours until the node is back."""


SCENARIOS = (Scenario("low", 2, 4), Scenario("mid", 1, 3), Scenario("high", 0.5, 2))
"""The paper's (arXiv 2510.16415)."""


@dataclass(frozen=True, order=True)
class Outage:
    """A slot without a node of its own for some iterations."""

    iteration: int
    slot: int
    duration: int


def outages(
    scenario: Scenario,
    *,
    seed: int,
    iterations: int,
    pipeline: int,
    data: int,
    iterations_per_hour: float,
    cluster_nodes: int,
) -> tuple[Outage, ...]:
    """The outages of a run in one of the paper's scenarios.

    The scenario is one of a cluster of ``cluster_nodes``; here are fewer, so failures are rarer in
    the same proportion and each node fails as often as there. Failures come at exponentially
    distributed times, to a slot drawn among those that ``adoptable`` allows.

    Args:
        pipeline: Stages. Slots are numbered as Megatron does: stage * data + replica.
        iterations_per_hour: What an hour is, in iterations.
    """
    chance = random.Random(f"{scenario.name}|{seed}")
    per_hour = pipeline * data / cluster_nodes / scenario.every_h
    duration = max(1, round(scenario.back_h * iterations_per_hour))
    found: list[Outage] = []
    hour = chance.expovariate(per_hour)
    while (iteration := 1 + int(hour * iterations_per_hour)) <= iterations:
        free = adoptable(found, iteration, pipeline=pipeline, data=data)
        if free:
            # An outage that lasts beyond the end lasts to the end.
            left = iterations + 1 - iteration
            found.append(Outage(iteration, chance.choice(free), min(duration, left)))
        hour += chance.expovariate(per_hour)
    return tuple(found)


def outages_of(
    losses: Iterable[Loss], duration: int, *, iterations: int, pipeline: int, data: int
) -> tuple[Outage, ...]:
    """Losses of slots (here ``Loss.stage`` is the slot) as outages of so many iterations each.

    A slot that is out already, and one without a neighbour to do both, cannot fail.
    """
    found: list[Outage] = []
    for loss in losses:
        if loss.stage in adoptable(found, loss.iteration, pipeline=pipeline, data=data):
            left = iterations + 1 - loss.iteration
            found.append(Outage(loss.iteration, loss.stage, min(duration, left)))
    return tuple(found)


def adoptable(
    found: Iterable[Outage], iteration: int, *, pipeline: int, data: int
) -> tuple[int, ...]:
    """Slots that may fail: they work, and so do their neighbours, and another replica is exact.

    A neighbour that does both must have its own stage only; and attention learns from replicas
    that are exact at the stage, so one of them is spared.
    """
    out = {o.slot for o in found if o.iteration <= iteration < o.iteration + o.duration}
    affected = {slot % data for slot in out}
    taken = {slot + step for slot in out for step in (-data, 0, data)}
    return tuple(
        slot
        for slot in range(pipeline * data)
        if slot not in taken and len(affected | {slot % data}) < data
    )


def degraded_share(found: Iterable[Outage], *, iterations: int, slots: int) -> float:
    """The share of slots and iterations without a node of its own."""
    return sum(outage.duration for outage in found) / (iterations * slots)


def degrades(found: Iterable[Outage]) -> tuple[str, ...]:
    """As faults in which no process dies."""
    return tuple(f"degrade@{o.iteration}:slot={o.slot}:for={o.duration}" for o in found)
