"""ReCoVer's versatile-workload policy: who computes which microbatches, and whose count.

The invariant: every committed step counts exactly B = W * G microbatches, whoever is alive
(arXiv 2605.11215). `plan_step` deals them for a step, `StepPlan.fail` mends the deal after a
failure inside the step. Both are pure and give the same answer on every process.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from megatron_ft.ledger import deal, default_ids

Policy = Literal["versatile", "balanced", "adaptive"]
"""versatile: the paper's, with spares. balanced: an even deal without spares. adaptive: the paper's
ablation, in which the batch shrinks with the replicas."""

Replay = Literal["exact", "exchangeable"]
"""exact: lost ids are computed by survivors, and a spare stands in only for ids it mirrored.
exchangeable: a spare's own next samples may count instead (the paper's)."""


class Role(StrEnum):
    """What a replica does in a step."""

    MAJOR = "major"
    MINOR = "minor"
    MAJOR_SPARE = "major-spare"
    MINOR_SPARE = "minor-spare"
    IDLE = "idle"
    """Came back inside the step and was not needed: computes nothing, contributes zeros."""

    @property
    def is_spare(self) -> bool:
        return self in (Role.MAJOR_SPARE, Role.MINOR_SPARE)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How many replicas have which role, and how much each one computes."""

    per_major: int
    """Microbatches of a major, and of a major-spare: g."""
    num_majors: int
    per_minor: int
    """Microbatches of the minor, and of a minor-spare; 0 where there is no minor."""
    num_major_spares: int
    num_minor_spares: int


