"""The convergence studies: which stage is lost when."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys

import pytest
from harness import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(ROOT / "tools"))

from studies import failures
from studies.failures import Loss, Outage, Start

from megatron_ft.arguments import add_ft_flags
from megatron_ft.faults.plan import plan_of
from megatron_ft.faults.spec import parse


def test_the_draws_are_those_of_the_flag() -> None:
    """`--ft-stage-failure-rate-per-hour` would lose the same stages in the same iterations."""
    parser = argparse.ArgumentParser()
    add_ft_flags(parser)
    words = "--ft-stage-failure-rate-per-hour 0.16 --ft-iteration-seconds 91.3 --ft-fault-seed 7"
    schedule = plan_of(parser.parse_args(words.split())).schedule(num_slots=4, num_stages=4)
    expected = [(i, spec.stage) for i in range(1, 401) for spec in schedule.specs_at(i)]
    drawn = failures.draw(0.16, seed=7, iterations=400, num_stages=4)
    assert [(loss.iteration, loss.stage) for loss in drawn] == expected and expected
    assert drawn != failures.draw(0.16, seed=8, iterations=400, num_stages=4)


def test_more_per_hour_adds_losses_and_their_number_is_as_expected() -> None:
    few, many = (
        failures.draw(rate, seed=3, iterations=8_000, num_stages=4) for rate in (0.05, 0.16)
    )
    assert set(few) < set(many)
    expected = failures.expected(0.16, iterations=8_000, stages=4)
    # p = 1 - 0.84^(91.3/3600) = 0.00441.
    assert expected == pytest.approx(32_000 * 0.004412, rel=1e-3)
    assert abs(len(many) - expected) < 4 * math.sqrt(expected)


def test_what_checkfree_plus_cannot_lose_is_left_out() -> None:
    losses = [Loss(3, 0), Loss(3, 1), Loss(4, 1), Loss(5, 2), Loss(5, 3), Loss(6, 0), Loss(6, 3)]
    kept, left_out = failures.survivable(losses, 4)
    assert left_out == (Loss(3, 1), Loss(5, 3))
    assert sorted((*kept, *left_out)) == losses


def test_replicas_die_once_and_one_is_spared() -> None:
    losses = [Loss(2, 1), Loss(5, 1), Loss(6, 0), Loss(7, 3), Loss(8, 2)]
    assert failures.shrinking(losses, 4) == (Loss(2, 1), Loss(6, 0), Loss(7, 3))


def test_a_run_with_checkpoints() -> None:
    """Ten iterations, a checkpoint every four; the 6th, 9th and 11th attempt fail."""
    losses = [Loss(6, 1), Loss(9, 0), Loss(9, 2), Loss(11, 3)]
    plan = failures.starts(losses, drawn=100, iterations=10, save_interval=4)
    # Attempts 1-6 do 1-5 and die in 6; 7-9 do 5, 6 and die in 7; 10-11 do 5 and die in 6.
    assert plan == (Start(0, 6, 1), Start(4, 7, 0), Start(4, 6, 3), Start(4, None))
    assert [start.steps(10) for start in plan] == [5, 2, 1, 6]
    assert [failures.attempts_until(plan, i) for i in (1, 5, 6, 7, 10)] == [1, 5, 8, 14, 17]
    with pytest.raises(ValueError, match="drawn"):
        failures.starts(losses, drawn=16, iterations=10, save_interval=4)


@settings(deadline=None)
@given(
    st.sets(st.integers(1, 400), max_size=30),
    st.integers(1, 60),
    st.integers(1, 20),
)
def test_checkpoints_play_out_as_step_by_step(
    attempts: set[int], iterations: int, save_interval: int
) -> None:
    losses = [Loss(attempt, 0) for attempt in sorted(attempts)]
    plan = failures.starts(losses, drawn=10_000, iterations=iterations, save_interval=save_interval)
    at = attempt = 0
    first: dict[int, int] = {}
    while at < iterations:
        attempt += 1
        if attempt in attempts:
            at = at // save_interval * save_interval
        else:
            at += 1
            first.setdefault(at, attempt)
    assert {i: failures.attempts_until(plan, i) for i in first} == first
    assert len(plan) == 1 + sum(a <= attempt for a in attempts)


@settings(deadline=None)
@given(st.integers(0, 50), st.sampled_from(failures.SCENARIOS))
def test_outages_leave_a_neighbour_and_an_exact_replica(
    seed: int, scenario: failures.Scenario
) -> None:
    pipeline, data, iterations = 2, 4, 300
    found = failures.outages(
        scenario,
        seed=seed,
        iterations=iterations,
        pipeline=pipeline,
        data=data,
        iterations_per_hour=10,
        cluster_nodes=8,
    )
    for iteration in range(1, iterations + 1):
        out = [o.slot for o in found if o.iteration <= iteration < o.iteration + o.duration]
        assert len(out) == len(set(out)) and len({slot % data for slot in out}) < data
        assert all(slot + data not in out for slot in out), "both stages of a replica"
    for outage, fault in zip(found, failures.degrades(found), strict=True):
        spec = parse(fault)
        assert (spec.iteration, spec.slot, spec.duration) == dataclasses.astuple(outage)
        assert outage.iteration + outage.duration <= iterations + 1


def test_scenarios_come_as_often_as_they_say() -> None:
    count = {
        scenario.name: sum(
            len(
                failures.outages(
                    scenario,
                    seed=seed,
                    iterations=4000,
                    pipeline=2,
                    data=4,
                    iterations_per_hour=10,
                    cluster_nodes=32,
                )
            )
            for seed in range(5)
        )
        for scenario in failures.SCENARIOS
    }
    # 2,000 hours, a quarter of the cluster's nodes; some find nobody to strike.
    assert count["low"] == pytest.approx(250, rel=0.2)
    assert count["low"] < count["mid"] < count["high"] <= 1100


def test_outages_of_slots_that_are_out_are_left_out() -> None:
    losses = [Loss(1, 0), Loss(2, 2), Loss(3, 1), Loss(6, 2)]
    found = failures.outages_of(losses, 4, iterations=8, pipeline=2, data=2)
    # Slot 2 is the neighbour of slot 0; slot 1 belongs to the only other replica.
    assert found == (Outage(1, 0, 4), Outage(6, 2, 3))
    assert failures.degraded_share(found, iterations=8, slots=4) == 7 / 32
