"""The grammar of injected faults: `KIND@ITERATION[:FIELD=VALUE]...`, as in `kill@7:slot=5`.

Pure: no process, clock or file is touched here. The tables KINDS, POINTS and FIELDS are the only
place that says what exists; docs/faults.md is written from them.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any


class FaultSpecError(ValueError):
    """A fault that cannot be injected as asked; the message says what is allowed."""


@dataclasses.dataclass(frozen=True)
class Point:
    """A place in a run where a fault can strike."""

    doc: str
    n_counts: str | None = None
    """What the field `n` counts there, from 0; None where a process comes by once."""


LATER = ("pool", "join")
"""Points that a process may come by in a later iteration only; a fault waits for it there."""

POINTS: dict[str, Point] = {
    "forward": Point("before the forward of a microbatch", "microbatches of the process"),
    "backward": Point("before the backward of a microbatch", "microbatches of the process"),
    "reduce": Point("before a gradient bucket is reduced", "buckets"),
    "reduced": Point("all buckets reduced, before the vote"),
    "voted": Point("after the vote, before the optimizer commits"),
    "optimizer": Point("in the optimizer step"),
    "logging": Point("after the step, while losses and timers are collected"),
    "eval": Point("in an evaluation", "batches of the evaluation"),
    "save": Point("while a checkpoint is written", "stages of the saving that the process does"),
    "repair": Point("during the repair of another fault", "steps of the repair protocol"),
    "join": Point(
        "while a process joins, at the first step of it in or after the iteration: its model is "
        "built; state is about to be sent; about to be received; received",
        "such steps of the process in one epoch",
    ),
    "pool": Point("idle in the pool, at the first look around in or after the iteration"),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to fail."""

    doc: str
    targets: tuple[str, ...] = ("slot", "process")
    """Fields that say who; exactly one of them is needed."""
    points: tuple[str, ...] = tuple(POINTS)
    """Where it can strike; the first is where it does if nobody says."""
    fields: tuple[str, ...] = ("times",)
    """Further fields that it takes."""
    needs: tuple[str, ...] = ()


_STEP_START = ("forward",)

