"""After a failure, or when the pool has grown: who serves which slot now. One pure function.

``plan`` goes through the ladder. For what the dead served, the first rule that can be applied:

1. fill: a pool process takes the slot, an exact copy from another replica of the stage;
2. CheckFree: a pool process takes the slot and rebuilds the stage, which is held by no one;
3. MeCeFO: the process of a neighbouring stage serves both;
4. ReCoVer: the replica goes dark and its healthy processes join the pool;
5. stop, unless what is missing can still come.

The rules themselves are beside what carries them out: 1, 2 and 4 in ``rejoin.refill``, 3 in
``adopt.rules``, 5 in ``rejoin.hope``. No communication, no torch, no clock: each process computes
the same plan from what all have told each other in the repair.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from megatron_ft.adopt import rules as adoption
from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.recovery_plan import RecoveryPlan
from megatron_ft.rejoin import refill as rules
from megatron_ft.rejoin.history import slots_of
from megatron_ft.rejoin.hope import Help, stop_if_hopeless
from megatron_ft.rejoin.refill import OFF, Built
from megatron_ft.topology import Assignment, Shard, Topology


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """What the user has switched on beside rules 1, 4 and 5, which are always on."""

    checkfree: CheckfreeOptions = OFF
    """Rule 2: how a stage that nobody holds is rebuilt, if at all."""
    adopt: bool = False
    """Rule 3. Needs two replicas or more, since an adopted stage is copied from another one."""
    respawn: bool = False
    """New processes are started for the dead, so that the job waits for them at rule 5."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a living process has told the others of itself in this repair."""

    built: Built | None = None
    """What it has built; for one that serves, its own slot. None for one that has built nothing."""
    building: int | None = None
    """The slot for which it builds."""
    committed: int = 0
    """The last step of which it holds the outcome."""
    held: frozenset[Shard] = frozenset()
    """Shards of which it holds the state beside that of what it has built."""
    receiving: bool = False
    """Whether the state of its own slot has not reached it, or is lost."""
    training: bool = False
    """Whether it is in a training step."""
    boundary: bool = False
    """Whether it is between two steps, where pool processes may come in."""
    over: bool = False
    """Whether training is over for it: nothing comes back any more."""
    finished: bool = False
    """Whether it is done with everything; the job ends when all active processes are."""
    unable: bool = False
    """Whether it cannot run two stages."""
    exhausted: bool = False
    """Whether it could start no more processes."""
    drain: tuple[int, ...] = ()
    """Replicas that somebody asked it to let go."""

    @classmethod
    def told(cls, facts: Mapping[str, Any]) -> Facts:
        """From the facts of a report, which has others too; what it leaves out is not the case."""
        return cls(
            **{field.name: facts[field.name] for field in fields(cls) if field.name in facts}
        )


@dataclass(frozen=True, kw_only=True)
class Situation:
    """All that a plan depends on, known to all processes alike."""

    topology: Topology
    before: Assignment
    """The last epoch's, with newcomers in its pool (``Assignment.joined``)."""
    dead: frozenset[int]
    """Those of its processes that are no more; empty where none has died."""
    living: Mapping[int, Facts]
    """The others."""
    strategies: Strategies = Strategies()
    closed: frozenset[int] = frozenset()
    """Slots that stay vacant: their replacements keep dying, or their replica was asked to go."""
    committed: int = 0
    """The last step that anybody had committed by the last repair, as far as that told."""
    left: frozenset[int] = frozenset()
    """Processes of replicas that were asked to go, and end."""


def plan(now: Situation) -> RecoveryPlan | None:
    """The next epoch's assignment and the actions that lead to it; None where the job is done.

    In the new assignment every replica is whole or dark. With no whole one and no ``Stop`` all
    wait for processes that build or come.
    """
    topology, living, on = now.topology, now.living, now.strategies
    active = [p for p in living if now.before.slots_of(p)]
    if active and all(living[p].finished for p in active):
        return None
    gone = drained(now)
    closed = now.closed | slots_of(topology, gone)
    holds = usable(topology, holds_of(living, now.committed), on)
    if now.before.active_processes and not active:
        holds = {}  # nobody is left who could say that they committed nothing more
    over = any(facts.over for facts in living.values())
    receiving = frozenset(p for p, facts in living.items() if facts.receiving)
    unable = frozenset(p for p, facts in living.items() if facts.unable)
    if on.adopt:
        settled = adoption.settle(
            topology,
            now.before,
            now.dead,
            holds,
            receiving,
            gone,
            # Elsewhere than in a step not all would go on from the same place.
            anew=not over and all(living[p].training for p in active),
            unable=unable,
        )
    else:
        settled = rules.release_broken(topology, now.before, now.dead, receiving, gone)
    ends = now.left | rules.processes_of(topology, now.before, gone)
    ready = ready_of(living, set(settled.assignment.pool) - ends)
    result = settled
    asked = any(facts.boundary for facts in living.values())
    if not over and (asked or not settled.assignment.whole_replicas(topology)):
        result = from_pool(settled, ready, holds, closed, unable, on)
    helpers = Help({}, {}, (), False)  # nobody comes back after the training
    if not over:
        building = building_of(living)
        pool = result.assignment.pool
        helpers = Help(
            built={p: built for p, built in ready.items() if p in pool},
            building=building,
            idle=[p for p in pool if p not in {*ready, *building, *ends}],
            # Where nobody serves, the lowest process starts new ones.
            respawns=on.respawn and not living[min(living)].exhausted,
        )
    return stop_if_hopeless(topology, result, helpers, holds, closed, on.checkfree)


