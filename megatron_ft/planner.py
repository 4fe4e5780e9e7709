"""After a failure, or when the pool has grown: who serves which slot now. One pure function.

`plan` applies, for each vacancy, the first rule that can be applied:

1. fill it from the pool, an exact copy from another replica of the stage;
2. CheckFree: fill it from the pool and rebuild the stage, which is held by no one;
3. MeCeFO: the neighbouring stage's process serves both;
4. ReCoVer: the replica goes dark and its healthy processes join the pool;
5. stop.

No communication, no torch, no clock: each process computes the same plan from agreed inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ft.placement import Option, Seat, Site, seat_processes, solve_column
from megatron_ft.recovery_plan import RecoveryPlan, Stop, actions_between
from megatron_ft.topology import Assignment, Shard, Topology


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """Which rules the user has switched on."""

    recover: bool = False
    """Rule 4: train on with fewer replicas."""
    checkfree: bool = False
    """Rule 2 for stages that have a neighbour on either side."""
    checkfree_plus: bool = False
    """Rule 2 for the first and last stage too; includes `checkfree`."""
    mecefo: bool = False
    """Rule 3; needs two replicas or more, since an adopted stage is copied from another one."""
    respawn: bool = False
    """Dead processes are replaced by new ones in the pool. Only changes what a stop advises."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What the processes can do now, agreed among them before the plan."""

    ready: frozenset[int] = frozenset()
    """The pool processes that can be given a slot. One that is still building cannot."""
    holds: Mapping[int, frozenset[Shard]] = field(default_factory=dict)
    """The shards whose current committed state a process holds, where that is not simply those of
    its slots: a pool process that served until a moment ago, or one that lost its state."""
    cannot_adopt: frozenset[int] = frozenset()
    """Processes that must not adopt a slot: no memory for two stages, or degraded already."""


def plan(
    topology: Topology,
    assignment: Assignment,
    failed: frozenset[int],
    strategies: Strategies,
    capabilities: Capabilities,
) -> RecoveryPlan:
    """The next epoch's assignment and the actions that lead to it.

    Never raises for a valid assignment. In the new assignment every replica is whole or dark,
    except after a `Stop`, where the survivors stay where they were.

    Args:
        assignment: the current epoch's, new pool processes included (`Assignment.joined`).
        failed: the dead. Empty when the pool has grown or a stage has lost its state.
    """
    assignment.check(topology)
    state = _State(topology, assignment, failed, strategies, capabilities)
    stop = _state_beyond_repair(state) or _place(state)
    if stop is not None:
        return RecoveryPlan(topology, assignment, failed, state.survivors(), (stop,))
    after = state.settled()
    after.check(topology)
    actions = tuple(actions_between(topology, assignment, after, state.holds))
    return RecoveryPlan(topology, assignment, failed, after, actions)


class _State:
    """The inputs, and the placement as it grows."""

    def __init__(
        self,
        topology: Topology,
        before: Assignment,
        failed: frozenset[int],
        strategies: Strategies,
        capabilities: Capabilities,
    ) -> None:
        self.topology = topology
        self.before = before
        self.strategies = strategies
        # Who serves two slots has shown that it can.
        self.cannot_adopt = frozenset(
            p for p in capabilities.cannot_adopt if len(before.slots_of(p)) < 2
        )
        self.living = [p for p in before.processes if p not in failed]
        self.process_of = [None if p in failed else p for p in before.process_of]
        self.adopted = {slot for slot in before.adopted if self.process_of[slot] is not None}
        self.free = {p for p in before.pool if p not in failed and p in capabilities.ready}
        self.building = [p for p in before.pool if p not in failed and p not in self.free]
        self.holds = {
            p: capabilities.holds.get(p, frozenset(map(topology.shard_of, before.slots_of(p))))
            for p in self.living
        }
        self.held = frozenset(shard for shards in self.holds.values() for shard in shards)

    @property
    def mecefo(self) -> bool:
        return self.strategies.mecefo and self.topology.data > 1

    def survivors_of(self, replica: int) -> list[int]:
        """The living processes that served the replica before, ascending."""
        served = {self.before.process_of[slot] for slot in self.topology.replica(replica)}
        return sorted(p for p in served if p is not None and p in self.holds)

    def release(self, replica: int) -> None:
        """Take a replica apart: its living processes become free."""
        self.free.update(self.survivors_of(replica))
        for slot in self.topology.replica(replica):
            self.process_of[slot] = None
            self.adopted.discard(slot)

    def survivors(self) -> Assignment:
        """The next epoch's assignment without any move."""
        process_of = [p if p in self.holds else None for p in self.before.process_of]
        adopted = tuple(slot for slot in self.before.adopted if process_of[slot] is not None)
        return self._assignment(process_of, adopted)

    def settled(self) -> Assignment:
        return self._assignment(self.process_of, tuple(sorted(self.adopted)))

    def _assignment(self, process_of: list[int | None], adopted: tuple[int, ...]) -> Assignment:
        active = set(process_of)
        pool = tuple(p for p in self.living if p not in active)
        return Assignment(self.before.epoch + 1, tuple(process_of), pool, adopted)


