"""ReCoVer's policy: the paper's numbers, and that every step counts exactly B microbatches."""

from __future__ import annotations

import os
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.ledger import deal, default_ids
from megatron_ft.recover.policy import (
    Layout,
    Policy,
    Replay,
    Role,
    StepPlan,
    boundary,
    plan_step,
    versatile_layout,
)
from megatron_ft.recover.policy_workload import PolicyWorkload

QUICK = settings(deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=250)


@pytest.mark.parametrize(
    ("replicas", "per_replica", "live", "g", "majors", "minor", "spares"),
    [
        (64, 128, 63, 131, 62, 70, (0, 0)),
        (64, 128, 48, 171, 47, 155, (0, 0)),
        (64, 128, 32, 256, 32, 0, (0, 0)),
        (64, 2, 63, 3, 42, 2, (16, 4)),
        (16, 4, 15, 5, 12, 4, (1, 1)),
        (8, 4, 7, 5, 6, 2, (0, 0)),
        (64, 128, 64, 128, 64, 0, (0, 0)),
    ],
)
def test_the_papers_layouts(
    replicas: int,
    per_replica: int,
    live: int,
    g: int,
    majors: int,
    minor: int,
    spares: tuple[int, int],
) -> None:
    assert versatile_layout(replicas * per_replica, live) == Layout(
        per_major=g,
        num_majors=majors,
        per_minor=minor,
        num_major_spares=spares[0],
        num_minor_spares=spares[1],
    )


def test_the_papers_boundary_step() -> None:
    plan = plan_step(num_replicas=64, microbatches_per_replica=128, live=range(64))
    live = [r for r in range(64) if r != 7]
    result = plan.fail([7], live)
    assert boundary(8064, 63, 8192) == (3, 61)
    assert [len(result.extra[r]) for r in live] == [3] * 2 + [2] * 61
    assert result.needs_recompute and not result.promotions and not result.forget
    assert sorted(m for ids in result.extra.values() for m in ids) == list(range(7, 8192, 64))
    assert result.plan.counted == tuple(range(8192))


@QUICK
@given(total=st.integers(1, 200), live=st.integers(1, 20), draw=st.data())
def test_a_boundary_is_an_even_deal(total: int, live: int, draw: st.DataObject) -> None:
    counted = draw.draw(st.integers(0, total - 1))
    s, z = boundary(counted, live, total)
    assert s >= 1 and counted + live * s >= total > counted + live * (s - 1)
    dealt = deal(range(total - counted), range(live))
    assert [len(dealt[r]) for r in range(live)] == [s] * (live - z) + [s - 1] * z


@QUICK
@given(total=st.integers(1, 300), draw=st.data())
def test_a_layout_adds_up(total: int, draw: st.DataObject) -> None:
    live = draw.draw(st.integers(1, total))
    layout = versatile_layout(total, live)
    assert layout.num_majors * layout.per_major + layout.per_minor == total
    assert layout.per_minor < layout.per_major
    assert live * layout.per_major >= total > live * (layout.per_major - 1)
    spares = layout.num_major_spares + layout.num_minor_spares
    assert layout.num_majors + (layout.per_minor > 0) + spares == live
    if layout.per_minor == 0:
        assert layout.num_minor_spares == 0
    elif spares:
        assert layout.num_major_spares == max(1, int(0.8 * spares))


@pytest.mark.parametrize("policy", get_args(Policy))
@pytest.mark.parametrize("replay", get_args(Replay))
def test_with_all_replicas_the_step_is_the_fault_free_one(policy: Policy, replay: Replay) -> None:
    for replicas, per_replica in ((1, 1), (4, 3), (7, 5), (64, 2)):
        plan = plan_step(
            num_replicas=replicas,
            microbatches_per_replica=per_replica,
            live=range(replicas),
            policy=policy,
            replay=replay,
        )
        for r in range(replicas):
            ids = default_ids(r, data=replicas, num_microbatches=replicas * per_replica)
            share = plan.shares[r]
            assert (share.role, share.computes, share.counts) == (Role.MAJOR, ids, ids)


# Fifteen of sixteen live, G = 4: majors 0..11, a major-spare 12, the minor 13, a minor-spare 14.
FIFTEEN = tuple(range(15))


def fifteen(replay: Replay = "exact") -> StepPlan:
    return plan_step(num_replicas=16, microbatches_per_replica=4, live=FIFTEEN, replay=replay)


def without(*dead: int) -> list[int]:
    return [r for r in FIFTEEN if r not in dead]


