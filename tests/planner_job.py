"""A job as the planner sees it, simulated: who has built what, who truly holds which state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from megatron_ft.adopt.rules import hosts_in
from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.planner import Facts, Situation, Strategies, builders, drained, holds_of, plan
from megatron_ft.recovery_plan import Adopt, Fill, GiveBack, GoDark, Rebuild, RecoveryPlan
from megatron_ft.rejoin.history import slots_of
from megatron_ft.rejoin.moving import needs_state
from megatron_ft.rejoin.refill import Built
from megatron_ft.schedule.placement import check_placement
from megatron_ft.topology import Assignment, Shard, Topology, initial_assignment

Held = Mapping[int, frozenset[Shard]]


@dataclass
class Process:
    """What one process would tell, and what is really in its memory."""

    built: int | None = None
    """The slot for which it has built, or which it served last."""
    building: int | None = None
    committed: int = 0
    receiving: bool = False
    unable: bool = False
    state: dict[Shard, int] = field(default_factory=dict)
    """Shard -> after how many steps it is the state."""


@dataclass
class Job:
    topology: Topology
    on: Strategies
    assignment: Assignment
    processes: dict[int, Process]
    step: int = 0
    known: int = 0
    """What the last repair told of the steps."""
    next_process: int = 0
    drained: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    barred: frozenset[int] = frozenset()

    @classmethod
    def started(cls, topology: Topology, on: Strategies, count: int) -> Job:
        """All slots served by the first processes, the others idle in the pool."""
        job = cls(topology, on, initial_assignment(topology, range(count)), {}, next_process=count)
        for p in range(count):
            slots = job.assignment.slots_of(p)
            job.processes[p] = Process(built=slots[0] if slots else None)
            job.processes[p].state = {topology.shard_of(slot): 0 for slot in slots}
        return job

    @property
    def closed(self) -> frozenset[int]:
        return self.barred | slots_of(self.topology, self.drained)

    def facts(self, process: int, **moment: object) -> Facts:
        mind, shard_of = self.processes[process], self.topology.shard_of
        built = None if mind.built is None else Built(shard_of(mind.built), mind.built)
        own = None if built is None else built.shard
        return Facts(
            built=built,
            building=mind.building,
            committed=mind.committed,
            receiving=mind.receiving,
            unable=mind.unable,
            held=frozenset(shard for shard in mind.state if shard != own),
            **moment,  # type: ignore[arg-type]
        )

    def situation(
        self, dead: Sequence[int] = (), told: Mapping[int, dict[str, object]] | None = None
    ) -> Situation:
        living = [p for p in self.assignment.processes if p not in dead]
        return Situation(
            topology=self.topology,
            before=self.assignment,
            dead=frozenset(dead),
            living={p: self.facts(p, **(told or {}).get(p, {})) for p in living},
            strategies=self.on,
            closed=self.closed,
            left=frozenset(self.left),
            committed=self.known,
        )

    def holds(self, living: Sequence[int]) -> dict[int, frozenset[Shard]]:
        """The shards whose last committed state is really in a process's memory."""
        minds = {p: self.processes[p] for p in living}
        return {
            p: frozenset(s for s, step in mind.state.items() if step == self.step)
            for p, mind in minds.items()
        }

    def held_of(self, living: Iterable[int]) -> set[Shard]:
        """The shards of which one of these processes would tell that it holds the last state."""
        told = {p: self.facts(p) for p in living}
        return {shard for shards in holds_of(told, self.step).values() for shard in shards}

    # -- what happens to it ----------------------------------------------------------------------

    def commit(self) -> None:
        """A step, by all who serve."""
        if not self.assignment.whole_replicas(self.topology):
            return
        self.step += 1
        for p in self.assignment.active_processes:
            mind = self.processes[p]
            mind.committed = self.step
            mind.state = dict.fromkeys(map(self.topology.shard_of, self.assignment.slots_of(p)))
            mind.state = dict.fromkeys(mind.state, self.step)

    def join(self, count: int) -> None:
        new = range(self.next_process, self.next_process + count)
        self.next_process += count
        self.processes |= {p: Process() for p in new}
        self.assignment = self.assignment.joined(new)

    def build(self, now: Situation, begin: bool, end: bool, warm: bool) -> None:
        """Idle processes begin what they are asked for; those that build are done."""
        wanted = builders(
            self.topology,
            self.assignment,
            {p: self.facts(p) for p in self.assignment.pool},
            self.closed,
            self.left,
            warm=warm,
        )
        for p, slot in wanted.items() if begin else ():
            mind = self.processes[p]
            assert mind.built is None and mind.building is None and p in self.assignment.pool
            mind.building = slot
        for p in self.assignment.pool if end else ():
            mind = self.processes[p]
            if mind.building is not None:
                mind.built, mind.building = mind.building, None
                mind.state = {self.topology.shard_of(mind.built): 0}

    def carry_out(self, now: Situation, result: RecoveryPlan, done: int | None = None) -> None:
        """Take over a plan's assignment and move state; all of it or the first ``done`` moves."""
        self.drained |= set(drained(now))
        for replica in drained(now):
            served = {now.before.process_of[s] for s in self.topology.replica(replica)}
            self.left |= {p for p in served if p is not None}
        self.known = max((self.known, *(facts.committed for facts in now.living.values())))
        self.assignment = result.assignment
        for p, facts in now.living.items():
            if facts.committed < self.known:  # what is beside its own stage is of no use any more
                mind = self.processes[p]
                own = None if mind.built is None else self.topology.shard_of(mind.built)
                mind.state = {s: step for s, step in mind.state.items() if s == own}
        self.processes = {p: self.processes[p] for p in result.assignment.processes}
        for p in result.assignment.active_processes:
            self.processes[p].built = result.assignment.slots_of(p)[0]
        if result.stop is not None:
            return
        moves = [a for a in result.actions if isinstance(a, Fill | Rebuild | Adopt)]
        for move in moves:
            if not isinstance(move, Adopt) and needs_state(move):
                self.processes[move.process].receiving = True
        for move in moves[:done]:
            mind = self.processes[move.process]
            mind.state[self.topology.shard_of(move.slot)] = self.step
            mind.committed = self.step
        if done is not None:
            return
        for p in self.assignment.active_processes:
            mind = self.processes[p]
            mind.receiving = False
            served = set(map(self.topology.shard_of, self.assignment.slots_of(p)))
            mind.state = {s: step for s, step in mind.state.items() if s in served}
        # In the pool a process keeps what it ran beside its stage: there may be no other copy.


