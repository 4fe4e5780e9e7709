"""The planner's ladder by example, and its promises over random failure sequences."""

from __future__ import annotations

import doctest
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.placement import Seat, Site, seat_processes, solve_column
from megatron_ft.planner import Capabilities, Strategies, plan
from megatron_ft.recovery_plan import (
    Adopt,
    Fill,
    GiveBack,
    GoDark,
    Rebuild,
    RecoveryPlan,
    Stop,
)
from megatron_ft.topology import Assignment, Shard, Topology, initial_assignment

QUICK = settings(deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=250)

# Slot numbers of the examples: replica r's stage s is slot 4 * r + s.
THREE_BY_FOUR = Topology(tensor=1, pipeline=4, data=3, order="tp-cp-ep-pp-dp")
TWO_BY_FOUR = Topology(tensor=1, pipeline=4, data=2, order="tp-cp-ep-pp-dp")
ONE_BY_FOUR = Topology(tensor=1, pipeline=4, data=1)


def fail(
    topology: Topology,
    processes: int,
    dead: set[int],
    holds: Mapping[int, frozenset[Shard]] | None = None,
    **on: bool,
) -> RecoveryPlan:
    """The plan after the first failure of a job whose pool is ready."""
    assignment = initial_assignment(topology, range(processes))
    capabilities = Capabilities(ready=frozenset(assignment.pool), holds=holds or {})
    return plan(topology, assignment, frozenset(dead), Strategies(**on), capabilities)


def test_rule_1_fills_from_the_pool_with_an_exact_copy() -> None:
    result = fail(TWO_BY_FOUR, 9, {5})
    assert result.actions == (Fill(slot=5, process=8, source_process=1, source_slot=1),)
    assert result.assignment == Assignment(1, (0, 1, 2, 3, 4, 8, 6, 7))
    assert result.describe() == [
        "epoch 0 -> 1: lost process 5 (slot 5 (replica 1, stage 1))",
        "slot 5 (replica 1, stage 1) is filled by process 8, copy from process 1",
        "2 of 2 replicas live, 0 processes in the pool",
    ]


def test_rule_1_prefers_a_process_that_holds_the_state() -> None:
    result = fail(TWO_BY_FOUR, 10, {5}, {9: frozenset({Shard(0, 1)})})
    assert result.actions == (Fill(slot=5, process=9, source_process=9, source_slot=None),)
    assert result.assignment.pool == (8,)


def test_rule_1_does_not_give_a_slot_to_a_process_that_is_building() -> None:
    assignment = initial_assignment(TWO_BY_FOUR, range(9))
    result = plan(TWO_BY_FOUR, assignment, frozenset({5}), Strategies(recover=True), Capabilities())
    assert result.actions == (GoDark(1, (4, 6, 7)),)
    assert result.assignment.pool == (4, 6, 7, 8)


def test_rule_1_copies_from_a_process_that_keeps_serving() -> None:
    assignment = Assignment(0, (1, 2, 3, 4, 5, 6, 7, 8), (0, 9))
    holds = {0: frozenset({Shard(0, 1)})}
    capabilities = Capabilities(ready=frozenset({9}), holds=holds)
    result = plan(TWO_BY_FOUR, assignment, frozenset({6}), Strategies(), capabilities)
    assert result.actions == (Fill(slot=5, process=9, source_process=2, source_slot=1),)


def test_rule_1_mends_a_process_that_lost_its_state_in_place() -> None:
    result = fail(TWO_BY_FOUR, 9, set(), {5: frozenset()})
    assert result.actions == (Fill(slot=5, process=5, source_process=1, source_slot=1),)


def test_rule_2_rebuilds_a_stage_that_is_held_nowhere() -> None:
    result = fail(ONE_BY_FOUR, 5, {1}, checkfree=True)
    assert result.actions == (Rebuild(slot=1, process=4, from_slots=(0, 2)),)


