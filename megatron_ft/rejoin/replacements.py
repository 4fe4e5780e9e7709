"""How many processes the job should have, and how new ones come in for those that are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_ft import planner
from megatron_ft.planner import Facts
from megatron_ft.rejoin.spawn import BOOT_TAG, IN_TAG, OUT_TAG, Order, Spawner
from megatron_ft.world import numbers
from megatron_ft.world.repaired import Report

if TYPE_CHECKING:
    import argparse

    from megatron_ft.rejoin.membership import Membership


class Replacements:
    """This process's part in starting new ones; the elected process starts them.

    Args:
        membership: What else this process knows of who belongs to the job.
        options: The ``--ft-*`` flags.
    """

    def __init__(self, membership: Membership, options: argparse.Namespace) -> None:
        self.membership = membership
        self.session = membership.session
        self.world = membership.world
        self.respawn: bool = options.ft_respawn
        self.spawner = Spawner(options.ft_respawn_limit, self._reserve, self._order)
        self.desired = 0
        """Processes that the job should have; what is missing is started with ``--ft-respawn``."""
        self.full = 0
        """Processes that it should have when nobody was asked to leave."""
        if self.world is not None:
            self.desired = len(self.world.ids)
            self.full = max(self.desired, self.world.topology.num_slots + options.ft_spares)
            if self.respawn:
                self.desired = self.full
        self.reserved = -1
        """The last id that anybody is known to have kept for a process that he has started."""
        self._next_slot: int | None = None
        """For which slot a process that is started now should build."""

    # -- repairs ---------------------------------------------------------------------------------

    def learn(self, reports: Mapping[int, Report]) -> None:
        """Take notice of the ids that others have kept."""
        self.reserved = max(self.reserved, *(r.facts["reserved"] for r in reports.values()))

    def choose(self, living: Mapping[int, Facts]) -> None:
        """Decide for which slot one more process would build."""
        world, membership = self.world, self.membership
        assignment = world.assignment.joined([world.next_process])
        told = {**living, world.next_process: Facts()}
        closed, left, warm = membership.closed, membership.history.left, membership.warm
        chosen = planner.builders(world.topology, assignment, told, closed, left, warm=warm)
        self._next_slot = chosen.get(world.next_process)

    def repaired(self) -> None:
        """A repair is over: one who is not elected starts no more, the elected one does."""
        if self.world.process != self.world.elected:
            self.spawner.cancel()
        if self._starts_processes:
            self.start_missing()

    def ask_back(self) -> None:
        """All processes that were asked to leave are to be replaced."""
        self.desired = self.full

    @property
    def _starts_processes(self) -> bool:
        """Whether new processes are started for those that are missing."""
        return self.respawn or self.membership.history.asked_back

    @property
    def _missing(self) -> int:
        """How many processes the job should have more than it has; negative if it has too many."""
        return self.desired - len(set(self.world.ids) - self.membership.history.left)

    def start_missing(self) -> None:
        """Start as many processes as the job should have and has not; the elected one does."""
        if self._missing <= 0:
            self.membership.history.asked_back = False
        if self.world.process == self.world.elected:
            self.spawner.want(self._missing)

    def _order(self, process: int) -> Order:
        """What a process that was started for this one prepares; called from a thread."""
        session = self.session
        return Order(
            process=process,
            slot=self._next_slot,
            topology=self.world.topology,
            iteration=session.iteration,
            run_dir=str(session.observer.run_dir.path),
            job=session.observer.log.job,
            watch=session.watch.shared() if session.watch is not None else None,
            made=numbers.made(),
        )

    def _reserve(self) -> int:
        """An id that no other process gets, whatever becomes of the one that it is for."""
        self.reserved = max(self.reserved + 1, self.world.next_process)
        return self.reserved

    # -- step boundaries -------------------------------------------------------------------------

    def one_waits(self) -> bool:
        """Whether a process that this one has started waits and is needed; else it is sent away."""
        if self.spawner.bridge is None:
            return False
        if self._missing > 0:
            return True
        self.spawner.discard()  # others came in its place
        return False

    def go_on(self) -> None:
        """Between repairs: start what is missing, also what could not be started before."""
        if self._starts_processes:
            self.start_missing()
            self.spawner.go_on()

    def waiting(self) -> int | None:
        """The id of a process that this one has started and that can be taken in now."""
        if self._missing <= 0 or self.spawner.bridge is None:
            return None
        assert self.spawner.order is not None
        newcomer = self.spawner.order.process
        return newcomer if self.spawner.ready() else None

    def admit(self, leader: int, newcomer: int) -> bool:
        """Take a process in; whether nobody died meanwhile."""
        bridge = self.spawner.bridge if leader == self.world.process else None
        if bridge is not None:
            self.spawner.tell(BOOT_TAG, self._boot())
        is_in = self.world.admit(leader, bridge, newcomer)
        if bridge is not None:
            self.spawner.tell(IN_TAG if is_in else OUT_TAG, None)
            self.spawner.parted(is_in)
        return is_in

    def _boot(self) -> dict[str, Any]:
        """What a newcomer must know."""
        world, membership = self.world, self.membership
        return {
            "ids": world.ids,
            "assignment": world.assignment,
            "next_process": world.next_process,
            "history": membership.history,
            "others": membership.others,
            "wanted": membership.wanted,
            "desired": self.desired,
            "full": self.full,
        }
