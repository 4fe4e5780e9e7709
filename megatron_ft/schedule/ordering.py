"""The order in which each process computes: 1F1B, for any routes and placement.

A process takes backward passes before forward passes and older microbatches before younger ones.
How many microbatches are in flight is limited for each place of a route: with P stages and a limit
of P, at most P - p microbatches may have passed forward at the p-th stage of their route (p = 0,
1, ..) and not yet backward there. Where all routes are 0, 1, .., P-1 on a process each, that is
Megatron's non-interleaved 1F1B: its warm-up of P - s - 1 forwards at stage s follows from it.

Why this never ends before all is computed: whatever has passed forward at the last place needs
nothing else for its backward pass, which frees that place. A microbatch that holds one of the
places before it waits for nothing but that, and so on to the first. Limits per stage instead would
lock up: a stage full of microbatches that go to its neighbour next, and the neighbour full of
microbatches that go to it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from megatron_ft.schedule.placement import Placement, processes_of
from megatron_ft.schedule.routes import Route

# Divided by the number of stages on the process. Only the ratio counts, and the order of 1F1B
# depends on it no further than that a backward pass is no shorter than a forward pass.
_FORWARD_TIME, _BACKWARD_TIME = 2, 4


class Compute(NamedTuple):
    """A forward or backward pass of a microbatch at a place of its route."""

    backward: bool
    microbatch: int
    place: int


def place_limits(num_stages: int, limit: int, *, forward_only: bool) -> tuple[int, ...] | None:
    """For each place of a route, how many microbatches may be in flight from there on.

    Args:
        limit: How many may be in flight in the replica.
        forward_only: Nothing is kept for a backward pass, so nothing is limited.
    """
    if forward_only:
        return None
    return tuple(min(limit, max(limit, num_stages) - place) for place in range(num_stages))


def order_computes(
    routes: Sequence[Route], placement: Placement, limit: int, *, forward_only: bool
) -> dict[int, list[Compute]]:
    """The forward and backward passes of each process, in order.

    All processes are played through, a backward pass taking twice the time of a forward pass, and a
    process with two stages taking as long for both as others for one: slower than others it is in
    any case, and in this order it keeps in step with them and does not run ahead with one stage.
    Microbatches enter in their order.

    Args:
        routes: Of each microbatch.
        limit: Microbatches in flight in the replica, at least 1.
    """
    limits = place_limits(len(placement), limit, forward_only=forward_only)
    last = len(placement) - 1
    order: dict[int, list[Compute]] = {process: [] for process in processes_of(placement)}
    forwards: dict[int, list[tuple[int, int]]] = {process: [] for process in order}
    backwards: dict[int, list[tuple[int, int]]] = {process: [] for process in order}
    idle = dict.fromkeys(order, True)
    in_flight = [0] * len(placement)
    entered = 0
    ends: list[tuple[int, int, Compute]] = []

    def host(microbatch: int, place: int) -> int:
        return placement[routes[microbatch][place]]

    def next_compute(process: int) -> Compute | None:
        if backwards[process]:
            return Compute(True, *heapq.heappop(backwards[process]))
        ready = forwards[process]
        open_ones = [at for at in ready if limits is None or in_flight[at[1]] < limits[at[1]]]
        if open_ones:
            chosen = min(open_ones)
            ready.remove(chosen)
            return Compute(False, *chosen)
        return None

    def admit() -> None:
        if entered < len(routes):
            forwards[host(entered, 0)].append((entered, 0))

    def finish(compute: Compute) -> None:
        backward, microbatch, place = compute
        if not backward and place < last:
            forwards[host(microbatch, place + 1)].append((microbatch, place + 1))
        elif not backward and not forward_only:
            heapq.heappush(backwards[host(microbatch, place)], (microbatch, place))
        elif backward:
            in_flight[place] -= 1
            if place > 0:
                heapq.heappush(backwards[host(microbatch, place - 1)], (microbatch, place - 1))

    admit()
    now = 0
    while True:
        started = True
        while started:  # a start may let the next microbatch in elsewhere
            started = False
            for process in order:
                compute = next_compute(process) if idle[process] else None
                if compute is None:
                    continue
                started, idle[process] = True, False
                order[process].append(compute)
                duration = _BACKWARD_TIME if compute.backward else _FORWARD_TIME
                duration //= placement.count(process)
                heapq.heappush(ends, (now + duration, process, compute))
                if not compute.backward:
                    in_flight[compute.place] += 1
                    if compute.place == 0:
                        entered += 1
                        admit()
        if not ends:
            return order
        now = ends[0][0]
        while ends and ends[0][0] == now:
            _, process, compute = heapq.heappop(ends)
            idle[process] = True
            finish(compute)