def test_the_order_of_roles_and_who_mirrors_whom() -> None:
    shares = fifteen().shares
    roles = [Role.MAJOR] * 12 + [Role.MAJOR_SPARE, Role.MINOR, Role.MINOR_SPARE]
    assert [shares[r].role for r in FIFTEEN] == roles
    assert [len(shares[r].computes) for r in FIFTEEN] == [5] * 13 + [4, 4]
    assert (shares[12].mirrors, shares[12].counts) == (0, ())
    assert shares[12].computes == shares[0].computes
    assert (shares[14].mirrors, shares[14].computes) == (13, shares[13].computes)


def test_a_spare_stands_in_for_the_major_it_mirrors() -> None:
    result = fifteen().fail([0], without(0))
    assert result.promotions == {12: 0}
    assert not result.needs_recompute and not result.forget
    assert result.plan.shares[12].role is Role.MAJOR
    assert result.plan.counted == tuple(range(64))


def test_exact_replay_does_not_promote_a_spare_for_what_it_did_not_mirror() -> None:
    result = fifteen().fail([1], without(1))
    assert not result.promotions and result.needs_recompute
    missing = fifteen().shares[1].counts
    assert sorted(m for ids in result.extra.values() for m in ids) == sorted(missing)
    assert result.plan.counted == tuple(range(64))


def test_exchangeable_replay_promotes_any_spare_of_the_right_role() -> None:
    plan = fifteen("exchangeable")
    assert min(plan.shares[12].computes) >= 64
    assert set(plan.shares[12].computes).isdisjoint(plan.shares[14].computes)
    result = plan.fail([1], without(1))
    assert result.promotions == {12: 1} and not result.needs_recompute
    assert len(result.plan.counted) == 64
    assert set(result.plan.counted) - set(range(64)) == set(plan.shares[12].computes)


def test_after_an_exchange_only_what_is_missing_is_computed() -> None:
    first = fifteen("exchangeable").fail([1], without(1))
    second = first.plan.fail([2], without(1, 2))
    assert sum(map(len, second.extra.values())) == 5
    assert len(second.plan.counted) == 64


def test_a_spare_that_dies_too_needs_no_replacement() -> None:
    result = fifteen().fail([0, 14], without(0, 14))
    assert result.promotions == {12: 0} and not result.needs_recompute


def test_each_spare_mirrors_another_major() -> None:
    plan = plan_step(num_replicas=64, microbatches_per_replica=2, live=range(1, 64))
    spares = [share for share in plan.shares.values() if share.role is Role.MAJOR_SPARE]
    assert [share.mirrors for share in spares] == list(range(1, 17))


def test_a_major_and_the_minor_are_both_replaced() -> None:
    for replay in get_args(Replay):
        result = fifteen(replay).fail([0, 13], without(0, 13))
        assert result.promotions == {12: 0, 14: 13}
        assert not result.needs_recompute and len(result.plan.counted) == 64


def test_no_one_is_promoted_unless_all_the_lost_are_covered() -> None:
    for replay in get_args(Replay):
        result = fifteen(replay).fail([0, 1], without(0, 1))
        assert not result.promotions and result.needs_recompute
        assert result.plan.counted == tuple(range(64))


def test_the_minor_is_not_replaced_by_a_major_spare() -> None:
    for replay in get_args(Replay):
        first = fifteen(replay).fail([14], without(14))
        assert not first.needs_recompute and not first.promotions
        second = first.plan.fail([13], without(13, 14))
        assert not second.promotions and second.needs_recompute
        assert second.plan.counted == tuple(range(64))


def test_a_spare_that_takes_on_extra_microbatches_forgets_what_it_mirrored() -> None:
    result = fifteen().fail([1, 2, 3], without(1, 2, 3))
    assert len(result.extra[12]) == 1
    assert result.forget == {12, 14}
    share = result.plan.shares[12]
    assert share.role is Role.MAJOR and share.computes == share.counts == result.extra[12]
    # From then on it is a contributor as any other.
    again = result.plan.fail([12], without(1, 2, 3, 12))
    assert sorted(m for ids in again.extra.values() for m in ids) == sorted(result.extra[12])
    assert again.plan.counted == tuple(range(64))


def test_after_a_boundary_a_spare_is_not_worth_a_major() -> None:
    # One extra microbatch each for the first five; the spare is not among them.
    first = fifteen("exchangeable").fail([4, 5], without(4, 5))
    plan = first.plan
    assert len(plan.shares[0].counts) == 6 and not first.promotions
    second = plan.fail([0], without(0, 4, 5))
    assert not second.promotions and len(second.plan.counted) == 64


