"""Which samples a step consumes, and that each microbatch counts exactly once."""

from __future__ import annotations

import hashlib
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.ledger import Ledger, deal, default_ids, samples_digest

QUICK = settings(deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=200)


def make(data: int = 3, per_replica: int = 4, micro_batch_size: int = 2) -> Ledger:
    return Ledger(
        data=data, microbatches_per_replica=per_replica, micro_batch_size=micro_batch_size
    )


def test_a_fault_free_step_consumes_what_megatrons_sampler_gives() -> None:
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    ledger = make()
    per_step = ledger.num_microbatches * ledger.micro_batch_size
    samplers = [
        iter(
            MegatronPretrainingSampler(
                total_samples=3 * per_step,
                consumed_samples=0,
                micro_batch_size=ledger.micro_batch_size,
                data_parallel_rank=replica,
                data_parallel_size=ledger.data,
            )
        )
        for replica in range(ledger.data)
    ]
    for step in range(3):
        quotas = ledger.begin(step, range(ledger.data))
        for replica, sampler in enumerate(samplers):
            for microbatch in quotas[replica]:
                assert list(ledger.samples(microbatch)) == next(sampler)
        ledger.commit()
    assert all(next(sampler, None) is None for sampler in samplers)


def test_quotas_with_all_replicas_are_the_default_ids() -> None:
    quotas = make().begin(0, [2, 0, 1])
    assert quotas == {0: (0, 3, 6, 9), 1: (1, 4, 7, 10), 2: (2, 5, 8, 11)}
    assert quotas[1] == default_ids(1, data=3, num_microbatches=12)


def test_a_lost_replicas_ids_are_computed_by_the_others() -> None:
    ledger = make()
    ledger.begin(0, range(3))
    assert ledger.fail([1]) == (1, 4, 7, 10)
    assert ledger.redistribute([0, 2]) == {0: (1, 7), 2: (4, 10)}
    assert ledger.contributed == {0: (0, 3, 6, 9), 2: (2, 5, 8, 11)}
    # The second failure takes what was contributed in both attempts.
    assert ledger.fail([2]) == (2, 4, 5, 8, 10, 11)
    assert ledger.redistribute([0]) == {0: (2, 4, 5, 8, 10, 11)}
    assert ledger.recomputed == 10
    assert ledger.commit() == tuple(range(12))


def test_a_refilled_replica_starts_empty_and_shares_the_work() -> None:
    ledger = make()
    ledger.begin(0, range(3))
    ledger.fail([1])
    assert ledger.redistribute(range(3)) == {0: (1, 10), 1: (4,), 2: (7,)}
    assert ledger.contributed[1] == ()
    ledger.commit()


def test_an_interrupted_survivor_keeps_what_it_contributed_and_owes_the_rest() -> None:
    ledger = make(data=3, per_replica=2)
    ledger.begin(0, range(3))
    ledger.fail([2])
    ledger.redistribute([0, 1])
    assert ledger.outstanding == {0: (2,), 1: (5,)}
    assert ledger.fail([], unfinished=[1]) == ()
    assert ledger.contributed == {0: (0, 3, 2), 1: (1, 4)}
    assert ledger.redistribute([0, 1]) == {0: (), 1: (5,)}
    assert ledger.commit() == tuple(range(6))


def test_samples_follow_from_step_to_step() -> None:
    ledger = make()
    ledger.begin(7, range(3), consumed_samples=100)
    assert ledger.samples(0) == range(100, 102)
    assert ledger.samples(11) == range(122, 124)
    ledger.commit()
    ledger.begin(8, [0])
    assert ledger.samples(0) == range(124, 126)


def test_commit_finds_a_missing_microbatch() -> None:
    ledger = make()
    ledger.begin(0, range(3))
    ledger.fail([1])
    ledger.assign({0: (1, 7), 2: (4,)}, [0, 2])
    with pytest.raises(AssertionError, match=r"microbatches \[10\] are missing"):
        ledger.commit()
    with pytest.raises(AssertionError, match="11 microbatches instead of 12"):
        ledger.commit("count")
    ledger.commit("none")


