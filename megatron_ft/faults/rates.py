"""Faults drawn from probabilities, alike in every process and in every replay of an iteration.

A draw is a hash of (seed, rate, iteration, slot) and of nothing else: no generator state that
could drift apart, no clock. Per-hour rates are the failure process of CheckFree (arXiv 2506.15461):
a probability h per hour becomes 1 - (1-h)^(t/3600) per iteration of t seconds, where t is a number
that is given once, not one that each process measures for itself. Rates of the whole job are
MeCeFO's (arXiv 2510.16415): f failures per hour, each in any of N slots, become
1 - exp(-f t / (3600 N)) per slot and iteration.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Sequence

from megatron_ft.faults.spec import (
    KINDS,
    FaultSpec,
    FaultSpecError,
    attributes,
    convert,
    lookup,
)

_SHAPE = (
    "KIND:PROBABILITY/UNIT[:FIELD=VALUE]... with UNIT h or iter: kill:0.1/h, kill:0.02/iter; "
    "or KIND:NUMBER/job-h, failures per hour of the whole job"
)
_RATE = re.compile(
    r"(?P<kind>[^@:]+):(?P<probability>[^:/]+)/(?P<unit>h|iter|job-h)"
    r"(?P<fields>(?::[^:=]+=[^:=]+)*)"
)
WHOLE_JOB = "job-h"

SCENARIOS = {"low": (2.0, 4.0), "mid": (1.0, 3.0), "high": (0.5, 2.0)}
"""MeCeFO's scenarios: hours between two failures in the job, hours until a failed node is back."""


@dataclasses.dataclass(frozen=True)
class FaultRate:
    """Each slot (each stage, for `lose-stage`) fails with this probability per hour or iteration.

    With the unit `job-h` the number is what the whole job is expected to have per hour, shared by
    its slots.

    Raises:
        FaultSpecError: unknown kind, a probability outside [0, 1], a negative number, or fields
            that the kind does not take.
    """

    kind: str
    probability: float
    unit: str
    """`h`, `iter` or `job-h`."""
    options: tuple[tuple[str, str], ...] = ()
    """Fields of the drawn specs, such as ("point", "reduce")."""

    def __post_init__(self) -> None:
        lookup(KINDS, "kind", self.kind)
        if self.unit == WHOLE_JOB:
            if not 0.0 <= self.probability < math.inf:
                raise FaultSpecError(f"{self}: failures per hour must be 0 or more")
        elif not 0.0 <= self.probability <= 1.0:
            raise FaultSpecError(f"{self}: the probability must be between 0 and 1")
        named = [name for name, _ in self.options]
        if fixed := [name for name in named if name in ("slot", "process", "stage", "times")]:
            raise FaultSpecError(f"{self}: a rate draws {', '.join(fixed)} itself")
        if len(set(named)) < len(named):
            raise FaultSpecError(f"{self}: a field is given twice")
        self.spec(1, 0)

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options]
        return ":".join([self.kind, f"{self.probability!r}/{self.unit}", *options])

    @property
    def target(self) -> str:
        """What the rate draws for: `slot` or `stage`."""
        return KINDS[self.kind].targets[0]

    def per_iteration(self, iteration_seconds: float | None, num_targets: int = 1) -> float:
        """The probability in one iteration, of one slot or stage.

        Args:
            iteration_seconds: what an iteration takes; only per-hour rates need it.
            num_targets: slots or stages that share a rate of the whole job.

        Raises:
            FaultSpecError: it is needed and not given.
        """
        if self.unit == "iter":
            return self.probability
        if iteration_seconds is None:
            raise FaultSpecError(
                f"{self}: a rate per hour needs the seconds of an iteration; "
                "give them, or a rate per iter"
            )
        if not 0.0 < iteration_seconds < math.inf:
            raise FaultSpecError(
                f"the seconds of an iteration must be positive: {iteration_seconds}"
            )
        hours = iteration_seconds / 3600.0
        if self.unit == WHOLE_JOB:
            return -math.expm1(-self.probability * hours / num_targets)
        return 1.0 - float((1.0 - self.probability) ** hours)

    def draw(self, seed: int, iteration: int, target: int) -> float:
        """A uniform number in [0, 1) for this slot or stage in this iteration."""
        # Without the probability: a higher rate then adds faults to those of a lower one.
        key = f"{seed}|{self.kind}|{self.options}|{iteration}|{target}".encode()
        return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / 2.0**53

    def spec(self, iteration: int, target: int) -> FaultSpec:
        """The fault that strikes if this slot or stage is drawn."""
        fields = {self.target: target, **dict(self.options)}
        return FaultSpec(kind=self.kind, iteration=iteration, **attributes(fields))


def parse_rate(text: str) -> FaultRate:
    """Read one rate.

    Raises:
        FaultSpecError: not of the grammar, or see `FaultRate`.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None:
        raise FaultSpecError(f"{text!r} is no rate; it must look like {_SHAPE}")
    probability = convert("the probability", match["probability"], float)
    pairs = [pair.split("=") for pair in match["fields"].split(":")[1:]]
    options = tuple((name, value) for name, value in pairs)
    return FaultRate(match["kind"], probability, match["unit"], options)


def scenario_rate(name: str, iteration_seconds: float | None) -> str:
    """One of MeCeFO's scenarios as a rate of `degrade` faults (arXiv 2510.16415, section 5).

    Args:
        name: a key of SCENARIOS.
        iteration_seconds: what an iteration takes.

    Raises:
        FaultSpecError: there is no such scenario, or no time of an iteration.
    """
    between, back = lookup(SCENARIOS, "scenario", name)
    if iteration_seconds is None or not 0.0 < iteration_seconds < math.inf:
        raise FaultSpecError(
            f"--ft-mecefo-scenario {name} is in hours: give --ft-iteration-seconds, what an "
            "iteration takes"
        )
    duration = max(1, round(back * 3600.0 / iteration_seconds))
    return f"degrade:{1.0 / between!r}/{WHOLE_JOB}:for={duration}"


class RateSchedule:
    """All faults that a set of rates brings about in a job.

    Args:
        rates: see `FaultRate`.
        seed: the same in all processes.
        num_slots: slots 0 to num_slots-1 draw, whether they are served or not.
        num_stages: likewise.
        iteration_seconds: what an iteration takes, for rates per hour.

    Raises:
        FaultSpecError: a rate per hour without `iteration_seconds`.
    """

    def __init__(
        self,
        rates: Sequence[FaultRate],
        *,
        seed: int,
        num_slots: int,
        num_stages: int,
        iteration_seconds: float | None = None,
    ) -> None:
        self._seed = seed
        self._sizes = {"slot": num_slots, "stage": num_stages}
        self._rates = [
            (rate, rate.per_iteration(iteration_seconds, self._sizes[rate.target]))
            for rate in rates
        ]
        self.specs_at = functools.lru_cache(maxsize=64)(self._specs_at)

    def _specs_at(self, iteration: int) -> tuple[FaultSpec, ...]:
        return tuple(
            rate.spec(iteration, number)
            for rate, probability in self._rates
            for number in range(self._sizes[rate.target])
            if rate.draw(self._seed, iteration, number) < probability
        )
