"""The planner's ladder by example, and its promises over random histories of a job."""

from __future__ import annotations

import doctest
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_job import Job, check, happens, in_whole_stages, jobs, planned, shuffled

from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.planner import (
    Facts,
    Situation,
    Strategies,
    holds_of,
    plan,
    pool_can_do_more,
    ready_of,
)
from megatron_ft.recovery_plan import Adopt, Fill, GiveBack, GoDark, Rebuild, RecoveryPlan, Stop
from megatron_ft.rejoin.refill import Built
from megatron_ft.topology import Assignment, Topology, initial_assignment

QUICK = settings(deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=100)

# Slot numbers of the examples: replica r's stage s is slot 4 * r + s.
TWO_BY_FOUR = Topology(tensor=1, pipeline=4, data=2, order="tp-cp-ep-pp-dp")
THREE_BY_FOUR = Topology(tensor=1, pipeline=4, data=3, order="tp-cp-ep-pp-dp")
ONE_BY_FOUR = Topology(tensor=1, pipeline=4, data=1)

CHECKFREE = CheckfreeOptions(enabled=True)
PLUS = CheckfreeOptions(enabled=True, plus=True)
NOTHING = Strategies()
MECEFO = Strategies(adopt=True)


def situation(
    topology: Topology,
    before: Assignment,
    dead: set[int],
    on: Strategies = NOTHING,
    built: Mapping[int, int] | None = None,
    **told: object,
) -> Situation:
    """All who trained at step 7 say the same, and those in the pool hold what they served.

    Args:
        built: Pool process -> the slot for which it has built; those that are left out are idle.
        told: What all active processes tell beside that.
    """
    living = {}
    for p in before.processes:
        slots = before.slots_of(p)
        if p in dead:
            continue
        if not slots:
            slot = (built or {}).get(p)
            living[p] = Facts(built=None if slot is None else Built(topology.shard_of(slot), slot))
            continue
        beside = frozenset(map(topology.shard_of, slots[1:]))
        mine = Built(topology.shard_of(slots[0]), slots[0])
        living[p] = Facts(built=mine, committed=7, held=beside, **told)  # type: ignore[arg-type]
    return Situation(
        topology=topology, before=before, dead=frozenset(dead), living=living, strategies=on
    )


def fail(topology: Topology, processes: int, dead: set[int], **more: object) -> RecoveryPlan:
    """The plan after the first failure of a job, in a step."""
    before = initial_assignment(topology, range(processes))
    return planned(situation(topology, before, dead, **{"training": True, **more}))  # type: ignore[arg-type]


def test_rule_4_frees_the_healthy_processes_of_a_replica() -> None:
    result = fail(TWO_BY_FOUR, 8, {5})
    assert result.actions == (GoDark(replica=1, released=(4, 6, 7)),)
    assert result.assignment == Assignment(1, (0, 1, 2, 3, None, None, None, None), (4, 6, 7))
    assert result.describe() == [
        "epoch 0 -> 1: lost process 5 (slot 5 (replica 1, stage 1))",
        "replica 1 goes dark: its processes 4, 6, 7 can serve elsewhere",
        "1 of 2 replicas live, 3 processes in the pool",
    ]


def test_rule_1_fills_between_two_steps_with_an_exact_copy() -> None:
    result = fail(TWO_BY_FOUR, 9, {5}, built={8: 5}, training=False, boundary=True)
    copies = [a for a in result.actions if isinstance(a, Fill) and a.is_copy]
    assert copies == [Fill(slot=5, process=8, source_process=1, source_slot=1)]
    assert result.assignment == Assignment(1, (0, 1, 2, 3, 4, 8, 6, 7))


@pytest.mark.parametrize("slot", [None, 6], ids=["idle", "built another stage"])
def test_rule_1_needs_a_process_that_has_built_the_stage(slot: int | None) -> None:
    built = {} if slot is None else {8: slot}
    result = fail(TWO_BY_FOUR, 9, {5}, built=built, boundary=True)
    assert result.assignment.dark_replicas(TWO_BY_FOUR) == (1,)


def test_rule_1_leaves_closed_slots_alone() -> None:
    before = initial_assignment(TWO_BY_FOUR, range(9))
    now = situation(TWO_BY_FOUR, before, {5}, built={8: 5}, boundary=True)
    assert planned(now).assignment.process_of[5] == 8
    closed = planned(replace(now, closed=frozenset({5})))
    assert closed.assignment.dark_replicas(TWO_BY_FOUR) == (1,)


def test_survivors_of_two_replicas_form_a_whole_one_in_the_step() -> None:
    result = fail(TWO_BY_FOUR, 8, {2, 3, 4, 5})
    assert result.assignment.process_of == (0, 1, 6, 7, None, None, None, None)
    assert not any(a.is_copy for a in result.actions if isinstance(a, Fill))


