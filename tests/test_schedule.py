"""Routes, placements, the compiler and the simulator, without torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.schedule.actions import COMPUTE, SENDS, Action, Kind, Schedule
from megatron_ft.schedule.by_index import ByIndex
from megatron_ft.schedule.compiler import compile_schedule
from megatron_ft.schedule.passage import changes_ends, passage
from megatron_ft.schedule.placement import (
    Placement,
    adopted,
    check_placement,
    normal,
    processes_of,
    stages_of,
)
from megatron_ft.schedule.routes import Route, identity, routes, swapped
from megatron_ft.schedule.simulator import ScheduleError, simulate

HALF = Fraction(1, 2)
SHARES = (Fraction(0), Fraction(1, 8), Fraction(1, 4), Fraction(1, 3), HALF, Fraction(1))
MAX_STAGES, MAX_MICROBATCHES = 16, 64


def placements_of(num_stages: int) -> list[Placement]:
    """Each stage on its own process, one adopted, and as many as can be."""
    found = [normal(num_stages)]
    for stage in range(num_stages):
        for host in (stage - 1, stage + 1):
            if 0 <= host < num_stages:
                found.append(adopted(num_stages, {stage: host}))
    if num_stages > 3:
        found.append(adopted(num_stages, {0: 1, num_stages - 1: num_stages - 2}))
        found.append(adopted(num_stages, {s: s + 1 for s in range(0, num_stages - 1, 2)}))
        found.append(adopted(num_stages, {s: s - 1 for s in range(1, num_stages, 2)}))
    return found


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[Route, ...], Placement, int, bool]:
    num_stages = draw(st.integers(1, MAX_STAGES))
    count = draw(st.integers(1, MAX_MICROBATCHES))
    share = draw(st.sampled_from(SHARES)) if num_stages > 1 else Fraction(0)
    start = draw(st.integers(0, 100))
    chosen = routes(num_stages, share, range(count), start=start)
    placement = draw(st.sampled_from(placements_of(num_stages)))
    limit = draw(st.one_of(st.just(num_stages), st.integers(1, 2 * num_stages)))
    return chosen, placement, limit, draw(st.booleans())


def stock(num_stages: int, stage: int, count: int) -> list[tuple[Kind, int]]:
    """Megatron's forward_backward_pipelining_without_interleaving, its loops written down."""
    warmup = min(num_stages - stage - 1, count)
    done: list[tuple[Kind, int]] = [(Kind.FORWARD, i) for i in range(warmup)]
    for i in range(count - warmup):
        done += [(Kind.FORWARD, warmup + i), (Kind.BACKWARD, i)]
    return done + [(Kind.BACKWARD, i) for i in range(count - warmup, count)]


def assert_stock(num_stages: int, count: int) -> None:
    schedule = compile_schedule((identity(num_stages),) * count, normal(num_stages))
    forwards = compile_schedule(
        (identity(num_stages),) * count, normal(num_stages), forward_only=True
    )
    for stage in range(num_stages):
        computes = [(action.kind, action.microbatch) for action in schedule.computes(stage)]
        assert computes == stock(num_stages, stage, count)
        assert schedule.peak_live(stage) == min(num_stages - stage, count)
        evaluated = [(action.kind, action.microbatch) for action in forwards.computes(stage)]
        assert evaluated == [(Kind.FORWARD, i) for i in range(count)]
    assert_messages_as_in_stock(schedule)
    for rendezvous in (False, True):
        played = simulate(schedule, rendezvous=rendezvous)
        assert played.makespan == 3 * (count + num_stages - 1)
        assert played.peak_live == tuple(min(num_stages - s, count) for s in range(num_stages))


def assert_messages_as_in_stock(schedule: Schedule) -> None:
    """Sent when computed, received when needed: nothing is kept longer than Megatron keeps it."""
    for actions in schedule.actions.values():
        computed, needed = None, None
        for action in actions:
            if action.kind in COMPUTE:
                computed = action
            elif action.kind in SENDS:
                assert computed is not None
                assert action[1:3] == computed[1:3], action
        for action in reversed(actions):
            if action.kind in COMPUTE:
                needed = action
            elif action.kind not in SENDS:
                assert needed is not None
                assert action[1:3] == needed[1:3], action


def assert_sound(schedule: Schedule, limit: int) -> None:
    buffered = simulate(schedule)
    simulate(schedule, 1.0, 1.0)
    met = simulate(schedule, 1.0, 3.0, rendezvous=True)
    assert met.peak_live == buffered.peak_live
    assert buffered.peak_live == tuple(map(schedule.peak_live, range(schedule.num_stages)))
    assert max(buffered.peak_live, default=0) <= (0 if schedule.forward_only else limit)
    busiest = max(buffered.busy.values())
    assert busiest <= buffered.makespan
    assert 0 <= buffered.bubble < 1


