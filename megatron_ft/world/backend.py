"""The torch.distributed backend ``ulfm``: MPI with fault tolerance, groups of slots.

    register(PlainPolicy())
    dist.init_process_group("ulfm", store=dist.HashStore(), rank=slot, world_size=num_slots)

No process is special and no store is shared: a group is made by MPI over its members only.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from megatron_ft.patches import ulfm
from megatron_ft.patches.registry import registry as registry_of_patches
from megatron_ft.world import registry
from megatron_ft.world.group import UlfmProcessGroup
from megatron_ft.world.policy import PlainPolicy

NAME = "ulfm"

__all__ = ["NAME", "PlainPolicy", "UlfmProcessGroup", "register", "unregister"]


def register(policy: PlainPolicy) -> None:
    """Make ``ulfm`` known to torch; ``policy`` connects and runs the groups made from now on."""

    def create(options: Any, _backend_options: Any) -> UlfmProcessGroup:
        slots = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        number = registry.next_number(slots)
        link = policy.link(slots, options.group_id, number)
        at = link.ranks[options.group_rank]
        if at != link.rank:
            raise ValueError(
                f"this process serves rank {link.rank} of group {options.group_id!r} by MPI, but "
                f"torch was told rank {options.group_rank}: pass its slot as rank to "
                "init_process_group"
            )
        group = UlfmProcessGroup(
            options.group_rank, link, options.group_id, number, policy, options.timeout
        )
        registry.add(group)
        policy.created(group)
        return group

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])
    registry_of_patches.install(ulfm.BACKEND)


def unregister() -> None:
    """Forget the backend and leave torch as it was; its groups must be destroyed before."""
    name = NAME.upper()
    if name in dist.Backend._plugins:
        del dist.Backend._plugins[name]
        del dist.Backend.backend_type_map[NAME]
        del dist.Backend.backend_capability[NAME]
        dist.Backend.backend_list.remove(NAME)
        delattr(dist.Backend, name)
    registry_of_patches.remove(ulfm.BACKEND)