def from_pool(
    settled: RecoveryPlan,
    ready: Mapping[int, Built],
    holds: Mapping[int, frozenset[Shard]],
    closed: Collection[int],
    unable: Collection[int],
    on: Strategies,
) -> RecoveryPlan:
    """Let pool processes take adopted slots, then dark replicas; what can be with rules 1 to 3.

    Args:
        settled: Its assignment's pool is drawn from.
        ready: The pool processes that can take a slot, and what they have built.
        holds: Process -> shards of which it holds the committed state.
        closed: Slots that stay vacant.
        unable: Processes that cannot run two stages.
    """
    topology = settled.topology
    result = adoption.give_back(topology, settled, ready, holds, closed)
    result = rules.refill(topology, result, ready, holds, closed, on.checkfree)
    if on.adopt:
        result = adoption.revive(topology, result, ready, holds, closed=closed, unable=unable)
    return result


def pool_can_do_more(
    topology: Topology,
    assignment: Assignment,
    ready: Mapping[int, Built],
    known: Mapping[int, Facts],
    closed: Collection[int],
    on: Strategies,
) -> bool:
    """Whether a repair between two steps would give the pool something to do.

    Args:
        ready: Pool processes that can take a slot, as far as this process knows.
        known: What the living told in the last repair.
    """
    holds = {
        p: frozenset(map(topology.shard_of, assignment.slots_of(p)))
        for p in assignment.active_processes
    }
    if not holds:  # nobody trains: what the pool has kept is what there is
        holds = usable(topology, holds_of(known), on)
    now = RecoveryPlan(topology, assignment, frozenset(), assignment, ())
    unable = [p for p, facts in known.items() if facts.unable]
    return bool(from_pool(now, ready, holds, closed, unable, on).actions)


def builders(
    topology: Topology,
    assignment: Assignment,
    living: Mapping[int, Facts],
    closed: Collection[int],
    left: Collection[int],
    *,
    warm: bool,
) -> dict[int, int]:
    """For which slot each pool process that has built nothing should build; see ``targets``.

    Args:
        warm: Whether those that nobody needs build, too, for slots of replica 0.
    """
    ready = ready_of(living, set(assignment.pool) - set(left))
    building = building_of({p: f for p, f in living.items() if p in assignment.pool})
    idle = [p for p in assignment.pool if p not in ready and p not in building and p not in left]
    wanted = rules.targets(topology, assignment, ready, building, idle, closed)
    if warm:
        spare = [p for p in idle if p not in wanted]
        slots = topology.replica(0)
        wanted |= {p: slots[i % len(slots)] for i, p in enumerate(spare)}
    return wanted


def drained(now: Situation) -> tuple[int, ...]:
    """The replicas that leave in this repair because somebody asked them to."""
    asked = {replica for facts in now.living.values() for replica in facts.drain}
    return rules.drainable(now.topology, now.before, now.dead, asked)


def holds_of(living: Mapping[int, Facts], committed: int = 0) -> dict[int, frozenset[Shard]]:
    """Process -> shards of which it holds the state of the last committed step.

    Args:
        committed: A step that is known to have been committed. What is older is of no use: with it
            the job would silently go back.
    """
    committed = max((committed, *(facts.committed for facts in living.values())))
    return {
        p: facts.held | (frozenset() if facts.receiving else {facts.built.shard})
        for p, facts in living.items()
        if facts.built is not None and facts.committed == committed
    }


def usable(
    topology: Topology, holds: Mapping[int, frozenset[Shard]], on: Strategies
) -> dict[int, frozenset[Shard]]:
    """``holds`` without what is left of stages that must be rebuilt.

    With tensor parallelism a stage is rebuilt as a whole: norms and the like, with their optimizer
    state, must stay the same on all its peers, which they would not if one had new ones.
    """
    if not on.checkfree.enabled:
        return dict(holds)
    held = frozenset(shard for shards in holds.values() for shard in shards)
    broken = {shard.pp for shard in set(topology.shards) - held}
    return {p: frozenset(s for s in shards if s.pp not in broken) for p, shards in holds.items()}


def ready_of(living: Mapping[int, Facts], pool: Iterable[int]) -> dict[int, Built]:
    """The processes of a pool that can take a slot at once, and what they have built."""
    told = ((p, living[p].built) for p in sorted(pool) if p in living)
    return {p: built for p, built in told if built is not None}


def building_of(living: Mapping[int, Facts]) -> dict[int, int]:
    """The processes that build, and for which slot."""
    return {p: facts.building for p, facts in living.items() if facts.building is not None}