def test_leftovers_of_two_dark_replicas_form_a_whole_one_between_steps() -> None:
    first = fail(THREE_BY_FOUR, 12, {5}).assignment
    built = {p: p for p in first.pool}
    now = situation(THREE_BY_FOUR, first, {10}, built=built, boundary=True)
    assert planned(now).assignment.whole_replicas(THREE_BY_FOUR) == (0, 1)


def test_rule_2_rebuilds_a_stage_that_is_held_nowhere() -> None:
    result = fail(ONE_BY_FOUR, 5, {1}, on=Strategies(checkfree=CHECKFREE), built={4: 1})
    assert [a for a in result.actions if isinstance(a, Rebuild)] == [Rebuild(1, 4, (0, 2))]


def test_rule_2_rebuilds_once_and_copies_to_the_other_replicas() -> None:
    on = Strategies(checkfree=CHECKFREE)
    result = fail(TWO_BY_FOUR, 10, {1, 5}, on=on, built={8: 1, 9: 5})
    assert result.actions[-2:] == (
        Rebuild(slot=1, process=8, from_slots=(0, 2)),
        Fill(slot=5, process=9, source_process=8, source_slot=1),
    )


def test_rule_2_with_two_adjacent_stages_goes_to_the_nearest_survivors() -> None:
    topology = Topology(tensor=1, pipeline=6, data=1)
    on = Strategies(checkfree=CHECKFREE)
    result = fail(topology, 8, {2, 3}, on=on, built={6: 2, 7: 3})
    rebuilds = [a for a in result.actions if isinstance(a, Rebuild)]
    assert rebuilds == [Rebuild(2, 6, (1, 4)), Rebuild(3, 7, (1, 4))]


def test_rule_2_rebuilds_in_place_where_the_process_lives() -> None:
    before = initial_assignment(ONE_BY_FOUR, range(4))
    now = situation(ONE_BY_FOUR, before, set(), Strategies(checkfree=CHECKFREE), training=True)
    hurt = replace(now.living[2], receiving=True)
    result = planned(replace(now, living={**now.living, 2: hurt}))
    assert Rebuild(2, 2, (1, 3)) in result.actions
    assert result.assignment.process_of == (0, 1, 2, 3)


def test_rule_2_rebuilds_all_tensor_parallel_peers_of_a_stage() -> None:
    topology = Topology(tensor=2, pipeline=3, data=1)
    on = Strategies(checkfree=CHECKFREE)
    result = fail(topology, 7, {2}, on=on, built={6: 2})
    rebuilds = [a for a in result.actions if isinstance(a, Rebuild)]
    assert rebuilds == [Rebuild(2, 6, (0, 4)), Rebuild(3, 3, (1, 5))]
    # Without CheckFree what lives is kept, whatever becomes of the other half.
    alone = fail(topology, 7, {2}, on=Strategies(), built={6: 2})
    assert alone.stop is not None and "state of stage 1 is lost" in alone.stop.reason


def test_rule_2_needs_checkfree_plus_for_the_ends() -> None:
    stop = fail(ONE_BY_FOUR, 5, {0}, on=Strategies(checkfree=CHECKFREE), built={4: 0}).stop
    assert stop is not None and stop.rule == 2 and "--ft-checkfree-plus" in stop.advice
    result = fail(ONE_BY_FOUR, 5, {0}, on=Strategies(checkfree=PLUS), built={4: 0})
    assert Rebuild(slot=0, process=4, from_slots=(1,)) in result.actions


@pytest.mark.parametrize("dead", [{0, 1}, {2, 3}])
def test_rule_2_stops_where_the_twin_is_lost_too(dead: set[int]) -> None:
    built = dict(zip(range(4, 6), sorted(dead), strict=True))
    stop = fail(ONE_BY_FOUR, 6, dead, on=Strategies(checkfree=PLUS), built=built).stop
    assert stop is not None and stop.rule == 2 and not stop.can_checkpoint


@pytest.mark.parametrize(("dead", "adopter"), [(4, 5), (5, 4), (6, 5), (7, 6)])
def test_rule_3_asks_the_stage_below_and_for_stage_0_the_one_above(dead: int, adopter: int) -> None:
    result = fail(TWO_BY_FOUR, 8, {dead}, on=MECEFO)
    peer = dead - 4
    assert result.actions == (Adopt(dead, adopter, source_process=peer, source_slot=peer),)
    assert result.assignment.slots_of(adopter) == (adopter, dead)


