"""What processes tell each other in a repair, what one attempt of it made, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

from megatron_ft.rejoin.relabel import moved
from megatron_ft.topology import Assignment, Topology
from megatron_ft.world.comms import free
from megatron_ft.world.derive import GroupKey
from megatron_ft.world.link import Link


@dataclass(frozen=True)
class Report:
    """What a process tells the others when a repair begins."""

    process: int
    groups: tuple[GroupKey, ...] = ()
    label: int | None = None
    """The slot for which the groups were made; None for a process without groups."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    adopted: tuple[int, tuple[GroupKey, ...]] | None = None
    """The slot that it serves beside its own, or served last, and the groups of that one. Where all
    who had built the stage for themselves are dead, they are known from here."""
    made: int = 0
    """How many communicators it has made."""


@dataclass(frozen=True)
class Repaired:
    """What came out of a repair, the same on every process."""

    epoch: int
    dead: tuple[int, ...]
    """Processes of the last epoch that are no more."""
    before: Assignment
    plan: Any
    """The planner's RecoveryPlan; None if nobody died."""
    reports: Mapping[int, Report]
    seconds: float
    """From the call to the new epoch, on this process."""
    refilled: bool = False
    """Whether slots were filled in this repair or in one that it began again."""
    waited: float = 0.0
    """How much of that this process waited until all were there."""
    joined: Mapping[int, float] = field(default_factory=dict)
    """Processes taken in right before, and the seconds that it took."""
    adopted: frozenset[int] = frozenset()
    """Replicas in which a neighbour adopted slots, in this repair or in one that it began again."""


@dataclass
class Outcome:
    """What one attempt of a repair made; put in place only once all agree."""

    plan: Any
    assignment: Assignment
    reports: Mapping[int, Report]
    dead: tuple[int, ...]
    derived: bool = False
    """Whether the groups have communicators in it; else another repair follows that makes them."""
    active: MPI.Comm | None = None
    made: dict[GroupKey, MPI.Intracomm] = field(default_factory=dict)
    """Communicators of this process's groups, a link for each unless a failure came between."""
    p2p: dict[tuple[int, ...], MPI.Intracomm] = field(default_factory=dict)
    """For messages within the replica, by slots."""
    links: dict[GroupKey, Link] = field(default_factory=dict)
    adopted: tuple[int, tuple[GroupKey, ...]] | None = None
    """The slot that this process serves beside its own, and the groups of that one."""
    keys: tuple[GroupKey, ...] = ()
    """The groups of all."""

    def comms(self) -> list[MPI.Comm]:
        """All communicators that it made."""
        comms = (self.active, *self.made.values(), *self.p2p.values())
        return list({id(comm): comm for comm in comms if comm is not None}.values())

    def discard(self) -> None:
        for comm in self.comms():
            free(comm)


def keys_of_slot(
    topology: Topology, slot: int, reports: Mapping[int, Report]
) -> tuple[GroupKey, ...]:
    """The groups of a slot whose own process is no more: as those who hold its shard have them."""
    label, keys = _holder(topology, slot, reports)
    return tuple(moved(topology, key, label, slot) for key in keys)


def _holder(
    topology: Topology, slot: int, reports: Mapping[int, Report]
) -> tuple[int, tuple[GroupKey, ...]]:
    at = topology.coordinate(slot)
    known = [(r.label, r.groups) for _, r in sorted(reports.items()) if r.label is not None]
    known += [r.adopted for _, r in sorted(reports.items()) if r.adopted is not None]
    for label, keys in known:
        assert label is not None
        if keys and topology.coordinate(label)._replace(dp=at.dp) == at:
            return label, keys
    raise AssertionError(f"nobody has the groups of slot {slot}")
