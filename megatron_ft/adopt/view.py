"""Megatron's and torch's globals as the adopted slot sees them.

Megatron keeps the groups of a process's slot in the globals of ``parallel_state``, and torch has
one default group. A process with two slots has these twice, and shows the one or the other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core import parallel_state
from torch.distributed import distributed_c10d

from megatron_ft.rejoin.relabel import move, moved
from megatron_ft.topology import Assignment, Topology
from megatron_ft.world import registry
from megatron_ft.world.derive import GroupKey
from megatron_ft.world.group import UlfmProcessGroup
from megatron_ft.world.link import Link
from megatron_ft.world.world import World

Names = dict[str, Any]
"""Global of ``parallel_state`` -> a group's key, a list of keys, a list of slots, or None."""


def names() -> Names:
    """What the globals of ``parallel_state`` hold, as other processes understand it."""
    found: Names = {}
    for name, value in vars(parallel_state).items():
        if not name.startswith("_") or not name.isupper():
            continue
        if isinstance(value, UlfmProcessGroup):
            found[name] = value.key
        elif isinstance(value, list) and value and isinstance(value[0], UlfmProcessGroup):
            found[name] = [group.key for group in value]
        elif value is None and name.endswith(("_GROUP", "_GROUP_GLOO", "_GROUPS", "_RANKS")):
            found[name] = None
        elif name.endswith("_RANKS") and isinstance(value, list | tuple):
            found[name] = list(value)
    return found


def moved_names(topology: Topology, known: Names, old: int, new: int) -> Names:
    """The globals of slot ``new``, where those of ``old``, another replica's, are known."""
    a, b = topology.replica_of(old), topology.replica_of(new)

    def of(value: Any) -> Any:
        if isinstance(value, GroupKey):
            return moved(topology, value, old, new)
        if isinstance(value, list):
            if value and all(isinstance(v, int) and topology.replica_of(v) == a for v in value):
                return [move(topology, v, b) for v in value]
            return [of(v) for v in value]
        return value

    return {name: of(value) for name, value in known.items()}


class SlotView:
    """The globals of one slot.

    Args:
        slot: The slot.
        known: Its globals.
        groups: Its groups.
        args: Megatron's flags, whose ``rank`` is one of them.
    """

    def __init__(
        self, slot: int, known: Names, groups: Mapping[GroupKey, UlfmProcessGroup], args: Any
    ) -> None:
        self.slot = slot
        self.args = args
        self.groups = groups

        def of(value: Any) -> Any:
            if isinstance(value, GroupKey):
                return groups[value]
            return [of(v) for v in value] if isinstance(value, list) else value

        self.globals = {name: of(value) for name, value in known.items()}
        (self.world,) = (g for g in groups.values() if _is_default(g))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While open, Megatron and torch see this slot."""
        state, world = vars(parallel_state), distributed_c10d._world
        before = {name: state[name] for name in self.globals}
        default, rank = world.default_pg, self.args.rank
        state.update(self.globals)
        world.default_pg, self.args.rank = self.world, self.slot
        try:
            yield
        finally:
            state.update(before)
            world.default_pg, self.args.rank = default, rank

    @contextlib.contextmanager
    def alone(self, world: World) -> Iterator[None]:
        """While open, this slot is shown, and no other one is served: for building by oneself."""
        process_of: list[int | None] = [None] * world.topology.num_slots
        process_of[self.slot] = world.process
        links = {group: group.link for group in self.groups.values()}
        listed = registry._groups[:]
        registry._groups[:] = list(links)
        world.alone = Assignment(0, tuple(process_of), ())
        for group in links:
            group.link = Link.make(group.slots, process_of, None)
        try:
            with self.shown():
                yield
        finally:
            for group, link in links.items():
                group.link = link
            world.alone = None
            registry._groups[:] = listed


def _is_default(group: UlfmProcessGroup) -> bool:
    """Whether it is this slot's counterpart of torch's default group."""
    default = distributed_c10d._get_default_group()
    assert isinstance(default, UlfmProcessGroup)
    return group.key == default.key