def test_rule_3_asks_the_other_side_where_the_first_serves_two_or_cannot() -> None:
    before = fail(TWO_BY_FOUR, 8, {5}, on=MECEFO).assignment
    now = situation(TWO_BY_FOUR, before, {6}, MECEFO, training=True)
    assert planned(now).actions == (Adopt(6, 7, source_process=2, source_slot=2),)
    now = situation(TWO_BY_FOUR, initial_assignment(TWO_BY_FOUR, range(8)), {5}, MECEFO)
    told = {p: replace(f, training=True, unable=p == 4) for p, f in now.living.items()}
    assert planned(replace(now, living=told)).assignment.slots_of(6) == (6, 5)


def test_rule_3_is_for_steps_and_gives_way_to_rule_4_elsewhere() -> None:
    assert fail(TWO_BY_FOUR, 8, {5}, on=MECEFO, training=False).actions == (GoDark(1, (4, 6, 7)),)
    # Stages 1 and 2 of replica 2 could be adopted, but not all of 0, 1 and 2.
    assert fail(THREE_BY_FOUR, 12, {8, 9, 10}, on=MECEFO).actions == (GoDark(2, (11,)),)


def test_rule_3_gives_back_when_the_pool_has_a_process() -> None:
    before = fail(TWO_BY_FOUR, 8, {5}, on=MECEFO).assignment.joined([8])
    now = situation(TWO_BY_FOUR, before, set(), MECEFO, built={8: 5}, boundary=True)
    give, fill = planned(now).actions
    assert give == GiveBack(slot=5, adopter=4, process=8)
    assert isinstance(fill, Fill) and (fill.slot, fill.process) == (5, 8)
    assert planned(now).assignment == Assignment(2, (0, 1, 2, 3, 4, 8, 6, 7))


def test_an_adopter_whom_the_state_has_not_reached_is_relieved_without_it() -> None:
    before = fail(TWO_BY_FOUR, 8, {5}, on=MECEFO).assignment.joined([8])
    now = situation(TWO_BY_FOUR, before, set(), MECEFO, built={8: 5}, boundary=True)
    empty = replace(now.living[4], held=frozenset())
    give, fill = planned(replace(now, living={**now.living, 4: empty})).actions
    assert isinstance(give, GiveBack) and fill == Fill(5, 8, source_process=1, source_slot=1)


def test_rule_5_waits_for_what_can_come_and_says_what_is_missing() -> None:
    assert fail(ONE_BY_FOUR, 4, {1}, on=Strategies(checkfree=CHECKFREE, respawn=True)).stop is None
    assert fail(ONE_BY_FOUR, 5, {1}, on=Strategies(checkfree=CHECKFREE)).stop is None
    stop = fail(ONE_BY_FOUR, 4, {1}, on=Strategies(checkfree=CHECKFREE)).stop
    assert stop is not None and stop.rule == 4 and "--ft-respawn" in stop.advice
    assert (stop.missing_processes, stop.can_checkpoint) == (1, True)


def test_rule_5_where_all_who_trained_are_dead() -> None:
    """What waits in the pool may be old: the job would silently go back to it."""
    topology = Topology(tensor=1, pipeline=1, data=2)
    before = Assignment(4, (0, 1), (2, 3))
    now = situation(topology, before, {0, 1}, Strategies(respawn=True), built={2: 0, 3: 1})
    stop = planned(now).stop
    assert stop is not None and "the state of stage 0 is lost" in stop.reason
    # While nobody trains nothing is committed, so what is up to date stays so.
    waits = replace(now, before=Assignment(5, (None, None), (2, 3)), dead=frozenset())
    assert planned(replace(waits, committed=0)).stop is None
    old = planned(replace(waits, committed=7)).stop
    assert old is not None and "the state of stage 0 is lost" in old.reason


def test_who_was_asked_to_leave_is_no_help() -> None:
    """A process of a drained replica lives on for a moment; nobody waits for it to build."""
    topology = Topology(tensor=1, pipeline=1, data=2)
    before = Assignment(3, (0, None), (1, 2))
    now = situation(topology, before, {0}, built={2: 1})
    fresh = replace(now.living[2], committed=7)
    now = replace(now, before=Assignment(3, (None, None), (1, 2)), living={**now.living, 2: fresh})
    assert planned(replace(now, left=frozenset({2}))).stop is None, "process 1 can build"
    stop = planned(replace(now, left=frozenset({1, 2}))).stop
    assert stop is not None and stop.rule == 4


def test_the_job_is_over_when_all_who_serve_have_finished() -> None:
    before = initial_assignment(TWO_BY_FOUR, range(9))
    assert plan(situation(TWO_BY_FOUR, before, {5}, finished=True)) is None
    assert plan(situation(TWO_BY_FOUR, before, {5}, over=True)) is not None