def _state_beyond_repair(state: _State) -> Stop | None:
    """Why a lost shard cannot be rebuilt with the rules that are on, if so (rule 2)."""
    topology, on = state.topology, state.strategies
    last = topology.pipeline - 1
    lost = [shard for shard in topology.shards if shard not in state.held]
    if not lost:
        return None
    restart = "Start again from the last checkpoint (--max-restarts does so)"
    for tp, pp in lost:
        name = f"stage {pp}" + (f", tp {tp}," if topology.tensor > 1 else "")
        reason = f"the state of {name} is held by no living process"
        if not any(Shard(tp, other) in state.held for other in range(topology.pipeline)):
            return Stop(2, f"{reason}, nor is that of any other stage", restart)
        if pp not in (0, last):
            if not (on.checkfree or on.checkfree_plus):
                advice = f"{restart}; --ft-checkfree would rebuild a middle stage"
                return Stop(2, f"{reason} and CheckFree is off", advice)
            continue
        if not on.checkfree_plus:
            advice = f"{restart}; --ft-checkfree-plus would rebuild the first and last stage"
            return Stop(2, f"{reason} and it has a neighbour on one side only", advice)
        # An end stage's embedding or head survives only in the twin on the stage beside it.
        twin = 1 if pp == 0 else last - 1
        if Shard(tp, twin) not in state.held:
            what = "embedding" if pp == 0 else "output layer"
            return Stop(2, f"{reason}, and the twin of its {what} died with stage {twin}", restart)
    return None


class _Draft:
    """How one replica could be made whole, for each number of processes given to it."""

    def __init__(self, state: _State, replica: int, *, fresh_may_host: bool) -> None:
        self.columns = state.topology.columns(replica)
        self.sites = [[_site(state, slot) for slot in column] for column in self.columns]
        self.options = [solve_column(s, fresh_may_host=fresh_may_host) for s in self.sites]
        self.minimum = sum(min(options) for options in self.options)
        self.vacant = sum(site.hard for sites in self.sites for site in sites)
        """Processes that leave no new slot to adopt."""
        self.exact = sum(not site.kept for sites in self.sites for site in sites)
        """Processes that leave no slot adopted at all."""

    def choose(self, fills: int) -> list[Option]:
        """The option of each pipeline when the replica is given `fills` processes."""
        chosen = [min(options) for options in self.options]
        left = fills - sum(chosen)
        vacant = [sum(site.hard for site in sites) for sites in self.sites]
        exact = [sum(not site.kept for site in sites) for sites in self.sites]
        for limit in (vacant, exact):
            for column, most in enumerate(limit):
                more = min(left, max(0, most - chosen[column]))
                chosen[column] += more
                left -= more
        assert left == 0, f"{fills} processes for {self.exact} slots"
        return [options[n] for options, n in zip(self.options, chosen, strict=True)]


def _site(state: _State, slot: int) -> Site:
    process = state.process_of[slot]
    if process is None:
        return Site(adoptable=state.mecefo and state.topology.shard_of(slot) in state.held)
    if slot in state.adopted:
        own = state.topology.stage_of(state.before.slots_of(process)[0])
        return Site(adopter="lower" if own < state.topology.stage_of(slot) else "upper")
    return Site(kept=True, may_host=state.mecefo and process not in state.cannot_adopt)