def test_rule_2_rebuilds_once_and_copies_to_the_other_replicas() -> None:
    result = fail(TWO_BY_FOUR, 10, {1, 5}, checkfree=True)
    assert result.actions == (
        Rebuild(slot=1, process=8, from_slots=(0, 2)),
        Fill(slot=5, process=9, source_process=8, source_slot=1),
    )


def test_rule_2_rebuilds_in_place_where_the_process_lives() -> None:
    nothing: frozenset[Shard] = frozenset()
    result = fail(TWO_BY_FOUR, 8, set(), {2: nothing, 6: nothing}, checkfree=True)
    assert result.actions == (
        Rebuild(slot=2, process=2, from_slots=(1, 3)),
        Fill(slot=6, process=6, source_process=2, source_slot=2),
    )
    assert result.assignment.process_of == tuple(range(8))


def test_rule_2_with_two_adjacent_stages_goes_to_the_nearest_survivors() -> None:
    topology = Topology(tensor=1, pipeline=6, data=1)
    result = fail(topology, 8, {2, 3}, checkfree=True)
    assert result.actions == (
        Rebuild(slot=2, process=6, from_slots=(1, 4)),
        Rebuild(slot=3, process=7, from_slots=(1, 4)),
    )


def test_rule_2_needs_checkfree_plus_for_the_ends() -> None:
    stop = fail(ONE_BY_FOUR, 5, {0}, checkfree=True).stop
    assert stop is not None and stop.rule == 2
    assert "--ft-checkfree-plus" in stop.advice
    result = fail(ONE_BY_FOUR, 5, {0}, checkfree_plus=True)
    assert result.actions == (Rebuild(slot=0, process=4, from_slots=(1,)),)
    result = fail(ONE_BY_FOUR, 5, {3}, checkfree_plus=True)
    assert result.actions == (Rebuild(slot=3, process=4, from_slots=(2,)),)


@pytest.mark.parametrize(
    ("dead", "text"),
    [
        ({0, 1}, "the twin of its embedding died with stage 1"),
        ({2, 3}, "the twin of its output layer died with stage 2"),
        ({0, 1, 2, 3}, "nor is that of any other stage"),
    ],
)
def test_rule_2_stops_where_there_is_nothing_to_rebuild_from(dead: set[int], text: str) -> None:
    stop = fail(ONE_BY_FOUR, 8, dead, checkfree_plus=True).stop
    assert stop is not None and stop.rule == 2 and not stop.can_checkpoint
    assert text in stop.reason


def test_rule_2_is_off_by_default() -> None:
    stop = fail(ONE_BY_FOUR, 5, {1}).stop
    assert (
        stop is not None and "CheckFree is off" in stop.reason and "--ft-checkfree" in stop.advice
    )


@pytest.mark.parametrize(("dead", "adopter"), [(4, 5), (5, 4), (6, 5), (7, 6)])
def test_rule_3_asks_the_stage_below_and_for_stage_0_the_one_above(dead: int, adopter: int) -> None:
    result = fail(TWO_BY_FOUR, 8, {dead}, mecefo=True, recover=True)
    peer = dead - 4
    assert result.actions == (Adopt(dead, adopter, source_process=peer, source_slot=peer),)
    assert result.assignment.slots_of(adopter) == (adopter, dead)


def test_rule_3_asks_the_other_side_where_the_first_serves_two() -> None:
    before = fail(TWO_BY_FOUR, 8, {5}, mecefo=True).assignment
    assert before.slots_of(4) == (4, 5)
    result = plan(TWO_BY_FOUR, before, frozenset({6}), Strategies(mecefo=True), Capabilities())
    assert result.actions == (Adopt(6, 7, source_process=2, source_slot=2),)


