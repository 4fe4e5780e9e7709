"""CheckFree while a neighbour serves two stages: what is known and kept of both. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner_job import Job, check
from planner_job import planned as planned_from

from megatron_ft.adopt.hosting import Hosting
from megatron_ft.adopt.rules import adoptions, settle
from megatron_ft.checkfree import lr_scale
from megatron_ft.checkfree.options import RECORD, CheckfreeOptions
from megatron_ft.checkfree.weights import norm_of
from megatron_ft.mecefo.options import nothing_is_adopted
from megatron_ft.planner import Facts, Situation, Strategies, plan
from megatron_ft.recovery_plan import Adopt, Fill, Rebuild, RecoveryPlan
from megatron_ft.rejoin.refill import Built
from megatron_ft.topology import Assignment, Shard, Topology, initial_assignment

BOTH = Strategies(checkfree=CheckfreeOptions(enabled=True), adopt=True)
PP3 = Topology(tensor=1, pipeline=3, data=2)
"""Slots of stage s: 2 s in replica 0 and 2 s + 1 in replica 1."""
PP4 = Topology(tensor=1, pipeline=4, data=2)

# -- gradient norms --------------------------------------------------------------------------------


def test_the_norm_of_a_stage_is_known_from_whoever_computed_it() -> None:
    own, beside = Shard(0, 1), Shard(0, 2)
    adopter = (7, {own: 4.0, beside: 9.0})
    assert norm_of(1, 1, [adopter]) == 2.0
    assert norm_of(2, 1, [adopter]) == 3.0, "an adopted stage counts like any other"
    assert norm_of(0, 1, [adopter]) is None
    # A process of the pool knows of an older step.
    assert norm_of(1, 1, [(6, {own: 100.0}), adopter]) == 2.0
    assert norm_of(0, 1, [(6, {Shard(0, 0): 100.0}), adopter]) is None
    assert norm_of(0, 1, []) is None
    # Tensor-parallel parts may be known from different replicas; all of them are needed.
    assert norm_of(1, 2, [(7, {Shard(0, 1): 9.0}), (7, {Shard(1, 1): 16.0})]) == 5.0
    assert norm_of(1, 2, [(7, {Shard(0, 1): 9.0})]) is None


@settings(deadline=None)
@given(st.data(), st.integers(1, 2), st.integers(2, 4))
def test_it_does_not_matter_who_tells(data: st.DataObject, tensor: int, stages: int) -> None:
    """All who committed the same step know the same numbers, each of them some."""
    shards = [Shard(tp, pp) for tp in range(tensor) for pp in range(stages)]
    values = {shard: data.draw(st.floats(0, 1e6)) for shard in shards}
    told = []
    for _ in range(data.draw(st.integers(1, 6))):
        known = data.draw(st.sets(st.sampled_from(shards), max_size=2))
        late = data.draw(st.booleans())
        told.append((7 - late, {s: values[s] + late for s in known}))
    last = max(committed for committed, _ in told)
    for stage in range(stages):
        found = norm_of(stage, tensor, told)
        assert found == norm_of(stage, tensor, list(reversed(told)))
        parts = [
            next((k[s] for c, k in told if c == last and s in k), None)
            for s in (Shard(tp, stage) for tp in range(tensor))
        ]
        if None in parts:
            assert found is None
        else:
            assert found == pytest.approx(math.sqrt(sum(p for p in parts if p is not None)))


# -- learning rate ---------------------------------------------------------------------------------

RECORDS = st.dictionaries(st.integers(0, 3), st.integers(0, 50), max_size=4)


@settings(deadline=None)
@given(RECORDS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 50), st.integers(0, 50))
def test_what_is_known_of_a_rebuilt_stage_travels_there_and_back(
    rebuilt: dict[int, int], own: int, adopted: int, own_uncounted: int, uncounted: int
) -> None:
    """From who holds it to an adopter, which keeps it apart from its own, and to who takes over."""
    if own == adopted:
        return

    def args(stage: int | None = None, steps: int = 0) -> Any:
        known = {s: (at, steps if s == stage else 0) for s, at in rebuilt.items()}
        return SimpleNamespace(**{RECORD: known})

    holder, adopter = args(adopted, uncounted), args(own, own_uncounted)
    heard = lr_scale.hear(adopter, holder, adopted)
    assert heard == (uncounted if adopted in rebuilt else 0)
    assert lr_scale.record(adopter) == lr_scale.record(args(own, own_uncounted)), "its own stays"
    back = SimpleNamespace(**vars(adopter))
    lr_scale.tell(back, adopted, heard)
    assert lr_scale.record(back).get(adopted) == lr_scale.record(holder).get(adopted)
    assert lr_scale.record(adopter) == lr_scale.record(args(own, own_uncounted))


def test_who_was_away_learns_which_stages_were_rebuilt_meanwhile() -> None:
    away = SimpleNamespace(**{RECORD: {0: (4, 4), 1: (4, 0)}})
    lr_scale.hear(away, SimpleNamespace(**{RECORD: {0: (4, 0), 1: (9, 9), 2: (9, 0)}}), 1)
    assert lr_scale.record(away) == {0: (4, 4), 1: (9, 0), 2: (9, 0)}


# -- what the planner does -------------------------------------------------------------------------


def facts(
    topology: Topology, before: Assignment, committed: int = 7, **more: Any
) -> dict[int, Facts]:
    """All who serve have committed the same step and are in the next one."""
    found = {}
    for p in before.active_processes:
        shards = [topology.shard_of(slot) for slot in before.slots_of(p)]
        built = Built(shards[0], before.slots_of(p)[0])
        found[p] = Facts(
            built=built, committed=committed, held=frozenset(shards[1:]), training=True, **more
        )
    return found


def planned(
    topology: Topology, before: Assignment, living: Mapping[int, Facts], dead: Iterable[int] = ()
) -> RecoveryPlan:
    gone = frozenset(dead)
    alive = {p: told for p, told in living.items() if p not in gone}
    now = Situation(topology=topology, before=before, dead=gone, living=alive, strategies=BOTH)
    result = plan(now)
    assert result is not None
    return result


def adopted_after(topology: Topology, *dead: int) -> Assignment:
    """What is served after these have died one after another, each in a step."""
    assignment = initial_assignment(topology, range(topology.num_slots))
    for process in dead:
        told = facts(topology, assignment)
        assignment = planned(topology, assignment, told, [process]).assignment
    assert len(assignment.adopted) == len(dead)
    return assignment


def losing(living: dict[int, Facts], shard: Shard) -> dict[int, Facts]:
    """Everybody has lost the state of a shard, although all live."""
    return {
        p: Facts(
            **{
                **vars(told),
                "held": told.held - {shard},
                "receiving": told.built is not None and told.built.shard == shard,
            }
        )
        for p, told in living.items()
    }


def test_the_stage_of_an_adopter_is_lost_and_it_keeps_the_adopted_one() -> None:
    before = adopted_after(PP3, 5)  # process 3 serves stages 1 and 2 of replica 1
    assert before.slots_of(3) == (3, 5)
    result = planned(PP3, before, losing(facts(PP3, before), Shard(0, 1)))
    assert [a for a in result.actions if isinstance(a, Rebuild)] == [Rebuild(2, 2, (0, 4))]
    assert result.assignment.whole_replicas(PP3) == (0,)
    assert 3 in result.assignment.pool


def test_an_adopted_stage_is_lost_and_its_adopter_keeps_its_own() -> None:
    before = adopted_after(PP3, 3)  # process 1 serves stages 0 and 1 of replica 1
    result = planned(PP3, before, losing(facts(PP3, before), Shard(0, 1)))
    assert [a for a in result.actions if isinstance(a, Rebuild)] == [Rebuild(2, 2, (0, 4))]
    assert 1 in result.assignment.pool


def test_what_adopters_alone_hold_is_a_source_when_they_serve_nothing() -> None:
    before = adopted_after(PP3, 5, 4)  # stage 2 is beside stage 1 in both replicas
    assert (before.slots_of(2), before.slots_of(3)) == ((2, 4), (3, 5))
    living = losing(facts(PP3, before), Shard(0, 1))
    waits = planned(PP3, before.joined([6]), living | {6: Facts()})
    assert waits.stop is None and waits.assignment.live_slots == ()
    ready = Facts(built=Built(Shard(0, 2), 4))
    now = {p: Facts(**{**vars(told), "training": False}) for p, told in living.items()}
    result = planned(PP3, waits.assignment, now | {6: ready})
    assert result.actions == (
        Fill(0, 0, 0, None),
        Fill(4, 6, 2, None),
        Rebuild(2, 2, (0, 4)),
    )


def test_with_the_adopter_of_a_lost_stage_dead_too_it_is_rebuilt() -> None:
    before = adopted_after(PP4, PP4.slot(pp=2, dp=1))  # process 3 serves stages 1 and 2
    living = facts(PP4, before) | {8: Facts(built=Built(Shard(0, 2), 4))}
    result = planned(PP4, before.joined([8]), living, dead=[3, 4])
    assert [a for a in result.actions if isinstance(a, Rebuild)] == [Rebuild(4, 8, (2, 6))]


def test_an_adopted_stage_whose_state_never_came_is_not_kept() -> None:
    """Its last holder died while it sent: nothing to adopt any more, and no source to name."""
    before = adopted_after(PP3, 3)
    holds = {p: frozenset({PP3.shard_of(p)}) for p in (0, 1, 4, 5)}
    result = settle(PP3, before, frozenset({2}), holds, anew=True)
    assert result.assignment.dark_replicas(PP3) == (0, 1)
    assert adoptions(result) == ()
    # Another one holds it: the adopter gets it from there.
    again = settle(PP3, before, frozenset(), {**holds, 2: frozenset({Shard(0, 1)})}, anew=True)
    assert adoptions(again) == (Adopt(3, 1, 2, 2),)
    # With one that cannot, and has not got it, the other neighbour does.
    unable = settle(
        PP3, before, frozenset(), {**holds, 2: frozenset({Shard(0, 1)})}, anew=True, unable=[1]
    )
    assert adoptions(unable) == (Adopt(3, 5, 2, 2),)
    # One that has the state and could not build the stage does not pass for one that runs it. Its
    # replica goes dark, and the other one gets the state from it.
    holds[1] |= {Shard(0, 1)}
    other = settle(PP3, before, frozenset({2}), holds, anew=True, unable=[1])
    assert (3, 5, 1) in [(a.slot, a.process, a.source_process) for a in adoptions(other)]
    alone = settle(PP3, before, frozenset({2, 5}), holds, anew=True, unable=[1])
    assert alone.assignment.dark_replicas(PP3) == (1,)
    assert [(a.slot, a.source_process) for a in adoptions(alone)] == [(2, 1)]


@settings(deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=150)
@given(st.data())
def test_no_last_copy_is_dropped(data: st.DataObject) -> None:
    """Processes die one by one and stages are lost, so that adopters come to hold the last copies.

    Moves may break off at any place, and replacements come late.
    """
    draw = data.draw
    topology = Topology(tensor=1, pipeline=draw(st.integers(3, 4)), data=2)
    job = Job.started(topology, replace(BOTH, respawn=True), topology.num_slots)
    for _ in range(draw(st.integers(3, 8))):
        if not any(mind.receiving for mind in job.processes.values()):
            job.commit()
        active = job.assignment.active_processes
        happens = draw(st.sampled_from(["death", "death", "loss", "more", "nothing"]))
        moment = draw(st.sampled_from(["training", "boundary"] if active else ["boundary"]))
        dead = [draw(st.sampled_from(active))] if happens == "death" and len(active) > 1 else []
        if happens == "loss":
            lose(job, draw(st.sampled_from(topology.shards)))
        if happens == "more":
            job.join(1)
        job.build(job.situation(), True, draw(st.booleans()), False)
        told = {p: {moment: True} for p in active or job.assignment.pool}
        now = job.situation(dead, told)
        result = planned_from(now)
        check(now, result, job.holds(list(now.living)))
        if result.stop is not None:
            return
        moves = [a for a in result.actions if isinstance(a, Fill | Rebuild | Adopt)]
        broken = bool(moves) and draw(st.booleans())
        held = job.held_of(now.living)
        job.carry_out(now, result, draw(st.integers(0, len(moves))) if broken else None)
        assert held <= job.held_of(job.processes), "the last copy of a stage was dropped"


def lose(job: Job, shard: Shard) -> None:
    """Everybody loses the state of a shard and lives on."""
    for p in job.assignment.active_processes:
        mind = job.processes[p]
        mind.state.pop(shard, None)
        if mind.built is not None and job.topology.shard_of(mind.built) == shard:
            mind.receiving = True


# -- what an adopter keeps -------------------------------------------------------------------------


class Kept(Hosting):
    """A process's part in adoption without a world; what it runs are stand-ins."""

    def __init__(self, slots: tuple[int, ...], committed: int = 7) -> None:
        self.world = SimpleNamespace(slots=slots, topology=PP3, adopted_slot=None)
        self.session = SimpleNamespace(committed=committed, transaction=None)
        self._view: Any = object()
        self._kept = []
        self.stage: Any = SimpleNamespace(view=self._view, holds_state=True, shard=Shard(0, 1))