def test_a_replica_that_comes_back_and_is_not_needed_is_idle() -> None:
    result = fifteen().fail([0], FIFTEEN)
    assert result.promotions == {12: 0}
    assert result.plan.shares[0].role is Role.IDLE
    assert result.forget == {0}
    again = result.plan.fail([5], without(5))
    assert len(again.extra[0]) == 1 and again.plan.shares[0].role is Role.MAJOR


def test_the_balanced_policy_has_no_spares() -> None:
    plan = plan_step(num_replicas=64, microbatches_per_replica=2, live=range(63), policy="balanced")
    assert {share.role for share in plan.shares.values()} == {Role.MAJOR}
    assert sorted({len(share.counts) for share in plan.shares.values()}) == [2, 3]
    assert plan.counted == tuple(range(128))


def test_the_adaptive_policy_shrinks_the_batch() -> None:
    plan = plan_step(num_replicas=4, microbatches_per_replica=3, live=range(4), policy="adaptive")
    result = plan.fail([1], [0, 2, 3])
    assert not result.needs_recompute
    assert result.plan.counted == tuple(m for m in range(12) if m % 4 != 1)
    back = result.plan.fail([2], [0, 1, 2, 3])
    assert back.extra == {0: (), 1: (1, 5, 9), 2: (2, 6, 10), 3: ()}


def test_more_than_b_is_impossible() -> None:
    plan = fifteen()
    share = plan.shares[0]
    doubled = {**plan.shares, 1: share, 14: share}
    broken = StepPlan(
        num_replicas=16,
        microbatches_per_replica=4,
        policy="versatile",
        replay="exact",
        shares=doubled,
    )
    with pytest.raises(AssertionError, match="69 microbatches count"):
        broken.fail([], FIFTEEN)


@QUICK
@given(
    replicas=st.integers(1, 12),
    per_replica=st.integers(1, 5),
    policy=st.sampled_from(get_args(Policy)),
    replay=st.sampled_from(get_args(Replay)),
    draw=st.data(),
)
def test_every_step_counts_exactly_b(
    replicas: int, per_replica: int, policy: Policy, replay: Replay, draw: st.DataObject
) -> None:
    workload = PolicyWorkload(replicas, per_replica, policy, replay)
    total = replicas * per_replica
    live = draw.draw(st.sets(st.sampled_from(range(replicas)), min_size=1))
    for step in range(draw.draw(st.integers(1, 3))):
        workload.begin(live, step)
        # What each replica's gradients hold, kept by the transaction's rules alone.
        gradients: dict[int, list[int]] = {r: [] for r in live}
        while True:
            for r in live:
                if workload.forgets(r):
                    gradients[r] = []
                gradients[r] += workload.to_compute(r)
            assert workload.quotas() == [len(gradients.get(r, [])) for r in range(replicas)]
            if not draw.draw(st.booleans()):
                break
            dead = draw.draw(st.sets(st.sampled_from(sorted(live)), max_size=len(live) - 1))
            forfeited = draw.draw(st.sets(st.sampled_from(sorted(live - dead))))
            back = draw.draw(st.sets(st.sampled_from(range(replicas)), max_size=2))
            live = (live - dead) | back
            gradients = {r: gradients.get(r, []) if r not in dead else [] for r in live}
            workload.after_failure(live, forfeited | (back & dead))
            workload = PolicyWorkload.from_bytes(workload.to_bytes())
            for r in forfeited | (back & dead):
                assert workload.forgets(r)
        counted = sorted(m for r in live if workload.counts(r) for m in gradients[r])
        assert len(set(counted)) == len(counted)
        if policy == "adaptive":
            own = [m for r in live for m in default_ids(r, data=replicas, num_microbatches=total)]
            assert counted == sorted(own)
        elif replay == "exact" or policy == "balanced":
            assert counted == list(range(total))
        else:
            assert len(counted) == total
        assert workload.commit() == tuple(counted)


def test_a_promoted_spare_contributes_and_a_spare_does_not() -> None:
    workload = PolicyWorkload(16, 4)
    workload.begin(FIFTEEN)
    assert [r for r in FIFTEEN if not workload.counts(r)] == [12, 14]
    assert workload.to_compute(15) == () and not workload.counts(15)
    assert workload.roles()[12:] == [Role.MAJOR_SPARE, Role.MINOR, Role.MINOR_SPARE, None]
    workload.after_failure(without(0))
    assert workload.counts(12) and not any(map(workload.to_compute, range(16)))
    assert workload.commit() == tuple(range(64))