# -- what must hold of every plan --------------------------------------------------------------


def check(now: Situation, result: RecoveryPlan, holds: Held) -> None:
    """What is promised of every plan.

    Args:
        holds: What the living really hold of the last committed state.
    """
    topology, before, after = now.topology, now.before, result.assignment
    after.check(topology)
    assert after.epoch == before.epoch + 1
    assert set(after.processes) == set(now.living), "all who live are known, nobody else"
    whole, dark = after.whole_replicas(topology), after.dark_replicas(topology)
    assert sorted((*whole, *dark)) == list(range(topology.data)), "a replica is whole or dark"
    for replica in whole:
        check_placement(hosts_in(topology, after, replica))
        hosts = {
            (topology.stage_of(slot), topology.stage_of(after.slots_of(process)[0]))
            for slot in topology.replica(replica)
            if (process := after.process_of[slot]) is not None
        }
        assert len(hosts) == topology.pipeline, "tensor- and context-parallel peers run alike"
    assert now.strategies.adopt or not after.adopted
    _check_who_moves(now, result)
    if result.stop is None:
        _check_state(now, result, holds)
    _check_stop(now, result, holds)


def _check_who_moves(now: Situation, result: RecoveryPlan) -> None:
    topology, before, after = now.topology, now.before, result.assignment
    unfit = {p for p, facts in now.living.items() if facts.receiving} | now.dead
    gone = drained(now)
    ends = now.left | {before.process_of[s] for r in gone for s in topology.replica(r)}
    assert not ends & set(after.active_processes), "who was asked to go does not serve"
    slots = {a.slot for a in result.actions if isinstance(a, Fill | Rebuild)}
    # One that has tried to run a second stage and could not leaves it to the other neighbour, and
    # may hold its state all the same.
    slots |= {
        a.slot
        for a in result.actions
        if isinstance(a, Adopt)
        and (tried := before.process_of[a.slot]) in now.living
        and now.living[tried].unable
    }
    for replica in before.whole_replicas(topology):
        served = {slot: before.process_of[slot] for slot in topology.replica(replica)}
        if replica in gone or unfit & set(served.values()):
            continue
        moved = {slot for slot, p in served.items() if after.process_of[slot] != p}
        # An adopter that may no longer run two stages only matters where it lost the second.
        assert moved <= slots & set(before.adopted) or replica in dict(_dark(result)), moved
    for action in result.actions:
        if isinstance(action, Fill | Rebuild):
            built = now.living[action.process].built
            assert built is not None and built.shard == topology.shard_of(action.slot)
            assert action.slot not in now.closed, "a closed slot is filled"
            assert after.process_of[action.slot] == action.process
            assert action.slot not in after.adopted
        if isinstance(action, Adopt):
            assert action.slot in after.adopted and now.strategies.adopt
            assert after.process_of[action.slot] == action.process
        if isinstance(action, GiveBack):
            assert action.slot in before.adopted and action.slot not in after.adopted
            assert before.process_of[action.slot] == action.adopter
    newly = set(after.dark_replicas(topology)) - set(before.dark_replicas(topology))
    assert newly <= dict(_dark(result)).keys(), "what goes dark is said"
    for replica, released in _dark(result):
        served_by = {before.process_of[slot] for slot in topology.replica(replica)}
        living = served_by & now.living.keys()
        assert set(released) == (set() if replica in gone else living)


