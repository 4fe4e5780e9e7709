"""The job as if the dark replicas had never been: for code that cannot do with vacant slots.

A checkpoint is written by rank 0, by the first data-parallel rank of each shard, or by all ranks of
a data-parallel group in turn. With vacant slots the writer may be missing. But vacancies are whole
replicas, so the live slots, counted through, are a complete Megatron job with fewer replicas. While
``compact`` is open, ranks, sizes and groups are those of that job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from megatron_ft.world import registry
from megatron_ft.world.link import Link
from megatron_ft.world.world import World


@contextlib.contextmanager
def compact(world: World) -> Iterator[None]:
    """Show the live slots as a job of their own; does nothing while none is vacant."""
    process_of = world.shown.process_of
    live = world.shown.live_slots
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
                group.link = Link.make(slots, processes, link.comm, link.p2p)
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
