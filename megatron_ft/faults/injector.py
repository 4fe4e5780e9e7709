"""Told of every point that this process reaches, strikes where a fault is due.

Before a fault strikes, `fault_injected` is on disk, so that a death does not take its own record
with it. The event log is also the memory: a fault that some process has carried out, dead by now
or not, does not strike again when the iteration is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Protocol

from megatron_ft.faults.deeds import DEEDS
from megatron_ft.faults.plan import FaultPlan
from megatron_ft.faults.spec import LATER, FaultSpec, FaultSpecError


class FaultLog(Protocol):
    """The part of `observe.events.EventLog` that is needed here."""

    @property
    def process(self) -> int: ...

    def emit(
        self, kind: str, *, iteration: int, epoch: int, durable: bool = ..., **fields: Any
    ) -> object: ...

    def of_kind(self, kind: str) -> Iterable[Mapping[str, Any]]: ...


class Injector:
    """The faults of one process.

    Args:
        plan: the faults of the job.
        log: this process's event log.
        slots: the slots that this process serves now: none in the pool, two in MeCeFO.
        stage_of: slot -> pipeline stage.
        epoch: the world epoch now, for the record.
        num_slots: slots of the job.
        num_stages: pipeline stages of the job.
        actions: how to carry out the kinds that only the runtime can: `lose-stage`, `degrade`.
        strikes: by kind, whether a fault finds in a slot what it needs; others always do.

    Raises:
        FaultSpecError: the plan has a kind that nobody can carry out.
    """

    def __init__(
        self,
        plan: FaultPlan,
        log: FaultLog,
        *,
        slots: Callable[[], Collection[int]],
        stage_of: Callable[[int], int],
        epoch: Callable[[], int],
        num_slots: int,
        num_stages: int,
        actions: Mapping[str, Callable[[FaultSpec], None]] | None = None,
        strikes: Mapping[str, Callable[[FaultSpec, int], bool]] | None = None,
    ) -> None:
        self._plan = plan
        self._log = log
        self._slots = slots
        self._stage_of = stage_of
        self._epoch = epoch
        self._deeds = {**DEEDS, **(actions or {})}
        self._strikes = strikes or {}
        self._schedule = plan.schedule(num_slots=num_slots, num_stages=num_stages)
        kinds = {spec.kind for spec in plan.specs} | {rate.kind for rate in plan.rates}
        if missing := sorted(kinds - set(self._deeds)):
            raise FaultSpecError(f"this run cannot carry out {', '.join(missing)}")
        # A lasting fault is due in several iterations; a drawn one may have begun before this one.
        rated = [rate.spec(1, 0) for rate in plan.rates]
        self._longest = max([_duration(spec) for spec in rated], default=1)
        self._due: tuple[int, list[FaultSpec]] = (0, [])
        self._spent: set[tuple[FaultSpec, int | None]] = set()
        self._lasting: set[FaultSpec] = set()

    def reach(self, point: str, iteration: int, n: int | None = None) -> None:
        """Report a point; does not return if a deadly fault is due there.

        Args:
            point: one of `spec.POINTS`.
            iteration: Megatron's iteration, from 1; for `pool`, the newest that is known.
            n: where the point counts something, which one this is, from 0.
        """
        if self._due[0] != iteration:
            self._due = (iteration, self._find_due(iteration))
        for spec in self._due[1]:
            if spec.point == point and spec.n in (None, n):
                self._consider(spec, iteration, n)

    def unfired(self, train_iters: int) -> list[FaultSpec]:
        """Named faults that should have struck by the end of iteration `train_iters` and did not.

        Faults carried out by processes that are dead by now count: they are in the event log.
        Drawn faults are not missed, because a slot that is vacant when it is drawn cannot fail.
        """
        fired = self._count()
        return [
            spec
            for spec in self._plan.specs
            if spec.iteration <= train_iters and fired.get(str(spec), 0) < spec.times
        ]

    def _find_due(self, iteration: int) -> list[FaultSpec]:
        named = [
            spec
            for spec in self._plan.specs
            if spec.iteration <= iteration < spec.iteration + _duration(spec)
            or (spec.point in LATER and spec.iteration <= iteration)
        ]
        first = max(1, iteration - self._longest + 1)
        drawn = [s for i in range(first, iteration + 1) for s in self._schedule.specs_at(i)]
        return named + [s for s in drawn if iteration < s.iteration + _duration(s)]

    def _consider(self, spec: FaultSpec, iteration: int, n: int | None) -> None:
        if spec in self._lasting:
            self._deeds[spec.kind](spec)
            return
        for slot in self._targets(spec):
            if (spec, slot) in self._spent:
                continue
            strikes = self._strikes.get(spec.kind)
            if strikes is not None and slot is not None and not strikes(spec, slot):
                continue
            # A stage is lost by each process of it; every other fault happens to one process.
            key = slot if spec.stage is not None else None
            if self._count(key).get(str(spec), 0) >= spec.times:
                self._spent.add((spec, slot))
                continue
            self._strike(spec, slot, iteration, n)

    def _targets(self, spec: FaultSpec) -> list[int | None]:
        """The slots for which this process carries out the fault; [None] for the process itself."""
        if spec.process is not None:
            return [None] if spec.process == self._log.process else []
        if spec.slot is not None:
            return [spec.slot] if spec.slot in self._slots() else []
        return [slot for slot in sorted(self._slots()) if self._stage_of(slot) == spec.stage]

    def _strike(self, spec: FaultSpec, slot: int | None, iteration: int, n: int | None) -> None:
        self._log.emit(
            "fault_injected",
            iteration=iteration,
            epoch=self._epoch(),
            durable=True,
            fault=str(spec),
            fault_kind=spec.kind,
            point=spec.point,
            n=n,
            slot=slot,
            stage=None if slot is None else self._stage_of(slot),
        )
        if spec.kind == "slow":
            self._lasting.add(spec)
        self._deeds[spec.kind](spec)

    def _count(self, slot: int | None = None) -> dict[str, int]:
        """Fault -> how often it has struck in this run, in `slot` or, for None, anywhere."""
        count: dict[str, int] = {}
        for event in self._log.of_kind("fault_injected"):
            if slot in (None, event.get("slot")):
                count[event["fault"]] = count.get(event["fault"], 0) + 1
        return count


def _duration(spec: FaultSpec) -> int:
    """Iterations in which a process must look at the spec; `degrade` lasts in the runtime."""
    return (spec.duration or 1) if spec.kind == "slow" else 1
