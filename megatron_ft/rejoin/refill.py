"""Which pool process takes which vacant slot, and what the others should prepare for. Pure.

A process can take a slot at once only if it has built that slot's shard (its Megatron model and
groups); which replica it built it for does not matter. So a dark replica comes back when for each
of its slots a process with that shard is there: leftovers of one or several dark replicas, spares,
and respawned processes alike.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.checkfree.weights import plan_sources
from megatron_ft.recovery_plan import Action, Fill, GoDark, Rebuild, RecoveryPlan, Stop
from megatron_ft.topology import Assignment, Shard, Topology

OFF = CheckfreeOptions()


@dataclass(frozen=True)
class Built:
    """What a pool process has built."""

    shard: Shard
    slot: int
    """The slot for which it built it, or which it served last."""


def release_broken(
    topology: Topology,
    before: Assignment,
    dead: frozenset[int],
    unfit: frozenset[int] = frozenset(),
    leaving: Collection[int] = (),
) -> RecoveryPlan:
    """After a failure: replicas that are not whole go dark, nobody changes his slot.

    Args:
        dead: The processes that are no more.
        unfit: Living processes whose state is not the committed one: they had not yet received it.
        leaving: Replicas that were asked to leave; their processes end, so none is released.
    """
    stay = [None if p in dead or p in unfit else p for p in before.process_of]
    kept: set[int] = set()
    for replica in range(topology.data):
        slots = topology.replica(replica)
        if replica not in leaving and all(stay[slot] is not None for slot in slots):
            kept.update(slots)
    process_of = tuple(p if slot in kept else None for slot, p in enumerate(stay))
    living = [p for p in before.processes if p not in dead]
    after = Assignment(
        before.epoch + 1, process_of, tuple(p for p in living if p not in set(process_of))
    )
    actions: list[Action] = []
    was_dark = before.dark_replicas(topology)
    for replica in after.dark_replicas(topology):
        if replica not in was_dark:
            served = {before.process_of[slot] for slot in topology.replica(replica)}
            released = sorted(p for p in served if p is not None and p not in dead)
            if replica in leaving:
                released = []
            actions.append(GoDark(replica, tuple(released)))
    return RecoveryPlan(topology, before, dead, after, tuple(actions))


def drainable(
    topology: Topology, before: Assignment, dead: Collection[int], asked: Collection[int]
) -> tuple[int, ...]:
    """Of the replicas that were asked to leave, those that can: one whole replica must stay."""
    whole = [
        replica
        for replica in before.whole_replicas(topology)
        if not any(before.process_of[slot] in dead for slot in topology.replica(replica))
    ]
    leaving: list[int] = []
    for replica in sorted(asked):
        if replica in whole and len(whole) > 1:
            whole.remove(replica)
            leaving.append(replica)
    return tuple(leaving)


def processes_of(
    topology: Topology, assignment: Assignment, replicas: Collection[int]
) -> frozenset[int]:
    """The processes that serve slots of these replicas."""
    served = {assignment.process_of[s] for r in replicas for s in topology.replica(r)}
    return frozenset(p for p in served if p is not None)


def refill(
    topology: Topology,
    plan: RecoveryPlan,
    built: Mapping[int, Built],
    holds: Mapping[int, frozenset[Shard]],
    barred: Collection[int] = (),
    checkfree: CheckfreeOptions = OFF,
) -> RecoveryPlan:
    """Fill as many dark replicas as the pool can make whole; rules 1 and 2.

    Args:
        plan: What ``release_broken`` made; its assignment's pool is drawn from.
        built: What each ready pool process has built.
        holds: Process -> shards of which it holds the committed state.
        barred: Slots that stay vacant because their replacements keep dying.
        checkfree: How a shard that nobody holds is rebuilt from its neighbours, if at all.

    Returns:
        ``plan`` with fills added, each with a source that holds the state, and a ``Rebuild`` for
        each shard that nobody holds. Where one cannot be rebuilt its replicas stay dark.
    """
    after = plan.assignment
    process_of = list(after.process_of)
    free = {p: built[p] for p in after.pool if p in built}
    filled: list[int] = []
    for replica in after.dark_replicas(topology):
        slots = topology.replica(replica)
        seats = seats_for(topology, slots, free, barred)
        shards = {topology.shard_of(slot) for slot in slots}
        if seats is None or not shards <= obtainable(topology, holds, checkfree):
            continue
        for slot, process in seats.items():
            process_of[slot] = process
            del free[process]
            filled.append(slot)
    if not filled:
        return plan
    pool = tuple(p for p in after.pool if p not in set(process_of))
    assignment = Assignment(after.epoch, tuple(process_of), pool, after.adopted)
    moves = _moves(topology, filled, assignment, holds, checkfree)
    actions = (*(a for a in plan.actions if not isinstance(a, Stop)), *moves)
    return RecoveryPlan(topology, plan.before, plan.failed, assignment, actions)


def targets(
    topology: Topology,
    assignment: Assignment,
    built: Mapping[int, Built],
    building: Mapping[int, int],
    idle: Collection[int],
    barred: Collection[int] = (),
) -> dict[int, int]:
    """For which slot each idle pool process should build, so that dark replicas become whole
    and neighbours are relieved of adopted slots.

    Args:
        built: Pool processes that are ready, and for what.
        building: Pool processes that build, and for which slot.
        idle: Pool processes that have built nothing, or nothing that is wanted.

    Returns:
        Process -> slot; a process that is not needed is left out.
    """
    have: dict[Shard, int] = {}
    for b in built.values():
        have[b.shard] = have.get(b.shard, 0) + 1
    for slot in building.values():
        shard = topology.shard_of(slot)
        have[shard] = have.get(shard, 0) + 1
    chosen: dict[int, int] = {}
    waiting = sorted(idle)
    dark = [s for r in assignment.dark_replicas(topology) for s in topology.replica(r)]
    # A neighbour is relieved of an adopted slot before a dark replica comes back.
    for slot in (*assignment.adopted, *dark):
        shard = topology.shard_of(slot)
        if have.get(shard, 0) > 0:
            have[shard] -= 1
        elif waiting and slot not in barred:
            chosen[waiting.pop(0)] = slot
    return chosen


def seats_for(
    topology: Topology,
    slots: tuple[int, ...],
    free: Mapping[int, Built],
    barred: Collection[int],
) -> dict[int, int] | None:
    """A process for each slot, or None. Those who built for that very slot first."""
    seats: dict[int, int] = {}
    left = dict(free)
    for slot in slots:
        if slot in barred:
            return None
        shard = topology.shard_of(slot)
        fitting = [p for p, b in left.items() if b.shard == shard]
        if not fitting:
            return None
        process = min(fitting, key=lambda p: (left[p].slot != slot, p))
        seats[slot] = process
        del left[process]
    return seats


def obtainable(
    topology: Topology, holds: Mapping[int, frozenset[Shard]], checkfree: CheckfreeOptions
) -> frozenset[Shard]:
    """The shards whose state somebody holds, or that can be rebuilt from others'."""
    held = frozenset(shard for shards in holds.values() for shard in shards)
    return held | {
        shard
        for shard in set(topology.shards) - held
        if sources_of(topology, shard, held, checkfree) is not None
    }


