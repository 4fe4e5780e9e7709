"""The processes of the job, who of them serves which slot, and how that is mended.

Two communicators (docs/design.md): ``world`` holds every living process that takes part, the idle
pool included, and is used to repair only; ``active`` holds the processes that serve slots, and
every vote and resilient collective runs on it. A repair replaces both and every group's
communicator, and raises the epoch. torch's group objects never change.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from mpi4py import MPI

from megatron_ft.rejoin.relabel import moved
from megatron_ft.topology import Assignment, Topology
from megatron_ft.world import numbers
from megatron_ft.world.comms import (
    AGREEING,
    agreed,
    agreement,
    free,
    merged_with,
    quiet,
    revoke,
    split_groups,
)
from megatron_ft.world.derive import GroupKey
from megatron_ft.world.errors import is_failure
from megatron_ft.world.link import Link
from megatron_ft.world.repaired import Outcome, Repaired, Report, keys_of_slot
from megatron_ft.world.watch import NO_WATCH, NoWatch

logger = logging.getLogger("megatron_ft.world")

_OK, _GO_ON = 1, 2
"""Bits of what is agreed on: yes, and no boundary is asked for."""
_SETTLE_S = 0.05


class Group(Protocol):
    """What the world needs of a torch process group."""

    key: GroupKey
    link: Link

    def drain(self) -> None: ...


Host = Callable[[int, Mapping[GroupKey, Link], Mapping[int, Report]], dict[GroupKey, Group]]
"""From an adopted slot, the links of its groups and the reports to the groups."""

Planner = Callable[[Assignment, frozenset[int], Mapping[int, Report]], Any]
"""From the assignment, the dead and the reports to a RecoveryPlan; pure."""


class World:
    """The living processes and their communicators.

    Args:
        topology: The slots.
        assignment: Who serves them at the start.
        process: Id of this process.
        comm: Holds every process of ``ids``; is duplicated.
        ids: Process id of each rank of ``comm``.
        planner: Decides what a repair does.

    Attributes:
        watch: Told when this process waits for others.
    """

    watch: NoWatch = NO_WATCH

    def __init__(
        self,
        topology: Topology,
        assignment: Assignment,
        process: int,
        comm: MPI.Comm,
        ids: Iterable[int],
        planner: Planner,
    ) -> None:
        self.topology = topology
        self.assignment = assignment
        self.process = process
        self.ids = list(ids)
        self.planner = planner
        self.next_process = max(self.ids) + 1
        """Id of the next process that is spawned; ids are never used twice."""
        self.comm = quiet(comm.Dup())
        assert self.ids[self.comm.rank] == process
        self.active: MPI.Comm | None
        self.groups: dict[GroupKey, Group] = {}
        self.label: int | None = self.slots[0] if self.slots else None
        self.relabel: Callable[[int, int], None] = _cannot_relabel
        """Makes this process, built for one slot, that of another; set by who built it."""
        self.adopted_slot: int | None = None
        """The slot that this process serves beside its own."""
        self.adopted_groups: dict[GroupKey, Group] = {}
        """The groups of that slot. Those in which its own is too share their link."""
        self.knows_groups_of: tuple[int, tuple[GroupKey, ...]] | None = None
        """The slot that this process served last beside its own, and the groups of that one."""
        self.provisional: Callable[[Any, Mapping[int, Report]], bool] = lambda plan, reports: False
        """Whether another repair follows at once, so that this one makes no communicators."""
        self.host: Host = _cannot_host
        """Makes the groups of an adopted slot."""
        self.unhost: Callable[[Iterable[Group]], None] = lambda groups: None
        """Forgets them."""
        self.known_keys: tuple[GroupKey, ...] = ()
        """The groups of all who serve slots, as of the last repair."""
        self.boundary_asked = False
        self._joined: dict[int, float] = {}
        """Processes taken in since the last repair, and the seconds that it took."""
        self._whole_at = 0.0
        """When all had the communicator that the last one was taken into."""
        self.alone: Assignment | None = None
        """While this process builds for a slot by itself: that slot is all that is served."""
        # The watch thread revokes communicators while the main thread may be replacing them.
        self._links = threading.Lock()
        self.active = _split_active(self.comm, assignment, process)

    @classmethod
    def outside(cls, topology: Topology, process: int, planner: Planner) -> World:
        """The world of a process that prepares itself before it enters that of the others."""
        alone = Assignment(0, (None,) * topology.num_slots, (process,))
        return cls(topology, alone, process, MPI.COMM_SELF, [process], planner)

    # -- who is who ------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        return self.assignment.epoch

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots that this process serves: none in the pool, two as a MeCeFO neighbour."""
        return self.assignment.slots_of(self.process)

    @property
    def shown(self) -> Assignment:
        """The assignment that Megatron's set-up sees: this process alone while it builds."""
        return self.alone or self.assignment

    @property
    def elected(self) -> int:
        """The process that writes for all: it serves the highest live slot.

        The last slots hold the last pipeline stage, where the loss is, and Megatron's own writers
        are on the last rank.
        """
        live = self.assignment.live_slots
        if not live:
            return min(self.ids)
        process = self.assignment.process_of[max(live)]
        assert process is not None
        return process

    def rank_of(self, process: int) -> int:
        return self.ids.index(process)

    # -- agreement -------------------------------------------------------------------------------

    def agree(self, ok: bool, *, boundary: bool = False) -> bool:
        """Whether every active process says ``ok`` and none has died unnoticed; uniform.

        All active processes call it in the same order: it is the one sequence of agreements of the
        job (docs/design.md), which is why one that fails elsewhere may simply say no here.

        Args:
            boundary: Ask everyone for a repair at the next step boundary, without a failure;
                ``boundary_asked`` tells on every process whether somebody did.
        """
        assert self.active is not None
        with self.watch.waiting():
            heard = agreement(self.active, (_OK if ok else 0) | (0 if boundary else _GO_ON))
        if heard & _OK:  # if not, a repair comes at once
            self.boundary_asked = self.boundary_asked or not heard & _GO_ON
        return bool(heard & _OK)

    def revoke_active(self) -> None:
        """Free every active process that waits in a vote's or resilient collective's messages."""
        if self.active is not None:
            revoke(self.active)

    def revoke_groups(self, *, pipeline: bool) -> None:
        """Free everyone who waits for this process.

        Args:
            pipeline: Point-to-point messages within the replica too. Left alone by a process that
                has done its whole part of the pipeline, so that its replica can finish.
        """
        with self._links:
            for group in self._all_groups():
                if group.link.comm is not None:
                    revoke(group.link.comm)
                if pipeline and group.link.p2p is not None:
                    revoke(group.link.p2p)

    def revoke_across(self) -> None:
        """Free everyone who waits for this process in a group across replicas."""
        for group in self._all_groups():
            if group.link.comm is not None and not self.within_replica(group.key.slots):
                revoke(group.link.comm)

    def _all_groups(self) -> list[Group]:
        return [*self.groups.values(), *self.adopted_groups.values()]

    # -- repair ----------------------------------------------------------------------------------

    def needs_repair(self) -> bool:
        """Whether somebody began a repair; for the pool, which takes part in nothing else."""
        self.watch.tick()
        try:
            self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)  # MPI hears of it only while inside MPI
        except MPI.Exception as error:
            if not is_failure(error):
                raise
        return bool(self.comm.Is_revoked())

    def known_dead(self) -> frozenset[int]:
        """The processes whose death MPI has told this one of, without asking anybody."""
        failed, everyone = self.comm.Get_failed(), self.comm.Get_group()
        ranks = MPI.Group.Translate_ranks(failed, range(failed.size), everyone)
        failed.Free()
        everyone.Free()
        return frozenset(self.ids[rank] for rank in ranks)

    def repair(self, facts: Mapping[str, Any], *, called: bool = True) -> Repaired:
        """Shrink the world, plan, and give every group a new communicator.

        Collective over all living processes. Failures during the repair begin it again.

        Args:
            facts: What the planner and the caller want to know of this process, picklable.
            called: Whether the others must be called to it; not so right after ``admit``, when all
                of them come by themselves.
        """
        started = time.monotonic()
        before = self.assignment
        known = frozenset(self.ids)
        with self.watch.waiting():
            for group in self._all_groups():
                group.drain()
        if called:
            time.sleep(max(0.0, self._whole_at + _SETTLE_S - time.monotonic()))
            revoke(self.comm)
        waited = 0.0
        while True:
            groups = () if self.alone is not None else tuple(self.groups)
            report = Report(
                self.process, groups, self.label, facts, self.knows_groups_of, numbers.made()
            )
            waited -= time.monotonic()
            with self.watch.waiting(), AGREEING:
                new = quiet(self.comm.Shrink())
            waited += time.monotonic()
            outcome, ok = None, True
            try:
                outcome = self.plan_and_derive(new, before, known, report)
            except MPI.Exception as error:
                if not is_failure(error):
                    raise
                revoke(new)
                ok = False
            with self.watch.waiting():
                held = agreed(new, ok)
            self._replace_world(new)
            if held:
                break
            if outcome is not None:
                outcome.discard()
        assert outcome is not None
        self._install(outcome)
        self.boundary_asked = False
        joined, self._joined = self._joined, {}
        return Repaired(
            epoch=self.epoch,
            dead=outcome.dead,
            before=before,
            plan=outcome.plan,
            reports=outcome.reports,
            seconds=time.monotonic() - started,
            waited=waited,
            joined=joined,
        )

    def plan_and_derive(
        self, new: MPI.Comm, before: Assignment, known: frozenset[int], report: Report
    ) -> Outcome:
        with self.watch.waiting():
            reports = {r.process: r for r in new.allgather(report)}
        numbers.catch_up(max(r.made for r in reports.values()) + numbers.SLACK)
        dead = frozenset(known - set(reports))
        plan = self.planner(before, dead, reports)
        assignment = plan.assignment if plan is not None else _without(before, dead)
        outcome = Outcome(plan, assignment, reports, tuple(sorted(dead)))
        if self.provisional(plan, reports):
            return outcome
        outcome.derived = True
        mine = assignment.slots_of(self.process)
        if mine and self.label is not None and mine[0] != self.label:
            self.relabel(self.label, mine[0])
            self.label = mine[0]
        try:
            self._derive(new, outcome, mine)
        except MPI.Exception:
            outcome.discard()
            raise
        return outcome

    def _derive(self, new: MPI.Comm, outcome: Outcome, mine: tuple[int, ...]) -> None:
        """Make the communicators of this process's groups."""
        assignment, reports, links = outcome.assignment, outcome.reports, outcome.links
        with self.watch.waiting():
            outcome.active = _split_active(new, assignment, self.process)
        ours = set(self.groups) if mine else set()
        if len(mine) == 2:
            outcome.adopted = (mine[1], keys_of_slot(self.topology, mine[1], reports))
            ours.update(outcome.adopted[1])
        for key in ours:
            if {assignment.process_of[slot] for slot in key.slots} - {None} == {self.process}:
                links[key] = Link.make(key.slots, assignment.process_of, None)
        every: list[GroupKey] = []
        for r in reports.values():
            slots = assignment.slots_of(r.process)
            if slots and r.label is not None:
                every += [moved(self.topology, key, r.label, slots[0]) for key in r.groups]
            for slot in slots[1:]:
                every += keys_of_slot(self.topology, slot, reports)
        outcome.keys = tuple(sorted(set(every)))
        with self.watch.waiting():
            split_groups(
                new,
                outcome.keys,
                assignment.process_of,
                mine,
                outcome.made,
                apart=self.within_replica,
                p2p=outcome.p2p,
            )
        for key, comm in outcome.made.items():
            assert key in ours, f"process {self.process}, slots {mine}: no group {key}"
            p2p = outcome.p2p.get(key.slots)
            links[key] = Link.make(key.slots, assignment.process_of, comm, p2p)

    def admit(self, leader: int, bridge: MPI.Intracomm | None, newcomer: int) -> bool:
        """Take a process that ``leader`` has spawned into the world, as one of the pool.

        Collective over the world, right after a repair; the new process calls ``join``.

        Args:
            leader: The process that spawned it.
            bridge: On the leader, what connects it with the new process.
            newcomer: The id of the new process.

        Returns:
            Whether it is in, the same on every process. If not, somebody has died: what follows is
            a repair, and ``leader`` must tell the new process.
        """
        assert newcomer not in self.ids
        started = time.monotonic()
        with self.watch.waiting():
            merged = merged_with(self.comm, self.rank_of(leader), bridge or MPI.COMM_SELF, 1, False)
            # On the old world: whoever has come this far hears what became of the others.
            held = agreed(self.comm, merged is not None)
        if not held:
            free(merged)
            return False
        assert merged is not None
        self._replace_by(merged)
        self._joined[newcomer] = time.monotonic() - started
        self.next_process = max(self.next_process, newcomer + 1)
        self.ids = [*self.ids, newcomer]
        self.assignment = self.assignment.joined([newcomer])
        return True

    def join(
        self,
        bridge: MPI.Intracomm,
        ids: Iterable[int],
        assignment: Assignment,
        next_process: int,
        is_in: Callable[[], bool],
    ) -> bool:
        """The new process's side of ``admit``.

        Args:
            bridge: Connects it with the process that spawned it.
            ids: Process id of each rank of the world that takes it in.
            assignment: Who serves the slots there.
            next_process: The others' ``next_process``.
            is_in: Waits until that process says whether all the others have taken it in.

        Returns:
            Whether they have.
        """
        started = time.monotonic()
        merged = merged_with(MPI.COMM_SELF, 0, bridge, 0, True)
        if merged is None or not is_in():
            return False
        self._replace_by(merged)
        self._joined[self.process] = time.monotonic() - started
        self.next_process = max(next_process, self.process + 1)
        self.ids = [*ids, self.process]
        self.assignment = assignment.joined([self.process])
        assert self.ids[self.comm.rank] == self.process
        return True

    def _replace_by(self, merged: MPI.Intracomm) -> None:
        old, self.comm = self.comm, merged
        free(old)
        self._whole_at = time.monotonic()

    def _install(self, outcome: Outcome) -> None:
        self.assignment = outcome.assignment
        if not outcome.derived:
            return
        with self._links:
            old: list[MPI.Comm | None] = [self.active]
            # Groups of both slots of a process share their link.
            for link in {id(group.link): group.link for group in self._all_groups()}.values():
                old += [link.comm, link.p2p]
            for key, group in self.groups.items():
                # Without a slot there is nothing to talk to: the dead link stays and may not be
                # used.
                group.link = outcome.links.get(key, group.link)
            self._install_adopted(outcome)
            self.known_keys = outcome.keys
            self.active = outcome.active
            for comm in {id(comm): comm for comm in old}.values():
                free(comm)

    def _install_adopted(self, outcome: Outcome) -> None:
        slot, keys = outcome.adopted if outcome.adopted is not None else (None, ())
        if slot != self.adopted_slot:
            self.unhost(list(self.adopted_groups.values()))
            self.adopted_slot, self.adopted_groups = slot, {}
            if slot is not None:
                links = {key: outcome.links[key] for key in keys}
                self.adopted_groups = self.host(slot, links, outcome.reports)
                self.knows_groups_of = (slot, tuple(keys))
        for key, group in self.adopted_groups.items():
            group.link = outcome.links[key]

    def _replace_world(self, new: MPI.Comm) -> None:
        # Local arithmetic, not a message: another failure may be under way already.
        old_group, new_group = self.comm.Get_group(), new.Get_group()
        ranks = MPI.Group.Translate_ranks(new_group, range(new.size), old_group)
        self.ids = [self.ids[rank] for rank in ranks]
        old_group.Free()
        new_group.Free()
        old, self.comm = self.comm, new
        free(old)

    def within_replica(self, slots: tuple[int, ...]) -> bool:
        return len({self.topology.replica_of(slot) for slot in slots}) == 1


def _split_active(comm: MPI.Comm, assignment: Assignment, process: int) -> MPI.Comm | None:
    slots = assignment.slots_of(process)
    part = comm.Split(0 if slots else MPI.UNDEFINED, slots[0] if slots else 0)
    return quiet(part) if slots else None


def _without(assignment: Assignment, dead: Iterable[int]) -> Assignment:
    """The same assignment, the slots of the dead vacant."""
    gone = set(dead)
    return Assignment(
        assignment.epoch,
        tuple(None if process in gone else process for process in assignment.process_of),
        tuple(process for process in assignment.pool if process not in gone),
        assignment.adopted,
    )


def _cannot_relabel(old: int, new: int) -> None:
    raise AssertionError(f"a process without groups cannot move from slot {old} to {new}")


def _cannot_host(slot: int, links: Any, reports: Any) -> dict[GroupKey, Group]:
    raise AssertionError(f"slot {slot} is adopted, and nobody can make its groups")