# -- routes ----------------------------------------------------------------------------------------


def test_swapped_routes_of_the_paper() -> None:
    assert swapped(2) == ((1, 0),)
    assert swapped(3) == ((1, 0, 2), (0, 2, 1))
    assert swapped(4) == ((1, 0, 3, 2),)
    assert swapped(5) == ((1, 0, 2, 4, 3),)
    assert swapped(8) == ((1, 0, 2, 3, 4, 5, 7, 6),)
    with pytest.raises(ValueError, match="two pipeline stages"):
        swapped(1)


def test_half_of_the_microbatches_are_every_second_one() -> None:
    straight, turned = identity(4), swapped(4)[0]
    assert routes(4, HALF, range(4)) == (straight, turned) * 2
    assert routes(4, Fraction(1, 4), range(8)) == ((straight,) * 3 + (turned,)) * 2
    assert routes(4, Fraction(0), range(3)) == (straight,) * 3
    assert routes(4, Fraction(1), range(3)) == (turned,) * 3


def test_swapped_ones_take_turns_with_three_stages() -> None:
    straight, (first, last) = identity(3), swapped(3)
    assert routes(3, HALF, range(8)) == (straight, first, straight, last) * 2


@pytest.mark.parametrize("share", [Fraction(-1, 2), Fraction(3, 2)])
def test_a_share_is_from_0_to_1(share: Fraction) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        routes(4, share, range(4))


def test_one_stage_has_nothing_to_swap() -> None:
    assert routes(1, Fraction(0), range(2)) == ((0,), (0,))
    with pytest.raises(ValueError, match="two pipeline stages"):
        routes(1, HALF, range(2))


@settings(deadline=None)
@given(
    st.integers(2, 16), st.sampled_from(SHARES), st.integers(1, 8), st.integers(1, 16), st.data()
)
def test_a_route_belongs_to_the_id_and_the_step(
    num_stages: int, share: Fraction, data: int, per_replica: int, draw: st.DataObject
) -> None:
    """Whoever computes an id, with whatever other ids, in whatever order."""
    step = draw.draw(st.integers(0, 50))
    ids = range(data * per_replica)
    start = step * per_replica
    whole = dict(zip(ids, routes(num_stages, share, ids, start=start, data=data), strict=True))
    some = draw.draw(st.lists(st.sampled_from(ids)))
    assert routes(num_stages, share, some, start=start, data=data) == tuple(
        whole[index] for index in some
    )


@settings(deadline=None)
@given(st.integers(2, 16), st.sampled_from(SHARES), st.integers(1, 8), st.integers(1, 16))
def test_every_replica_swaps_its_share(
    num_stages: int, share: Fraction, data: int, per_replica: int
) -> None:
    """Over steps exactly, and in each replica that owns its ids: m, m + data, .."""
    steps = share.denominator
    for replica in range(data):
        ids = range(replica, data * per_replica, data)
        taken = [
            route
            for step in range(steps)
            for route in routes(num_stages, share, ids, start=step * per_replica, data=data)
        ]
        turned = [route for route in taken if route != identity(num_stages)]
        assert len(turned) == share * steps * per_replica
        if num_stages == 3:
            counts = [turned.count(route) for route in swapped(3)]
            assert max(counts) - min(counts) <= 1


# -- placements ------------------------------------------------------------------------------------


def test_placements() -> None:
    assert normal(4) == (0, 1, 2, 3)
    assert adopted(4, {2: 1}) == (0, 1, 1, 3)
    assert stages_of((0, 1, 1, 3), 1) == (1, 2)
    assert processes_of((0, 1, 1, 3)) == (0, 1, 3)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ((0, 1, 2, 1), "own or that of a neighbouring"),
        ((1, 2, 2), "but not its own"),
        ((1, 1, 1), "more than two"),
        ((0, 5), "own or that of a neighbouring"),
        ((0, -1), "own or that of a neighbouring"),
    ],
)
def test_placements_that_cannot_be(placement: Placement, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_placement(placement)


# -- the compiler ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 5, 8, 16])
def test_identity_is_1f1b(num_stages: int) -> None:
    for count in {1, 2, num_stages - 1, num_stages, num_stages + 1, 3 * num_stages + 1, 64} - {0}:
        assert_stock(num_stages, count)


def test_two_stages_written_out() -> None:
    schedule = compile_schedule((identity(2),) * 3, normal(2))
    f, b = Kind.FORWARD, Kind.BACKWARD
    send, receive = Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION
    back, got = Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT
    first = [(f, 0), (send, 0), (f, 1), (send, 1), (got, 0), (b, 0)]
    first += [(f, 2), (send, 2), (got, 1), (b, 1), (got, 2), (b, 2)]
    last = [(receive, 0), (f, 0), (b, 0), (receive, 1), (back, 0), (f, 1), (b, 1)]
    last += [(receive, 2), (back, 1), (f, 2), (b, 2), (back, 2)]
    assert [(a.kind, a.microbatch) for a in schedule.actions[0]] == first
    assert [(a.kind, a.microbatch) for a in schedule.actions[1]] == last


@settings(max_examples=80, deadline=None)
@given(cases())
def test_any_schedule_is_sound(case: tuple[tuple[Route, ...], Placement, int, bool]) -> None:
    chosen, placement, limit, forward_only = case
    schedule = compile_schedule(chosen, placement, limit, forward_only=forward_only)
    assert_sound(schedule, limit)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_routes_that_no_strategy_asks_for(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, 6))
    one = st.permutations(range(num_stages)).map(tuple)
    chosen = tuple(data.draw(st.lists(one, min_size=1, max_size=12)))
    placement = data.draw(st.sampled_from(placements_of(num_stages)))
    assert_sound(compile_schedule(chosen, placement), num_stages)


