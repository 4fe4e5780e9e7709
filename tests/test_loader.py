"""The ledger's iterator against Megatron's own sampler, and what only it can do."""

import gc
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import Split
from megatron.core.rerun_state_machine import (
    RerunDataIterator,
    destroy_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tokenizers import MegatronTokenizer
from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
from torch.utils.data import DataLoader, Dataset

from megatron_ft.data.build import build_pairs
from megatron_ft.data.corpus import FileCorpus
from megatron_ft.data.loader import LedgerIterator
from megatron_ft.data.tokenizer import ByteTokenizer
from megatron_ft.ledger import default_ids


class Numbers(Dataset):
    """Sample i is the number i; knows which samples were read by which thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads: list[int] = []
        self.threads: set[int] = set()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        self.reads.append(index)
        self.threads.add(threading.get_ident())
        return {"number": torch.tensor(index)}


def numbers(batch: dict[str, torch.Tensor]) -> list[int]:
    return batch["number"].tolist()


def ledger(dataset: Any, **options: Any) -> LedgerIterator:
    sizes = {"micro_batch_size": 1, "global_microbatches": 4, "dp_rank": 0, "dp_size": 2}
    return LedgerIterator(dataset=dataset, **(sizes | options))


def megatron_loader(
    dataset: Any, *, micro_batch_size: int, dp_rank: int, dp_size: int, consumed_samples: int
) -> DataLoader[Any]:
    """Megatron's single loader, as build_pretraining_data_loader makes it."""
    sampler = MegatronPretrainingSampler(
        total_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=micro_batch_size,
        data_parallel_rank=dp_rank,
        data_parallel_size=dp_size,
    )
    return DataLoader(dataset, batch_sampler=sampler)


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


TOPOLOGIES = {
    "micro_batch_size": st.integers(1, 4),
    "per_replica": st.integers(1, 4),
    "dp_size": st.integers(1, 5),
    "size": st.integers(1, 90),
    "consumed": st.integers(0, 89),
    "prefetch": st.integers(0, 3),
}


@settings(max_examples=150, deadline=None)
@given(**TOPOLOGIES)
def test_order_and_end_are_megatrons(
    micro_batch_size: int, per_replica: int, dp_size: int, size: int, consumed: int, prefetch: int
) -> None:
    dataset, consumed = Numbers(size), consumed % size
    for dp_rank in range(dp_size):
        topology = {
            "micro_batch_size": micro_batch_size,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "consumed_samples": consumed,
        }
        iterator = ledger(
            dataset, global_microbatches=dp_size * per_replica, prefetch=prefetch, **topology
        )
        theirs = [numbers(batch) for batch in megatron_loader(dataset, **topology)]
        ours = [numbers(batch) for batch in iterator]
        assert ours == theirs
        with pytest.raises(StopIteration):
            next(iterator)
        iterator.close()


@settings(max_examples=60, deadline=None)
@given(**TOPOLOGIES)
def test_resume_in_the_middle(
    micro_batch_size: int, per_replica: int, dp_size: int, size: int, consumed: int, prefetch: int
) -> None:
    """A new iterator, a rewound one and the sampler agree from any step on."""
    step_samples = micro_batch_size * per_replica * dp_size
    dataset, consumed = Numbers(size + 3 * step_samples), consumed % size
    for dp_rank in range(dp_size):
        topology = {"micro_batch_size": micro_batch_size, "dp_rank": dp_rank, "dp_size": dp_size}
        options = {"global_microbatches": dp_size * per_replica, "prefetch": prefetch, **topology}
        running = ledger(dataset, **options)
        rewound = ledger(dataset, **options)
        for _ in range(per_replica):
            next(running), next(rewound)
        running.begin_step(consumed)
        rewound.begin_step(consumed + step_samples)
        next(rewound)
        rewound.begin_step(consumed)
        fresh = ledger(dataset, consumed_samples=consumed, **options)
        theirs = iter(megatron_loader(dataset, consumed_samples=consumed, **topology))
        for _ in range(2 * per_replica):
            expected = numbers(next(theirs))
            assert [numbers(next(it)) for it in (running, rewound, fresh)] == [expected] * 3
        assert fresh.base == consumed + step_samples


def test_evaluation_with_its_own_batch_sizes() -> None:
    """Evaluations take turns with steps of training; each goes on where its last one ended."""
    eval_iters, eval_global, eval_micro, dp_size = 3, 12, 2, 3
    dataset = Numbers(200)
    topology = {"dp_rank": 1, "dp_size": dp_size}
    valid = ledger(
        dataset,
        kind="valid",
        micro_batch_size=eval_micro,
        global_microbatches=eval_global // eval_micro,
        consumed_samples=2 * eval_global,
        **topology,
    )
    initialize_rerun_state_machine()
    iterator = RerunDataIterator(valid)  # as Megatron wraps it
    consumed = 2 * eval_global
    for _ in range(2):
        for _ in range(eval_iters):
            microbatches = [
                numbers(next(iterator)) for _ in range(eval_global // (eval_micro * dp_size))
            ]
            expected = megatron_loader(
                dataset, micro_batch_size=eval_micro, consumed_samples=consumed, **topology
            )
            assert microbatches == [numbers(batch) for batch in itertools.islice(expected, 2)]
            assert valid.drain() == list(itertools.chain.from_iterable(microbatches))
            consumed += eval_global
    destroy_rerun_state_machine()


@pytest.fixture(scope="module")
def gpt_dataset(tmp_path_factory: pytest.TempPathFactory) -> GPTDataset:
    folder = tmp_path_factory.mktemp("loader")
    for number in range(30):
        (folder / f"{number}.txt").write_text(f"text {number} " * (5 + number))
    summary = build_pairs(FileCorpus([folder]), ByteTokenizer(), folder / "pair", append_eod=True)
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=257
    )
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=32,
        split="1,0,0",
        blend=([str(summary.prefixes[0])], None),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    low_level = IndexedDataset(str(summary.prefixes[0]))
    indices = torch.arange(len(low_level)).numpy()
    return GPTDataset(low_level, str(summary.prefixes[0]), indices, 60, Split.train, config)


def test_gpt_dataset_batches_are_megatrons(gpt_dataset: GPTDataset) -> None:
    topology = {"micro_batch_size": 3, "dp_rank": 1, "dp_size": 2, "consumed_samples": 12}
    iterator = ledger(gpt_dataset, global_microbatches=4, **topology)
    theirs = list(megatron_loader(gpt_dataset, **topology))
    ours = list(iterator)
    assert len(ours) == len(theirs) > 5
    for our, their in zip(ours, theirs, strict=True):
        assert list(our) == list(their)
        for key in our:
            assert our[key].dtype == their[key].dtype and torch.equal(our[key], their[key])


@pytest.mark.parametrize("prefetch", [0, 1, 5])
def test_assigned_ids(prefetch: int) -> None:
    iterator = ledger(Numbers(1000), micro_batch_size=2, global_microbatches=6, prefetch=prefetch)
    iterator.begin_step(120)
    assert [numbers(next(iterator)) for _ in range(2)] == [[120, 121], [124, 125]]
    # The rest of the step goes elsewhere, then ids that another has lost come here.
    iterator.assign([5, 1])
    assert [numbers(next(iterator)) for _ in range(2)] == [[130, 131], [122, 123]]
    iterator.assign([0])
    assert numbers(next(iterator)) == [120, 121]
    assert iterator.drain() == [120, 121, 124, 125, 130, 131, 122, 123, 120, 121]
    assert iterator.drain() == []
    iterator.assign([])
    assert iterator.base == 120
    # Nothing is left of this step: the next one follows by itself, with the fault-free ids.
    assert [numbers(next(iterator)) for _ in range(4)] == [
        [132, 133],
        [136, 137],
        [140, 141],
        [144, 145],
    ]
    assert iterator.base == 144 and iterator.drain() == [144, 145]
    # The same step again, from its beginning.
    iterator.begin_step(144)
    assert numbers(next(iterator)) == [144, 145] and iterator.drain() == [144, 145]
    iterator.close()


@settings(max_examples=80, deadline=None)
@given(data=st.data(), dp_size=st.integers(1, 4), per_replica=st.integers(1, 3))
def test_whoever_computes_them_the_samples_of_a_step_stay(
    data: st.DataObject, dp_size: int, per_replica: int
) -> None:
    """Ids dealt in any way to any live replicas cover the samples of the step, once each."""
    num_microbatches = dp_size * per_replica
    dataset = Numbers(50 * num_microbatches)
    iterators = [
        ledger(
            dataset,
            micro_batch_size=2,
            dp_rank=rank,
            dp_size=dp_size,
            global_microbatches=num_microbatches,
        )
        for rank in range(dp_size)
    ]
    for step in range(4):
        base = step * num_microbatches * 2
        owners = data.draw(
            st.lists(
                st.integers(0, dp_size - 1), min_size=num_microbatches, max_size=num_microbatches
            )
        )
        ids = data.draw(st.permutations(range(num_microbatches)))
        consumed: list[int] = []
        for rank, iterator in enumerate(iterators):
            iterator.begin_step(base)
            mine = [m for m, owner in zip(ids, owners, strict=True) if owner == rank]
            iterator.assign(mine)
            for m in mine:
                assert numbers(next(iterator)) == [base + 2 * m, base + 2 * m + 1]
            consumed += iterator.drain()
        assert sorted(consumed) == list(range(base, base + 2 * num_microbatches))
    for iterator in iterators:
        iterator.close()


def test_an_assigned_id_ends_where_its_round_ends() -> None:
    """Whoever computes an id, the data ends at the same id as in a fault-free run."""
    iterator = ledger(Numbers(7))  # rounds {0, 1}, {2, 3}, {4, 5}; 6 is left over
    iterator.begin_step(4)
    iterator.assign([1, 2])
    assert numbers(next(iterator)) == [5]
    with pytest.raises(StopIteration):
        next(iterator)


def test_reads_ahead_so_far_and_no_further() -> None:
    dataset = Numbers(1000)
    iterator = ledger(dataset, micro_batch_size=2, prefetch=3)
    time.sleep(0.05)
    assert dataset.reads == [] and not threads_of("read-train")
    next(iterator)
    # The one asked for and three more: the second of this step and, beyond, the next step's.
    expected = [0, 1, 4, 5, 8, 9, 12, 13]
    wait_for(lambda: len(dataset.reads) == len(expected))
    time.sleep(0.05)
    assert dataset.reads == expected
    assert threading.get_ident() not in dataset.threads and len(dataset.threads) == 1
    # An ordinary next step finds its reads done.
    next(iterator)
    iterator.begin_step(8)
    iterator.assign([0, 2])
    assert [numbers(next(iterator)) for _ in range(2)] == [[8, 9], [12, 13]]
    assert len(dataset.reads) == len(set(dataset.reads))
    iterator.close()


def test_reading_ahead_follows_the_assignment_of_the_step_not_the_lost_ids() -> None:
    dataset = Numbers(1000)
    iterator = ledger(dataset, prefetch=2)
    iterator.begin_step(0)
    iterator.assign([0, 1, 2])  # three of four, as the other replica is short
    for _ in range(3):
        next(iterator)
    iterator.assign([3])
    next(iterator)
    wait_for(lambda: len(dataset.reads) == 6)
    assert sorted(dataset.reads) == [0, 1, 2, 3, 4, 5]
    # A step with the fault-free ids: those are expected from then on.
    iterator.begin_step(100)
    dataset.reads.clear()
    next(iterator), next(iterator)
    wait_for(lambda: len(dataset.reads) == 4)
    assert dataset.reads == [100, 102, 104, 106]
    iterator.close()


class Gate(Numbers):
    """Reads from `closed_from` on wait until the gate opens."""

    def __init__(self, size: int, closed_from: int) -> None:
        super().__init__(size)
        self.closed_from = closed_from
        self.gate = threading.Event()

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(index)
        if index >= self.closed_from:
            assert self.gate.wait(10)
        return sample


def test_reads_no_longer_wanted_are_cancelled() -> None:
    dataset = Gate(1000, closed_from=2)
    iterator = ledger(dataset, global_microbatches=8, prefetch=3)
    next(iterator)
    wait_for(lambda: dataset.reads == [0, 2])  # 2 is under way; 4 and 6 wait behind it
    iterator.assign([1])
    dataset.gate.set()
    assert numbers(next(iterator)) == [1]
    iterator.close()
    assert 4 not in dataset.reads and 6 not in dataset.reads


class Broken(Numbers):
    def __init__(self, size: int, bad: int) -> None:
        super().__init__(size)
        self.bad: int | None = bad

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index == self.bad:
            raise OSError(f"cannot read sample {index}")
        return super().__getitem__(index)


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_an_error_surfaces_where_it_belongs_and_skips_nothing(prefetch: int) -> None:
    dataset = Broken(100, bad=4)
    iterator = ledger(dataset, prefetch=prefetch)
    assert [numbers(next(iterator)) for _ in range(2)] == [[0], [2]]
    for _ in range(2):
        with pytest.raises(OSError, match="cannot read sample 4"):
            next(iterator)
    assert iterator.drain() == []
    dataset.bad = None
    assert [numbers(next(iterator)) for _ in range(3)] == [[4], [6], [8]]
    iterator.close()


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_thread_ends_with_close_and_with_the_iterator() -> None:
    assert not threads_of("read-test")
    iterator = ledger(Numbers(100), kind="test")
    next(iterator)
    assert len(threads_of("read-test")) == 1
    iterator.close()
    assert not threads_of("read-test")
    assert numbers(next(iterator)) == [2]
    assert len(threads_of("read-test")) == 1
    del iterator
    gc.collect()
    wait_for(lambda: not threads_of("read-test"))


def test_close_cancels_what_is_pending() -> None:
    dataset = Gate(100, closed_from=2)
    iterator = ledger(dataset, prefetch=4)
    next(iterator)
    wait_for(lambda: dataset.reads == [0, 2])
    threading.Timer(0.05, dataset.gate.set).start()
    iterator.close()
    assert dataset.reads == [0, 2] and not threads_of("read-train")


def test_what_is_kept_does_not_grow() -> None:
    iterator = ledger(Numbers(10_000), prefetch=2)
    for _ in range(1000):
        next(iterator)
    assert len(iterator.drain()) <= 2 and len(iterator._reads) <= 2
    iterator.close()


def wrong_options() -> Iterator[tuple[dict[str, Any], str]]:
    yield {"global_microbatches": 3}, "cannot be dealt evenly to 2 replicas"
    yield {"micro_batch_size": 0}, "microbatches of 0 samples"
    yield {"dp_rank": 2}, r"rank 2 is not in 0\.\.1"
    yield {"prefetch": -1}, "prefetch must be"
    yield {"consumed_samples": 10}, "no samples left to consume: 10, 10 .the train data"
    yield {"dataset": Numbers(0), "kind": "valid"}, "no sample to consume: 0 .the valid data"


@pytest.mark.parametrize(("options", "message"), wrong_options())
def test_messages(options: dict[str, Any], message: str) -> None:
    options = {"dataset": Numbers(10)} | options
    with pytest.raises(ValueError, match=message):
        ledger(**options)
    if "consumed_samples" in options:
        with pytest.raises(AssertionError, match="no samples left to consume: 10, 10"):
            megatron_loader(
                Numbers(10), micro_batch_size=1, dp_rank=0, dp_size=2, consumed_samples=10
            )


@pytest.mark.parametrize("ids", [[0, 0], [8], [-1]])
def test_wrong_ids(ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"different ones of 0\.\.7"):
        ledger(Numbers(10)).assign(ids)


def test_default_ids_are_those_of_the_ledger() -> None:
    iterator = ledger(Numbers(100), dp_rank=1, dp_size=3, global_microbatches=9)
    own = default_ids(1, data=3, num_microbatches=9)
    assert [numbers(next(iterator))[0] for _ in own] == list(own)
    iterator.close()