def _place(state: _State) -> Stop | None:
    """Give the free processes to vacancies, and decide who adopts and what goes dark."""
    recover, replicas = state.strategies.recover, range(state.topology.data)
    survivors = {r: len(state.survivors_of(r)) for r in replicas}
    # Without rule 4 no replica may be left out.
    live = [r for r in replicas if survivors[r] or not recover]
    while True:
        fresh_may_host = state.mecefo and state.free.isdisjoint(state.cannot_adopt)
        drafts = {r: _Draft(state, r, fresh_may_host=fresh_may_host) for r in live}
        short = sum(draft.minimum for draft in drafts.values()) - len(state.free)
        if short <= 0:
            break
        if not recover:
            return _too_few(state, short)
        # Least is moved if the replica that misses most gives way, the last one among equals.
        victim = max(live, key=lambda r: (drafts[r].minimum, -survivors[r], r))
        live.remove(victim)
        state.release(victim)

    budget = {r: draft.minimum for r, draft in drafts.items()}
    left = -short
    # Vacancies before slots that have an adopter; replicas that soon become exact first.
    vacant = {r: draft.vacant for r, draft in drafts.items()}
    exact = {r: draft.exact for r, draft in drafts.items()}
    for limit in (vacant, exact):
        for r in sorted(live, key=lambda r: (limit[r] - budget[r], r)):
            more = min(left, max(0, limit[r] - budget[r]))
            budget[r] += more
            left -= more

    # What is left may bring dark replicas back, those first that lost least.
    for r in sorted(set(replicas) - set(live), key=lambda r: (-survivors[r], r)):
        draft = _Draft(state, r, fresh_may_host=state.mecefo)
        fills = min(left, draft.exact)
        num_adopted = draft.exact - fills
        if fills < draft.minimum or num_adopted > len(state.free - state.cannot_adopt):
            continue
        # Skipped layers learn from exact replicas alone: without any, this one rather waits.
        if num_adopted and live and not any(budget[other] == exact[other] for other in live):
            continue
        live.append(r)
        drafts[r], exact[r], budget[r] = draft, draft.exact, fills
        left -= fills

    if not live:
        draft = _Draft(state, 0, fresh_may_host=state.mecefo)
        return _too_few(state, max(1, draft.minimum - left))
    _apply(state, {r: (drafts[r], drafts[r].choose(budget[r])) for r in live})
    return None


def _too_few(state: _State, missing: int) -> Stop:
    """The stop for want of processes (rules 3 and 4)."""
    size, usable = state.topology.replica_size, len(state.living) - len(state.building)
    if state.strategies.recover:
        reason = f"{usable} processes are left and one whole replica needs {size}"
        advice = []
    else:
        reason = f"the vacant slots need {missing} more ready processes and ReCoVer is off"
        advice = ["--ft-recover would train on with the whole replicas"]
    if not state.mecefo and state.topology.data > 1 and state.topology.pipeline > 1:
        advice.append("--ft-mecefo would let a neighbour serve two stages")
    if state.building:
        advice.append(f"{len(state.building)} processes of the pool are not ready yet")
    if state.strategies.respawn:
        advice.append(f"{missing} new processes would do")
    else:
        advice.append("--ft-respawn would start new processes")
    advice.append("more processes than slots at the start would wait in the pool")
    text = "; ".join(advice)
    return Stop(
        4,
        reason,
        text[0].upper() + text[1:],
        missing_processes=missing,
        can_checkpoint=state.held.issuperset(state.topology.shards),
    )


def _apply(state: _State, chosen: Mapping[int, tuple[_Draft, list[Option]]]) -> None:
    """Seat processes and record who adopts."""
    fills: list[int] = []
    host_of: dict[int, int] = {}  # newly adopted slot -> the slot whose process adopts it
    for draft, options in chosen.values():
        for slots, sites, option in zip(draft.columns, draft.sites, options, strict=True):
            for stage, (slot, site, label) in enumerate(
                zip(slots, sites, option.labels, strict=True)
            ):
                if label == "fill":
                    fills.append(slot)
                    state.adopted.discard(slot)
                elif label != "keep" and site.adopter is None:
                    host_of[slot] = slots[stage + (1 if label == "upper" else -1)]
    hosted = {host: slot for slot, host in host_of.items()}
    shard_of = state.topology.shard_of
    seats = [
        Seat(slot, tuple(shard_of(s) for s in (slot, hosted.get(slot)) if s is not None))
        for slot in fills
    ]
    last_slot = {p: slots[0] for p in state.free if (slots := state.before.slots_of(p))}
    seated = seat_processes(seats, sorted(state.free), state.holds, state.cannot_adopt, last_slot)
    for slot, process in seated.items():
        state.process_of[slot] = process
    for slot, host in host_of.items():
        state.process_of[slot] = state.process_of[host]
        state.adopted.add(slot)
