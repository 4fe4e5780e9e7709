"""Which samples a step consumes, who computes them, and whether each one counted exactly once.

A step is made of B = data * microbatches_per_replica microbatches with ids 0..B-1, whoever is
alive. Fault-free, replica r owns the ids m = r (mod data), which is the order of Megatron's own
sampler. After a failure the same ids are computed by others.

    quotas = ledger.begin(step, live)
    while True:
        ...run the quotas, reduce, vote...
        if the vote holds:
            ledger.commit()
            break
        lost = ledger.fail(lost_replicas)
        quotas = ledger.redistribute(live)

Who computes what need not be this module's even deal: `begin` and `assign` take the quotas of
ReCoVer's policy (`megatron_ft.recover.policy`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

Quotas = dict[int, tuple[int, ...]]
"""Microbatch ids by replica."""


def default_ids(replica: int, *, data: int, num_microbatches: int) -> tuple[int, ...]:
    """The ids that replica `replica` of `data` owns in a fault-free step, in order."""
    return tuple(range(replica, num_microbatches, data))


def deal(
    ids: Iterable[int], takers: Sequence[int], room: Mapping[int, int] | None = None
) -> Quotas:
    """Deal ids in turn, one a round to each taker that still has room.

    With all replicas and B ids this gives the fault-free quotas, and without `room` no taker gets
    two more than another.

    Args:
        room: how many ids each taker gets at most; unlimited where it is None.
    """
    dealt: dict[int, list[int]] = {taker: [] for taker in takers}
    open_takers: list[int] = []
    for microbatch in ids:
        while not open_takers:
            open_takers = [t for t in takers if room is None or len(dealt[t]) < room[t]]
            assert open_takers, "more ids than room"
        dealt[open_takers.pop(0)].append(microbatch)
    return {taker: tuple(given) for taker, given in dealt.items()}


def samples_digest(indices: Iterable[int]) -> str:
    """Sixteen hex characters that name dataset indices, in whatever order they were consumed.

    They are the first of SHA-256 over the ascending decimal indices, joined by commas.
    """
    text = ",".join(map(str, sorted(indices)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(kw_only=True)
class Ledger:
    """The accounts of one step at a time. Equal on every process."""

    data: int
    """Replicas the job was configured with, live or not."""
    microbatches_per_replica: int
    """Microbatches of one replica in a fault-free step: Megatron's num_microbatches, G."""
    micro_batch_size: int
    """Samples of one microbatch."""
    step: int = -1
    consumed_samples: int = 0
    """Samples consumed before this step: Megatron's consumed_train_samples."""
    outstanding: Quotas = field(default_factory=dict)
    """Ids that each live replica computes in the attempt under way."""
    contributed: Quotas = field(default_factory=dict)
    """Ids whose gradient each live replica holds from earlier attempts."""
    recomputed: int = 0
    """Ids computed anew in this step because a replica was lost."""

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step over all replicas, B. The divisor of the loss, for ever."""
        return self.data * self.microbatches_per_replica

    def begin(
        self,
        step: int,
        live: Iterable[int],
        *,
        consumed_samples: int | None = None,
        quotas: Mapping[int, Sequence[int]] | None = None,
    ) -> Quotas:
        """Open a step and return the ids of each live replica.

        Args:
            live: the whole replicas.
            consumed_samples: samples consumed before; by default this step follows the last
                committed one.
            quotas: the ids of each live replica, where they are not dealt evenly.
        """
        assert not self.outstanding and not self.contributed, f"step {self.step} is still open"
        live = sorted(live)
        self.step = step
        if consumed_samples is not None:
            self.consumed_samples = consumed_samples
        self.recomputed = 0
        if quotas is None:
            quotas = deal(range(self.num_microbatches), live)
        self.contributed = {replica: () for replica in live}
        self.outstanding = {replica: tuple(quotas.get(replica, ())) for replica in live}
        return dict(self.outstanding)

    def fail(self, lost: Iterable[int], *, unfinished: Iterable[int] = ()) -> tuple[int, ...]:
        """Close an attempt that failed and return the ids that no one holds any more, ascending.

        A replica is lost when any of its slots has lost its gradients, even if the slot is served
        again: its other slots drop theirs. The other replicas ran their quotas to the end, so all
        they computed stays valid in their snapshots.

        Args:
            lost: replicas whose contributions are void.
            unfinished: replicas that survive but were interrupted before the end of their quota:
                they keep earlier contributions and the quota stays outstanding.
        """
        lost, unfinished = set(lost), set(unfinished)
        void: list[int] = []
        for replica in list(self.contributed):
            if replica in lost:
                void += self.contributed.pop(replica) + self.outstanding.pop(replica)
            elif replica not in unfinished:
                self.contributed[replica] += self.outstanding[replica]
                self.outstanding[replica] = ()
        return tuple(sorted(void))

    def assign(self, extra: Mapping[int, Sequence[int]], live: Iterable[int]) -> Quotas:
        """Open the next attempt: `extra` ids on top of what is outstanding.

        Args:
            live: the whole replicas now. Those that were not live, or were lost, start empty.
        """
        live = sorted(live)
        gone = self.contributed.keys() - set(live)
        assert not gone, f"replicas {sorted(gone)} are not live and were not reported lost"
        self.contributed = {replica: self.contributed.get(replica, ()) for replica in live}
        self.outstanding = {
            replica: self.outstanding.get(replica, ()) + tuple(extra.get(replica, ()))
            for replica in live
        }
        self.recomputed += sum(map(len, extra.values()))
        return dict(self.outstanding)

    def redistribute(self, live: Iterable[int]) -> Quotas:
        """Open the next attempt with the missing ids dealt evenly over the live replicas."""
        live = sorted(live)
        accounted = {
            m for ids in (*self.contributed.values(), *self.outstanding.values()) for m in ids
        }
        missing = [m for m in range(self.num_microbatches) if m not in accounted]
        return self.assign(deal(missing, live), live)

    def credit(self, replica: int, ids: Sequence[int]) -> None:
        """Count ids that a replica has computed already: a spare that is promoted."""
        self.contributed[replica] += tuple(ids)

    def commit(self, invariant: Literal["exact", "count", "none"] = "exact") -> tuple[int, ...]:
        """Close the step after a vote that held and return the ids that counted, ascending.

        Args:
            invariant: "exact": the ids are 0..B-1, each once. "count": B distinct ids (ReCoVer's
                exchangeable replay). "none": distinct ids (ReCoVer's adaptive policy).

        Raises:
            AssertionError: the invariant is broken.
        """
        ids = sorted(
            m for quotas in (self.contributed, self.outstanding) for q in quotas.values() for m in q
        )
        assert len(set(ids)) == len(ids), f"step {self.step}: a microbatch counts twice: {ids}"
        if invariant == "exact":
            missing = sorted(set(range(self.num_microbatches)) - set(ids))
            assert ids == list(range(self.num_microbatches)), (
                f"step {self.step}: microbatches {missing} are missing"
            )
        elif invariant == "count":
            assert len(ids) == self.num_microbatches, (
                f"step {self.step}: {len(ids)} microbatches instead of {self.num_microbatches}"
            )
        self.contributed, self.outstanding = {}, {}
        self.consumed_samples += self.num_microbatches * self.micro_batch_size
        return tuple(ids)

    def samples(self, microbatch: int) -> range:
        """The dataset indices of a microbatch of the step that is open."""
        first = self.consumed_samples + microbatch * self.micro_batch_size
        return range(first, first + self.micro_batch_size)

    def to_bytes(self) -> bytes:
        """The accounts as JSON, for a process that joins."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Ledger:
        """The accounts written by `to_bytes`."""
        fields = json.loads(data)
        for name in ("outstanding", "contributed"):
            fields[name] = {int(replica): tuple(ids) for replica, ids in fields[name].items()}
        return cls(**fields)