def test_rule_3_keeps_to_the_same_tensor_index() -> None:
    topology = Topology(tensor=2, pipeline=2, data=2)
    stage_1_of_replica_0 = {topology.slot(tp=tp, pp=1, dp=0) for tp in (0, 1)}
    result = fail(topology, 8, stage_1_of_replica_0, mecefo=True)
    for action in result.actions:
        assert isinstance(action, Adopt)
        own, adopted = map(topology.coordinate, result.assignment.slots_of(action.process))
        assert own.tp == adopted.tp and own.dp == adopted.dp == 0
    assert result.assignment.degraded_stages(topology) == {(0, 0), (0, 1)}


def test_rule_3_skips_processes_that_cannot() -> None:
    assignment = initial_assignment(TWO_BY_FOUR, range(8))
    capabilities = Capabilities(cannot_adopt=frozenset({4}))
    on = Strategies(mecefo=True)
    result = plan(TWO_BY_FOUR, assignment, frozenset({5}), on, capabilities)
    assert result.actions == (Adopt(5, 6, source_process=1, source_slot=1),)


def test_rule_3_gives_back_when_the_pool_has_a_process() -> None:
    before = fail(TWO_BY_FOUR, 8, {5}, mecefo=True).assignment.joined([8])
    ready = Capabilities(ready=frozenset({8}))
    result = plan(TWO_BY_FOUR, before, frozenset(), Strategies(mecefo=True), ready)
    assert result.actions == (
        GiveBack(slot=5, adopter=4, process=8),
        Fill(slot=5, process=8, source_process=1, source_slot=1),
    )
    assert result.assignment == Assignment(2, (0, 1, 2, 3, 4, 8, 6, 7))


def test_the_pool_goes_to_vacancies_before_adopted_slots() -> None:
    before = fail(TWO_BY_FOUR, 8, {1}, mecefo=True).assignment.joined([8])
    ready = Capabilities(ready=frozenset({8}))
    result = plan(TWO_BY_FOUR, before, frozenset({6}), Strategies(mecefo=True), ready)
    assert result.actions == (Fill(slot=6, process=8, source_process=2, source_slot=2),)
    assert result.assignment.adopted == (1,)


def test_the_pool_goes_to_the_replica_that_becomes_exact() -> None:
    # Replica 0 misses stages 1 and 3, replica 1 only stage 1.
    result = fail(THREE_BY_FOUR, 13, {1, 3, 5}, mecefo=True)
    assert result.assignment.adopted == (1, 3)
    assert result.assignment.process_of[5] == 12


def test_the_dark_replica_that_lost_least_comes_back_first() -> None:
    on = Strategies(recover=True, mecefo=True)
    dead = frozenset({4, 5, 6, 7})
    before = fail(THREE_BY_FOUR, 12, set(dead), recover=True, mecefo=True).assignment
    assert before.dark_replicas(THREE_BY_FOUR) == (1,)
    result = plan(THREE_BY_FOUR, before, frozenset({8, 9}), on, Capabilities())
    assert result.assignment.dark_replicas(THREE_BY_FOUR) == (1,)
    assert set(result.assignment.adopted) < set(THREE_BY_FOUR.replica(2))


def test_rule_3_gives_way_to_rule_4_where_no_neighbour_is_free() -> None:
    # Stages 1 and 2 of replica 2 could be adopted, but not all of 0, 1 and 2.
    result = fail(THREE_BY_FOUR, 12, {8, 9, 10}, mecefo=True, recover=True)
    assert result.actions == (GoDark(2, (11,)),)


def test_healthy_processes_of_a_dark_replica_end_adoptions_elsewhere() -> None:
    before = fail(THREE_BY_FOUR, 12, {5}, mecefo=True, recover=True).assignment
    on = Strategies(mecefo=True, recover=True)
    result = plan(THREE_BY_FOUR, before, frozenset({8, 9, 10}), on, Capabilities())
    assert result.actions == (
        GoDark(2, (11,)),
        GiveBack(slot=5, adopter=4, process=11),
        Fill(slot=5, process=11, source_process=1, source_slot=1),
    )


