"""Several runs side by side: each against the first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from megatron_ft.observe.event_table import Event
from megatron_ft.report import wording
from megatron_ft.report.curves import digits, thin
from megatron_ft.report.figures import Figure, figures_of
from megatron_ft.report.load import RunData


@dataclasses.dataclass(frozen=True)
class Difference:
    """The losses of one run against those of the first, at the steps that both committed."""

    name: str
    steps: list[int]
    values: list[float]
    """Loss minus that of the first run, thinned; finite ones only."""
    num_common: int
    num_same_samples: int
    """Common steps that consumed the same samples."""
    largest: float | None
    """The largest absolute difference; None without a common step of finite loss."""
    largest_at: int | None
    largest_relative: float | None
    """The largest difference relative to the first run's loss."""
    first_difference: int | None
    """The first step at which the losses are not equal, digit for digit."""

    @property
    def text(self) -> str:
        """In words."""
        if not self.num_common:
            return "no step in common"
        same = (
            f"{self.num_same_samples:,} of {self.num_common:,} common steps have the same samples"
        )
        if self.first_difference is None:
            equal = "" if self.largest is None else "; all losses are equal, digit for digit"
            return same + equal
        if self.largest is None:
            return f"{same}; they first differ at step {self.first_difference:,}"
        relative = ""
        if self.largest_relative is not None:
            relative = f", relative at most {self.largest_relative:.2g}"
        return (
            f"{same}; losses differ by at most {self.largest:.3g} (step {self.largest_at:,})"
            f"{relative}; they first differ at step {self.first_difference:,}"
        )


def difference(run: RunData, first: RunData) -> Difference:
    """Compare the committed steps of two runs."""
    reference = {step["iteration"]: step for step in first.accounts.steps}
    common = [
        (step, reference[step["iteration"]])
        for step in run.accounts.steps
        if step["iteration"] in reference
    ]
    finite = [
        (step["iteration"], step["lm_loss"] - other["lm_loss"], other["lm_loss"])
        for step, other in common
        if math.isfinite(step["lm_loss"]) and math.isfinite(other["lm_loss"])
    ]
    deltas = [delta for _, delta, _ in finite]
    kept = thin(deltas)
    at = max(range(len(deltas)), key=lambda index: abs(deltas[index]), default=None)
    relative = [abs(delta / loss) for _, delta, loss in finite if loss]
    return Difference(
        name=run.name,
        steps=[finite[index][0] for index in kept],
        values=[digits(deltas[index]) for index in kept],
        num_common=len(common),
        num_same_samples=sum(s["samples_digest"] == o["samples_digest"] for s, o in common),
        largest=None if at is None else abs(deltas[at]),
        largest_at=None if at is None else finite[at][0],
        largest_relative=max(relative, default=None),
        first_difference=next(
            (step["iteration"] for step, other in common if _differ(step, other)), None
        ),
    )


def _differ(step: Event, other: Event) -> bool:
    """Whether two losses are not the same number, or one of them is no number."""
    losses = float(step["lm_loss"]), float(other["lm_loss"])
    return losses[0] != losses[1] and not all(map(math.isnan, losses))


def differences(runs: Sequence[RunData]) -> list[Difference]:
    """All runs but the first, against the first."""
    return [difference(run, runs[0]) for run in runs[1:]]


def side_by_side(runs: Sequence[RunData]) -> list[list[Figure]]:
    """Key figures: a list for each figure, with an item for each run."""
    return [list(figures) for figures in zip(*map(figures_of, runs), strict=True)]


def change(figure: Figure, first: Figure) -> str:
    """The difference of two figures in words; empty where there is none to tell."""
    a, b = figure.raw, first.raw
    if figure.field == "downtime_s":
        a, b = sum(a), sum(b)
    elif figure.field == "step_seconds":
        a, b = a.get("p50"), b.get("p50")
    elif figure.field == "overhead_bytes" and a and b:
        a, b = sum(a.values()), sum(b.values())
    if not _is_number(a) or not _is_number(b) or a == b:
        return ""
    if figure.field == "goodput":
        return f"{(a - b) * 100:+.1f} points"
    if figure.field in ("final_lm_loss", "validation_lm_loss"):
        return f"{a - b:+.2g}"
    if isinstance(a, int) and isinstance(b, int) and abs(b) < 10_000:
        return f"{a - b:+,}"
    if not b:
        return ""
    return f"{(a / b - 1) * 100:+.1f}%" if 0.5 <= a / b < 2 else f"x {wording.number(a / b)}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
