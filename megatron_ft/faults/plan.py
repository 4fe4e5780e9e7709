"""What the flags and the YAML file ask for, together.

A fault file is a list of specs, or a mapping of these keys:

    faults:                       # specs as text or as mappings
      - kill@7:slot=5:point=reduce
      - {kind: stop, iteration: 9, slot: 2, cont: 1.5}
    rates: [kill:0.05/h]
    seed: 17                      # of the rates
    iteration_seconds: 91.3       # what an iteration takes, for rates per hour
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ft.faults.rates import FaultRate, RateSchedule, parse_rate, scenario_rate
from megatron_ft.faults.spec import (
    FaultSpec,
    FaultSpecError,
    convert,
    from_mapping,
    parse,
    validate,
)

_KEYS = ("faults", "rates", "seed", "iteration_seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultPlan:
    """Every fault of a run, named or drawn."""

    specs: tuple[FaultSpec, ...] = ()
    rates: tuple[FaultRate, ...] = ()
    seed: int | None = None
    """Seed of the rates; None for 0."""
    iteration_seconds: float | None = None

    def __bool__(self) -> bool:
        return bool(self.specs or self.rates)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of all faults, named or drawn."""
        return frozenset(s.kind for s in self.specs) | frozenset(r.kind for r in self.rates)

    def __or__(self, other: FaultPlan) -> FaultPlan:
        """Both plans' faults; the other's seed and iteration time where it has them."""
        return FaultPlan(
            specs=self.specs + other.specs,
            rates=self.rates + other.rates,
            seed=self.seed if other.seed is None else other.seed,
            iteration_seconds=other.iteration_seconds or self.iteration_seconds,
        )

    def check(
        self,
        *,
        num_slots: int,
        num_stages: int,
        train_iters: int | None,
        num_processes: int | None = None,
    ) -> None:
        """See `spec.validate`; rates per hour without `iteration_seconds` are refused too."""
        validate(
            self.specs,
            num_slots=num_slots,
            num_stages=num_stages,
            train_iters=train_iters,
            num_processes=num_processes,
        )
        self.schedule(num_slots=num_slots, num_stages=num_stages)

    def schedule(self, *, num_slots: int, num_stages: int) -> RateSchedule:
        """The draws of the plan's rates."""
        return RateSchedule(
            self.rates,
            seed=self.seed or 0,
            num_slots=num_slots,
            num_stages=num_stages,
            iteration_seconds=self.iteration_seconds,
        )


def plan_from_flags(
    faults: Sequence[str] = (),
    file: str | os.PathLike[str] | None = None,
    rates: Sequence[str] = (),
    seed: int | None = None,
    iteration_seconds: float | None = None,
) -> FaultPlan:
    """The plan of `--ft-fault`, `--ft-fault-file`, `--ft-fault-rate` and `--ft-fault-seed`.

    Raises:
        FaultSpecError: see `spec.parse`, `rates.parse_rate` and `load`.
    """
    flags = FaultPlan(
        specs=tuple(map(parse, faults)),
        rates=tuple(map(parse_rate, rates)),
        seed=seed,
        iteration_seconds=iteration_seconds,
    )
    return (load(file) if file is not None else FaultPlan()) | flags


def plan_of(options: Any) -> FaultPlan:
    """The plan of all flags of a job that have to do with faults.

    Args:
        options: What the parser made of the ``--ft-fault...``, ``--ft-stage-failure...`` and
            ``--ft-mecefo-scenario`` flags.

    Raises:
        FaultSpecError: see `plan_from_flags`.
    """
    rates = list(options.ft_fault_rate)
    if options.ft_stage_failure_rate_per_hour:
        rates.append(f"lose-stage:{options.ft_stage_failure_rate_per_hour}/h")
    if options.ft_mecefo_scenario:
        rates.append(scenario_rate(options.ft_mecefo_scenario, options.ft_iteration_seconds))
    return plan_from_flags(
        options.ft_fault,
        options.ft_fault_file,
        rates,
        options.ft_fault_seed,
        options.ft_iteration_seconds,
    )


def load(path: str | os.PathLike[str]) -> FaultPlan:
    """Read a fault file.

    Raises:
        FaultSpecError: no such file, no YAML, unknown keys, or a fault that is none. The message
            names the file.
    """
    import yaml  # type: ignore[import-untyped,unused-ignore]

    try:
        content = yaml.safe_load(Path(path).read_text())
        return _from_content(content)
    except (OSError, yaml.YAMLError, FaultSpecError) as error:
        raise FaultSpecError(f"fault file {path}: {error}") from error


def _from_content(content: Any) -> FaultPlan:
    if isinstance(content, list):
        content = {"faults": content}
    if not isinstance(content, Mapping):
        raise FaultSpecError(f"must be a list of faults or a mapping of {', '.join(_KEYS)}")
    if unknown := [str(key) for key in content if key not in _KEYS]:
        raise FaultSpecError(f"unknown {', '.join(unknown)}; there are {', '.join(_KEYS)}")
    for key in ("faults", "rates"):
        if not isinstance(content.get(key) or [], list):
            raise FaultSpecError(f"{key} must be a list")
    seed, seconds = content.get("seed"), content.get("iteration_seconds")
    return FaultPlan(
        specs=tuple(map(_spec, content.get("faults") or ())),
        rates=tuple(parse_rate(str(rate)) for rate in content.get("rates") or ()),
        seed=None if seed is None else convert("seed", seed, int),
        iteration_seconds=None if seconds is None else convert("iteration_seconds", seconds, float),
    )


def _spec(item: Any) -> FaultSpec:
    return from_mapping(item) if isinstance(item, Mapping) else parse(str(item))