def test_rule_4_frees_the_healthy_processes_of_a_replica() -> None:
    result = fail(TWO_BY_FOUR, 8, {5}, recover=True)
    assert result.actions == (GoDark(replica=1, released=(4, 6, 7)),)
    assert result.assignment == Assignment(1, (0, 1, 2, 3, None, None, None, None), (4, 6, 7))


def test_rule_4_lets_one_broken_replica_mend_another() -> None:
    result = fail(THREE_BY_FOUR, 12, {5, 10}, recover=True)
    assert result.actions == (
        GoDark(replica=2, released=(8, 9, 11)),
        Fill(slot=5, process=9, source_process=9, source_slot=9),
    )
    assert result.assignment.whole_replicas(THREE_BY_FOUR) == (0, 1)
    assert result.assignment.pool == (8, 11)


def test_survivors_of_two_replicas_form_a_whole_one() -> None:
    result = fail(TWO_BY_FOUR, 8, {2, 3, 4, 5}, recover=True)
    assert result.assignment.process_of == (0, 1, 6, 7, None, None, None, None)
    assert all(not action.is_copy for action in result.actions if isinstance(action, Fill))


def test_leftovers_of_two_dark_replicas_form_a_whole_one() -> None:
    first = fail(THREE_BY_FOUR, 12, {5}, recover=True)
    assert first.assignment.dark_replicas(THREE_BY_FOUR) == (1,)
    second = plan(
        THREE_BY_FOUR,
        first.assignment,
        frozenset({8}),
        Strategies(recover=True),
        Capabilities(ready=frozenset(first.assignment.pool)),
    )
    assert second.assignment.whole_replicas(THREE_BY_FOUR) == (0, 2)
    assert second.assignment.process_of[8] == 4


def test_a_dark_replica_comes_back_as_soon_as_it_can_be_whole() -> None:
    dark = fail(TWO_BY_FOUR, 8, {5}, recover=True).assignment
    on = Strategies(recover=True)
    ready = Capabilities(ready=frozenset(dark.pool))
    assert plan(TWO_BY_FOUR, dark, frozenset(), on, ready).actions == ()
    more = dark.joined([8])
    result = plan(TWO_BY_FOUR, more, frozenset(), on, Capabilities(ready=frozenset(more.pool)))
    assert result.assignment.whole_replicas(TWO_BY_FOUR) == (0, 1)
    assert len(result.actions) == 4 and result.assignment.pool == ()


def test_a_dark_replica_comes_back_with_adopted_stages() -> None:
    dark = fail(TWO_BY_FOUR, 8, {5}, recover=True).assignment
    on = Strategies(recover=True, mecefo=True)
    ready = Capabilities(ready=frozenset(dark.pool))
    result = plan(TWO_BY_FOUR, dark, frozenset(), on, ready)
    assert result.assignment.whole_replicas(TWO_BY_FOUR) == (0, 1)
    assert len(result.assignment.adopted) == 1


def test_rebuilding_uses_the_survivors_of_another_replica() -> None:
    # Stage 1 died in both replicas and nothing is in the pool.
    result = fail(TWO_BY_FOUR, 8, {1, 5}, recover=True, checkfree=True)
    assert result.actions == (
        GoDark(replica=1, released=(4, 6, 7)),
        Rebuild(slot=1, process=4, from_slots=(0, 2)),
    )


def test_rule_5_says_how_many_processes_are_missing() -> None:
    stop = fail(TWO_BY_FOUR, 8, {0, 1, 2, 3, 4}, recover=True, checkfree_plus=True).stop
    assert stop == Stop(
        rule=4,
        reason="3 processes are left and one whole replica needs 4",
        advice="--ft-mecefo would let a neighbour serve two stages; --ft-respawn would start new "
        "processes; more processes than slots at the start would wait in the pool",
        missing_processes=1,
        can_checkpoint=False,
    )


