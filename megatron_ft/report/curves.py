"""Curves over the steps, thinned for a page without losing an extreme."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from megatron_ft.observe.event_table import Event
from megatron_ft.report.timeline import Timeline

# A plot is at most some 1,200 pixels wide; each bucket keeps up to four points. The loss is what a
# reader looks at more closely, so it keeps more.
NUM_BUCKETS = 600
NUM_LOSS_BUCKETS = 2500
# Digits enough to read any value off the page, and half of what all of them would take.
NUM_DIGITS = 9

METRICS = {
    "lm_loss": "loss",
    "grad_norm": "gradient norm",
    "seconds": "seconds a step",
    "tokens_per_second": "tokens a second",
    "learning_rate": "learning rate",
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """Points of one curve; all lists have the same length."""

    label: str
    steps: list[int]
    seconds: list[float]
    """Since the run began."""
    values: list[float]
    total: int
    """How many points there were before thinning."""
    not_finite: list[int]
    """Steps whose value is NaN or infinite."""


def thin(values: Sequence[float], num_buckets: int = NUM_BUCKETS) -> list[int]:
    """Indices to keep: of each bucket the first, the lowest, the highest and the last.

    The line through what is kept covers, at every bucket, the same range as the line through all.
    """
    if len(values) <= 4 * num_buckets:
        return list(range(len(values)))
    kept: set[int] = set()
    for bucket in range(num_buckets):
        begin = bucket * len(values) // num_buckets
        end = (bucket + 1) * len(values) // num_buckets
        inside = range(begin, end)
        kept |= {begin, end - 1, min(inside, key=values.__getitem__)}
        kept.add(max(inside, key=values.__getitem__))
    return sorted(kept)


def curves_of(
    steps: Sequence[Event], timeline: Timeline, num_loss_buckets: int = NUM_LOSS_BUCKETS
) -> dict[str, Curve]:
    """All metrics of the committed steps; one that no step has is left out.

    Args:
        num_loss_buckets: how far the loss is thinned, see `thin`.
    """
    found = {}
    for name, label in METRICS.items():
        having = [step for step in steps if step.get(name) is not None]
        if having:
            buckets = num_loss_buckets if name == "lm_loss" else NUM_BUCKETS
            found[name] = _curve(label, name, having, timeline, buckets)
    return found


def _curve(
    label: str, name: str, steps: Sequence[Event], timeline: Timeline, num_buckets: int
) -> Curve:
    finite = [step for step in steps if math.isfinite(step[name])]
    values = [float(step[name]) for step in finite]
    kept = [finite[index] for index in thin(values, num_buckets)]
    return Curve(
        label=label,
        steps=[step["iteration"] for step in kept],
        seconds=[round(float(step["time"]) - timeline.begin, 3) for step in kept],
        values=[digits(float(step[name])) for step in kept],
        total=len(steps),
        not_finite=[step["iteration"] for step in steps if not math.isfinite(step[name])],
    )


def digits(value: float) -> float:
    """The value with `NUM_DIGITS` significant digits."""
    return float(f"{value:.{NUM_DIGITS}g}")
