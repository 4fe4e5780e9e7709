"""A process that serves no slot waits: for a slot, for work, or for the end of the job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from mpi4py import MPI

from megatron_ft.world.errors import is_failure

if TYPE_CHECKING:
    from megatron_ft.rejoin.membership import Membership

READY_TAG = 7301
POOL_INTERVAL_S = 0.02


class Pool:
    """This process's time in the pool."""

    def __init__(self, membership: Membership) -> None:
        self.membership = membership
        self.world = membership.world
        self._gave_up = False

    def wait(self) -> None:
        """Wait in the pool until this process serves a slot or is asked to build for one.

        Raises:
            Released: The job is over.
        """
        with self.world.watch.working():  # every look around ticks
            self._look_around()

    def _look_around(self) -> None:
        membership = self.membership
        announced = -1
        while not self.world.slots:
            if membership.built is None and membership.target is not None:
                return
            if self.world.needs_repair() or self._nobody_trains() or self._one_less_waits():
                membership.take_part({})
            elif not self.world.assignment.live_slots and self._can_go_on():
                membership.take_part({"boundary": True})
            elif membership.built is not None and announced != self.world.epoch:
                announced = self.world.epoch
                self._announce()
            time.sleep(POOL_INTERVAL_S)

    def _nobody_trains(self) -> bool:
        """Whether all active processes died at once, so that none of them can begin a repair."""
        active = self.world.assignment.active_processes
        return bool(active) and self.world.known_dead().issuperset(active)

    def _one_less_waits(self) -> bool:
        """Whether somebody has died while nobody trains, so that nobody else would notice."""
        return not self.world.assignment.live_slots and bool(self.world.known_dead())

    def _can_go_on(self) -> bool:
        """While nobody trains: whether this process has a reason to call all to a repair."""
        elected = self.world.process == self.world.elected
        replacements = self.membership.replacements
        ended = replacements.respawn and replacements.spawner.exhausted
        given_up = elected and ended and not self._gave_up
        self._gave_up = self._gave_up or given_up
        return given_up or self.membership.wants_boundary()

    def _announce(self) -> None:
        """Tell the elected process what this one has built."""
        elected = self.world.elected
        try:
            self.world.comm.send(
                (self.world.process, self.membership.built),
                dest=self.world.rank_of(elected),
                tag=READY_TAG,
            )
        except MPI.Exception as error:
            if not is_failure(error):
                raise