def test_rule_5_keeps_the_survivors_in_place() -> None:
    result = fail(TWO_BY_FOUR, 8, {5})
    stop = result.stop
    assert stop is not None and stop.rule == 4 and stop.can_checkpoint
    assert stop.missing_processes == 1 and "--ft-recover" in stop.advice
    assert result.assignment.process_of == (0, 1, 2, 3, 4, None, 6, 7)
    later = result.assignment.joined([8])
    ready = Capabilities(ready=frozenset({8}))
    again = plan(TWO_BY_FOUR, later, frozenset(), Strategies(), ready)
    assert again.actions == (Fill(slot=5, process=8, source_process=1, source_slot=1),)


def test_two_adopters_of_different_replicas_form_the_last_whole_one() -> None:
    before = Assignment(3, (0, 0, None, None, None, None, 7, 7), adopted=(0, 7))
    on = Strategies(recover=True, mecefo=True)
    result = plan(TWO_BY_FOUR, before, frozenset(), on, Capabilities())
    assert result.stop is None
    assert sorted(map(len, map(result.assignment.slots_of, (0, 7)))) == [2, 2]
    assert all(not action.is_copy for action in result.actions if isinstance(action, Fill | Adopt))


def test_the_examples_of_the_documentation() -> None:
    page = Path(__file__).parent.parent / "docs" / "planner.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted > 20 and not failed


# --- promises over random failure sequences ---------------------------------------------------


@dataclass
class World:
    """A job as a user of the planner sees it: who lives, who is ready, who holds what."""

    topology: Topology
    on: Strategies
    assignment: Assignment
    ready: set[int]
    holds: dict[int, frozenset[Shard]] = field(default_factory=dict)
    next_process: int = 0

    def commit(self) -> None:
        """A step is committed: what a process of the pool holds is out of date."""
        for process in self.assignment.processes:
            slots = self.assignment.slots_of(process)
            self.holds[process] = frozenset(map(self.topology.shard_of, slots))


def whole_replica_is_possible(
    world: World, usable: int, can_adopt: int, held: frozenset[Shard]
) -> bool:
    """Whether the rules that are on allow one whole replica, found without the planner."""
    topology, on = world.topology, world.on
    last = topology.pipeline - 1
    fewest = 0
    for tp in range(topology.tensor):
        lost = {pp for pp in range(topology.pipeline) if Shard(tp, pp) not in held}
        if len(lost) == topology.pipeline or (lost and not (on.checkfree or on.checkfree_plus)):
            return False
        if lost & {0, last} and not on.checkfree_plus:
            return False
        if lost >= {0, 1} or lost >= {last - 1, last}:
            return False

        def cover(stage: int, lost: set[int] = lost) -> int:
            if stage > last:
                return 0
            alone = 1 + cover(stage + 1)
            pair = on.mecefo and topology.data > 1 and not lost >= {stage, stage + 1}
            return min(alone, 1 + cover(stage + 2)) if pair and stage < last else alone

        fewest += topology.context * cover(0)
    num_adopted = max(0, topology.replica_size - usable)
    return usable >= fewest and num_adopted <= can_adopt


