"""Rule 3: which neighbour serves the slots of the dead beside its own, and who takes them back.

What is decided here is decided stage by stage: where a process of a stage dies, its tensor-parallel
peers' counterparts adopt alike, since two peers that run a stage in another order would wait for
each other in its collectives. A peer that lives is free for other slots then.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from megatron_ft.adopt.column import Site, solve_column
from megatron_ft.recovery_plan import Action, Adopt, Fill, GiveBack, GoDark, RecoveryPlan
from megatron_ft.rejoin.refill import Built, seats_for, source_of
from megatron_ft.topology import Assignment, Shard, Topology

Holds = Mapping[int, frozenset[Shard]]
"""Process -> shards of which it holds the committed state."""


def settle(
    topology: Topology,
    before: Assignment,
    dead: frozenset[int],
    holds: Holds,
    unfit: frozenset[int] = frozenset(),
    leaving: Collection[int] = (),
    *,
    anew: bool,
    unable: Collection[int] = (),
) -> RecoveryPlan:
    """After a failure: what a neighbour can serve it adopts, other broken replicas go dark.

    Args:
        dead: The processes that are no more.
        holds: Of the living ones.
        unfit: Living processes that have not got the state of their own slot.
        leaving: Replicas that were asked to leave; their processes end, so none is released.
        anew: Whether a slot may be adopted that was not so far. What was stays as it is.
        unable: Processes that have tried to run two stages and could not.
    """
    gone = dead | unfit
    process_of: list[int | None] = list(before.process_of)
    adopted = set(before.adopted)
    for replica in range(topology.data):
        hosts = None
        if replica not in leaving:
            hosts = _hosts(topology, before, replica, gone, holds, anew=anew, unable=unable)
        for slot in topology.replica(replica):
            adopted.discard(slot)
            if hosts is None:
                process_of[slot] = None
                continue
            at = topology.coordinate(slot)
            host = topology.slot(tp=at.tp, cp=at.cp, pp=hosts[at.pp], dp=replica)
            process_of[slot] = before.process_of[host]
            if host != slot:
                adopted.add(slot)
    living = [p for p in before.processes if p not in dead]
    serving = set(process_of)
    after = Assignment(
        before.epoch + 1,
        tuple(process_of),
        tuple(p for p in living if p not in serving),
        tuple(sorted(adopted)),
    )
    actions: list[Action] = []
    was_dark = before.dark_replicas(topology)
    for replica in after.dark_replicas(topology):
        if replica not in was_dark:
            served = {before.process_of[slot] for slot in topology.replica(replica)}
            released = sorted(p for p in served if p is not None and p not in dead)
            actions.append(GoDark(replica, () if replica in leaving else tuple(released)))
    for slot in after.adopted:
        process, shard = after.process_of[slot], topology.shard_of(slot)
        assert process is not None
        has_it = shard in holds.get(process, frozenset())
        if has_it and before.process_of[slot] == process:
            continue
        source, source_slot = source_of(topology, slot, after, holds)
        actions.append(Adopt(slot, process, source, source_slot))
    return RecoveryPlan(topology, before, dead, after, tuple(actions))


def give_back(
    topology: Topology,
    plan: RecoveryPlan,
    built: Mapping[int, Built],
    holds: Holds,
    barred: Collection[int] = (),
) -> RecoveryPlan:
    """Let pool processes take adopted slots, so that these are trained exactly again.

    Args:
        plan: Its assignment's pool is drawn from.
        built: What each ready pool process has built.
        barred: Slots that stay as they are because their replacements keep dying.

    Returns:
        ``plan`` with a ``GiveBack`` and a ``Fill`` for each slot that changes hands.
    """
    after = plan.assignment
    process_of = list(after.process_of)
    free = {p: built[p] for p in after.pool if p in built}
    returned: dict[int, tuple[int, int]] = {}
    for slots in _adopted_stages(topology, after):
        seats = seats_for(topology, slots, free, barred)
        for slot, taker in (seats or {}).items():
            process_of[slot] = taker
            del free[taker]
            adopter = after.process_of[slot]
            assert adopter is not None
            returned[slot] = (adopter, taker)
    if not returned:
        return plan
    assignment = Assignment(
        after.epoch,
        tuple(process_of),
        tuple(p for p in after.pool if p not in set(process_of)),
        tuple(slot for slot in after.adopted if slot not in returned),
    )
    # An adopter whom the state has not reached yet does not need it any more.
    actions = [a for a in plan.actions if not (isinstance(a, Adopt) and a.slot in returned)]
    actions += [GiveBack(slot, adopter, taker) for slot, (adopter, taker) in returned.items()]
    actions += [
        Fill(slot, taker, *source_of(topology, slot, assignment, holds))
        for slot, (_, taker) in returned.items()
    ]
    return RecoveryPlan(topology, plan.before, plan.failed, assignment, tuple(actions))


def revive(
    topology: Topology,
    plan: RecoveryPlan,
    built: Mapping[int, Built],
    holds: Holds,
    *,
    closed: Collection[int] = (),
    unable: Collection[int] = (),
) -> RecoveryPlan:
    """Bring dark replicas back in which neighbours can serve what the pool has nobody for.

    Args:
        plan: Its assignment's pool is drawn from, after ``refill`` has made whole what it could.
        built: What each ready pool process has built.
        closed: Slots that no process of the pool takes; a replica of which all are stays dark.
        unable: Processes that cannot run two stages.

    Returns:
        ``plan`` with a ``Fill`` for each slot that is served again by a process of its own, and an
        ``Adopt`` for each of the others.
    """
    after = plan.assignment
    held = {shard for shards in holds.values() for shard in shards}
    if topology.data < 2 or not held.issuperset(topology.shards):
        return plan
    process_of = list(after.process_of)
    adopted = set(after.adopted)
    free = {p: built[p] for p in after.pool if p in built}
    taken: list[int] = []
    for replica in after.dark_replicas(topology):
        if set(closed).issuperset(topology.replica(replica)):
            continue
        seats: dict[int, int] = {}
        column = []
        for slots in _stages(topology, replica):
            left = {p: b for p, b in free.items() if p not in seats.values()}
            found = seats_for(topology, tuple(slots), left, closed)
            seats |= found or {}
            able = found is not None and not set(found.values()) & set(unable)
            column.append(Site(kept=found is not None, adoptable=True, may_host=able))
        hosts = _solved(column)
        if hosts is None:
            continue
        for slot in topology.replica(replica):
            at = topology.coordinate(slot)
            host = topology.slot(tp=at.tp, cp=at.cp, pp=hosts[at.pp], dp=replica)
            process_of[slot] = seats[host]
            free.pop(seats[host], None)
            taken.append(slot)
            if host != slot:
                adopted.add(slot)
    if not taken:
        return plan
    assignment = Assignment(
        after.epoch,
        tuple(process_of),
        tuple(p for p in after.pool if p not in set(process_of)),
        tuple(sorted(adopted)),
    )
    actions: list[Action] = list(plan.actions)
    # Its own state first: with it, a process takes over all that goes with a state.
    for slot in sorted(taken, key=lambda slot: (slot in adopted, slot)):
        process = process_of[slot]
        assert process is not None
        kind = Adopt if slot in adopted else Fill
        actions.append(kind(slot, process, *source_of(topology, slot, assignment, holds)))
    return RecoveryPlan(topology, plan.before, plan.failed, assignment, tuple(actions))


def adoptions(plan: RecoveryPlan | None) -> tuple[Adopt, ...]:
    """The slots that a plan lets a neighbour serve from now on."""
    return () if plan is None else tuple(a for a in plan.actions if isinstance(a, Adopt))


def hosts_in(topology: Topology, assignment: Assignment, replica: int) -> tuple[int, ...]:
    """For each stage of a whole replica, the stage whose process runs it: the placement."""
    hosts = []
    for pp in range(topology.pipeline):
        process = assignment.process_of[topology.slot(pp=pp, dp=replica)]
        assert process is not None, f"replica {replica} is dark"
        hosts.append(topology.stage_of(assignment.slots_of(process)[0]))
    return tuple(hosts)


def _hosts(
    topology: Topology,
    before: Assignment,
    replica: int,
    gone: Collection[int],
    holds: Holds,
    *,
    anew: bool,
    unable: Collection[int],
) -> list[int] | None:
    """For each stage of a replica, the stage whose processes run it; None where it goes dark."""
    stages = range(topology.pipeline)
    slots = _stages(topology, replica)
    adopted = set(before.adopted)
    held = {shard for shards in holds.values() for shard in shards}

    def stays(slot: int) -> bool:
        process = before.process_of[slot]
        if process is None or process in gone:
            return False
        if slot not in adopted:
            return True
        # Whom the state has not reached, or who lost it, gets it from another one. Who could not
        # build the second stage may hold its state, but runs one only.
        return process not in unable and topology.shard_of(slot) in held

    own = [all(stays(s) and s not in adopted for s in slots[pp]) for pp in stages]
    unable_stages = [any(before.process_of[s] in unable for s in slots[pp]) for pp in stages]
    column = []
    for pp in stages:
        adopter = None
        if all(stays(slot) and slot in adopted for slot in slots[pp]):
            process = before.process_of[slots[pp][0]]
            assert process is not None
            host = topology.stage_of(before.slots_of(process)[0])
            # A process of which a peer died serves nothing any more.
            if own[host]:
                adopter = "lower" if host < pp else "upper"
        column.append(
            Site(
                kept=own[pp],
                adopter=adopter,  # type: ignore[arg-type]  # one of the two
                adoptable=anew
                and topology.data > 1
                and all(topology.shard_of(slot) in held for slot in slots[pp]),
                may_host=anew and not unable_stages[pp],
            )
        )
    return _solved(column)


def _solved(column: Sequence[Site]) -> list[int] | None:
    """For each stage, the one whose processes run it, without new ones; None if it cannot be."""
    labels = solve_column(column)
    if labels is None:
        return None
    step = {"keep": 0, "lower": -1, "upper": 1}
    return [pp + step[label] for pp, label in enumerate(labels)]


def _stages(topology: Topology, replica: int) -> list[list[int]]:
    """The slots of each stage of a replica."""
    slots: list[list[int]] = [[] for _ in range(topology.pipeline)]
    for slot in topology.replica(replica):
        slots[topology.stage_of(slot)].append(slot)
    return slots


def _adopted_stages(topology: Topology, assignment: Assignment) -> list[tuple[int, ...]]:
    """The slots of each adopted stage of each replica."""
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for slot in assignment.adopted:
        at = topology.coordinate(slot)
        found[at.dp, at.pp] = (*found.get((at.dp, at.pp), ()), slot)
    return list(found.values())