def test_the_same_again() -> None:
    chosen = routes(5, HALF, range(9))
    first = compile_schedule(chosen, normal(5))
    assert compile_schedule.__wrapped__(chosen, normal(5)) == first


@given(st.sampled_from([4, 5, 8, 16]), st.sampled_from(SHARES), st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_swapping_costs_little_time_and_memory(
    num_stages: int, share: Fraction, rounds: int
) -> None:
    """One change of routes in a step: less than two more microbatches would take."""
    count = rounds * num_stages
    schedule = compile_schedule(routes(num_stages, share, range(count)), normal(num_stages))
    played = simulate(schedule)
    assert played.makespan <= 3 * (count + num_stages - 1) + 5
    assert max(played.peak_live) <= num_stages


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("cost", [0.645, 1.0])
def test_a_process_with_two_stages_is_kept_busy(num_stages: int, cost: float) -> None:
    """It is the bottleneck; 0.645 of its cost is what a stage in MeCeFO's mode was measured at."""
    count = 4 * num_stages
    for stage in range(num_stages):
        for host in {max(stage - 1, 0), min(stage + 1, num_stages - 1)} - {stage}:
            placement = adopted(num_stages, {stage: host})
            times = [cost if process == host else 1.0 for process in placement]
            played = simulate(compile_schedule((identity(num_stages),) * count, placement), times)
            assert played.busy[host] == pytest.approx(6 * cost * count)
            assert played.makespan <= 1.15 * 6 * cost * count
            assert max(played.peak_live) <= num_stages


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="does not visit each of 3 stages once"):
        compile_schedule(((0, 1, 1),), normal(3))
    with pytest.raises(ValueError, match="does not visit each of 2 stages once"):
        compile_schedule((identity(3),), normal(2))
    with pytest.raises(ValueError, match="at least one microbatch"):
        compile_schedule((identity(2),), normal(2), 0)
    with pytest.raises(ValueError, match="neighbouring"):
        compile_schedule((identity(3),), (0, 1, 0))


# -- the simulator finds what is wrong ------------------------------------------------------------


def changed(process: int, change: list[Action]) -> Schedule:
    schedule = compile_schedule((identity(2),) * 3, normal(2))
    return replace(schedule, actions={**schedule.actions, process: tuple(change)})


def actions_of(process: int) -> list[Action]:
    return list(compile_schedule((identity(2),) * 3, normal(2)).actions[process])


def swap(actions: list[Action], one: int, other: int) -> list[Action]:
    """Two actions in each other's place."""
    actions[one], actions[other] = actions[other], actions[one]
    return actions


def test_the_simulator_notices_what_is_left_out() -> None:
    for process in (0, 1):
        for at in range(len(actions_of(process))):
            fewer = actions_of(process)
            del fewer[at]
            with pytest.raises(ScheduleError):
                simulate(changed(process, fewer))
            with pytest.raises(ScheduleError):
                simulate(changed(process, fewer), rendezvous=True)


def test_the_simulator_notices_what_is_done_twice() -> None:
    for process in (0, 1):
        for at, action in enumerate(actions_of(process)):
            more = actions_of(process)
            more.insert(at, action)
            with pytest.raises(ScheduleError):
                simulate(changed(process, more))