def check_plan(
    world: World, failed: frozenset[int], capabilities: Capabilities, result: RecoveryPlan
) -> None:
    topology, before, after = world.topology, world.assignment, result.assignment
    living = set(before.processes) - failed
    held_before = frozenset(shard for p in living for shard in world.holds[p])
    after.check(topology)
    assert after.epoch == before.epoch + 1
    assert set(after.processes) == living
    assert set(after.active_processes) <= living - (set(before.pool) - world.ready)

    usable = living - (set(before.pool) - world.ready)
    can_adopt = {
        p for p in usable if p not in capabilities.cannot_adopt or len(before.slots_of(p)) == 2
    }
    possible = whole_replica_is_possible(world, len(usable), len(can_adopt), held_before)
    if result.stop is not None:
        assert result.actions == (result.stop,)
        assert result.stop.reason and result.stop.advice
        assert not (possible and world.on.recover), result.describe()
        assert [after.process_of[s] for s in range(topology.num_slots)] == [
            p if p in living else None for p in before.process_of
        ]
        return

    whole, dark = after.whole_replicas(topology), after.dark_replicas(topology)
    assert whole and len(whole) + len(dark) == topology.data
    assert world.on.recover or not dark
    if not before.adopted:
        assert possible, result.describe()
    fullest = min(topology.data, len(usable) // topology.replica_size)
    assert len(whole) >= fullest
    new_adoptions = set(after.adopted) - set(before.adopted)
    assert (world.on.mecefo and topology.data > 1) or not new_adoptions
    for slot in new_adoptions:
        process = after.process_of[slot]
        assert process not in capabilities.cannot_adopt or len(before.slots_of(process)) == 2

    if not world.on.mecefo and not before.adopted:
        assert len(whole) == fullest
        vacancies = [
            sum(before.process_of[s] not in living for s in topology.replica(dp))
            for dp in range(topology.data)
        ]
        moved = [s for s in after.live_slots if after.process_of[s] != before.process_of[s]]
        assert len(moved) == sum(sorted(vacancies)[: len(whole)])

    execute(world, result, held_before)


def execute(world: World, result: RecoveryPlan, held: frozenset[Shard]) -> None:
    """Carry the actions out on who holds what, and check that each one can be."""
    topology, before, after = world.topology, world.assignment, result.assignment
    snapshot = {p: world.holds[p] for p in before.processes if p not in result.failed}
    holds = dict(snapshot)
    rebuilt: set[Shard] = set()
    order = {GoDark: 0, GiveBack: 1, Fill: 2, Adopt: 2, Rebuild: 3}
    ranks = []
    touched: set[int] = set()
    for action in result.actions:
        rank = order[type(action)]
        if isinstance(action, GoDark):
            served = {before.process_of[s] for s in topology.replica(action.replica)}
            assert set(action.released) == served & set(snapshot)
            assert action.replica in after.dark_replicas(topology)
        elif isinstance(action, GiveBack):
            assert action.slot in before.adopted and action.slot not in after.adopted
            assert before.process_of[action.slot] == action.adopter
            assert after.process_of[action.slot] == action.process
        else:
            assert not isinstance(action, Stop)
            shard = topology.shard_of(action.slot)
            assert after.process_of[action.slot] == action.process
            assert (action.slot in after.adopted) == isinstance(action, Adopt) or isinstance(
                action, Rebuild
            )
            assert action.slot not in touched
            touched.add(action.slot)
            if isinstance(action, Rebuild):
                assert shard not in held and shard not in rebuilt
                assert world.on.checkfree or world.on.checkfree_plus
                at = topology.coordinate(action.slot)
                assert at.pp not in (0, topology.pipeline - 1) or world.on.checkfree_plus
                assert action.from_slots
                for slot in action.from_slots:
                    source = after.process_of[slot]
                    assert source is not None and topology.shard_of(slot) in holds[source]
                    between = range(*sorted((at.pp, topology.stage_of(slot))))[1:]
                    assert not any(Shard(at.tp, pp) in held for pp in between)
                rebuilt.add(shard)
            else:
                rank += 2 if shard in rebuilt else 0
                supply = holds if shard in rebuilt else snapshot
                assert shard in supply[action.source_process], result.describe()
            holds[action.process] = holds[action.process] | {shard}
        ranks.append(rank)
    assert ranks == sorted(ranks)
    for slot in after.live_slots:
        process = after.process_of[slot]
        assert process is not None and topology.shard_of(slot) in holds[process]
    intact = all(
        topology.shard_of(slot) in snapshot[process]
        for process in snapshot
        for slot in before.slots_of(process)
    )
    if intact and not after.adopted and not before.adopted:
        # A source stays or goes to the pool: none is overwritten while others copy from it.
        copies = [a for a in result.actions if isinstance(a, Fill) and a.is_copy]
        written = {a.process for a in result.actions if isinstance(a, Rebuild)}
        written.update(a.process for a in copies)
        for action in copies:
            shard = topology.shard_of(action.slot)
            assert shard in rebuilt or action.source_process not in written
    for process in after.active_processes:
        holds[process] = frozenset(map(topology.shard_of, after.slots_of(process)))
    world.holds = holds


@st.composite
def worlds(draw: st.DrawFn) -> World:
    small = st.integers(1, 2)
    topology = Topology(
        tensor=draw(small),
        context=draw(small),
        pipeline=draw(st.integers(1, 5)),
        data=draw(st.integers(1, 4)),
        order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])),
    )
    on = Strategies(**{name: draw(st.booleans()) for name in Strategies.__annotations__})
    most = topology.num_slots + 3
    num_processes = draw(st.integers(topology.replica_size, most))
    assignment = initial_assignment(topology, range(num_processes))
    world = World(topology, on, assignment, set(assignment.pool), next_process=num_processes)
    world.commit()
    return world


