"""Orders that wait for the next step boundary, and what came of them. Pure but for a lock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from megatron_ft.control.protocol import ControlError
from megatron_ft.topology import Assignment, Topology


@dataclass(eq=False)  # two orders of the same content are two
class Order:
    """Something that all processes do together between two steps."""

    replica: int | None = None
    """Replica that is to leave."""
    respawn: bool = False
    """Whether vacant slots are to be filled by new processes."""
    done: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] = field(default_factory=dict)

    def reply(self, **answer: Any) -> None:
        self.answer = answer
        self.done.set()


class Orders:
    """The orders that the elected process has taken and not yet carried out."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Order] = []
        self._told: list[Order] = []

    def add(self, order: Order) -> None:
        with self._lock:
            self._waiting.append(order)

    def withdraw(self, order: Order) -> bool:
        """Take an order back; whether that was in time, before the others were told of it."""
        with self._lock:
            if order not in self._waiting or order in self._told:
                return False
            self._waiting.remove(order)
            return True

    @property
    def pending(self) -> bool:
        with self._lock:
            return bool(self._waiting)

    def tell(self, *, boundary: bool) -> dict[str, Any]:
        """What this process tells the others in a repair.

        Args:
            boundary: Whether it is one at a step boundary; in others orders wait.
        """
        with self._lock:
            # Those that a repair was told which did not come to its end wait again.
            self._told = list(self._waiting) if boundary else []
        drains = tuple(o.replica for o in self._told if o.replica is not None)
        respawns = any(o.respawn for o in self._told)
        return {"drain": drains, "respawn": respawns} if self._told else {}

    def told(self) -> list[Order]:
        """Take out the orders of the last ``tell``: the repair that heard them is done."""
        with self._lock:
            told, self._told = self._told, []
            self._waiting = [order for order in self._waiting if order not in told]
        return told

    def give_up(self, why: str) -> None:
        """Answer all that wait: this process does not carry out orders any more."""
        with self._lock:
            waiting, self._waiting, self._told = self._waiting, [], []
        for order in waiting:
            order.reply(error=why)


def check_drain(topology: Topology, assignment: Assignment, replica: int) -> None:
    """Whether a replica may leave now.

    Raises:
        ControlError: It does not exist, is dark, or is the last one.
    """
    if not 0 <= replica < topology.data:
        raise ControlError(f"no replica {replica}: they are 0 to {topology.data - 1}")
    whole = assignment.whole_replicas(topology)
    if replica not in whole:
        raise ControlError(f"replica {replica} is dark already: nothing of it serves")
    if len(whole) == 1:
        raise ControlError(
            f"replica {replica} is the last one: without it training ends. Save and stop the job, "
            "or fill another replica first (respawn)"
        )


def status(topology: Topology, assignment: Assignment) -> dict[str, Any]:
    """Who serves which slot, as JSON.

    Returns:
        ``epoch``, ``slots`` (one mapping a slot: ``slot``, ``replica``, ``stage``, ``tp``,
        ``process`` or None), ``pool`` (process ids), ``whole_replicas`` and ``dark_replicas``.
    """
    slots = []
    for slot, process in enumerate(assignment.process_of):
        at = topology.coordinate(slot)
        slots.append(
            {"slot": slot, "replica": at.dp, "stage": at.pp, "tp": at.tp, "process": process}
        )
    return {
        "epoch": assignment.epoch,
        "slots": slots,
        "pool": list(assignment.pool),
        "whole_replicas": list(assignment.whole_replicas(topology)),
        "dark_replicas": list(assignment.dark_replicas(topology)),
    }