def test_the_examples_of_the_documentation() -> None:
    page = Path(__file__).parent.parent / "docs" / "planner.md"
    failed, attempted = doctest.testfile(str(page), module_relative=False)
    assert attempted > 20 and not failed


# --- promises over random histories -----------------------------------------------------------


@QUICK
@given(jobs(), st.data())
def test_any_history(job: Job, data: st.DataObject) -> None:
    """Total, the same on every process, and all that ``check`` asks for."""
    for _ in range(data.draw(st.integers(1, 6))):
        now = happens(job, data)
        result = planned(now)
        assert planned(shuffled(now)) == result
        assert all(isinstance(line, str) for line in result.describe())
        check(now, result, job.holds(list(now.living)))
        if result.stop is not None:
            return
        moves = [a for a in result.actions if isinstance(a, Fill | Rebuild | Adopt)]
        broken = bool(moves) and data.draw(st.integers(0, 3)) == 0
        held = in_whole_stages(now, job.held_of(now.living))
        job.carry_out(now, result, data.draw(st.integers(0, len(moves))) if broken else None)
        assert held <= job.held_of(job.processes), "the last copy of a stage was dropped"


@QUICK
@given(jobs(), st.data())
def test_a_boundary_is_asked_for_if_it_changes_something(job: Job, data: st.DataObject) -> None:
    """Else a process that is ready would wait for ever, or boundaries would follow each other."""
    now = happens(job, data)
    result = planned(now)
    if result.stop is not None:
        return
    job.carry_out(now, result)
    job.build(now, data.draw(st.booleans()), True, False)
    for _ in range(2):
        active = job.assignment.active_processes or job.assignment.pool[:1]
        now = job.situation((), {p: {"boundary": True} for p in active})
        expected = pool_can_do_more(
            job.topology,
            job.assignment,
            ready_of(now.living, set(job.assignment.pool) - job.left),
            now.living,
            job.closed,
            job.on,
        )
        result = planned(now)
        check(now, result, job.holds(list(now.living)))
        assert bool([a for a in result.actions if not isinstance(a, Stop)]) == expected
        if result.stop is not None:
            return
        job.carry_out(now, result)
    assert not expected, "the second time there is nothing left to do"


@QUICK
@given(jobs(), st.data())
def test_no_news_change_nothing(job: Job, data: st.DataObject) -> None:
    job.carry_out(now := happens(job, data), planned(now))
    now = job.situation((), {p: {"training": True} for p in job.assignment.active_processes})
    if job.assignment.live_slots:
        assert planned(now).actions == ()
        assert planned(now).assignment.process_of == job.assignment.process_of


# --- negative controls: the checks find what is wrong -----------------------------------------


def _moved(result: RecoveryPlan, slot: int, process: int | None) -> RecoveryPlan:
    process_of = list(result.assignment.process_of)
    process_of[slot] = process
    pool = set(result.assignment.processes) | set(result.assignment.pool)
    after = replace(
        result.assignment,
        process_of=tuple(process_of),
        pool=tuple(sorted(pool - set(process_of))),
    )
    return replace(result, assignment=after)


WRONG: dict[str, Callable[[RecoveryPlan], RecoveryPlan]] = {
    "a dead process serves": lambda r: _moved(r, 5, 5),
    "half a replica is dark": lambda r: _moved(r, 6, None),
    "a stale copy": lambda r: replace(
        r,
        actions=tuple(
            replace(a, source_process=8) if isinstance(a, Fill) and a.slot == 5 else a
            for a in r.actions
        ),
    ),
    "no copy": lambda r: replace(r, actions=tuple(a for a in r.actions if not isinstance(a, Fill))),
    "somebody is forgotten": lambda r: replace(r, assignment=replace(r.assignment, pool=())),
    "the epoch stays": lambda r: replace(r, assignment=replace(r.assignment, epoch=0)),
    "a stop for no reason": lambda r: replace(r, actions=(*r.actions, Stop(4, "", ""))),
    "a healthy replica is moved": lambda r: _swapped(r),
}


def _swapped(result: RecoveryPlan) -> RecoveryPlan:
    a, b, *rest = result.assignment.process_of
    return replace(result, assignment=replace(result.assignment, process_of=(b, a, *rest)))


@pytest.mark.parametrize("wrong", WRONG)
def test_a_doctored_plan_is_found(wrong: str) -> None:
    before = initial_assignment(TWO_BY_FOUR, range(10))
    now = situation(TWO_BY_FOUR, before, {5}, built={8: 5}, boundary=True)
    result = planned(now)
    holds = holds_of(now.living)
    check(now, result, {p: holds.get(p, frozenset()) for p in now.living})
    with pytest.raises(AssertionError):
        check(now, WRONG[wrong](result), {p: holds.get(p, frozenset()) for p in now.living})
