"""The job as if the dark replicas had never been: for code that cannot do with vacant slots.

A checkpoint is written by rank 0, by the first data-parallel rank of each shard, or by all ranks of
a data-parallel group in turn. With vacant slots the writer may be missing. But vacancies are whole
replicas, so the live slots, counted through, are a complete Megatron job with fewer replicas. While
``compact`` is open, ranks, sizes and groups are those of that job.

A replica in which a process runs two stages is left out, too: nobody could write for both. Its
processes share the communicators across replicas, so the others get new ones for that time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from mpi4py import MPI
from torch.distributed import distributed_c10d

from megatron_ft.world import registry
from megatron_ft.world.comms import free, revoke, split_groups
from megatron_ft.world.derive import GroupKey
from megatron_ft.world.errors import guard
from megatron_ft.world.link import Link
from megatron_ft.world.world import World

NO_COMMS: Mapping[GroupKey, MPI.Intracomm | None] = {}


def hosting_replicas(world: World) -> frozenset[int]:
    """The replicas in which a process runs two stages."""
    return frozenset(map(world.topology.replica_of, world.shown.adopted))


@contextlib.contextmanager
def compact_exact(world: World) -> Iterator[bool]:
    """Show the slots of exact replicas as a job of their own; whether this process is in it.

    Collective over the active processes.

    Raises:
        WorldBroken: A process died.
    """
    without = hosting_replicas(world)
    takes_part = world.topology.replica_of(world.slots[0]) not in without
    if not without:
        with compact(world):
            yield True
        return
    comms: dict[GroupKey, MPI.Intracomm | None] = {}
    try:
        _make_without(world, without, comms)
        with compact(world, without, comms) if takes_part else contextlib.nullcontext():
            yield takes_part
    except BaseException:
        # Others may wait in one of them for this process, which gives up.
        for comm in _distinct(comms):
            revoke(comm)
        raise
    finally:
        for comm in _distinct(comms):
            free(comm)


def _distinct(comms: Mapping[GroupKey, MPI.Intracomm | None]) -> list[MPI.Intracomm]:
    return list({id(comm): comm for comm in comms.values() if comm is not None}.values())


def _make_without(
    world: World, replicas: frozenset[int], comms: dict[GroupKey, MPI.Intracomm | None]
) -> None:
    """Add new communicators for the groups across replicas, without these replicas."""
    process_of = _without(world, replicas)
    mine = [slot for slot in world.slots if process_of[slot] is not None]
    across = [key for key in world.known_keys if not world.within_replica(key.slots)]
    keys = [key for key in (world.groups if mine else ()) if not world.within_replica(key.slots)]
    assert world.active is not None
    made: dict[GroupKey, MPI.Intracomm] = {}
    try:
        with guard("split", "world"):
            split_groups(world.active, across, process_of, mine, made)
    finally:
        comms.update(dict.fromkeys(keys))
        comms.update(made)


def _without(world: World, replicas: frozenset[int]) -> tuple[int | None, ...]:
    return tuple(
        None if world.topology.replica_of(slot) in replicas else process
        for slot, process in enumerate(world.shown.process_of)
    )


@contextlib.contextmanager
def compact(
    world: World,
    without: frozenset[int] = frozenset(),
    comms: Mapping[GroupKey, MPI.Intracomm | None] = NO_COMMS,
) -> Iterator[None]:
    """Show the live slots as a job of their own; does nothing while none is vacant.

    Args:
        without: Replicas that are to be left out although they are live.
        comms: Communicators of groups that have others without them.
    """
    process_of = _without(world, without)
    live = [slot for slot, process in enumerate(process_of) if process is not None]
    mine = world.shown.slots_of(world.process)[0]
    if len(live) == len(process_of):
        yield
        return
    number = {slot: i for i, slot in enumerate(live)}
    processes = [process_of[slot] for slot in live]
    group_ranks: dict[Any, dict[int, int]] = distributed_c10d._world.pg_group_ranks
    before_links = {group: group.link for group in registry.live_groups()}
    before_shown = {group: group.shown_rank for group in before_links}
    before_ranks = {group: group_ranks[group] for group in before_links}
    before_lists = {
        name: ranks
        for name, ranks in vars(parallel_state).items()
        if name.endswith("_GLOBAL_RANKS") and isinstance(ranks, list | tuple)
    }
    try:
        for group, link in before_links.items():
            slots = tuple(number[slot] for slot in link.slots if slot in number)
            if mine in link.slots:
                comm = comms.get(group.key, link.comm)
                group.link = Link.make(slots, processes, comm, link.p2p)
                group.shown_rank = slots.index(number[mine])
                group_ranks[group] = {slot: i for i, slot in enumerate(slots)}
        for name, ranks in before_lists.items():
            setattr(parallel_state, name, type(ranks)(number[r] for r in ranks if r in number))
        assert dist.get_world_size() == len(live)
        yield
    finally:
        for group, link in before_links.items():
            group.link = link
            group.shown_rank = before_shown[group]
            group_ranks[group] = before_ranks[group]
        for name, ranks in before_lists.items():
            setattr(parallel_state, name, ranks)
