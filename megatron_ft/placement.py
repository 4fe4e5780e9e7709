"""Who could serve the slots of one pipeline, and which process goes to which seat.

Two small exact solvers under the planner. `solve_column` decides, for one pipeline of a replica,
which vacancies to fill and which a neighbouring stage adopts (MeCeFO), for every number of fills.
`seat_processes` then puts processes on the filled slots so that as few as possible copy state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_ft.topology import Shard

# How a stage is served: by the process it has, by a fresh one, or by its lower or upper neighbour.
Label = Literal["keep", "fill", "lower", "upper"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One stage of a pipeline, as a failure left it."""

    kept: bool = False
    """A living process serves it as its own slot."""
    adopter: Literal["lower", "upper"] | None = None
    """The living neighbour that serves it already, as an adopted slot."""
    adoptable: bool = False
    """It may be adopted anew: the strategy is on and a living process holds its state."""
    may_host: bool = False
    """The process kept here may adopt a neighbouring stage, were it not doing so already."""

    @property
    def hard(self) -> bool:
        """Nobody serves it."""
        return not self.kept and self.adopter is None


class Option(NamedTuple):
    """The best way to serve a pipeline with a given number of fresh processes."""

    given_back: int
    """How many of the fills take a slot off its adopter."""
    off_side: int
    """How many adoptions are by the neighbour that rule 3 names second."""
    labels: tuple[Label, ...]


# Left to right over a pipeline. After a stage, its process can still adopt the next one ("open") or
# cannot ("closed"), or the stage itself waits to be adopted by the next ("owed"). The number
# counts the fresh processes so far.
_State = tuple[Literal["open", "closed", "owed"], int]


def solve_column(column: Sequence[Site], *, fresh_may_host: bool) -> dict[int, Option]:
    """For each feasible number of fresh processes, the best labels of a pipeline.

    A process serves its own stage and at most one neighbour's. Rule 3 names the neighbour: stage 1
    for stage 0, else the stage below; the other one where that is not possible. What is served
    stays as it is, except that an adopted stage may be filled.

    Args:
        column: the pipeline's stages, first to last.
        fresh_may_host: whether a freshly filled stage may adopt a neighbour at once.
    """

    def may_host(site: Site) -> bool:
        return site.may_host if site.kept else fresh_may_host

    table: dict[_State, Option] = {("closed", 0): Option(0, 0, ())}
    for stage, site in enumerate(column):
        below = column[stage - 1] if stage > 0 else None
        following: dict[_State, Option] = {}
        for (state, fills), best in table.items():
            own: Label = "keep" if site.kept else "fill"
            given_back = best.given_back + (site.adopter is not None)
            option = Option(given_back, best.off_side, (*best.labels, own))
            if state == "owed":
                assert below is not None
                if not below.hard or may_host(site):
                    _offer(following, ("closed", fills + (not site.kept)), option)
                continue
            _offer(following, ("open", fills + (not site.kept)), option)
            if site.kept:
                continue
            adopt = site.hard and site.adoptable
            if site.adopter == "upper" or adopt:
                off_side = best.off_side + (adopt and stage > 0)
                option = Option(best.given_back, off_side, (*best.labels, "upper"))
                _offer(following, ("owed", fills), option)
            by_lower = site.adopter == "lower" or (adopt and below is not None and may_host(below))
            if state == "open" and by_lower:
                option = Option(best.given_back, best.off_side, (*best.labels, "lower"))
                _offer(following, ("closed", fills), option)
        table = following

    options: dict[int, Option] = {}
    for (state, fills), option in table.items():
        if state != "owed" and (fills not in options or option < options[fills]):
            options[fills] = option
    return options


def _offer(table: dict[_State, Option], state: _State, option: Option) -> None:
    if state not in table or option < table[state]:
        table[state] = option


class Seat(NamedTuple):
    """A slot that a fresh process takes, perhaps with a neighbouring slot to adopt at once."""

    slot: int
    shards: tuple[Shard, ...]
    """The shard of the slot and, where it adopts, that of the adopted slot."""

    @property
    def hosts(self) -> bool:
        return len(self.shards) == 2


def seat_processes(
    seats: Sequence[Seat],
    free: Sequence[int],
    holds: Mapping[int, frozenset[Shard]],
    cannot_adopt: frozenset[int],
    last_slot: Mapping[int, int],
) -> dict[int, int]:
    """The process of each seat's slot, as many as possible holding the state already.

    A maximum matching of seats and processes that hold a shard of theirs; the seats that are left
    take the lowest free processes. Ties prefer a process that served the very slot, then the
    lowest number.

    Args:
        seats: at most as many as `free`, and those that host at most as many as can adopt.
        free: the processes that may be seated.
        holds: for each process, the shards it holds the committed state of.
        cannot_adopt: processes that must not take a seat that hosts.
        last_slot: the slot a process served as its own before, where it did.
    """
    seats = sorted(seats)
    holders: dict[Shard, list[int]] = {}
    for process in sorted(free):
        for shard in holds.get(process, frozenset()):
            holders.setdefault(shard, []).append(process)

    candidates: list[list[int]] = []
    staying: set[int] = set()
    for index, seat in enumerate(seats):
        found = dict.fromkeys(p for shard in seat.shards for p in holders.get(shard, ()))
        fits = [p for p in found if not (seat.hosts and p in cannot_adopt)]
        stays = [p for p in fits if last_slot.get(p) == seat.slot]
        candidates.append(stays + [p for p in fits if p not in stays])
        if stays:
            staying.add(index)

    # Those that can stay where they are come first; augmenting never unseats a process.
    seat_of: dict[int, int] = {}  # process -> index of its seat
    for index in sorted(range(len(seats)), key=lambda i: (i not in staying, i)):
        _augment(index, candidates, seat_of)

    process_of = {seats[index].slot: process for process, index in seat_of.items()}
    rest = [process for process in sorted(free) if process not in seat_of]
    for seat in sorted(seats, key=lambda seat: (not seat.hosts, seat.slot)):
        if seat.slot in process_of:
            continue
        fit = next((p for p in rest if not (seat.hosts and p in cannot_adopt)), None)
        if fit is None:
            # All that can adopt sit where none is needed to: take the place of one of them.
            # The seat that it leaves comes up later in this loop, where any process will do.
            other = next(
                s.slot
                for s in seats
                if not s.hosts and s.slot in process_of and process_of[s.slot] not in cannot_adopt
            )
            fit = process_of.pop(other)
        else:
            rest.remove(fit)
        process_of[seat.slot] = fit
    return process_of


def _augment(start: int, candidates: Sequence[Sequence[int]], seat_of: dict[int, int]) -> None:
    """Occupy seat `start` along an augmenting path, if there is one (Kuhn's algorithm)."""
    asked_by: dict[int, int] = {}  # process -> the seat that asks for it
    queue = [start]
    for index in queue:
        for process in candidates[index]:
            if process in asked_by:
                continue
            asked_by[process] = index
            if process in seat_of:
                queue.append(seat_of[process])
                continue
            # It is free: move it here, the process it displaces one seat on, and so to the start.
            while True:
                target = asked_by[process]
                displaced = [p for p in candidates[target] if seat_of.get(p) == target]
                seat_of[process] = target
                if target == start:
                    return
                (process,) = displaced
