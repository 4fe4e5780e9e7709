"""From routes and a placement to the list of actions of each process.

``ordering`` says in which order each process computes. Here the messages are put in between, so
that the lists are projections of one order of everything that happens in the replica. Therefore
they cannot lock up: of all that is still to be done, what comes first in that order has nobody to
wait for, even if a send waits for its receive. And therefore messages from one process to another
are received in the order in which they are sent, without tags.

A send comes right after what it sends has been computed. A receive comes right before what it is
needed for, as in Megatron's schedule, or before that where the sender could not go on otherwise;
whoever runs the list starts a receive there and waits for it where it is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ft.schedule.actions import RECEIVE_OF, Action, Kind, Schedule
from megatron_ft.schedule.ordering import Compute, order_computes
from megatron_ft.schedule.placement import Placement, check_placement, processes_of
from megatron_ft.schedule.routes import Route

CACHED = 128
"""Schedules kept; a job has one for each number of microbatches, twice as many with evaluation, and
one for each way in which a share of swapped microbatches falls into a step."""


@functools.lru_cache(maxsize=CACHED)
def compile_schedule(
    routes: tuple[Route, ...],
    placement: Placement,
    limit: int | None = None,
    *,
    forward_only: bool = False,
) -> Schedule:
    """Compile the actions of all processes of a replica.

    Microbatches with the same route run one after another: mixed, each waits for stages that others
    hold, and a step takes up to half as long again; in groups the change from one to the next costs
    a pass or two in the whole step.

    Args:
        routes: Of each microbatch, in the order of their indices.
        placement: The process of each stage.
        limit: Microbatches in flight in the replica, by default as many as stages. The peak of live
            activations at the p-th stage of a route is lower by p, as in 1F1B. It may be lower than
            that, for memory, or higher.
        forward_only: For evaluation.

    Raises:
        ValueError: A route does not visit each stage once, the placement cannot be, or the limit is
            not positive.
    """
    check_placement(placement)
    stages = list(range(len(placement)))
    for route in set(routes):
        if sorted(route) != stages:
            raise ValueError(f"route {route} does not visit each of {len(stages)} stages once")
    limit = len(placement) if limit is None else limit
    if limit < 1:
        raise ValueError(f"at least one microbatch must be in flight, not {limit}")
    entry = _grouped(routes)
    order = order_computes(
        [routes[index] for index in entry], placement, limit, forward_only=forward_only
    )
    lists = {
        process: [compute._replace(microbatch=entry[compute.microbatch]) for compute in computes]
        for process, computes in order.items()
    }
    actions = _Linear(routes, placement, lists).run()
    return Schedule(routes, placement, actions, forward_only)


def _grouped(routes: tuple[Route, ...]) -> list[int]:
    """The indices of the microbatches, those with the same route together."""
    group_of = {route: number for number, route in enumerate(dict.fromkeys(routes))}
    return sorted(range(len(routes)), key=lambda index: group_of[routes[index]])


@dataclass(frozen=True)
class _Message:
    kind: Kind
    microbatch: int
    from_stage: int
    to_stage: int
    sender: int
    receiver: int
    consumer: Compute


class _Linear:
    """Goes through what all processes do in one order and writes down who does what."""

    def __init__(
        self,
        routes: tuple[Route, ...],
        placement: Placement,
        lists: dict[int, list[Compute]],
    ) -> None:
        self.routes = routes
        self.placement = placement
        self.lists = lists
        self.next = dict.fromkeys(lists, 0)
        self.actions: dict[int, list[Action]] = {p: [] for p in processes_of(placement)}
        self.unsent: list[_Message] = []
        """Oldest first; those of one process leave in this order."""
        self.there: set[Compute] = {Compute(False, m, 0) for m in range(len(routes))}
        """Computes whose input is on their process."""
        self.last_place = len(placement) - 1

    def run(self) -> dict[int, tuple[Action, ...]]:
        while self._deliver_what_is_needed() or self._compute_one() or self._deliver_early():
            pass
        assert all(self.next[p] == len(computes) for p, computes in self.lists.items())
        return {process: tuple(actions) for process, actions in self.actions.items()}

    def _deliver_what_is_needed(self) -> bool:
        """Deliver the oldest message that its receiver needs for its next compute."""
        for message in self._heads():
            if message.consumer == self._next(message.receiver):
                self._deliver(message)
                return True
        return False

    def _compute_one(self) -> bool:
        """The next compute of the first process that has its input and nothing left to send."""
        sending = {message.sender for message in self.unsent}
        for process in self.lists:
            compute = self._next(process)
            if compute in self.there and process not in sending:
                self._compute(process, compute)
                return True
        return False

    def _deliver_early(self) -> bool:
        """Everybody waits for receivers that need the message later: the one who needs it first."""
        heads = self._heads()
        if heads:
            self._deliver(min(heads, key=self._position))
        return bool(heads)

    def _heads(self) -> list[_Message]:
        """The oldest message of each process that has some to send, oldest first."""
        heads: dict[int, _Message] = {}
        for message in self.unsent:
            heads.setdefault(message.sender, message)
        return list(heads.values())

    def _position(self, message: _Message) -> int:
        """How many computes the receiver does before it needs a message."""
        computes = self.lists[message.receiver]
        return computes.index(message.consumer) - self.next[message.receiver]

    def _next(self, process: int) -> Compute | None:
        computes, at = self.lists[process], self.next[process]
        return computes[at] if at < len(computes) else None

    def _compute(self, process: int, compute: Compute) -> None:
        backward, microbatch, place = compute
        stage = self.routes[microbatch][place]
        kind = Kind.BACKWARD if backward else Kind.FORWARD
        self.actions[process].append(Action(kind, microbatch, stage))
        self.next[process] += 1
        for message in self._results(process, compute):
            if message.receiver == process:
                self.there.add(message.consumer)
            else:
                self.unsent.append(message)

    def _results(self, process: int, compute: Compute) -> Iterator[_Message]:
        """Who needs what has been computed."""
        backward, microbatch, place = compute
        route = self.routes[microbatch]
        if not backward and place == self.last_place:
            # Its own backward pass, which needs nothing from elsewhere.
            self.there.add(Compute(True, microbatch, place))
            return
        to_place = place - 1 if backward else place + 1
        if to_place < 0:
            return
        yield _Message(
            kind=Kind.SEND_GRADIENT if backward else Kind.SEND_ACTIVATION,
            microbatch=microbatch,
            from_stage=route[place],
            to_stage=route[to_place],
            sender=process,
            receiver=self.placement[route[to_place]],
            consumer=Compute(backward, microbatch, to_place),
        )

    def _deliver(self, message: _Message) -> None:
        self.unsent.remove(message)
        index = message.microbatch
        self.actions[message.sender].append(
            Action(message.kind, index, message.from_stage, message.receiver)
        )
        self.actions[message.receiver].append(
            Action(RECEIVE_OF[message.kind], index, message.to_stage, message.sender)
        )
        self.there.add(message.consumer)
