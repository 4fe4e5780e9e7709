"""The rules of rejoin: whose slot is filled by whom. Pure, over random failures and pools."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.planner import Facts, builders
from megatron_ft.recovery_plan import Fill, Rebuild, RecoveryPlan
from megatron_ft.rejoin.history import History
from megatron_ft.rejoin.hope import Help, stop_if_hopeless
from megatron_ft.rejoin.refill import (
    Built,
    filled,
    obtainable,
    refill,
    release_broken,
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
    dark = release_broken(topology, before, frozenset({0}))
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
    dark = release_broken(topology, before, frozenset({0, 4}))  # stage 0 of replica 0, stage 1 of 1
    built = {3: Built(Shard(0, 1), 3), 1: Built(Shard(0, 0), 1)}
    plan = refill(topology, dark, built, held(topology, dark.assignment))
    assert whole(plan.assignment, topology) == {0, 2}
    assert plan.assignment.process_of[:6] == (1, None, 2, 3, None, 5)


OFF = CheckfreeOptions()
CHECKFREE = CheckfreeOptions(enabled=True)
PLUS = CheckfreeOptions(enabled=True, plus=True)
NOBODY = Help({}, {}, (), False)


def test_nobody_holds_the_state() -> None:
    topology = Topology(tensor=1, pipeline=2, data=1)
    before = initial_assignment(topology, range(3))
    dark = release_broken(topology, before, frozenset({0}))
    built = {1: Built(Shard(0, 1), 1), 2: Built(Shard(0, 0), 0)}
    holds = {1: frozenset({Shard(0, 1)})}
    plan = refill(topology, dark, built, holds)
    assert not filled(plan)
    stop = stop_if_hopeless(topology, plan, Help(built, {}, (), True), holds).stop
    assert stop is not None and stop.rule == 2 and "--ft-checkfree" in stop.advice


def test_a_middle_stage_is_rebuilt_from_its_neighbours() -> None:
    topology = Topology(tensor=2, pipeline=3, data=1)
    before = initial_assignment(topology, range(7))
    dark = release_broken(topology, before, frozenset({2}))  # tp 0 of stage 1; its peer 3 lives
    built = {p: Built(topology.shard_of(p), p) for p in (0, 1, 3, 4, 5)}
    built[6] = Built(Shard(0, 1), 2)
    holds = {p: frozenset({b.shard}) for p, b in built.items() if p != 6}
    assert not filled(refill(topology, dark, built, holds))
    plan = refill(topology, dark, built, holds, checkfree=CHECKFREE)
    (rebuild,) = [a for a in plan.actions if isinstance(a, Rebuild)]
    assert (rebuild.slot, rebuild.process, rebuild.from_slots) == (2, 6, (0, 4))
    assert {a.slot for a in plan.actions if isinstance(a, Fill)} == {0, 1, 3, 4, 5}


def test_two_replicas_that_lost_the_same_stage() -> None:
    topology = Topology(tensor=1, pipeline=3, data=2)
    before = initial_assignment(topology, range(6))
    dark = release_broken(topology, before, frozenset({2, 3}))  # stage 1 of both
    built = {p: Built(topology.shard_of(s), s) for p, s in {0: 0, 1: 1, 4: 4, 5: 5}.items()}
    built |= {6: Built(Shard(0, 1), 2), 7: Built(Shard(0, 1), 3)}
    plan_before = release_broken(topology, dark.assignment.joined([6, 7]), frozenset())
    holds = {p: frozenset({built[p].shard}) for p in (0, 1, 4, 5)}
    plan = refill(topology, plan_before, built, holds, checkfree=CHECKFREE)
    assert whole(plan.assignment, topology) == {0, 1}
    kinds = [(type(a).__name__, a.slot) for a in plan.actions if isinstance(a, Fill | Rebuild)]
    assert kinds[-2:] == [("Rebuild", 2), ("Fill", 3)], "rebuilt once, then copied"
    last = plan.actions[-1]
    assert isinstance(last, Fill) and (last.source_process, last.source_slot) == (6, 2)


def test_what_can_be_rebuilt() -> None:
    topology = Topology(tensor=1, pipeline=4, data=1)

    def lost(stages: set[int], checkfree: CheckfreeOptions) -> set[int]:
        holds = {p: frozenset({Shard(0, p)}) for p in range(4) if p not in stages}
        return {s.pp for s in set(topology.shards) - obtainable(topology, holds, checkfree)}

    assert lost({1}, OFF) == {1}
    assert lost({1}, CHECKFREE) == set()
    assert lost({1, 2}, CHECKFREE) == set(), "the nearest survivors on either side"
    assert lost({0}, CHECKFREE) == {0} and lost({3}, CHECKFREE) == {3}
    assert lost({0}, PLUS) == set() and lost({3}, PLUS) == set()
    assert lost({1, 2}, PLUS) == set()
    assert lost({0, 1}, PLUS) == {0, 1}, "the embedding and its twin are gone"
    assert lost({0, 1, 2, 3}, PLUS) == {0, 1, 2, 3}


def test_a_job_waits_for_what_can_come() -> None:
    topology = Topology(tensor=1, pipeline=2, data=2)
    before = initial_assignment(topology, range(5))  # process 4 is a spare
    dark = release_broken(topology, before, frozenset({0, 1}))  # stage 0 of both replicas
    assert not whole(dark.assignment, topology)
    built = {2: Built(Shard(0, 1), 2), 3: Built(Shard(0, 1), 3)}
    holds = {p: frozenset({b.shard}) for p, b in built.items()}
    stopped = stop_if_hopeless(topology, dark, Help(built, {}, [4], True), holds)
    assert stopped.stop is not None and "stage 0 is lost" in stopped.stop.reason

    # The state of each stage is still there.
    dark = release_broken(topology, before, frozenset({0, 3}))
    built = {2: Built(Shard(0, 1), 2), 1: Built(Shard(0, 0), 1)}
    holds = {p: frozenset({b.shard}) for p, b in built.items()}
    # Leftovers of both replicas make a whole one.
    assert stop_if_hopeless(topology, dark, Help(built, {}, (), False), holds).stop is None
    one = {2: built[2]}
    assert stop_if_hopeless(topology, dark, Help(one, {}, [4], False), holds).stop is None
    assert stop_if_hopeless(topology, dark, Help(one, {4: 0}, (), False), holds).stop is None
    assert stop_if_hopeless(topology, dark, Help(one, {}, (), True), holds).stop is None
    stop = stop_if_hopeless(topology, dark, Help(one, {4: 2}, (), False), holds).stop
    assert stop is not None and stop.rule == 4 and "--ft-respawn" in stop.advice
    every_slot = range(topology.num_slots)
    assert stop_if_hopeless(topology, dark, Help(one, {}, [4], True), holds, every_slot).stop


def test_a_slot_whose_replacements_die_stays_vacant() -> None:
    topology = Topology(tensor=1, pipeline=1, data=2)
    dark = release_broken(topology, initial_assignment(topology, range(3)), frozenset({0}))
    built = {2: Built(Shard(0, 0), 0)}
    holds = held(topology, dark.assignment)
    assert filled(refill(topology, dark, built, holds))
    assert not filled(refill(topology, dark, built, holds, barred={0}))
    assert targets(topology, dark.assignment, {}, {}, [2], barred={0}) == {}


def test_whoever_is_still_receiving_does_not_serve() -> None:
    topology = Topology(tensor=1, pipeline=2, data=2)
    before = initial_assignment(topology, range(4))
    plan = release_broken(topology, before, frozenset(), unfit=frozenset({2}))
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
        settled = release_broken(topology, assignment, frozenset(dead))
        assert settled == release_broken(topology, assignment, frozenset(dead))
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
            assert stop_if_hopeless(topology, plan, NOBODY, holds).stop is not None
            return


def test_a_slot_for_which_newcomers_keep_dying_stays_vacant() -> None:
    history = History()
    history.count_unborn((3,))
    history.count_unborn((3, 1))
    assert history.barred == frozenset()
    history.count_unborn((3,))
    assert history.barred == {3}


def test_who_takes_its_slot_again_is_no_replacement() -> None:
    """Two stages are lost in one step: after the first all take their slots again, then the second
    is found to be lost, too. That fails nobody, however often it happens."""
    topology = Topology(tensor=1, pipeline=4, data=1)
    before = initial_assignment(topology, range(4))
    history = History()
    for step in (10, 20, 30, 40):
        back = [Fill(slot, slot, slot, None) for slot in (1, 2, 3)]
        plan = RecoveryPlan(topology, before, frozenset(), before, (*back, Rebuild(0, 0, (1,))))
        told = {p: Facts(built=Built(Shard(0, p), p), committed=step) for p in range(4)}
        history.count_failures((), told, {})
        history.note_fills(plan)
        told[3] = replace(told[3], receiving=True)
        history.count_failures((), told, {})
        assert history.barred == frozenset()
    # Whom a replacement's state does not reach, three times in a row, is one that failed.
    for _ in range(3):
        history.note_fills(RecoveryPlan(topology, before, frozenset(), before, (Fill(1, 1, 2, 2),)))
        told = {1: Facts(built=Built(Shard(0, 1), 1), committed=40, receiving=True)}
        history.count_failures((), told, {})
    assert history.barred == {1}
    history.note_fills(RecoveryPlan(topology, before, frozenset(), before, (Fill(1, 1, 2, 2),)))
    history.count_failures((), {1: replace(told[1], committed=41)}, {})
    assert history.barred == frozenset(), "it had trained a step in between"


def test_a_process_that_is_started_builds_what_nobody_else_does() -> None:
    topology = Topology(tensor=1, pipeline=2, data=2)
    before = initial_assignment(topology, range(4))
    dark = release_broken(
        topology, before, frozenset({0, 3})
    ).assignment  # stage 0, stage 1: all wait
    living = {1: Facts(built=Built(Shard(0, 0), 1)), 2: Facts(built=Built(Shard(0, 1), 2))}

    def slot_of(assignment: Assignment, known: dict[int, Facts], newcomer: int) -> int | None:
        joined = assignment.joined([newcomer])
        told = {**known, newcomer: Facts()}
        return builders(topology, joined, told, (), (), warm=False).get(newcomer)

    assert slot_of(dark, living, 4) == 1, "the leftovers can make replica 0 whole"
    with_4 = {**living, 4: Facts(built=Built(Shard(0, 0), 1))}
    assert slot_of(dark.joined([4]), with_4, 5) == 3
    with_5 = {**with_4, 5: Facts(building=3)}
    assert slot_of(dark.joined([4, 5]), with_5, 6) is None
