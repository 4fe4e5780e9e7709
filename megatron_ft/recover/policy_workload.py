"""The policy and the ledger as a step transaction asks for them, attempt by attempt."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict

from megatron_ft.ledger import Ledger
from megatron_ft.recover.policy import (
    Policy,
    Redistribution,
    Replay,
    Role,
    Share,
    StepPlan,
    plan_step,
)


class PolicyWorkload:
    """Who computes which microbatch ids in the coming attempt of a step, and whose count.

    Args:
        num_replicas: replicas the job was configured with, W.
        per_replica: microbatches of one replica in a fault-free step, G.
        policy: `--ft-recover-policy`.
        replay: `--ft-recover-replay`.
        micro_batch_size: samples of a microbatch.
    """

    def __init__(
        self,
        num_replicas: int,
        per_replica: int,
        policy: Policy = "versatile",
        replay: Replay = "exact",
        micro_batch_size: int = 1,
    ) -> None:
        self.policy: Policy = policy
        self.replay: Replay = replay
        self.ledger = Ledger(
            data=num_replicas,
            microbatches_per_replica=per_replica,
            micro_batch_size=micro_batch_size,
        )
        self.plan: StepPlan | None = None
        self.last: Redistribution | None = None
        """What the last failure inside this step changed; None before the first."""

    def begin(
        self,
        live: Collection[int],
        step: int = 0,
        consumed_samples: int = 0,
        quotas: Mapping[int, int] | None = None,
    ) -> None:
        """Open a step; one that was left open by a process that lost its replica is forgotten.

        Args:
            quotas: How many microbatches each live replica computes; None for an even deal.
        """
        self.ledger = Ledger(
            data=self.ledger.data,
            microbatches_per_replica=self.ledger.microbatches_per_replica,
            micro_batch_size=self.ledger.micro_batch_size,
        )
        self.last = None
        self.plan = plan_step(
            num_replicas=self.ledger.data,
            microbatches_per_replica=self.ledger.microbatches_per_replica,
            live=live,
            policy=self.policy,
            replay=self.replay,
            quotas=quotas,
        )
        counts = {r: share.counts for r, share in self.plan.shares.items()}
        self.ledger.begin(step, live, consumed_samples=consumed_samples, quotas=counts)

    def to_compute(self, replica: int) -> tuple[int, ...]:
        """The ids that a replica computes in the coming attempt, in order."""
        if self.last is not None:
            return self.last.extra.get(replica, ())
        share = self._open.shares.get(replica)
        return share.computes if share is not None else ()

    def counts(self, replica: int) -> bool:
        """Whether what the replica has computed counts: a spare contributes zeros."""
        share = self._open.shares.get(replica)
        return share is not None and not share.role.is_spare

    def forgets(self, replica: int) -> bool:
        """Whether the replica must zero its gradients before the coming attempt."""
        return self.last is not None and replica in self.last.forget

    def after_failure(self, live: Collection[int], forfeited: Iterable[int] = ()) -> None:
        """Deal the ids of lost replicas.

        Args:
            live: the whole replicas after the repair.
            forfeited: replicas that are live but whose contributions are void.
        """
        before = self._open
        lost = set(forfeited) | (before.shares.keys() - set(live))
        self.last = before.fail(lost, live)
        self.plan = self.last.plan
        self.ledger.fail(lost)
        for spare in self.last.promotions:
            self.ledger.credit(spare, before.shares[spare].computes)
        self.ledger.assign(self.last.extra, live)

    def quotas(self) -> list[int]:
        """Microbatches that each replica has computed of this step, spares included."""
        shares = self._open.shares
        return [len(shares[r].computes) if r in shares else 0 for r in range(self.ledger.data)]

    def contributed(self) -> dict[int, int]:
        """Microbatches of the step that count, by live replica."""
        return {r: len(share.counts) for r, share in self._open.shares.items()}

    def roles(self) -> Sequence[Role | None]:
        """The role of each replica, None where it is dark."""
        shares = self._open.shares
        return [shares[r].role if r in shares else None for r in range(self.ledger.data)]

    def commit(self) -> tuple[int, ...]:
        """Close the step and return the ids that counted, ascending.

        Raises:
            AssertionError: they are not what the policy promises.
        """
        return self.ledger.commit(self._open.invariant)

    def to_bytes(self) -> bytes:
        """The open step as JSON, for a process that takes a slot in the middle of it."""
        plan, last = self._open, self.last
        return json.dumps(
            {
                "ledger": self.ledger.to_bytes().decode(),
                "policy": self.policy,
                "replay": self.replay,
                "shares": {r: asdict(share) for r, share in plan.shares.items()},
                "last": None
                if last is None
                else {
                    "extra": dict(last.extra),
                    "promotions": dict(last.promotions),
                    "forget": sorted(last.forget),
                },
            }
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> PolicyWorkload:
        """The open step written by `to_bytes`."""
        fields = json.loads(data)
        ledger = Ledger.from_bytes(fields["ledger"].encode())
        self = cls(
            ledger.data,
            ledger.microbatches_per_replica,
            fields["policy"],
            fields["replay"],
            ledger.micro_batch_size,
        )
        self.ledger = ledger
        self.plan = StepPlan(
            num_replicas=ledger.data,
            microbatches_per_replica=ledger.microbatches_per_replica,
            policy=fields["policy"],
            replay=fields["replay"],
            shares={
                int(r): Share(
                    role=Role(share["role"]),
                    computes=tuple(share["computes"]),
                    counts=tuple(share["counts"]),
                    mirrors=share["mirrors"],
                )
                for r, share in fields["shares"].items()
            },
        )
        if fields["last"] is not None:
            last = fields["last"]
            self.last = Redistribution(
                plan=self.plan,
                extra={int(r): tuple(ids) for r, ids in last["extra"].items()},
                promotions={int(spare): lost for spare, lost in last["promotions"].items()},
                forget=frozenset(last["forget"]),
            )
        return self

    @property
    def _open(self) -> StepPlan:
        assert self.plan is not None, "no step has begun"
        return self.plan