@QUICK
@given(worlds(), st.data())
def test_random_failure_sequences(world: World, data: st.DataObject) -> None:
    for _ in range(data.draw(st.integers(1, 6))):
        assignment = world.assignment
        if data.draw(st.booleans()):
            world.commit()
        new = range(world.next_process, world.next_process + data.draw(st.integers(0, 3)))
        world.next_process += len(new)
        assignment = world.assignment = assignment.joined(new)
        world.holds.update((process, frozenset()) for process in new)
        world.ready |= set(assignment.pool) - set(new)
        world.ready |= {process for process in new if data.draw(st.booleans())}

        processes = list(assignment.processes)
        most = data.draw(st.sampled_from([0, 1, 2, len(processes)]))
        failed = frozenset(
            data.draw(st.lists(st.sampled_from(processes), max_size=most)) if processes else ()
        )
        if data.draw(st.integers(0, 4)) == 0:
            lost = data.draw(st.sampled_from(world.topology.shards))
            for process in data.draw(st.sampled_from([processes, processes[:1], processes[1:]])):
                world.holds[process] -= {lost}
        unable = data.draw(st.booleans())
        capabilities = Capabilities(
            ready=frozenset(world.ready),
            holds={p: world.holds[p] for p in data.draw(st.permutations(processes))},
            cannot_adopt=frozenset(p for p in processes if unable and data.draw(st.booleans())),
        )
        result = plan(world.topology, assignment, failed, world.on, capabilities)
        again = Capabilities(
            ready=capabilities.ready,
            holds=dict(sorted(capabilities.holds.items())),
            cannot_adopt=capabilities.cannot_adopt,
        )
        assert plan(world.topology, assignment, failed, world.on, again) == result
        assert all(isinstance(line, str) for line in result.describe())
        check_plan(world, failed, capabilities, result)
        world.assignment = result.assignment
        world.holds = {p: world.holds[p] for p in result.assignment.processes}


@QUICK
@given(worlds(), st.data())
def test_no_failure_and_no_news_change_nothing(world: World, data: st.DataObject) -> None:
    failed = data.draw(st.sets(st.sampled_from(list(world.assignment.processes)), max_size=4))
    ready = frozenset(world.ready)
    first = plan(
        world.topology, world.assignment, frozenset(failed), world.on, Capabilities(ready=ready)
    )
    ready = frozenset(first.assignment.pool)
    if first.stop is None:
        second = plan(
            world.topology, first.assignment, frozenset(), world.on, Capabilities(ready=ready)
        )
        assert second.actions == ()


