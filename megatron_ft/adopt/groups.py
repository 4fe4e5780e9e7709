"""The groups of an adopted slot: made here alone, for MPI has connected them in the repair.

torch's ``new_group`` is of no use: it asks for this process's rank, which is that of its own slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed import distributed_c10d

from megatron_ft.world.derive import GroupKey
from megatron_ft.world.group import UlfmProcessGroup
from megatron_ft.world.link import Link
from megatron_ft.world.policy import PlainPolicy


def make(
    slot: int, links: Mapping[GroupKey, Link], policy: PlainPolicy
) -> dict[GroupKey, UlfmProcessGroup]:
    """Groups in which this process is ``slot``, known to torch.

    Args:
        slot: The adopted slot; a member of each group.
        links: The groups, with what connects them.
        policy: Runs their operations.
    """
    world = distributed_c10d._world
    own = distributed_c10d._get_default_group()
    groups = {}
    for key, link in links.items():
        rank = key.slots.index(slot)
        name = f"adopted-{slot}-{key.number}-{'.'.join(map(str, key.slots))}"
        group = UlfmProcessGroup(rank, link, name, key.number, policy, own._timeout)
        group.setGroupDesc("adopted")
        world.pg_map[group] = world.pg_map[own]
        world.pg_names[group] = name
        world.pg_group_ranks[group] = {member: i for i, member in enumerate(key.slots)}
        world.pg_backend_config[group] = world.pg_backend_config[own]
        groups[key] = group
    return groups


def forget(groups: Iterable[Any]) -> None:
    """Let torch forget groups that ``make`` made; whoever replaced their links frees these."""
    world = distributed_c10d._world
    for group in groups:
        for of_group in (
            *(world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config),
        ):
            of_group.pop(group, None)
