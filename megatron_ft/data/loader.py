"""Samples by microbatch id, for Megatron's `--dataloader-type external`.

Microbatch id m of a step covers the dataset samples `base + m*mbs + [0, mbs)`, where `base` is what
was consumed before the step. Reading is random access, so that after a failure anyone can compute
any id. Left to itself the iterator yields exactly what Megatron's single loader would.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, Protocol, Self

from torch.utils.data import default_collate

from megatron_ft.ledger import default_ids


class Samples(Protocol):
    """A map-style torch dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class LedgerIterator:
    """Yields the collated microbatches of one replica, step after step.

        iterator.begin_step(consumed_samples)
        iterator.assign(ids)        # only where they are not the fault-free ones
        batches = [next(iterator) for _ in ids]

    Without `begin_step` the next step follows by itself once the ids of a step are used up, always
    with the fault-free ids. Batches are read ahead by a thread that starts with the first `next`,
    so an iterator that is never asked costs nothing. Not to be called from two threads.
    """

    def __init__(
        self,
        *,
        dataset: Samples,
        micro_batch_size: int,
        global_microbatches: int,
        dp_rank: int,
        dp_size: int,
        consumed_samples: int = 0,
        kind: Literal["train", "valid", "test"] = "train",
        prefetch: int = 2,
    ) -> None:
        """Start at the step before which `consumed_samples` were consumed.

        Args:
            dataset: samples that `default_collate` can stack.
            micro_batch_size: samples of a microbatch (of evaluation for valid and test).
            global_microbatches: microbatches of a step over all replicas, B.
            dp_rank: this replica.
            dp_size: replicas the job was configured with.
            kind: which split this is; for messages and for whoever holds the iterator.
            prefetch: microbatches read ahead, 0 for reading in `next` itself.

        Raises:
            ValueError: sizes do not fit together, or no sample is left (as Megatron's loader, and
                with its words).
        """
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"data-parallel rank {dp_rank} is not in 0..{dp_size - 1}")
        if micro_batch_size < 1 or global_microbatches < 1 or global_microbatches % dp_size:
            raise ValueError(
                f"{global_microbatches} microbatches of {micro_batch_size} samples cannot be dealt "
                f"evenly to {dp_size} replicas: change the batch sizes"
            )
        if prefetch < 0:
            raise ValueError(f"prefetch must be 0 or more, not {prefetch}")
        if len(dataset) == 0:
            raise ValueError(f"no sample to consume: 0 (the {kind} data is empty)")
        if consumed_samples >= len(dataset):
            raise ValueError(
                f"no samples left to consume: {consumed_samples}, {len(dataset)} (the {kind} data "
                "is used up: more data, or fewer iterations)"
            )
        self.kind = kind
        self.micro_batch_size = micro_batch_size
        self.global_microbatches = global_microbatches
        self._dataset = dataset
        self._dp_size = dp_size
        self._default_ids = default_ids(dp_rank, data=dp_size, num_microbatches=global_microbatches)
        self._prefetch = prefetch
        self._executor: ThreadPoolExecutor | None = None
        self._reads: dict[int, Future[Any]] = {}
        """Reads under way or done, by first sample."""
        self._base = consumed_samples
        self._likely_ids: Sequence[int] = self._default_ids
        """Ids to expect of the step after this one; reading ahead goes by them."""
        self._outstanding = deque(self._default_ids)
        self._is_untouched = True
        """Whether nothing was handed out in the step under way."""
        self._consumed: list[int] = []

    @property
    def base(self) -> int:
        """Samples consumed before the step under way: index of its first sample."""
        return self._base

    def begin_step(self, consumed_samples: int) -> None:
        """Go to the step before which `consumed_samples` were consumed, with its fault-free ids.

        It may be the step under way, which then starts anew, or any other.
        """
        if consumed_samples < 0:
            raise ValueError(f"consumed samples must be 0 or more, not {consumed_samples}")
        self._base = consumed_samples
        self._outstanding = deque(self._default_ids)
        self._likely_ids = self._default_ids
        self._is_untouched = True
        self._consumed = []

    def assign(self, ids: Sequence[int]) -> None:
        """Set what the next `next` calls return, in place of all that is outstanding in this step.

        Args:
            ids: microbatch ids of the step under way, also such as were returned before. Those from
                B on are of the samples after the step, which exchangeable spares compute.

        Raises:
            ValueError: an id is not one of 0..2B-1, or is there twice.
        """
        ids = list(ids)
        limit = 2 * self.global_microbatches
        if len(set(ids)) != len(ids) or not all(0 <= m < limit for m in ids):
            raise ValueError(f"microbatch ids must be different ones of 0..{limit - 1}: {ids}")
        self._outstanding = deque(ids)
        if self._is_untouched:
            # Later assignments are what others have lost, and say nothing of the next step.
            self._likely_ids = ids or self._default_ids

    def drain(self) -> list[int]:
        """Return the dataset indices handed out in this step since the last call, and forget them.

        In the order handed out; an id assigned twice is there twice. A new step forgets what was
        not fetched.
        """
        consumed, self._consumed = self._consumed, []
        return consumed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """Return the next microbatch, `default_collate` of its samples.

        Raises:
            StopIteration: the data ends before all replicas have a whole microbatch of this round,
                where Megatron's single loader ends too.
            Exception: whatever the dataset raises; the next call tries the same microbatch again.
        """
        if not self._outstanding:
            self.begin_step(self._base + self.global_microbatches * self.micro_batch_size)
        microbatch = self._outstanding[0]
        if not self._is_complete(self._base, microbatch):
            raise StopIteration
        start = self._base + microbatch * self.micro_batch_size
        batch = self._read_ahead_and_wait(start) if self._prefetch else self._read(start)
        self._outstanding.popleft()
        self._is_untouched = False
        self._consumed += range(start, start + self.micro_batch_size)
        return batch

    def close(self) -> None:
        """End the thread after the read under way; a later `next` starts one anew."""
        for read in self._reads.values():
            read.cancel()
        self._reads.clear()
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def _is_complete(self, base: int, microbatch: int) -> bool:
        """Whether the data has a microbatch for every replica in the round of this one.

        Megatron's sampler deals such rounds and drops the last, partial one.
        """
        rounds = microbatch // self._dp_size + 1
        return base + rounds * self._dp_size * self.micro_batch_size <= len(self._dataset)

    def _read(self, start: int) -> Any:
        return default_collate(
            [self._dataset[index] for index in range(start, start + self.micro_batch_size)]
        )

    def _read_ahead_and_wait(self, start: int) -> Any:
        self._plan_reads(self._prefetch + 1)
        try:
            return self._reads[start].result()
        finally:
            del self._reads[start]
            self._plan_reads(self._prefetch, after_this=True)

    def _plan_reads(self, count: int, after_this: bool = False) -> None:
        """Have the next `count` microbatches read, and nothing else."""
        first = int(after_this)
        wanted = list(itertools.islice(self._upcoming(), first, first + count))
        for start in self._reads.keys() - set(wanted):
            self._reads.pop(start).cancel()
        if self._executor is None:
            # One thread: the order of reading is that of use, and datasets need no locks.
            self._executor = ThreadPoolExecutor(1, f"read-{self.kind}")
        for start in wanted:
            if start not in self._reads:
                self._reads[start] = self._executor.submit(self._read, start)

    def _upcoming(self) -> Iterator[int]:
        """Yield first samples: outstanding ones, then those that later steps will likely want."""
        base: int = self._base
        ids: Sequence[int] = tuple(self._outstanding)
        while True:
            for microbatch in ids:
                if not self._is_complete(base, microbatch):
                    return
                yield base + microbatch * self.micro_batch_size
            base += self.global_microbatches * self.micro_batch_size
            ids = self._likely_ids