def test_a_process_of_the_pool_keeps_what_it_ran_beside_its_stage() -> None:
    hosting = Kept(())
    stage = hosting.stage
    hosting._unhost([])
    hosting.settle()
    assert hosting.stage is None, "it does not run it any more"
    assert hosting.held() == {Shard(0, 1)} and hosting.holding(Shard(0, 1)) is stage
    hosting.settle()  # another repair in which nothing is wanted of it
    assert hosting.held() == {Shard(0, 1)}
    hosting.outdated(7)
    assert hosting.held() == {Shard(0, 1)}
    hosting.outdated(8)
    assert hosting.held() == frozenset(), "the others have gone on"


def test_who_trains_drops_what_it_runs_no_more() -> None:
    hosting = Kept((1,))
    hosting.settle()
    assert hosting.held() == {Shard(0, 1)}, "it is still its own to run"
    hosting._unhost([])
    assert hosting.held() == {Shard(0, 1)}, "until the state is where it is wanted"
    hosting.settle()
    assert hosting.held() == frozenset()


def test_a_lost_state_is_not_kept() -> None:
    hosting = Kept(())
    hosting.stage.holds_state = False
    hosting._unhost([])
    hosting.settle()
    assert hosting.held() == frozenset()


# -- flags -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"ft_checkfree": True}, None),
        ({"ft_checkfree_plus": True}, "--ft-checkfree goes with adoption"),
        ({"ft_recover": False, "ft_checkfree_plus": True}, None),
        ({"ft_mecefo": False, "ft_checkfree_plus": True}, None),
    ],
)
def test_it_is_said_where_nothing_is_adopted(changes: dict[str, bool], says: str | None) -> None:
    flags = {"ft_mecefo": True, "ft_recover": True, "ft_checkfree": False}
    flags |= {"ft_checkfree_plus": False, **changes}
    reason = nothing_is_adopted(SimpleNamespace(**flags))
    assert (reason is None) if says is None else (reason is not None and says in reason)
