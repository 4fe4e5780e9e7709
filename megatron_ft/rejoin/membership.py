"""This process's part in who belongs to the job: what it has built, and what it takes over.

Every process has one. Repairs go through it: it tells the others what this process has built and
holds, plans refills, takes in spawned processes and moves state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from megatron_ft import planner
from megatron_ft.adopt.rules import adoptions
from megatron_ft.planner import Facts, Situation, Strategies
from megatron_ft.recovery_plan import Adopt, Fill, Rebuild, RecoveryPlan
from megatron_ft.rejoin.building import Meanwhile
from megatron_ft.rejoin.history import History
from megatron_ft.rejoin.moving import give_state, move_state, needs_state
from megatron_ft.rejoin.newcomer import Newcomer
from megatron_ft.rejoin.pool import READY_TAG, Pool
from megatron_ft.rejoin.refill import Built, processes_of
from megatron_ft.rejoin.replacements import Replacements
from megatron_ft.topology import Assignment, Shard
from megatron_ft.world.errors import is_failure
from megatron_ft.world.repaired import Repaired, Report

if TYPE_CHECKING:
    from megatron_ft.session import Session


class Released(Exception):
    """The job is over; a process of the pool may go."""


def moves_of(plan: RecoveryPlan) -> list[Fill | Rebuild | Adopt]:
    """The actions of a plan by which state goes to another process."""
    return [a for a in plan.actions if isinstance(a, Fill | Rebuild | Adopt)]


def coming_in(plan: RecoveryPlan | None, reports: Mapping[int, Report]) -> tuple[int, int] | None:
    """Who has started a process that is taken in after this repair, and that one's id, or None.

    Whom the pool can serve without it goes first.
    """
    if plan is None or plan.stop is not None or moves_of(plan):
        return None
    told = {p: r.facts["spawned"] for p, r in sorted(reports.items())}
    return next(((p, newcomer) for p, newcomer in told.items() if newcomer is not None), None)


class Membership:
    """What this process has built and holds, and its part in repairs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.world = session.world
        self.built: Built | None = None
        self.building: int | None = None
        self.receiving = False
        self.finished = False
        self.target: int | None = None
        """The slot for which this process is asked to build; None if for none."""
        self.pid = os.getpid()
        self.pids: dict[int, int] = {}
        """Process -> its operating-system pid, for people."""
        self.leaving = False
        """Whether this process's replica was asked to leave, so that it ends."""
        self.newcomer: Newcomer | None = None
        """In a process that another one started, until it is one of the world."""
        self.taken_in = False
        """Whether this process has just been taken in, and the others wait for it to repair."""
        self.history = History()
        self.others: dict[int, Report] = {}
        """The reports of the last repair."""
        self.ready: dict[int, Built] = {}
        """Pool processes that can take a slot, as far as this process knows."""
        options = session.early.options
        if self.world is not None:
            self.world.provisional = lambda plan, reports: coming_in(plan, reports) is not None
        self.warm: bool = options.ft_spare_warm
        checkfree = session.early.checkfree
        # An adopter can run neither swapped routes nor twins.
        self.adopts: bool = session.early.mecefo.enabled and not checkfree.plus
        self.strategies = Strategies(
            checkfree=checkfree, adopt=self.adopts, respawn=options.ft_respawn
        )
        self.replacements = Replacements(self, options)
        self.pool = Pool(self)
        self.on_repaired: Callable[[Repaired], None] = lambda repaired: None
        self._changed = True
        self.wanted: dict[int, int] = {}
        """Pool process -> the slot that the last repair asked it to build for."""
        self._meanwhile: Meanwhile | None = None

    # -- what the others are told ----------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        slots = self.world.slots
        built = self.built
        if slots:
            built = Built(self.world.topology.shard_of(slots[0]), slots[0])
        return {
            "built": built,
            "building": self.building,
            "receiving": self.receiving,
            "committed": self.session.committed,
            "iteration": self.session.iteration,
            "stepped": self.session.stepped,
            "evaluation": self.session.evaluation_state(),
            "finished": self.finished,
            "over": self.session.training_over,
            "exhausted": self.replacements.spawner.exhausted,
            "reserved": self.replacements.reserved,
            "grad_squares": self.session.grad_squares,
            "pid": self.pid,
            "held": self.held_beside,
            **(self.session.hosting.facts() if self.session.hosting is not None else {}),
        }

    @property
    def held_beside(self) -> frozenset[Shard]:
        """Shards whose state this process holds beside its own one's."""
        hosting = self.session.hosting
        return frozenset() if hosting is None else hosting.held()

    def decide(
        self, before: Assignment, dead: frozenset[int], reports: Mapping[int, Report]
    ) -> RecoveryPlan | None:
        """The planner of this process's world; the same on every process."""
        return planner.plan(self._situation(before, dead, reports))

    def _situation(
        self, before: Assignment, dead: Collection[int], reports: Mapping[int, Report]
    ) -> Situation:
        return Situation(
            topology=self.world.topology,
            before=before,
            dead=frozenset(dead),
            living={p: Facts.told(report.facts) for p, report in reports.items()},
            strategies=self.strategies,
            closed=self.closed,
            committed=self.history.committed,
            left=frozenset(self.history.left),
        )

    @property
    def closed(self) -> frozenset[int]:
        """Slots that are not filled, for whatever reason."""
        return self.history.closed(self.world.topology)

    # -- repairs ---------------------------------------------------------------------------------

    def repair(self, facts: Mapping[str, Any]) -> Repaired:
        """Repair until the world is whole, newcomers are in, and state is where it belongs."""
        called = not self.taken_in
        refilled, adopted = False, set[int]()
        while True:
            boundary = bool(facts.get("boundary"))
            spawned = self.replacements.waiting() if boundary else None
            orders = self.session.control.orders.tell(boundary=boundary)
            failed = tuple(self.replacements.spawner.failed)
            told = {**self.facts(), **facts, **orders, "spawned": spawned, "failed": failed}
            repaired = self.world.repair(told, called=called)
            called, self.taken_in = True, False
            del self.replacements.spawner.failed[: len(failed)]
            if self.session.hosting is not None:
                last = max(r.facts["committed"] for r in repaired.reports.values())
                self.session.hosting.outdated(last)
            self._learn(repaired)
            self.on_repaired(repaired)
            if repaired.plan is None or repaired.plan.stop is not None:
                return repaired
            moves = moves_of(repaired.plan)
            fills = [a for a in moves if not isinstance(a, Adopt)]
            if (coming := coming_in(repaired.plan, repaired.reports)) is not None:
                # One at a time: the first newcomer takes part in taking in the second.
                called = not self.replacements.admit(*coming)
                facts = {**facts, "boundary": True}
                continue
            # Who takes a slot gets its state in this repair; a newcomer can wait for the next one.
            refilled = refilled or bool(fills)
            adopted |= {self.world.topology.replica_of(a.slot) for a in adoptions(repaired.plan)}
            told_by = replace(repaired, refilled=refilled, adopted=frozenset(adopted))
            if not moves or not self.world.slots:
                give_state(self.session, moves)
                self._settle_adopted()
                return told_by
            self.receiving = any(f.process == self.world.process and needs_state(f) for f in fills)
            if move_state(self.session, moves, repaired):
                self.receiving = False
                self._settle_adopted()
                return told_by
            facts = {name: fact for name, fact in facts.items() if name != "boundary"}

    def _settle_adopted(self) -> None:
        if self.session.hosting is not None:
            self.session.hosting.settle()

    def _learn(self, repaired: Repaired) -> None:
        """Draw the same conclusions from a repair as everybody else."""
        topology, assignment = self.world.topology, self.world.assignment
        living = {p: Facts.told(report.facts) for p, report in repaired.reports.items()}
        asked = self._follow_orders(repaired)
        begun = {
            # Who told nothing may have begun after the last repair, which asked it to.
            p: self.wanted.get(p) if (slot := report.facts["building"]) is None else slot
            for p, report in self.others.items()
        }
        self.history.count_failures(repaired.dead, living, begun)
        for report in repaired.reports.values():
            self.history.count_unborn(report.facts["failed"])
        self.others = dict(repaired.reports)
        self.replacements.learn(repaired.reports)
        self.pids = {process: r.facts["pid"] for process, r in repaired.reports.items()}
        if repaired.plan is None:
            return
        self.history.note_fills(repaired.plan)
        left = self.history.left
        self.ready = planner.ready_of(living, set(assignment.pool) - left)
        wanted = planner.builders(topology, assignment, living, self.closed, left, warm=self.warm)
        self.wanted = wanted
        self.replacements.choose(living)
        self.target = wanted.get(self.world.process)
        if not self.world.slots:
            label = self.world.label
            if self.built is None and label is not None:
                self.built = Built(topology.shard_of(label), label)
        if not self.world.slots or not repaired.before.slots_of(self.world.process):
            # What it tells from now on is of the step in which the others are.
            self.session.iteration = max(
                (r.facts["iteration"] for r in repaired.reports.values()), default=0
            )
            trained = set(repaired.before.active_processes)
            known = [r.facts["evaluation"] for p, r in repaired.reports.items() if p in trained]
            if known and self.session.transaction is not None:
                self.session.take_evaluation_state(max(known, key=lambda state: state["count"]))
        self._changed = True
        if asked:
            self.history.asked_back = True
        self.replacements.repaired()

    def warm_target(self) -> int:
        """For which slot a spare of the launch builds beforehand."""
        topology = self.world.topology
        number = sorted(self.world.assignment.pool).index(self.world.process)
        return topology.replica(0)[number % topology.replica_size]

    def _follow_orders(self, repaired: Repaired) -> bool:
        """Note what orders this repair carried out; whether vacant slots are asked back."""
        if repaired.plan is None:
            self.session.control.orders.give_up("the job has ended")
            return False
        topology = self.world.topology
        before, dead = repaired.before, repaired.dead
        gone = planner.drained(self._situation(before, dead, repaired.reports))
        processes = processes_of(topology, before, gone)
        self.history.drained.update(gone)
        self.history.left |= processes
        self.replacements.desired -= len(processes)
        self.leaving = self.leaving or self.world.process in processes
        asked = any(r.facts.get("respawn") for r in repaired.reports.values())
        if asked:
            self.history.drained.clear()
            self.history.failures.clear()
            self.session.barred_said.clear()
            self.replacements.ask_back()
        for order in self.session.control.orders.told():
            if order.replica is not None and order.replica not in gone:
                order.reply(error=f"replica {order.replica} cannot leave: others died meanwhile")
            else:
                order.reply(iteration=self.session.committed, processes=sorted(processes))
        return asked

    # -- step boundaries -------------------------------------------------------------------------

    def wants_boundary(self) -> bool:
        """Whether the elected process knows a reason for a repair without a failure."""
        world = self.world
        if self.replacements.one_waits():
            return True
        if world.process != world.elected:
            return False
        self._hear()
        if self.replacements.spawner.failed:
            return True  # after a few of them the slot stays vacant, as all must know
        self.replacements.go_on()
        if self.session.control.orders.pending:
            return True
        if self.world.known_dead():
            return True  # one of the pool: nobody who trains has noticed
        if not self._changed:
            return False
        self._changed = False
        known = {p: Facts.told(report.facts) for p, report in self.others.items()}
        return planner.pool_can_do_more(
            world.topology, world.assignment, self.ready, known, self.closed, self.strategies
        )

    def _hear(self) -> None:
        """Take notice of pool processes that have become ready since the last repair."""
        comm, status = self.world.comm, MPI.Status()
        try:
            while comm.Iprobe(MPI.ANY_SOURCE, READY_TAG, status):
                process, built = comm.recv(source=status.source, tag=READY_TAG)
                self.ready[process] = built
                self._changed = True
        except MPI.Exception as error:  # the world is revoked: the next agreement says so
            if not is_failure(error):
                raise

    # -- pool ------------------------------------------------------------------------------------

    def take_part(self, facts: Mapping[str, Any]) -> None:
        """Repair as one who serves no slot.

        Raises:
            Released: The job is over.
        """
        repaired = self.repair(facts)
        if repaired.plan is None:
            raise Released
        if repaired.plan.stop is not None:
            self.session.stop(repaired)

    def start_building(self, slot: int) -> None:
        """From now on this process builds for ``slot`` by itself; a thread takes part in repairs.

        Megatron's set-up then sees a job in which no other slot is served. A newcomer takes part in
        no repairs yet, and its thread only looks whether somebody waits for it.
        """
        world = self.world
        assert self.built is None and not world.groups
        process_of: list[int | None] = [None] * world.topology.num_slots
        process_of[slot] = world.process
        self.building, self.target = slot, None
        world.alone = Assignment(0, tuple(process_of), ())
        look = self._repair_if_needed if self.newcomer is None else self.newcomer.look_back
        self._meanwhile = Meanwhile(look)

    def stop_building(self) -> None:
        """This process has built what it was asked for, or never built alone."""
        if self._meanwhile is None:
            return
        self._meanwhile.stop()
        self._meanwhile = None
        slot = self.building
        assert slot is not None
        self.world.alone = None
        self.building = None
        self.receiving = True  # what it has built is what a model is before it is loaded
        self.built = Built(self.world.topology.shard_of(slot), slot)
        self.world.label = slot
        if self.newcomer is not None:
            self.newcomer.enter(self.session)

    def _repair_if_needed(self) -> None:
        if not self.world.needs_repair():
            return
        try:
            self.take_part({})
        except Released:
            self.session.leave(0, "")
        except self.session.no_way_on as stop:
            self.session.leave(75, str(stop))
