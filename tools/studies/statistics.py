"""What is computed from the results of several seeds."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Curve = Sequence[tuple[float, float]]
"""Points (iteration, loss), ascending in the first."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float | None
    """Of the sample; None for one seed."""
    count: int

    def text(self, digits: int = 3) -> str:
        if self.deviation is None:
            return f"{self.mean:.{digits}f}"
        return f"{self.mean:.{digits}f} ± {self.deviation:.{digits}f}"


def spread(values: Sequence[float]) -> Spread:
    """Raises ValueError where there are no values."""
    if not values:
        raise ValueError("no values to take a mean of")
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, len(values))


def perplexity(loss: float) -> float:
    """Of a mean loss in nats; infinite where it does not fit."""
    return math.exp(loss) if loss < 700 else math.inf


def increases(values: Mapping[int, float], baseline: Mapping[int, float]) -> list[float]:
    """Relative increase over the baseline for each seed that both have, in the order of seeds."""
    return [values[seed] / baseline[seed] - 1 for seed in sorted(values) if seed in baseline]


@dataclass(frozen=True)
class OrderCheck:
    """Whether values come in the order that a paper has them in."""

    expected: tuple[str, ...]
    """From best to worst."""
    found: tuple[str, ...]
    holds: bool
    """Of the means, strictly."""
    seeds: Mapping[int, bool]
    """Of each seed that has all of them."""

    def text(self) -> str:
        number = sum(self.seeds.values())
        outcome = "reproduced" if self.holds else "NOT reproduced"
        return (
            f"order {' < '.join(self.expected)}: {outcome} by the means "
            f"({' < '.join(self.found)}), and by {number} of {len(self.seeds)} seeds"
        )


def check_order(values: Mapping[str, Mapping[int, float]], expected: Sequence[str]) -> OrderCheck:
    """Compare the order of methods, lower values first, with the expected one.

    Args:
        values: method -> seed -> value; each has at least one.

    Raises:
        ValueError: A method has no value.
    """
    missing = [name for name in expected if not values.get(name)]
    if missing:
        raise ValueError(f"no values of {', '.join(missing)}")
    common = sorted(set.intersection(*(set(values[name]) for name in expected)))
    # Seeds differ more than methods do: means over different seeds cannot be compared.
    counted = {name: [values[name][seed] for seed in common] for name in expected}
    means = {n: statistics.fmean(counted[n] if common else values[n].values()) for n in expected}
    found = tuple(sorted(expected, key=lambda name: means[name]))
    return OrderCheck(
        tuple(expected),
        found,
        _ascends([means[name] for name in expected]),
        {seed: _ascends([values[name][seed] for name in expected]) for seed in common},
    )


def _ascends(values: Sequence[float]) -> bool:
    return all(a < b for a, b in itertools.pairwise(values))


def first_below(curve: Curve, target: float) -> float | None:
    """Where a curve first reaches ``target``, interpolated; None if it does not.

    A curve that begins below the target reaches it at its first point.
    """
    before: tuple[float, float] | None = None
    for at, loss in curve:
        if loss <= target:
            if before is None or before[1] <= loss:
                return at
            share = (before[1] - target) / (before[1] - loss)
            return before[0] + share * (at - before[0])
        before = (at, loss)
    return None


def value_at(curve: Curve, at: float) -> float:
    """The value of a curve at a place between its first and its last point, interpolated."""
    if not curve or not curve[0][0] <= at <= curve[-1][0]:
        raise ValueError(f"{at} is not on a curve of {len(curve)} points")
    before = curve[0]
    for point in curve:
        if point[0] >= at:
            width = point[0] - before[0]
            share = (at - before[0]) / width if width else 0.0
            return before[1] + share * (point[1] - before[1])
        before = point
    raise AssertionError("the last point is not before the place")


def mean_excess(curve: Curve, base: Curve, after: float = 0) -> float:
    """How much higher a curve is than ``base``, the mean over its points later than ``after``.

    Less a matter of how long ago the last failure was than the last points alone.

    Raises:
        ValueError: The curves have no such point in common.
    """
    table = dict(base)
    excess = [loss - table[at] for at, loss in curve if at > after and at in table]
    if not excess:
        raise ValueError(f"no common points after {after}")
    return statistics.fmean(excess)


def elapsed(costs: Sequence[float], until: float) -> float:
    """The sum of the first ``until`` costs, the last one in part.

    Args:
        costs: Of iterations 1, 2, ...
    """
    whole = math.floor(until)
    if until > len(costs):
        raise ValueError(f"{until} iterations, and costs of {len(costs)}")
    part = until - whole
    return math.fsum(costs[:whole]) + (part * costs[whole] if part else 0.0)
