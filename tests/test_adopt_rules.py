"""Rule 3: who serves the slots of the dead beside its own, and who takes them back. Pure."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.adopt.rules import adoptions, give_back, hosts_in, revive, settle
from megatron_ft.recovery_plan import Adopt, Fill, GiveBack, GoDark, RecoveryPlan
from megatron_ft.rejoin import refill
from megatron_ft.rejoin.refill import Built
from megatron_ft.schedule.placement import check_placement
from megatron_ft.topology import Assignment, Shard, Topology, initial_assignment

PP4 = Topology(tensor=1, pipeline=4, data=2)


def held(topology: Topology, assignment: Assignment) -> dict[int, frozenset[Shard]]:
    return {
        p: frozenset(topology.shard_of(slot) for slot in assignment.slots_of(p))
        for p in assignment.active_processes
    }


def kill(topology: Topology, before: Assignment, *dead: int, anew: bool = True) -> RecoveryPlan:
    holds = {p: s for p, s in held(topology, before).items() if p not in dead}
    return settle(topology, before, frozenset(dead), holds, anew=anew)


@pytest.mark.parametrize(("stage", "adopter"), [(0, 1), (1, 0), (2, 1), (3, 2)])
def test_the_stage_below_adopts_and_for_the_first_the_one_above(stage: int, adopter: int) -> None:
    before = initial_assignment(PP4, range(8))
    dead = PP4.slot(pp=stage, dp=1)
    plan = kill(PP4, before, dead)
    (adopt,) = adoptions(plan)
    other = PP4.slot(pp=stage, dp=0)
    assert adopt == Adopt(dead, PP4.slot(pp=adopter, dp=1), other, other)
    assert plan.assignment.whole_replicas(PP4) == (0, 1)
    assert plan.assignment.adopted == (dead,)
    hosts = [0, 1, 2, 3]
    hosts[stage] = adopter
    assert hosts_in(PP4, plan.assignment, 1) == tuple(hosts)
    assert hosts_in(PP4, plan.assignment, 0) == (0, 1, 2, 3)


def test_the_other_side_where_that_one_serves_two_already() -> None:
    first = kill(PP4, initial_assignment(PP4, range(8)), 1)  # stage 0 of replica 1, by stage 1
    second = kill(PP4, first.assignment, PP4.slot(pp=2, dp=1))
    assert hosts_in(PP4, second.assignment, 1) == (1, 1, 3, 3)
    # What was adopted before is not copied again.
    assert [a.slot for a in adoptions(second)] == [PP4.slot(pp=2, dp=1)]


def test_with_its_adopter_dead_too_the_replica_goes_dark() -> None:
    first = kill(PP4, initial_assignment(PP4, range(8)), 1)
    second = kill(PP4, first.assignment, PP4.slot(pp=1, dp=1))
    assert second.assignment.dark_replicas(PP4) == (1,)
    assert second.assignment.adopted == ()
    assert [a for a in second.actions if isinstance(a, GoDark)] == [GoDark(1, (5, 7))]


def test_two_stages_in_the_middle_are_adopted_from_either_side() -> None:
    first = kill(PP4, initial_assignment(PP4, range(8)), PP4.slot(pp=2, dp=1))
    second = kill(PP4, first.assignment, PP4.slot(pp=1, dp=1))
    assert hosts_in(PP4, second.assignment, 1) == (0, 0, 3, 3)


def test_nothing_is_adopted_that_nobody_holds_or_when_it_is_not_the_time() -> None:
    before = initial_assignment(PP4, range(8))
    assert kill(PP4, before, 0, 1).assignment.dark_replicas(PP4) == (0, 1)
    assert kill(PP4, before, 1, anew=False).assignment.dark_replicas(PP4) == (1,)
    adopted = kill(PP4, before, 1).assignment
    later = kill(PP4, adopted, anew=False)
    assert later.assignment.adopted == (1,) and later.actions == ()


def test_a_peer_of_the_dead_is_relieved_so_that_all_peers_run_alike() -> None:
    topology = Topology(tensor=2, pipeline=2, data=2)
    before = initial_assignment(topology, range(8))
    dead = topology.slot(tp=0, pp=1, dp=1)
    plan = kill(topology, before, dead)
    peer = topology.slot(tp=1, pp=1, dp=1)
    assert plan.assignment.adopted == (dead, peer) and plan.assignment.pool == (peer,)
    assert {a.process for a in adoptions(plan)} == {
        topology.slot(tp=tp, pp=0, dp=1) for tp in range(2)
    }


def test_a_pool_process_takes_the_adopted_slot() -> None:
    adopted = kill(PP4, initial_assignment(PP4, range(8)), 1).assignment.joined([9])
    assert refill.targets(PP4, adopted, {}, {}, [9]) == {9: 1}
    now = RecoveryPlan(PP4, adopted, frozenset(), adopted, ())
    holds = held(PP4, adopted)
    plan = give_back(PP4, now, {9: Built(Shard(0, 0), 0)}, holds)
    assert plan.actions == (GiveBack(1, 3, 9), Fill(1, 9, 3, None)) or plan.actions == (
        GiveBack(1, 3, 9),
        Fill(1, 9, 0, 0),
    )
    assert plan.assignment.adopted == () and plan.assignment.slots_of(3) == (3,)
    # One that has built another stage is of no use, nor where the slot is barred.
    assert give_back(PP4, now, {9: Built(Shard(0, 2), 4)}, holds) is now
    assert give_back(PP4, now, {9: Built(Shard(0, 0), 0)}, holds, barred=[1]) is now


def test_a_dark_replica_comes_back_with_a_neighbour_in_two_slots() -> None:
    """A death where nothing can be adopted at once: between two steps."""
    before = initial_assignment(PP4, range(8))
    dark = kill(PP4, before, PP4.slot(pp=2, dp=1), anew=False)
    assert dark.assignment.dark_replicas(PP4) == (1,)
    assert dark.assignment.pool == (1, 3, 7)
    built = {p: Built(PP4.shard_of(p), p) for p in dark.assignment.pool}
    holds = held(PP4, dark.assignment) | {7: frozenset({Shard(0, 3)})}
    now = RecoveryPlan(PP4, dark.assignment, frozenset(), dark.assignment, ())
    plan = revive(PP4, now, built, holds)
    plan.assignment.check(PP4)
    assert hosts_in(PP4, plan.assignment, 1) == (0, 1, 1, 3)
    assert plan.actions == (
        Fill(1, 1, 0, 0),
        Fill(3, 3, 2, 2),
        Fill(7, 7, 7, None),  # it holds what was committed last
        Adopt(5, 3, 4, 4),  # after its own state, with which it takes over all that goes with one
    )
    assert revive(PP4, now, built, holds, unable=[3]).assignment.slots_of(7) == (7, 5)
    assert revive(PP4, now, built, holds, unable=[3, 7]) is now
    assert revive(PP4, now, built, holds, closed=PP4.replica(1)) is now
    without = {p: shards for p, shards in holds.items() if p != 4}
    assert revive(PP4, now, built, without) is now, "nobody has the state of stage 2"
    del built[1], built[3]
    assert revive(PP4, now, built, holds) is now, "too few neighbours"


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    return Topology(
        tensor=draw(st.integers(1, 2)),
        pipeline=draw(st.integers(2, 5)),
        data=draw(st.integers(1, 3)),
        order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])),
    )


@settings(deadline=None, max_examples=60)
@given(topologies(), st.data())
def test_whatever_dies_every_replica_is_whole_or_dark(
    topology: Topology, data: st.DataObject
) -> None:
    assignment = initial_assignment(topology, range(topology.num_slots))
    for _ in range(4):
        living = assignment.processes
        dead = frozenset(data.draw(st.sets(st.sampled_from(living), max_size=2)))
        if dead >= set(assignment.active_processes):
            break
        anew = data.draw(st.booleans())
        holds = {p: s for p, s in held(topology, assignment).items() if p not in dead}
        plan = settle(topology, assignment, dead, holds, anew=anew)
        after = plan.assignment
        after.check(topology)
        assert not dead & set(after.processes)
        assert set(after.processes) == set(living) - dead
        whole, dark = after.whole_replicas(topology), after.dark_replicas(topology)
        assert sorted((*whole, *dark)) == list(range(topology.data))
        assert set(dark) >= set(assignment.dark_replicas(topology))
        if not anew:
            assert set(after.adopted) <= set(assignment.adopted)
        for replica in whole:
            check_placement(hosts_in(topology, after, replica))
        for action in adoptions(plan):
            assert topology.shard_of(action.slot) in holds[action.source_process]
        served = {
            s for s in after.adopted if topology.shard_of(s) not in holds[after.process_of[s]]
        }  # type: ignore[index]
        assert {a.slot for a in adoptions(plan)} == served, "what is not held is copied"
        # Nobody is moved: who serves a slot of his own served it before.
        for process in after.active_processes:
            assert after.slots_of(process)[0] == assignment.slots_of(process)[0]
        assignment = after
        if not whole:
            break


@settings(deadline=None, max_examples=60)
@given(topologies(), st.data())
def test_without_adoption_it_is_the_rule_that_ran_before(
    topology: Topology, data: st.DataObject
) -> None:
    before = initial_assignment(topology, range(topology.num_slots + 1))
    dead = frozenset(data.draw(st.sets(st.sampled_from(before.processes), max_size=3)))
    unfit = frozenset(data.draw(st.sets(st.sampled_from(before.processes), max_size=1))) - dead
    leaving = data.draw(st.sets(st.sampled_from(range(topology.data)), max_size=1))
    mine = settle(topology, before, dead, held(topology, before), unfit, leaving, anew=False)
    if topology.tensor == 1 or not (dead | unfit):
        assert mine == refill.release_broken(topology, before, dead, unfit, leaving)
    else:
        theirs = refill.release_broken(topology, before, dead, unfit, leaving)
        assert mine.assignment == theirs.assignment


@settings(deadline=None, max_examples=60)
@given(topologies(), st.data())
def test_the_pool_serves_what_it_can(topology: Topology, data: st.DataObject) -> None:
    """Dark replicas and adopted slots, and a pool of processes that have built this or that."""
    assignment = initial_assignment(topology, range(topology.num_slots))
    for anew in (True, False):
        dead = data.draw(st.sets(st.sampled_from(assignment.active_processes), max_size=2))
        assignment = kill(topology, assignment, *dead, anew=anew).assignment
        if not assignment.active_processes:
            return
    assignment = assignment.joined(range(topology.num_slots, topology.num_slots + 3))
    built = {
        p: Built(topology.shard_of(slot), slot)
        for p in assignment.pool
        for slot in [data.draw(st.integers(0, topology.num_slots - 1))]
    }
    unable = data.draw(st.sets(st.sampled_from(assignment.processes), max_size=2))
    holds = held(topology, assignment)
    before = RecoveryPlan(topology, assignment, frozenset(), assignment, ())
    plan = give_back(topology, before, built, holds)
    relieved = set(assignment.adopted) - set(plan.assignment.adopted)
    assert {a.slot for a in plan.actions if isinstance(a, GiveBack)} == relieved
    plan = revive(topology, plan, built, holds, unable=unable)
    after = plan.assignment
    after.check(topology)
    assert set(after.processes) == set(assignment.processes)
    assert set(after.whole_replicas(topology)) >= set(assignment.whole_replicas(topology))
    for replica in after.whole_replicas(topology):
        check_placement(hosts_in(topology, after, replica))
    for action in plan.actions:
        if isinstance(action, Fill):
            assert built[action.process].shard == topology.shard_of(action.slot)
        if isinstance(action, Adopt):
            assert action.process not in unable
        if isinstance(action, Adopt | Fill):
            assert after.process_of[action.slot] == action.process
            assert topology.shard_of(action.slot) in holds[action.source_process]
    # Whoever trained goes on where he was.
    for process in assignment.active_processes:
        assert after.slots_of(process)[0] == assignment.slots_of(process)[0]
