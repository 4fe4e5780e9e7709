"""What a session answers to orders; runs in the control server's threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_ft.control.orders import Order, Orders, check_drain, status
from megatron_ft.control.protocol import ORDERS, ControlError
from megatron_ft.control.server import ANSWER_S, ControlServer

if TYPE_CHECKING:
    from megatron_ft.session import Session

LOOK_S = 0.2
"""How often it is looked whether who gave an order still waits."""
NOT_ELECTED = "another process writes for the job now: ask again"


class Control:
    """Orders to one process of the job; only the elected one listens.

    Args:
        session: The session of this process.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.orders = Orders()
        self._server = ControlServer(session.observer.run_dir.path, self.handle)

    def elect(self, elected: bool) -> None:
        """Listen, or stop it, as the assignment says."""
        if elected:
            self._server.open()
        else:
            self._server.close(last=False)
            self.orders.give_up(NOT_ELECTED)

    def close(self, *, last: bool) -> None:
        """The job ends for this process; ``last`` if it is the elected one."""
        self._server.close(last=last)
        self.orders.give_up("the job has ended")
        self._server.finish()

    def handle(self, message: dict[str, Any], gone: Callable[[], bool]) -> dict[str, Any]:
        """Answer one order.

        Args:
            message: The order.
            gone: Whether nobody waits for the answer any more; an order that has not begun then
                is not carried out.

        Raises:
            ControlError: It is unknown, malformed, or cannot be followed now.
        """
        order = message.get("order")
        if order not in ORDERS:
            raise ControlError(f"unknown order {order!r}; there are {', '.join(ORDERS)}")
        if order == "status":
            return self._status()
        if order == "drain":
            replica = message.get("replica")
            if not isinstance(replica, int):
                raise ControlError("drain needs a replica, as a number")
            world = self.session.world
            assert world is not None
            check_drain(world.topology, world.assignment, replica)
            return self._carry_out(Order(replica=replica), gone)
        return self._carry_out(Order(respawn=True), gone)

    def _status(self) -> dict[str, Any]:
        session, world = self.session, self.session.world
        assert world is not None
        membership = session.membership
        # Copies: the main thread may replace these while they are read.
        others = dict(membership.others)
        return {
            **status(world.topology, world.assignment),
            "iteration": session.committed,
            "elected": world.process,
            "pids": {str(process): pid for process, pid in dict(membership.pids).items()},
            "building": {
                str(p): r.facts["building"]
                for p, r in others.items()
                if r.facts.get("building") is not None
            },
            "ready": {str(p): built.slot for p, built in dict(membership.ready).items()},
            "drained_replicas": sorted(membership.history.drained),
            "barred_slots": sorted(membership.history.barred),
        }

    def _carry_out(self, order: Order, gone: Callable[[], bool]) -> dict[str, Any]:
        self.orders.add(order)
        deadline = time.monotonic() + ANSWER_S
        while not order.done.wait(LOOK_S):
            if (gone() or time.monotonic() > deadline) and self.orders.withdraw(order):
                raise ControlError(f"taken back: not begun within {ANSWER_S:g} s, or nobody waits")
        if "error" in order.answer:
            raise ControlError(order.answer["error"])
        return order.answer