KINDS: dict[str, Kind] = {
    "kill": Kind("SIGKILL to itself"),
    "stop": Kind(
        "SIGSTOP to itself; with cont, SIGCONT that many seconds later", fields=("cont", "times")
    ),
    "exception": Kind("a Python exception, InjectedFault"),
    "exit": Kind("os._exit(1)"),
    "loop": Kind("an endless loop in Python; other threads of the process go on"),
    "hold-gil": Kind("a C call that never returns and never releases the GIL"),
    "lose-stage": Kind(
        "weights and optimizer state of a stage are gone in all replicas, no process dies",
        targets=("stage",),
        points=_STEP_START,
    ),
    "degrade": Kind(
        "the node shares its neighbour's work in MeCeFO mode, no process dies; "
        "for a number of iterations, or to the end",
        targets=("slot", "stage"),
        points=_STEP_START,
        fields=("for",),
    ),
    "slow": Kind(
        "sleeps s seconds at each microbatch for a number of iterations (1)",
        points=("forward", "backward"),
        fields=("s", "for"),
        needs=("s",),
    ),
}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a spec: the attribute of FaultSpec it sets and the values it takes."""

    doc: str
    attribute: str
    type: type
    least: float = 0
    """The smallest value; a float must be greater than it."""


FIELDS: dict[str, Field] = {
    "slot": Field("the slot whose process fails", "slot", int),
    "process": Field("the process that fails, where no slot names it (the pool)", "process", int),
    "stage": Field("the pipeline stage, from 0", "stage", int),
    "point": Field("where in the iteration", "point", str),
    "n": Field("which one of those that the point counts, from 0; the first it meets", "n", int),
    "cont": Field("seconds from SIGSTOP to SIGCONT", "cont", float),
    "s": Field("seconds of sleep", "seconds", float),
    "for": Field("how many iterations it lasts", "duration", int, 1),
    "times": Field(
        "how often it strikes, if the iteration is replayed after it (1)", "times", int, 1
    ),
}

_SHAPE = "KIND@ITERATION[:FIELD=VALUE]..."
_SPEC = re.compile(r"(?P<kind>[^@:]+)@(?P<iteration>\d+)(?P<fields>(?::[^:=]+=[^:=]+)*)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultSpec:
    """One fault. Two equal specs are one fault: `str(spec)` is its name in the event log.

    Raises:
        FaultSpecError: the fields do not go together, or one is out of range.
    """

    kind: str
    iteration: int
    """Megatron's iteration, from 1."""
    slot: int | None = None
    process: int | None = None
    stage: int | None = None
    point: str = ""
    """Where it strikes; the kind's usual point if not given."""
    n: int | None = None
    """Which of the things that the point counts; None for the first one met."""
    cont: float | None = None
    """Seconds."""
    seconds: float | None = None
    duration: int | None = None
    """Iterations that it lasts; None for 1, or for `degrade` to the end of the run."""
    times: int = 1

    def __post_init__(self) -> None:
        kind = lookup(KINDS, "kind", self.kind)
        # Frozen, and yet equal specs must be equal however their point was given.
        object.__setattr__(self, "point", self.point or kind.points[0])
        if self.iteration < 1:
            raise FaultSpecError(f"{self}: iterations count from 1")
        lookup(POINTS, "point", self.point)
        if self.point not in kind.points:
            raise FaultSpecError(
                f"{self}: {self.kind} makes no sense at {self.point}, "
                f"only at {', '.join(kind.points)}"
            )
        given = [name for name, field in FIELDS.items() if self._is_given(field)]
        allowed = (*kind.targets, "point", *kind.fields)
        if POINTS[self.point].n_counts is not None and self.kind not in ("lose-stage", "degrade"):
            allowed = (*allowed, "n")
        if unknown := [name for name in given if name not in allowed]:
            raise FaultSpecError(
                f"{self}: {self.kind} at {self.point} takes no {', '.join(unknown)}, "
                f"only {', '.join(allowed)}"
            )
        self._check_target(kind, given)
        if missing := [name for name in kind.needs if name not in given]:
            raise FaultSpecError(f"{self}: {self.kind} needs {', '.join(missing)}")
        self._check_ranges()

    def __str__(self) -> str:
        """The canonical text, which `parse` turns back into an equal spec."""
        default_point = KINDS[self.kind].points[0]
        fields = [
            f"{name}={_text(getattr(self, field.attribute))}"
            for name, field in FIELDS.items()
            if self._is_given(field) and (name, self.point) != ("point", default_point)
        ]
        return ":".join([f"{self.kind}@{self.iteration}", *fields])

    def _is_given(self, field: Field) -> bool:
        value = getattr(self, field.attribute)
        return value is not None and (field.attribute, value) != ("times", 1)

    def _check_target(self, kind: Kind, given: Sequence[str]) -> None:
        named = [name for name in kind.targets if name in given]
        if not named:
            wanted = " or ".join(f"{name}=N" for name in kind.targets)
            raise FaultSpecError(
                f"{self}: a fault spec that names no {kind.targets[0]}; {self.kind} needs {wanted}"
            )
        if len(named) > 1:
            raise FaultSpecError(f"{self}: {' and '.join(named)} both say who; give one")
        if self.point == "pool" and self.process is None:
            raise FaultSpecError(f"{self}: a process in the pool serves no slot; give process=N")

    def _check_ranges(self) -> None:
        for name, field in FIELDS.items():
            value = getattr(self, field.attribute)
            if value is None or field.type is str:
                continue
            if field.type is int and value < field.least:
                raise FaultSpecError(f"{self}: {name} must be at least {field.least:g}")
            if field.type is float and not (field.least < value < math.inf):
                raise FaultSpecError(f"{self}: {name} must be more than {field.least:g} seconds")


