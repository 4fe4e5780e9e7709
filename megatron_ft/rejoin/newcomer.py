"""A process that was started by another one: it prepares itself alone, then enters the world."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, NoReturn

from mpi4py import MPI

from megatron_ft.rejoin import priority, spawn
from megatron_ft.rejoin.building import Meanwhile
from megatron_ft.world import numbers

if TYPE_CHECKING:
    from megatron_ft.session import Session

IMPORT_PATIENCE_S = 600.0
BOOT_PATIENCE_S = math.inf
"""Evaluations and checkpoints come before it, and may take as long as they like."""


class Newcomer:
    """This process, from its start until it is one of the world.

    Args:
        bridge: Connects it with the process that started it.
        order: What that one told it to prepare.
    """

    def __init__(self, bridge: MPI.Intracomm, order: spawn.Order) -> None:
        self.bridge = bridge
        self.order = order

    @classmethod
    def arrive(cls, bridge: MPI.Intracomm) -> Newcomer:
        """Say that this process has imported, and learn what it is for; or leave."""
        try:
            return cls(bridge, spawn.wait_for_order(bridge, IMPORT_PATIENCE_S))
        except spawn.NotWanted as why:
            leave(why)

    def look_back(self) -> None:
        """Leave if there is nobody any more for whom to prepare."""
        try:
            spawn.parent_lives(self.bridge)
        except spawn.NotWanted as why:
            leave(why)

    def enter(self, session: Session) -> None:
        """Wait until the others take this process in, and take part in the repair that does it."""
        membership, world = session.membership, session.world
        assert world is not None
        # While it is alone, for it may be many.
        numbers.catch_up(self.order.made + numbers.SLACK)
        priority.restore()
        try:
            boot = spawn.wait_for_boot(self.bridge, BOOT_PATIENCE_S)
            # If somebody dies meanwhile, this process may not hear of it where it waits.
            out = Meanwhile(self._leave_if_out)
            joined = world.join(
                self.bridge,
                boot["ids"],
                boot["assignment"],
                boot["next_process"],
                lambda: spawn.wait_until_in(self.bridge, BOOT_PATIENCE_S),
            )
            out.stop()
        except spawn.NotWanted as why:
            leave(why)
        if not joined:
            leave(spawn.NotWanted("somebody died while it was taken in"))
        self.bridge.Free()
        # From here on it must draw the same conclusions as everybody else.
        membership.history = boot["history"]
        membership.others, membership.wanted = boot["others"], boot["wanted"]
        replacements = membership.replacements
        replacements.desired, replacements.full = boot["desired"], boot["full"]
        session.barred_said = set(membership.history.barred)
        membership.taken_in, membership.newcomer = True, None
        membership.take_part({"boundary": True})

    def _leave_if_out(self) -> None:
        try:
            if spawn.is_out(self.bridge):
                raise spawn.NotWanted("somebody died while it was taken in")
        except spawn.NotWanted as why:
            leave(why)


def leave(why: Exception) -> NoReturn:
    """End this process, for which there is no use; nobody takes that for a failure of the job."""
    print(f"megatron_ft: a process that was started leaves: {why}", flush=True)
    os._exit(0)
