"""A process changes its slot: the same shard, in another replica.

What it has built is the same in every replica; only numbers differ. Its groups within the replica
become those of the other one, and its rank in groups across replicas changes.
"""

from __future__ import annotations

from typing import Any

from megatron_ft.topology import Topology
from megatron_ft.world.derive import GroupKey


def moved(topology: Topology, key: GroupKey, old: int, new: int) -> GroupKey:
    """The group that a process of slot ``new`` has where that of slot ``old`` has ``key``."""
    a, b = topology.replica_of(old), topology.replica_of(new)
    if a == b or not all(topology.replica_of(slot) == a for slot in key.slots):
        return key
    return GroupKey(key.number, tuple(move(topology, slot, b) for slot in key.slots))


def move(topology: Topology, slot: int, replica: int) -> int:
    """The slot of the same coordinate in another replica."""
    at = topology.coordinate(slot)
    return topology.slot(tp=at.tp, cp=at.cp, pp=at.pp, dp=replica)


def relabel(session: Any, old: int, new: int) -> None:
    """Make this process, built for slot ``old``, one of slot ``new``."""
    import torch.distributed as dist
    from megatron.core import parallel_state
    from torch.distributed import distributed_c10d

    world, topology = session.world, session.world.topology
    assert topology.shard_of(old) == topology.shard_of(new), (old, new)
    replica, before = topology.replica_of(new), topology.replica_of(old)
    group_ranks: dict[Any, dict[int, int]] = distributed_c10d._world.pg_group_ranks
    groups = {}
    for group in world.groups.values():
        group.key = moved(topology, group.key, old, new)
        group.shown_rank = group.key.slots.index(new)
        group_ranks[group] = {slot: i for i, slot in enumerate(group.key.slots)}
        groups[group.key] = group
    world.groups = groups
    for name, ranks in list(vars(parallel_state).items()):
        if not name.endswith("_GLOBAL_RANKS") or not isinstance(ranks, list | tuple):
            continue
        if ranks and all(topology.replica_of(r) == before for r in ranks):
            setattr(parallel_state, name, type(ranks)(move(topology, r, replica) for r in ranks))
    session.args.rank = new
    if session.transaction is not None:
        session.transaction.replica = replica
    assert dist.get_rank() == new
