"""What a campaign says: jobs, what strikes them, and what must be true of them afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from megatron_ft.topology import Topology

EXACT = 1e-6
"""Relative, on losses in fp32. The same microbatches in another order of summation differ by some
1e-8; a step that is one microbatch short shifts the next losses by 1e-4 and more."""


@dataclass(frozen=True, kw_only=True)
class Model:
    """The size of the LLaMA that is trained, in Megatron's words."""

    layers: int = 4
    hidden: int = 48
    ffn: int = 128
    heads: int = 4
    query_groups: int = 2
    sequence: int = 32
    """Tokens of a sample."""


@dataclass(frozen=True, kw_only=True)
class Punisher:
    """Kills from outside, at random times (tools/punisher.py)."""

    mtbf: float
    """Mean seconds between failures."""
    seconds: float
    seed: int = 0
    least_kills: int = 1
    """Fewer than that prove nothing."""


@dataclass(frozen=True, kw_only=True)
class End:
    """How close the training must stay to the fault-free one."""

    bound: float = EXACT
    """Relative difference of losses: of each step if `each_step`, else of the end."""
    each_step: bool = True
    """False for strategies that approximate: the mean of the last losses, and validation."""
    later_from: int | None = None
    """From this step on `later_bound` holds: hundreds of steps amplify a last digit."""
    later_bound: float = EXACT

    def bound_at(self, iteration: int) -> float:
        later = self.later_from is not None and iteration >= self.later_from
        return self.later_bound if later else self.bound


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What may grow from the first repair to the last step, in one process that lives through."""

    process: int
    resident_mb: float
    """Groups, files and threads may not grow at all."""


@dataclass(frozen=True, kw_only=True)
class Count:
    """How often an event must be there."""

    least: int
    most: int | None = None

    def __str__(self) -> str:
        return str(self.least) if self.most == self.least else f"at least {self.least}"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What must be true besides the invariants, which hold for every case."""

    exit_code: int = 0
    status: str | None = None
    """`status` of summary.json; None for any."""
    message: str | None = None
    """Words in the `message` of summary.json."""
    end: End = End()
    weights_equal: bool = False
    """All replicas of a stage hold the same bytes at the end, optimizer state included."""
    events: dict[str, Count] = field(default_factory=dict)
    """By kind of event."""
    growth: Growth | None = None
    repair_s: float | None = None
    """The median of the repairs, in seconds, at the most."""
    drawn_faults: int = 0
    """How many faults of `rates` must strike at least."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a run without any fault is, too."""

    topology: Topology
    model: Model
    seed: int
    iterations: int
    microbatches: int
    """Of a replica, in a fault-free step."""
    flags: tuple[str, ...]
    """Megatron's, and those of strategies that change what is computed without a fault."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job with faults."""

    campaign: str
    name: str
    setting: Setting
    strategies: tuple[str, ...] = ()
    """Flags that the fault-free run does not have."""
    spares: int = 0
    """Processes that wait in the pool, besides one for each slot."""
    faults: tuple[str, ...] = ()
    """As `str(FaultSpec)` spells them."""
    rates: tuple[str, ...] = ()
    fault_seed: int = 0
    punisher: Punisher | None = None
    sabotage: tuple[str, ...] = ()
    """What is broken in the ranks on purpose (`hooks.SABOTAGE`)."""
    expect: Expectation = Expectation()
    must_fail: tuple[str, ...] = ()
    """Of a control: the checks that must be red. Empty for a case."""
    timeout: float = 300.0
    """Seconds, after which the job is killed and the case has failed."""

    @property
    def is_control(self) -> bool:
        return bool(self.must_fail)

    @property
    def title(self) -> str:
        return f"{self.campaign}/{self.name}"

    @property
    def hooks(self) -> tuple[str, ...]:
        """What is done in the ranks besides training."""
        looks = ["weights"] * self.expect.weights_equal
        looks += ["census"] * (self.expect.growth is not None)
        return (*looks, *self.sabotage)


@dataclass(frozen=True)
class Campaign:
    """A file of cases and controls."""

    file: Path
    name: str
    cases: tuple[Case, ...]
    """Controls are behind the cases."""
