"""Rule 5: whether a job in which no replica is whole waits for processes, or stops. Pure.

Nothing is lost while every shard is held by somebody or can be rebuilt: then the job stands still
until spares have built what is missing, or new processes have come, and goes on with the same step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron_ft.checkfree.options import CheckfreeOptions
from megatron_ft.recovery_plan import RecoveryPlan, Stop
from megatron_ft.rejoin.refill import OFF, Built, obtainable
from megatron_ft.topology import Shard, Topology


@dataclass(frozen=True)
class Help:
    """Who could make a replica whole again."""

    built: Mapping[int, Built]
    """Pool processes that are ready."""
    building: Mapping[int, int]
    """Pool processes that build, and for which slot."""
    idle: Collection[int]
    """Pool processes that have built nothing and can build for any slot."""
    respawns: bool
    """Whether new processes are started for the dead."""


def stop_if_hopeless(
    topology: Topology,
    plan: RecoveryPlan,
    helpers: Help,
    holds: Mapping[int, frozenset[Shard]],
    barred: Collection[int] = (),
    checkfree: CheckfreeOptions = OFF,
) -> RecoveryPlan:
    """The plan itself where a replica is whole or may become so, else with a stop.

    Args:
        holds: Process -> shards of which it holds the committed state.
        barred: Slots that stay vacant.
    """
    if plan.assignment.whole_replicas(topology):
        return plan
    lost = set(topology.shards) - obtainable(topology, holds, checkfree)
    if lost:
        stop = _nowhere(topology, lost, checkfree)
    elif any(_comes_back(topology, r, helpers, barred) for r in range(topology.data)):
        return plan
    else:
        stop = _too_few(topology, plan)
    actions = (*(a for a in plan.actions if not isinstance(a, Stop)), stop)
    return RecoveryPlan(topology, plan.before, plan.failed, plan.assignment, actions)


def _comes_back(topology: Topology, replica: int, helpers: Help, barred: Collection[int]) -> bool:
    """Whether each slot of a replica finds a process that is ready, builds for it, or is free."""
    slots = topology.replica(replica)
    if any(slot in barred for slot in slots):
        return False
    if helpers.respawns:
        return True
    have: dict[Shard, int] = {}
    for shard in [
        *(built.shard for built in helpers.built.values()),
        *(topology.shard_of(slot) for slot in helpers.building.values()),
    ]:
        have[shard] = have.get(shard, 0) + 1
    missing = 0
    for slot in slots:
        shard = topology.shard_of(slot)
        if have.get(shard, 0) > 0:
            have[shard] -= 1
        else:
            missing += 1
    return missing <= len(helpers.idle)


def _nowhere(topology: Topology, lost: Collection[Shard], checkfree: CheckfreeOptions) -> Stop:
    stages = sorted({shard.pp for shard in lost})
    names = ("stage " if len(stages) == 1 else "stages ") + ", ".join(map(str, stages))
    reason = f"the state of {names} is lost in every replica"
    if not checkfree.enabled:
        advice = "--ft-checkfree rebuilds such a stage from its neighbours"
    elif not checkfree.plus:
        advice = "--ft-checkfree-plus rebuilds the first and the last stage, too"
        reason += ", and CheckFree needs a living stage on either side"
    else:
        advice = "a first or last stage needs its neighbour, which holds the twin of its embedding"
        reason += ", and so is what it could be rebuilt from"
    again = "start again from the last checkpoint (megatron-ft-run --max-restarts does so)"
    return Stop(2, reason, f"{advice[0].upper()}{advice[1:]}; {again}")


def _too_few(topology: Topology, plan: RecoveryPlan) -> Stop:
    pool = len(plan.assignment.pool)
    reason = (
        f"every replica has lost a process: {pool} are left, and a replica needs "
        f"{topology.replica_size}, one that has built each of its stages"
    )
    advice = (
        "--ft-spares or --ft-respawn keep replacements ready; start again from the last "
        "checkpoint (megatron-ft-run --max-restarts does so)"
    )
    missing = max(0, topology.replica_size - pool)
    return Stop(4, reason, advice, missing_processes=missing, can_checkpoint=True)