def parse(text: str) -> FaultSpec:
    """Read one spec.

    Raises:
        FaultSpecError: not of the grammar, or see `FaultSpec`.
    """
    match = _SPEC.fullmatch(text.strip())
    if match is None:
        raise FaultSpecError(f"{text!r} is no fault; it must look like {_SHAPE}: kill@7:slot=5")
    pairs = [pair.split("=") for pair in match["fields"].split(":")[1:]]
    if len({name for name, _ in pairs}) < len(pairs):
        raise FaultSpecError(f"{text!r}: a field is given twice")
    return from_mapping({"kind": match["kind"], "iteration": match["iteration"], **dict(pairs)})


def from_mapping(mapping: Mapping[str, Any]) -> FaultSpec:
    """Read one spec from a mapping of field names to values, as in a YAML file.

    Raises:
        FaultSpecError: unknown or missing keys, values of the wrong type, or see `FaultSpec`.
    """
    fields = dict(mapping)
    if missing := [name for name in ("kind", "iteration") if name not in fields]:
        raise FaultSpecError(f"the fault {fields} has no {' and no '.join(missing)}")
    kind = str(fields.pop("kind"))
    iteration = convert("iteration", fields.pop("iteration"), int)
    return FaultSpec(kind=kind, iteration=iteration, **attributes(fields))


def attributes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Field names and values as keyword arguments of FaultSpec.

    Raises:
        FaultSpecError: unknown fields, or values of the wrong type.
    """
    known = {name: lookup(FIELDS, "field", name) for name in fields}
    return {
        field.attribute: convert(name, fields[name], field.type) for name, field in known.items()
    }


def lookup[T](table: Mapping[str, T], what: str, name: str) -> T:
    """The entry of a table; FaultSpecError lists what there is."""
    if name not in table:
        raise FaultSpecError(f"unknown {what} {name!r}; there are {', '.join(table)}")
    return table[name]


def convert(name: str, value: Any, to: type) -> Any:
    """A value from text or YAML in the type of its field, or FaultSpecError."""
    try:
        # YAML gives numbers as numbers, and bool is an int; text gives strings.
        if isinstance(value, bool) or (to is int and float(value) != int(value)):
            raise ValueError
        return to(value)
    except (TypeError, ValueError, OverflowError):
        noun = {int: "a whole number", float: "a number", str: "text"}[to]
        raise FaultSpecError(f"{name}={value} must be {noun}") from None


def validate(
    specs: Sequence[FaultSpec],
    *,
    num_slots: int,
    num_stages: int,
    train_iters: int | None,
    num_processes: int | None = None,
) -> None:
    """Check that each spec can strike in a job of this size.

    Args:
        train_iters: The last iteration; None where it is not known.
        num_processes: highest number of processes that the job can have; None for no limit.

    Raises:
        FaultSpecError: lists every spec that names what the job does not have, comes after its
            end, or is given twice.
    """
    problems = []
    for spec in specs:
        limits = [
            ("slots", spec.slot, num_slots),
            ("stages", spec.stage, num_stages),
            ("processes", spec.process, num_processes),
        ]
        for names, value, limit in limits:
            if value is not None and limit is not None and value >= limit:
                problems.append(f"{spec}: the job has {names} 0 to {limit - 1}")
        if train_iters is not None and spec.iteration > train_iters:
            problems.append(f"{spec}: the run ends with iteration {train_iters}")
    for spec in dict.fromkeys(spec for spec in specs if specs.count(spec) > 1):
        problems.append(f"{spec}: given twice; to strike twice it takes times=2")
    if problems:
        raise FaultSpecError("faults that cannot happen:\n  " + "\n  ".join(problems))


def _text(value: Any) -> str:
    return repr(value) if isinstance(value, float) else str(value)
