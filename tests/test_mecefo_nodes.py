"""Who is degraded, with which layers, and how many microbatches it gets; all without torch."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.faults.degrade import Degradations, degradations_of
from megatron_ft.faults.plan import plan_from_flags
from megatron_ft.faults.rates import SCENARIOS, parse_rate, scenario_rate
from megatron_ft.faults.spec import FaultSpecError, parse
from megatron_ft.mecefo.budget import LayerActivations, LayerCost
from megatron_ft.mecefo.choices import Choices
from megatron_ft.mecefo.nodes import Node, neighbour, nodes_of
from megatron_ft.mecefo.options import MecefoOptions
from megatron_ft.mecefo.quotas import REMEMBERED, Speeds, deal_by_speed
from megatron_ft.recover.policy_workload import PolicyWorkload
from megatron_ft.topology import Assignment, Topology

# -- nodes -----------------------------------------------------------------------------------------


def test_the_neighbour_is_the_one_before() -> None:
    assert [neighbour(stage, 4, ()) for stage in range(4)] == [1, 0, 1, 2]
    assert neighbour(2, 4, {0, 1}) == 3, "the other side where that one is degraded"
    assert neighbour(2, 3, {0, 1}) is None and neighbour(0, 4, {1, 2}) is None
    assert neighbour(0, 1, ()) is None


def test_a_process_with_two_slots_is_a_degraded_node() -> None:
    topology = Topology(tensor=2, pipeline=2, data=2)
    own = list(range(8))
    assert nodes_of(Assignment(0, tuple(own)), topology) == frozenset()
    # Slots 0 and 1 are stage 0 of replica 0, 4 and 5 its stage 1; one tensor peer adopted one.
    own[4] = 0
    assert nodes_of(Assignment(1, tuple(own), adopted=(4,)), topology) == {Node(0, (0, 1))}


# -- degrade faults --------------------------------------------------------------------------------


def degradations(*faults: str, stages: int = 4, data: int = 2) -> Degradations:
    topology = Topology(tensor=1, pipeline=stages, data=data)
    return degradations_of(plan_from_flags(faults), topology)


def test_a_fault_lasts_as_long_as_it_says() -> None:
    # With two replicas slot 5 is stage 2 of replica 1.
    found = degradations("degrade@4:slot=5:for=3", "degrade@9:stage=0")
    by_iteration = {i: found.nodes_at(i) for i in range(1, 30)}
    assert [i for i in range(1, 9) if by_iteration[i]] == [4, 5, 6]
    assert by_iteration[4] == {Node(1, (1, 2))}
    assert by_iteration[9] == by_iteration[29] == {Node(0, (0, 1)), Node(1, (0, 1))}
    assert found.nodes_at(5) == by_iteration[5], "asked again, when a run goes back"


def test_faults_that_find_no_node_do_not_strike() -> None:
    faults = ("degrade@2:slot=2:for=9", "degrade@3:slot=0:for=9", "degrade@4:slot=4:for=9")
    found = degradations(*faults, stages=3)
    assert found.nodes_at(2) == {Node(0, (0, 1))}
    # Its process runs both already; of stage 2 no neighbour is left.
    assert not found.strikes(parse(faults[1]), 0) and not found.strikes(parse(faults[2]), 4)
    assert found.nodes_at(4) == {Node(0, (0, 1))}
    assert found.strikes(parse(faults[0]), 2)
    assert found.nodes_at(11) == frozenset(), "and nothing is left when the first one has passed"


def test_one_stage_alone() -> None:
    assert degradations("degrade@1:slot=1", stages=1).nodes_at(1) == {Node(1, (0,))}


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 99), st.integers(1, 12))
def test_drawn_nodes_are_pairs_of_neighbours(stages: int, data: int, seed: int, lasts: int) -> None:
    topology = Topology(tensor=1, pipeline=stages, data=data)
    plan = plan_from_flags(rates=[f"degrade:0.1/iter:for={lasts}"], seed=seed)
    found = degradations_of(plan, topology)
    for iteration in range(1, 40):
        nodes = found.nodes_at(iteration)
        for replica in range(data):
            run = [s for n in nodes if n.replica == replica for s in n.stages]
            assert len(set(run)) == len(run), "no stage runs twice"
        for node in nodes:
            assert node.stages == tuple(range(node.stages[0], node.stages[-1] + 1))
            assert len(node.stages) == min(stages, 2)


# -- the paper's scenarios -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_fails_as_often_and_as_long(name: str) -> None:
    between, back = SCENARIOS[name]
    seconds, slots = 36.0, 16
    rate = parse_rate(scenario_rate(name, seconds))
    assert parse_rate(str(rate)) == rate
    per_job_hour = slots * rate.per_iteration(seconds, slots) * 3600 / seconds
    assert per_job_hour == pytest.approx(1 / between, rel=0.01)
    assert rate.spec(1, 0).duration == round(back * 100)


def test_scenarios_are_drawn() -> None:
    """At 36 s an iteration, 20 hours of "high" have 40 failures, standard deviation 6."""
    plan = plan_from_flags(rates=[scenario_rate("high", 36.0)], iteration_seconds=36.0)
    drawn = plan.schedule(num_slots=16, num_stages=4)
    assert 15 < sum(len(drawn.specs_at(i)) for i in range(1, 2001)) < 65


def test_a_scenario_needs_the_time_of_an_iteration() -> None:
    with pytest.raises(FaultSpecError, match="give --ft-iteration-seconds"):
        scenario_rate("high", None)
    with pytest.raises(FaultSpecError, match="0 or more"):
        parse_rate("degrade:-1/job-h")


# -- choices ---------------------------------------------------------------------------------------

LAYERS = (range(1, 4), range(4, 7), range(7, 10))
COST = LayerCost(kept=0.5, again=0.1, attention=0.25)
KEPT = LayerActivations(normal=10, input_only=1, ffn_kept=4, attention=5, again=6)


def choices(**options: float | None) -> Choices:
    return Choices(MecefoOptions(enabled=True, **options), LAYERS, COST, KEPT, microbatches=4)


def test_without_a_budget_all_attention_is_skipped() -> None:
    nodes = {Node(1, (0, 1)), Node(2, (1, 2))}
    found = choices()
    assert found.of((0, 1)).exact == frozenset()
    assert found.skipping(0, nodes) == dict.fromkeys(range(1, 4), frozenset({1}))
    assert found.skipping(1, nodes) == dict.fromkeys(range(4, 7), frozenset({1, 2}))


def test_a_budget_goes_to_the_topmost_layers() -> None:
    # Six layers at 0.5 take 1.0 of a stage; what is left of 1.2 is 2 exact ones.
    found = choices(budget=1.2, memory=2.0)
    assert found.of((0, 1)).exact == {5, 6}
    skipping = found.skipping(1, {Node(0, (0, 1))})
    assert skipping == {4: frozenset({0}), 5: frozenset(), 6: frozenset()}
    assert found.of((0,)).exact == {2, 3}, "a lone stage is the upper one of two"


def test_all_processes_choose_alike() -> None:
    one, other = choices(budget=1.1, memory=0.6), choices(budget=1.1, memory=0.6)
    other.of((1, 2))
    assert [one.of(pair) for pair in ((0, 1), (1, 2))] == [
        other.of(pair) for pair in ((0, 1), (1, 2))
    ]


# -- quotas ----------------------------------------------------------------------------------------

speeds = st.dictionaries(st.integers(0, 7), st.floats(0.1, 10.0), min_size=1, max_size=4)


@settings(deadline=None)
@given(speeds, st.integers(0, 12), st.integers(0, 3))
def test_the_last_to_finish_is_as_early_as_can_be(
    seconds: dict[int, float], num: int, fill: int
) -> None:
    quotas = deal_by_speed(num, seconds, fill=fill)
    replicas = sorted(seconds)
    assert sorted(quotas) == replicas and sum(quotas.values()) == num
    if num < len(replicas):
        assert max(quotas.values()) <= 1
        return
    assert min(quotas.values()) >= 1

    def end(counts: tuple[int, ...]) -> float:
        return max((n + fill) * seconds[r] for n, r in zip(counts, replicas, strict=True))

    rest = num - len(replicas)
    every = (
        counts
        for counts in itertools.product(range(1, rest + 2), repeat=len(replicas))
        if sum(counts) == num
    )
    assert end(tuple(quotas[r] for r in replicas)) <= min(map(end, every)) * (1 + 1e-12)
    for a, b in itertools.permutations(replicas, 2):
        if seconds[a] > seconds[b]:
            assert quotas[a] <= quotas[b], "a slower replica never gets more"


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(0, 60), st.floats(0.1, 9.0))
def test_equal_speeds_are_the_even_deal(replicas: int, num: int, seconds: float) -> None:
    quotas = deal_by_speed(num, dict.fromkeys(range(replicas), seconds), fill=2)
    assert list(quotas.values()) == [len(range(r, num, replicas)) for r in range(replicas)]


@pytest.mark.parametrize("seconds", [{}, {0: 0.0}, {0: 1.0, 1: math.nan}])
def test_times_must_be_positive(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        deal_by_speed(4, seconds)


def test_quotas_only_where_somebody_is_degraded_and_speeds_are_known() -> None:
    speeds = Speeds(num_stages=2)
    assert speeds.measured(1.0, 4) == 0.2
    assert speeds.quotas(8, [0, 1], {1}) is None
    for _ in range(REMEMBERED):
        speeds.observe({0: 1.0, 1: 2.0})
    speeds.observe({0: 50.0, 1: 0.0})  # one step that was disturbed; replica 1 computed nothing
    assert speeds.quotas(8, [0, 1], ()) is None
    assert speeds.quotas(8, [0, 1], {3}) is None
    assert speeds.quotas(8, [0, 1], {1}) == {0: 6, 1: 2}
    assert speeds.quotas(8, [0, 1, 2], {1}) is None, "nothing is known of replica 2"
    speeds.forget()
    assert speeds.quotas(8, [0, 1], {1}) is None


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_uneven_quotas_and_a_death_still_count_every_microbatch(
    replicas: int, per_replica: int, data: st.DataObject
) -> None:
    seconds = {r: data.draw(st.floats(0.1, 10.0)) for r in range(replicas)}
    workload = PolicyWorkload(replicas, per_replica, "balanced", "exact")
    live = list(range(replicas))
    quotas = deal_by_speed(replicas * per_replica, seconds)
    workload.begin(live, quotas=quotas)
    assert workload.quotas() == [quotas[r] for r in live]
    if replicas > 1:
        dead = data.draw(st.sampled_from(live))
        workload.after_failure([r for r in live if r != dead])
        assert dead not in workload.contributed()
    assert sum(workload.contributed().values()) == replicas * per_replica
    assert workload.commit() == tuple(range(replicas * per_replica))
