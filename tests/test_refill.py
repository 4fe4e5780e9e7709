"""The rules of rejoin: whose slot is filled by whom. Pure, over random failures and pools."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.recovery_plan import Fill
from megatron_ft.rejoin.refill import (
    Built,
    filled,
    refill,
    settle,
    stop_if_nothing_is_whole,
    targets,
)
from megatron_ft.topology import Assignment, Shard, Topology, initial_assignment


def whole(assignment: Assignment, topology: Topology) -> set[int]:
    return set(assignment.whole_replicas(topology))


def held(topology: Topology, assignment: Assignment) -> dict[int, frozenset[Shard]]:
    return {
        p: frozenset({topology.shard_of(assignment.slots_of(p)[0])})
        for p in assignment.active_processes
    }


def test_a_spare_and_the_leftover_bring_a_replica_back() -> None:
    topology = Topology(tensor=1, pipeline=2, data=2)
    before = initial_assignment(topology, range(5))  # process 4 is the spare
    dark = settle(topology, before, frozenset({0}))
    assert dark.assignment.process_of == (None, 1, None, 3)
    assert dark.assignment.pool == (2, 4)
    assert targets(topology, dark.assignment, {2: Built(Shard(0, 1), 2)}, {}, [4]) == {4: 0}

    built = {2: Built(Shard(0, 1), 2), 4: Built(Shard(0, 0), 0)}
    plan = refill(topology, dark, built, held(topology, dark.assignment))
    assert plan.assignment.process_of == (4, 1, 2, 3)
    fills = [a for a in plan.actions if isinstance(a, Fill)]
    assert [(f.slot, f.process, f.source_process, f.source_slot) for f in fills] == [
        (0, 4, 1, 1),
        (2, 2, 3, 3),
    ]


def test_leftovers_of_two_replicas_make_a_whole_one() -> None:
    topology = Topology(tensor=1, pipeline=2, data=3)
    before = initial_assignment(topology, range(6))
    dark = settle(topology, before, frozenset({0, 4}))  # stage 0 of replica 0, stage 1 of 1
    built = {3: Built(Shard(0, 1), 3), 1: Built(Shard(0, 0), 1)}
    plan = refill(topology, dark, built, held(topology, dark.assignment))
    assert whole(plan.assignment, topology) == {0, 2}
    assert plan.assignment.process_of[:6] == (1, None, 2, 3, None, 5)


def test_nobody_holds_the_state() -> None:
    topology = Topology(tensor=1, pipeline=2, data=1)
    before = initial_assignment(topology, range(3))
    dark = settle(topology, before, frozenset({0}))
    built = {1: Built(Shard(0, 1), 1), 2: Built(Shard(0, 0), 0)}
    plan = refill(topology, dark, built, {1: frozenset({Shard(0, 1)})})
    assert not filled(plan)
    stop = stop_if_nothing_is_whole(topology, plan, respawns=False).stop
    assert stop is not None and "--ft-respawn" in stop.advice


def test_a_slot_whose_replacements_die_stays_vacant() -> None:
    topology = Topology(tensor=1, pipeline=1, data=2)
    dark = settle(topology, initial_assignment(topology, range(3)), frozenset({0}))
    built = {2: Built(Shard(0, 0), 0)}
    holds = held(topology, dark.assignment)
    assert filled(refill(topology, dark, built, holds))
    assert not filled(refill(topology, dark, built, holds, barred={0}))
    assert targets(topology, dark.assignment, {}, {}, [2], barred={0}) == {}


def test_whoever_is_still_receiving_does_not_serve() -> None:
    topology = Topology(tensor=1, pipeline=2, data=2)
    before = initial_assignment(topology, range(4))
    plan = settle(topology, before, frozenset(), unfit=frozenset({2}))
    assert whole(plan.assignment, topology) == {1}
    assert plan.assignment.pool == (0, 2)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Topology, int, list[set[int]]]:
    topology = Topology(
        tensor=draw(st.integers(1, 2)),
        pipeline=draw(st.integers(1, 3)),
        data=draw(st.integers(1, 4)),
    )
    spares = draw(st.integers(0, 3))
    processes = range(topology.num_slots + spares)
    deaths = draw(st.lists(st.sets(st.sampled_from(processes), max_size=3), max_size=5))
    return topology, spares, deaths


@given(histories())
def test_any_history(history: tuple[Topology, int, list[set[int]]]) -> None:
    topology, spares, deaths = history
    assignment = initial_assignment(topology, range(topology.num_slots + spares))
    built = {
        p: Built(topology.shard_of(s[0]), s[0])
        for p in assignment.active_processes
        if (s := assignment.slots_of(p))
    }
    living = set(assignment.processes)
    for dead in deaths:
        dead &= living
        living -= dead
        settled = settle(topology, assignment, frozenset(dead))
        assert settled == settle(topology, assignment, frozenset(dead))
        settled.assignment.check(topology)
        holds = held(topology, settled.assignment)
        ready = {p: b for p, b in built.items() if p in settled.assignment.pool}
        plan = refill(topology, settled, ready, holds)
        plan.assignment.check(topology)
        assert plan.assignment.epoch == assignment.epoch + 1
        assert set(plan.assignment.processes) == living
        assert whole(settled.assignment, topology) <= whole(plan.assignment, topology)
        for replica in range(topology.data):
            served = [plan.assignment.process_of[s] is not None for s in topology.replica(replica)]
            assert all(served) or not any(served), "a replica is whole or dark"
        for action in plan.actions:
            if isinstance(action, Fill):
                assert topology.shard_of(action.slot) in holds[action.source_process]
                assert ready[action.process].shard == topology.shard_of(action.slot)
        idle = [p for p in plan.assignment.pool if p not in ready]
        wanted = targets(topology, plan.assignment, ready, {}, idle)
        assert wanted.keys() <= set(idle)
        assert all(plan.assignment.process_of[slot] is None for slot in wanted.values())
        assignment = plan.assignment
        if not whole(assignment, topology):
            assert stop_if_nothing_is_whole(topology, plan, respawns=True).stop is not None
            return