def test_the_simulator_notices_messages_in_another_order() -> None:
    # Stage 0 sends microbatch 1 before microbatch 0, which stage 1 receives first.
    sends = [a for a in actions_of(0) if a.kind is not Kind.SEND_ACTIVATION or a.microbatch > 1]
    at = next(i for i, a in enumerate(sends) if (a.kind, a.microbatch) == (Kind.FORWARD, 1)) + 1
    sends[at:at] = [Action(Kind.SEND_ACTIVATION, m, 0, 1) for m in (1, 0)]
    with pytest.raises(ScheduleError, match="gets the message of"):
        simulate(changed(0, sends))


def test_the_simulator_tells_rendezvous_from_buffered_sends() -> None:
    """Both sides send first: good with buffers, a deadlock without; Megatron uses one call."""
    actions = actions_of(1)
    back = next(i for i, a in enumerate(actions) if a.kind is Kind.SEND_GRADIENT)
    assert actions[back - 1].kind is Kind.RECEIVE_ACTIVATION
    got = next(i for i, a in enumerate(actions_of(0)) if a.kind is Kind.RECEIVE_GRADIENT)
    assert actions_of(0)[got - 1].kind is Kind.SEND_ACTIVATION
    crossed = changed(1, swap(actions, back - 1, back))
    simulate(crossed)
    with pytest.raises(ScheduleError, match="locked up"):
        simulate(crossed, rendezvous=True)


def test_the_simulator_notices_a_deadlock() -> None:
    # Stage 0 waits for a gradient before it sends what the gradient is of.
    actions = actions_of(0)
    got = next(i for i, a in enumerate(actions) if a.kind is Kind.RECEIVE_GRADIENT)
    assert actions[got + 1].kind is Kind.BACKWARD
    actions[1:1] = [actions.pop(got), actions.pop(got)]
    for rendezvous in (False, True):
        with pytest.raises(ScheduleError, match="locked up"):
            simulate(changed(0, actions), rendezvous=rendezvous)


def test_times_of_stages() -> None:
    schedule = compile_schedule((identity(2),) * 4, normal(2))
    slow = simulate(schedule, [1.0, 2.0], [2.0, 4.0])
    assert slow.busy == {0: 12.0, 1: 24.0}
    assert slow.makespan == 1 + 24 + 2
    assert slow.bubble == pytest.approx(1 - 36 / 54)
    with pytest.raises(ValueError, match="3 times for 2 stages"):
        simulate(schedule, [1.0, 2.0, 3.0])


# -- what the executor is told ---------------------------------------------------------------------


def test_a_passage_says_where_a_route_begins_and_ends() -> None:
    chosen = (identity(4), swapped(4)[0])
    assert [passage(chosen, 0, s).enters for s in range(4)] == [True, False, False, False]
    assert [passage(chosen, 0, s).leaves for s in range(4)] == [False, False, False, True]
    assert [passage(chosen, 1, s).enters for s in range(4)] == [False, True, False, False]
    assert [passage(chosen, 1, s).leaves for s in range(4)] == [False, False, True, False]


@pytest.mark.parametrize(
    ("num_stages", "ends"), [(2, [0, 1]), (3, [0, 1, 2]), (5, [0, 1, 3, 4]), (8, [0, 1, 6, 7])]
)
def test_only_end_stages_need_to_follow(num_stages: int, ends: list[int]) -> None:
    mixed = [identity(num_stages), *swapped(num_stages)]
    assert [s for s in range(num_stages) if changes_ends(mixed, s)] == ends
    assert not any(changes_ends([identity(num_stages)], s) for s in range(num_stages))


@settings(deadline=None)
@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_items_by_index(order: list[int], wanted: set[int]) -> None:
    """In any order, and for those microbatches only that ask."""
    items = ByIndex(iter("abcdefgh"))
    for index in order:
        items.begin(index)
        if index in wanted:
            assert next(items) == "abcdefgh"[index]
        items.end()
    assert not items._kept


def test_no_torch_and_no_mpi() -> None:
    code = (
        "import sys; from megatron_ft.schedule import by_index, compiler, passage, simulator; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'mpi4py', 'megatron')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# -- everything ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("num_stages", range(1, MAX_STAGES + 1))
def test_all_sizes(num_stages: int) -> None:
    """All shares with a process for each stage, and with one adoption after another."""
    adoptions = placements_of(num_stages)[1:]
    compiled = compile_schedule.__wrapped__
    for count in range(1, MAX_MICROBATCHES + 1):
        assert_stock(num_stages, count)
        for share in SHARES if num_stages > 1 else SHARES[:1]:
            chosen = routes(num_stages, share, range(count))
            assert_sound(compiled(chosen, normal(num_stages)), num_stages)
            assert_sound(compiled(chosen, normal(num_stages), forward_only=True), num_stages)
            for placement in adoptions[:1]:
                limit = num_stages + count % 2
                assert_sound(compiled(chosen, placement, limit), limit)
            adoptions = adoptions[1:] + adoptions[:1]