def versatile_layout(num_microbatches: int, num_live: int) -> Layout:
    """The paper's deal of B microbatches over W' live replicas.

    g is the smallest number with W' * g >= B; B // g majors compute g each, one minor the rest;
    the other replicas are spares, split between the two roles.
    """
    per_major = -(-num_microbatches // num_live)
    num_majors, per_minor = divmod(num_microbatches, per_major)
    num_spares = num_live - num_majors - (per_minor > 0)
    major_spares = num_spares
    if per_minor:
        while major_spares > 1 and major_spares > int(0.8 * num_spares):
            major_spares -= 1
    return Layout(
        per_major=per_major,
        num_majors=num_majors,
        per_minor=per_minor,
        num_major_spares=major_spares,
        num_minor_spares=num_spares - major_spares,
    )


def boundary(num_counted: int, num_live: int, num_microbatches: int) -> tuple[int, int]:
    """The paper's (s, z) of a boundary step.

    s is the smallest number with C + W' * s >= B and z = C + W' * s - B: the last z replicas
    compute s - 1 extra microbatches, the others s. `deal` in turns yields just that.
    """
    assert num_counted < num_microbatches, "nothing is missing"
    s = -(-(num_microbatches - num_counted) // num_live)
    return s, num_counted + num_live * s - num_microbatches


@dataclass(frozen=True, kw_only=True)
class Share:
    """One live replica's part of a step."""

    role: Role
    computes: tuple[int, ...]
    """The ids of which it holds the gradients, or will when the attempt under way ends."""
    counts: tuple[int, ...]
    """The ids that it contributes: all that it computes, or none for a spare."""
    mirrors: int | None = None
    """The replica whose ids a spare computes too (exact replay)."""


@dataclass(frozen=True, kw_only=True)
class Redistribution:
    """What changes for the survivors of a failure inside a step."""

    plan: StepPlan
    """The plan from here on."""
    extra: Mapping[int, tuple[int, ...]]
    """The ids that each live replica still has to compute in the next attempt."""
    promotions: Mapping[int, int]
    """Spare -> the lost replica that it stands in for. It contributes what it has computed."""
    forget: frozenset[int]
    """Live replicas that must zero their gradients before the next attempt: those that lost a
    slot's gradients, and spares that turn to extra microbatches."""

    @property
    def needs_recompute(self) -> bool:
        """A boundary step: something has to be computed. Otherwise restoring the stale buckets
        and reducing again is enough."""
        return any(self.extra.values())


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Who computes what in one step, as of the last failure inside it."""

    num_replicas: int
    """Replicas the job was configured with, W."""
    microbatches_per_replica: int
    """Microbatches of one replica in a fault-free step, G."""
    policy: Policy
    replay: Replay
    shares: Mapping[int, Share]
    """By live replica."""

    @property
    def num_microbatches(self) -> int:
        """B, the divisor of the loss, for ever."""
        return self.num_replicas * self.microbatches_per_replica

    @property
    def counted(self) -> tuple[int, ...]:
        """The ids that count, ascending. Exactly B of them, except under "adaptive"."""
        return tuple(sorted(m for share in self.shares.values() for m in share.counts))

    @property
    def invariant(self) -> Literal["exact", "count", "none"]:
        """What `Ledger.commit` can hold this plan to."""
        if self.policy == "adaptive":
            return "none"
        return "exact" if self.replay == "exact" or self.policy == "balanced" else "count"

    def fail(self, lost: Iterable[int], live: Collection[int]) -> Redistribution:
        """Mend the step after a failure.

        Args:
            lost: the replicas whose contributions are void, also those that are whole again.
                Replicas that are not live any more are lost without being named.
            live: the whole replicas after the repair.
        """
        live = sorted(live)
        void = set(lost) | (self.shares.keys() - set(live))
        kept = {r: share for r, share in self.shares.items() if r not in void}
        empty = [r for r in live if r not in kept]
        if self.policy == "adaptive":
            extra = {r: self._own_ids(r) for r in empty}
            return self._mended(kept, live, extra, promotions={})

        num_counted = sum(len(share.counts) for share in kept.values())
        assert num_counted <= self.num_microbatches, f"{num_counted} microbatches count"
        if num_counted == self.num_microbatches:
            return self._mended(kept, live, {}, promotions={})
        failed = {r: self.shares[r] for r in sorted(void & self.shares.keys())}
        promotions = self._stand_ins(kept, {r: s for r, s in failed.items() if s.counts})
        if promotions is not None:
            for spare, replaced in promotions.items():
                role, ids = self.shares[replaced].role, kept[spare].computes
                kept[spare] = Share(role=role, computes=ids, counts=ids)
            return self._mended(kept, live, {}, promotions)

        counted = {m for share in kept.values() for m in share.counts}
        open_ids = [m for m in range(self.num_microbatches) if m not in counted]
        # In exchangeable replay ids from beyond the step may count, and as many of its own are
        # then skipped.
        missing = open_ids[: self.num_microbatches - num_counted]
        return self._mended(kept, live, deal(missing, live), promotions={})

    def _stand_ins(
        self, kept: Mapping[int, Share], failed: Mapping[int, Share]
    ) -> dict[int, int] | None:
        """A spare for each failed contributor, or None unless all of them are covered."""
        spares = [r for r in sorted(kept) if kept[r].role.is_spare]
        promotions: dict[int, int] = {}
        for replica, share in failed.items():
            fit = next((r for r in spares if self._covers(kept[r], share)), None)
            if fit is None:
                return None
            spares.remove(fit)
            promotions[fit] = replica
        return promotions

    def _covers(self, spare: Share, failed: Share) -> bool:
        if self.replay == "exact":
            return set(spare.computes) == set(failed.counts)
        # The right role is the one of equal size: a major that has taken on extra microbatches
        # since cannot be replaced, or the batch would fall short.
        return len(spare.computes) == len(failed.counts)

    def _mended(
        self,
        kept: Mapping[int, Share],
        live: Collection[int],
        extra: Mapping[int, tuple[int, ...]],
        promotions: Mapping[int, int],
    ) -> Redistribution:
        shares: dict[int, Share] = {}
        forget: set[int] = set()
        role: Role
        for r in live:
            more = extra.get(r, ())
            share = kept.get(r)
            if share is not None and not more:
                shares[r] = share
            elif share is not None and not share.role.is_spare:
                role = Role.MAJOR if share.role is Role.IDLE else share.role
                shares[r] = Share(
                    role=role, computes=share.computes + more, counts=share.counts + more
                )
            else:
                # A spare cannot contribute what it computes from now on without what it has
                # computed so far, so it starts from nothing, as one that lost a slot does.
                role = Role.MAJOR if more else Role.IDLE
                shares[r] = Share(role=role, computes=more, counts=more)
                forget.add(r)
        return Redistribution(
            plan=StepPlan(
                num_replicas=self.num_replicas,
                microbatches_per_replica=self.microbatches_per_replica,
                policy=self.policy,
                replay=self.replay,
                shares=shares,
            ),
            extra={r: extra.get(r, ()) for r in live},
            promotions=promotions,
            forget=frozenset(forget),
        )

    def _own_ids(self, replica: int) -> tuple[int, ...]:
        return default_ids(replica, data=self.num_replicas, num_microbatches=self.num_microbatches)


def plan_step(
    *,
    num_replicas: int,
    microbatches_per_replica: int,
    live: Collection[int],
    policy: Policy = "versatile",
    replay: Replay = "exact",
    quotas: Mapping[int, int] | None = None,
) -> StepPlan:
    """Deal the microbatches of a step over the live replicas.

    With all replicas live this is the fault-free step: replica r computes the ids r (mod W).

    Args:
        quotas: Under "balanced", how many each live replica gets, where not as many as possible
            alike; their sum is B.
    """
    live = sorted(live)
    assert quotas is None or policy == "balanced", "only an even deal can be made an uneven one"
    assert live and len(live) <= num_replicas, f"{live} of {num_replicas} replicas"
    num_microbatches = num_replicas * microbatches_per_replica
    if policy == "adaptive":
        own = {
            r: default_ids(r, data=num_replicas, num_microbatches=num_microbatches) for r in live
        }
        shares = {r: Share(role=Role.MAJOR, computes=own[r], counts=own[r]) for r in live}
    elif policy == "balanced":
        dealt = deal(range(num_microbatches), live, quotas)
        shares = {r: Share(role=Role.MAJOR, computes=dealt[r], counts=dealt[r]) for r in live}
    else:
        shares = _versatile_shares(num_microbatches, live, replay)
    return StepPlan(
        num_replicas=num_replicas,
        microbatches_per_replica=microbatches_per_replica,
        policy=policy,
        replay=replay,
        shares=shares,
    )


def _versatile_shares(num_microbatches: int, live: list[int], replay: Replay) -> dict[int, Share]:
    """Majors, major-spares, the minor and minor-spares, laid out in this order."""
    layout = versatile_layout(num_microbatches, len(live))
    majors, rest = live[: layout.num_majors], live[layout.num_majors :]
    major_spares, rest = rest[: layout.num_major_spares], rest[layout.num_major_spares :]
    num_minors = int(layout.per_minor > 0)
    minors, minor_spares = rest[:num_minors], rest[num_minors:]

    room = dict.fromkeys(majors, layout.per_major) | dict.fromkeys(minors, layout.per_minor)
    quotas = deal(range(num_microbatches), majors + minors, room)
    shares = {r: Share(role=Role.MAJOR, computes=quotas[r], counts=quotas[r]) for r in majors}
    shares |= {r: Share(role=Role.MINOR, computes=quotas[r], counts=quotas[r]) for r in minors}
    next_id = num_microbatches
    for role, spares, mirrored in (
        (Role.MAJOR_SPARE, major_spares, majors),
        (Role.MINOR_SPARE, minor_spares, minors),
    ):
        for k, spare in enumerate(spares):
            if replay == "exact":
                named = mirrored[k % len(mirrored)]
                shares[spare] = Share(role=role, computes=quotas[named], counts=(), mirrors=named)
            else:
                size = len(quotas[mirrored[0]])
                ids = tuple(range(next_id, next_id + size))
                next_id += size
                shares[spare] = Share(role=role, computes=ids, counts=())
    return {r: shares[r] for r in live}