def test_commit_finds_a_microbatch_that_counts_twice() -> None:
    ledger = make()
    ledger.begin(0, range(3))
    ledger.credit(0, [5])
    for invariant in ("exact", "count", "none"):
        with pytest.raises(AssertionError, match="counts twice"):
            ledger.commit(invariant)  # type: ignore[arg-type]


def test_a_replica_cannot_vanish_or_a_step_be_opened_twice() -> None:
    ledger = make()
    ledger.begin(0, range(3))
    with pytest.raises(AssertionError, match="still open"):
        ledger.begin(1, range(3))
    ledger.fail([1])
    with pytest.raises(AssertionError, match=r"replicas \[2\] are not live"):
        ledger.redistribute([0])


def test_the_digest_names_a_set_of_samples() -> None:
    expected = hashlib.sha256(b"1,2,10").hexdigest()[:16]
    assert samples_digest([10, 1, 2]) == samples_digest(iter((2, 10, 1))) == expected
    assert samples_digest([1, 2]) != samples_digest([12])
    assert samples_digest([1, 1]) != samples_digest([1])


@QUICK
@given(
    ids=st.lists(st.integers(0, 99), unique=True),
    takers=st.lists(st.integers(0, 9), unique=True, min_size=1),
)
def test_an_even_deal(ids: list[int], takers: list[int]) -> None:
    dealt = deal(ids, takers)
    sizes = [len(dealt[taker]) for taker in takers]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert sorted(m for given_ids in dealt.values() for m in given_ids) == sorted(ids)


def test_a_deal_respects_the_room() -> None:
    assert deal(range(6), [4, 5, 6], {4: 3, 5: 1, 6: 2}) == {4: (0, 3, 5), 5: (1,), 6: (2, 4)}
    with pytest.raises(AssertionError, match="more ids than room"):
        deal(range(3), [0, 1], {0: 1, 1: 1})


@QUICK
@given(
    data=st.integers(1, 5), per_replica=st.integers(1, 4), micro=st.integers(1, 3), draw=st.data()
)
def test_every_step_counts_every_microbatch_once(
    data: int, per_replica: int, micro: int, draw: st.DataObject
) -> None:
    ledger = make(data, per_replica, micro)
    live = set(range(data))
    for step in range(draw.draw(st.integers(1, 3))):
        quotas = ledger.begin(step, live)
        # What each replica's gradient holds, kept without the ledger.
        gradient = {replica: list(quotas[replica]) for replica in live}
        while draw.draw(st.booleans()):
            lost = draw.draw(st.sets(st.sampled_from(sorted(live))))
            back = draw.draw(st.sets(st.sampled_from(range(data))))
            survivors = live - lost
            live = survivors | back or {min(lost)}
            void = sorted(m for replica in lost for m in gradient[replica])
            assert ledger.fail(lost) == tuple(void)
            ledger = Ledger.from_bytes(ledger.to_bytes())
            quotas = ledger.redistribute(live)
            assert quotas.keys() == live
            gradient = {r: gradient[r] if r in survivors else [] for r in live}
            for replica in live:
                gradient[replica] += quotas[replica]
            sizes = [len(quotas[replica]) for replica in live]
            assert max(sizes) - min(sizes) <= 1
        expected = list(range(data * per_replica))
        assert sorted(m for ids in gradient.values() for m in ids) == expected
        samples = [i for ids in gradient.values() for m in ids for i in ledger.samples(m)]
        first = step * len(expected) * micro
        digest = samples_digest(range(first, first + len(expected) * micro))
        assert samples_digest(samples) == digest
        assert ledger.commit() == tuple(expected)


def test_the_accounts_survive_the_way_to_a_joiner() -> None:
    ledger = make()
    ledger.begin(5, range(3), consumed_samples=48)
    ledger.fail([0])
    ledger.redistribute([1, 2])
    assert Ledger.from_bytes(ledger.to_bytes()) == ledger