def sources_of(
    topology: Topology, shard: Shard, held: Collection[Shard], checkfree: CheckfreeOptions
) -> tuple[int, ...] | None:
    """The stages that a shard nobody holds is rebuilt from; None where it cannot be."""
    if not checkfree.enabled:
        return None
    stages = [pp for pp in range(topology.pipeline) if Shard(shard.tp, pp) in held]
    found = plan_sources(shard.pp, stages, topology.pipeline, options=checkfree, norms=None)
    return None if found is None else tuple(source.stage for source in found)


def _moves(
    topology: Topology,
    slots: Collection[int],
    after: Assignment,
    holds: Mapping[int, frozenset[Shard]],
    checkfree: CheckfreeOptions,
) -> list[Action]:
    """How each newly served slot gets its state: what exists first, then what is rebuilt once."""
    fills: list[Action] = []
    rebuilds: list[Action] = []
    late: list[Action] = []
    rebuilt: dict[Shard, int] = {}
    held = {shard for shards in holds.values() for shard in shards}
    for slot in sorted(slots):
        shard, process = topology.shard_of(slot), after.process_of[slot]
        assert process is not None
        if shard in held:
            fills.append(_fill(topology, slot, after, holds))
        elif shard not in rebuilt:
            rebuilt[shard] = slot
            stages = sources_of(topology, shard, held, checkfree)
            assert stages is not None, "only what is obtainable is filled"
            at = topology.coordinate(slot)
            near = [topology.slot(tp=at.tp, cp=at.cp, pp=pp, dp=at.dp) for pp in stages]
            rebuilds.append(Rebuild(slot, process, tuple(near)))
        else:
            source = after.process_of[rebuilt[shard]]
            assert source is not None
            late.append(Fill(slot, process, source, rebuilt[shard]))
    return [*fills, *rebuilds, *late]


def _fill(
    topology: Topology, slot: int, after: Assignment, holds: Mapping[int, frozenset[Shard]]
) -> Fill:
    process = after.process_of[slot]
    assert process is not None
    return Fill(slot, process, *source_of(topology, slot, after, holds))


def source_of(
    topology: Topology, slot: int, after: Assignment, holds: Mapping[int, frozenset[Shard]]
) -> tuple[int, int | None]:
    """The process from which that of ``slot`` gets its state, and the slot that it serves.

    The process itself, and None, where it holds the state already.
    """
    process, shard = after.process_of[slot], topology.shard_of(slot)
    assert process is not None
    if shard in holds.get(process, frozenset()):
        return process, None
    sources = sorted(p for p, shards in holds.items() if shard in shards)
    serving = {p: s for s, p in enumerate(after.process_of) if topology.shard_of(s) == shard}
    # Spread the copies over the live peers; any of them holds the same bytes.
    peers = [p for p in sources if p in serving] or sources
    source = peers[topology.replica_of(slot) % len(peers)]
    return source, serving.get(source)


def filled(plan: RecoveryPlan | None) -> bool:
    """Whether a plan gives a slot to a process."""
    return plan is not None and any(isinstance(action, Fill | Rebuild) for action in plan.actions)