def _dark(result: RecoveryPlan) -> list[tuple[int, tuple[int, ...]]]:
    return [(a.replica, a.released) for a in result.actions if isinstance(a, GoDark)]


def _check_state(now: Situation, result: RecoveryPlan, holds: Held) -> None:
    """Carry the moves out one after the other, as processes do, on what is really held."""
    topology, after = now.topology, result.assignment
    have = {p: set(holds[p]) for p in now.living}
    for p in (p for p, facts in now.living.items() if facts.receiving):
        built = now.living[p].built
        have[p] -= set() if built is None else {built.shard}
    held = {shard for shards in have.values() for shard in shards}
    rebuilt = {
        topology.shard_of(a.slot): a.process for a in result.actions if isinstance(a, Rebuild)
    }
    for action in result.actions:
        if isinstance(action, Fill | Adopt):
            shard = topology.shard_of(action.slot)
            if shard in rebuilt:
                assert action.source_process == rebuilt[shard], f"{action}: not what was rebuilt"
            assert shard in have[action.source_process], f"{action}: its source has no such state"
            have[action.process].add(shard)
        elif isinstance(action, Rebuild):
            shard = topology.shard_of(action.slot)
            peers = {s for s in topology.shards if s.pp == shard.pp}
            assert not peers <= held, f"{action}: its stage is held, all of it"
            assert peers <= rebuilt.keys(), f"{action}: peers that must stay alike are not rebuilt"
            assert now.strategies.checkfree.enabled and action.from_slots
            for slot in action.from_slots:
                process = after.process_of[slot]
                assert process is not None and topology.shard_of(slot) in have[process], action
            have[action.process].add(shard)
    for slot in after.live_slots:
        process = after.process_of[slot]
        assert process is not None
        assert topology.shard_of(slot) in have[process], f"slot {slot} has no state"
    kept = {shard for shards in have.values() for shard in shards}
    assert held <= kept, f"lost {held - kept}"
    if after.live_slots:
        serve = {topology.shard_of(slot) for slot in after.live_slots}
        assert serve == set(topology.shards)


def _check_stop(now: Situation, result: RecoveryPlan, holds: Held) -> None:
    """The job stops if and only if nothing is whole and nothing that comes can help."""
    topology, after, on = now.topology, result.assignment, now.strategies
    over = any(facts.over for facts in now.living.values())
    if after.live_slots:
        assert result.stop is None
        return
    # Pool processes cannot know whether a step was committed since the last repair.
    knows = not now.before.active_processes or set(now.before.active_processes) & set(now.living)
    told = {
        p: holds[p] - (set() if not facts.receiving or facts.built is None else {facts.built.shard})
        for p, facts in now.living.items()
        if knows
    }
    have = in_whole_stages(now, {shard for shards in told.values() for shard in shards})
    lost = {s for s in topology.shards if s not in have and not can_be_rebuilt(now, s, have)}
    if lost:
        assert result.stop is not None and result.stop.rule == 2
        return
    gone = drained(now)
    ends = now.left | {now.before.process_of[s] for r in gone for s in topology.replica(r)}
    closed = now.closed | slots_of(topology, gone)
    pool = [] if over else [p for p in now.living if p not in ends]
    supply: Counter[Shard] = Counter()
    idle = 0
    for p in pool:
        facts = now.living[p]
        if facts.built is not None:
            supply[facts.built.shard] += 1
        elif facts.building is not None:
            supply[topology.shard_of(facts.building)] += 1
        else:
            idle += 1
    more = on.respawn and not over and not now.living[min(now.living)].exhausted
    comes = any(
        not closed & set(topology.replica(r))
        and (
            more or (Counter(map(topology.shard_of, topology.replica(r))) - supply).total() <= idle
        )
        for r in range(topology.data)
    )
    assert (result.stop is None) == comes
    assert result.stop is None or result.stop.rule == 4