@QUICK
@given(st.integers(1, 6), st.booleans(), st.data())
def test_a_column_is_solved_as_by_trying_everything(
    length: int, fresh_may_host: bool, data: st.DataObject
) -> None:
    sites: list[Site] = []
    for stage in range(length):
        kept = data.draw(st.booleans())
        sites.append(
            Site(
                kept=kept,
                adoptable=not kept and data.draw(st.booleans()),
                may_host=kept and data.draw(st.booleans()),
            )
        )
        if stage and not kept and sites[stage - 1].kept and data.draw(st.booleans()):
            sites[stage] = Site(adopter="lower")
        elif kept and stage and sites[stage - 1].hard and data.draw(st.booleans()):
            sites[stage - 1] = Site(adopter="upper")

    def works(labels: tuple[str, ...]) -> bool:
        served = [0] * length
        for stage, label in enumerate(labels):
            site = sites[stage]
            if (label == "keep") != site.kept:
                return False
            if label in ("keep", "fill"):
                continue
            host = stage + (1 if label == "upper" else -1)
            if not 0 <= host < length or labels[host] not in ("keep", "fill"):
                return False
            served[host] += 1
            if site.adopter is None:
                able = sites[host].may_host if sites[host].kept else fresh_may_host
                if not (able and site.adoptable):
                    return False
            elif site.adopter != label:
                return False
        return max(served) <= 1

    expected: dict[int, list[tuple[str, ...]]] = {}
    for labels in itertools.product(("keep", "fill", "lower", "upper"), repeat=length):
        if works(labels):
            expected.setdefault(labels.count("fill"), []).append(labels)
    options = solve_column(sites, fresh_may_host=fresh_may_host)
    assert options.keys() == expected.keys()
    assert sorted(options) == list(range(min(options), max(options) + 1))
    for fills, option in options.items():
        assert option.labels in expected[fills]

        def cost(labels: tuple[str, ...]) -> tuple[int, int, tuple[str, ...]]:
            filled = [
                s.adopter is not None for s, x in zip(sites, labels, strict=True) if x == "fill"
            ]
            off = [
                site.adopter is None and label != ("upper" if stage == 0 else "lower")
                for stage, (site, label) in enumerate(zip(sites, labels, strict=True))
                if label in ("lower", "upper")
            ]
            return sum(filled), sum(off), labels

        assert tuple(option) == min(map(cost, expected[fills]))


@QUICK
@given(st.data())
def test_seating_copies_as_little_as_possible(data: st.DataObject) -> None:
    shards = [Shard(0, pp) for pp in range(3)]
    free = list(range(data.draw(st.integers(1, 5))))
    seats = [
        Seat(slot, (data.draw(st.sampled_from(shards)),))
        for slot in range(data.draw(st.integers(0, len(free))))
    ]
    holds = {p: frozenset(data.draw(st.sets(st.sampled_from(shards), max_size=2))) for p in free}
    seated = seat_processes(seats, free, holds, frozenset(), {})
    assert seated.keys() == {seat.slot for seat in seats}
    assert len(set(seated.values())) == len(seats)

    def held(processes: tuple[int, ...]) -> int:
        return sum(s.shards[0] in holds[p] for s, p in zip(seats, processes, strict=True))

    best = max(map(held, itertools.permutations(free, len(seats))))
    assert held(tuple(seated[seat.slot] for seat in seats)) == best


def test_processes_that_cannot_adopt_do_not_get_seats_that_must() -> None:
    seats = [Seat(0, (Shard(0, 0),)), Seat(1, (Shard(0, 1), Shard(0, 2)))]
    holds = {5: frozenset({Shard(0, 0)})}
    assert seat_processes(seats, [4, 5], holds, frozenset({4}), {}) == {0: 4, 1: 5}


def test_a_process_stays_where_it_served() -> None:
    seats = [Seat(0, (Shard(0, 0),)), Seat(1, (Shard(0, 0),))]
    holds = {5: frozenset({Shard(0, 0)}), 6: frozenset({Shard(0, 0)})}
    assert seat_processes(seats, [5, 6], holds, frozenset(), {5: 1}) == {0: 6, 1: 5}
    assert seat_processes(seats, [5, 6], holds, frozenset(), {5: 0}) == {0: 5, 1: 6}
    assert seat_processes(seats, [5, 6], holds, frozenset(), {6: 0}) == {0: 6, 1: 5}