def in_whole_stages(now: Situation, have: set[Shard]) -> set[Shard]:
    """With CheckFree a stage of which a tensor-parallel part is lost is lost as a whole."""
    if not now.strategies.checkfree.enabled:
        return have
    return {s for s in have if {o for o in now.topology.shards if o.pp == s.pp} <= have}


def can_be_rebuilt(now: Situation, lost: Shard, have: set[Shard]) -> bool:
    """Rule 2, found in another way than the planner's."""
    checkfree, last = now.strategies.checkfree, now.topology.pipeline - 1
    stages = {shard.pp for shard in have if shard.tp == lost.tp}
    between = any(s < lost.pp for s in stages) and any(s > lost.pp for s in stages)
    end = lost.pp in (0, last)
    if not checkfree.enabled or (end and not checkfree.plus):
        return False
    if not checkfree.plus:
        return between
    twins = {1: 0, last - 1: last, 0: 1, last: last - 1}
    partners = {b for a, b in ((0, 1), (1, 0), (last - 1, last), (last, last - 1)) if a == lost.pp}
    assert lost.pp not in twins or partners
    if not partners <= stages:
        return False
    return between or (len(partners) == 1 and (end or checkfree.swap_share > 0))


def shuffled(now: Situation) -> Situation:
    """The same, told in another order."""
    return replace(now, living=dict(reversed(now.living.items())))


# -- random jobs -------------------------------------------------------------------------------


@st.composite
def strategies_on(draw: st.DrawFn, pipeline: int) -> Strategies:
    plus = draw(st.booleans()) and pipeline > 1
    return Strategies(
        checkfree=CheckfreeOptions(
            enabled=plus or draw(st.booleans()),
            plus=plus,
            swap_share=draw(st.sampled_from([0, 1])),  # type: ignore[arg-type]
        ),
        adopt=not plus and draw(st.booleans()),
        respawn=draw(st.booleans()),
    )


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    topology = Topology(
        tensor=draw(st.integers(1, 2)),
        context=draw(st.sampled_from([1, 1, 1, 2])),
        pipeline=draw(st.integers(1, 4)),
        data=draw(st.integers(1, 3)),
        order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])),
    )
    count = draw(st.integers(topology.replica_size, topology.num_slots + 3))
    return Job.started(topology, draw(strategies_on(topology.pipeline)), count)


MOMENTS = {
    "step": {"training": True},
    "boundary": {"boundary": True},
    "elsewhere": {},
    "after": {"over": True},
}


def happens(job: Job, data: st.DataObject, calm: bool = False) -> Situation:
    """What has happened since the last repair, and what all tell each other in the next one.

    Args:
        calm: Whether nobody dies and nobody loses anything.
    """
    draw = data.draw
    if not any(mind.receiving for mind in job.processes.values()) and draw(st.booleans()):
        job.commit()
    job.join(draw(st.sampled_from([0, 0, 1, 3])))
    job.build(job.situation(), draw(st.booleans()), draw(st.booleans()), draw(st.booleans()))
    processes = list(job.assignment.processes)
    dead: list[int] = []
    told: dict[int, dict[str, object]] = {}
    active = job.assignment.active_processes
    name = draw(st.sampled_from(["step", "step", "boundary", "boundary", "elsewhere", "after"]))
    moment: dict[str, object] = dict(MOMENTS[name])
    if not calm:
        most = draw(st.sampled_from([0, 1, 1, 2, 4, len(processes)]))
        dead = draw(st.lists(st.sampled_from(processes), max_size=most, unique=True))
        if draw(st.integers(0, 5)) == 0 and active:
            lost = job.processes[draw(st.sampled_from(active))]
            lost.receiving = True
            assert lost.built is not None
            lost.state.pop(job.topology.shard_of(lost.built), None)
        if draw(st.integers(0, 5)) == 0:
            job.processes[draw(st.sampled_from(processes))].unable = True
        if draw(st.integers(0, 8)) == 0:
            job.barred = frozenset(draw(st.sets(st.integers(0, job.topology.num_slots - 1))))
        if draw(st.integers(0, 8)) == 0:
            job.drained.clear()
    for p in active:
        told[p] = dict(moment) if calm or draw(st.integers(0, 9)) else {}
    if name == "boundary" and active and not calm and draw(st.integers(0, 2)) == 0:
        told[active[-1]]["drain"] = (draw(st.integers(0, job.topology.data - 1)),)
    if not active and processes and name == "boundary":
        told[processes[-1]] = dict(moment)
    if len(dead) == len(processes):
        dead = dead[1:]
    return job.situation(dead, told)


def planned(now: Situation) -> RecoveryPlan:
    result = plan(now)
    assert result is not None
    return result
