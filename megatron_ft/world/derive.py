"""Which ``Split`` of the world makes which groups: pure, so that all processes agree.

After a failure every communicator is derived by Split over the repaired world (Create_group may
hang there). A Split is collective over the world and cuts it into disjoint parts, so groups with no
process in common share one: a round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class GroupKey:
    """A torch process group as all its members name it."""

    number: int
    """Order of creation, the same on every member."""
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """One Split: the groups it makes, no process in two of them."""

    groups: tuple[GroupKey, ...]

    def color(self, slots: Iterable[int]) -> tuple[int, GroupKey] | None:
        """Which part a process that serves ``slots`` belongs to; None if to no part."""
        mine = set(slots)
        for color, group in enumerate(self.groups):
            if mine & set(group.slots):
                return color, group
        return None


def rounds(groups: Iterable[GroupKey], process_of: Sequence[int | None]) -> list[Round]:
    """Pack the groups that need a communicator into as few rounds as their order allows.

    Args:
        groups: Every group of every process, duplicates allowed.
        process_of: The process that serves each slot, None where it is vacant.

    Returns:
        Rounds in the order in which every process must take part. A group served by fewer than
        two processes needs no communicator and is in no round.
    """
    packed: list[tuple[list[GroupKey], set[int]]] = []
    for group in sorted(set(groups)):
        processes = {p for slot in group.slots if (p := process_of[slot]) is not None}
        if len(processes) < 2:
            continue
        for members, taken in packed:
            if not processes & taken:
                members.append(group)
                taken |= processes
                break
        else:
            packed.append(([group], set(processes)))
    return [Round(tuple(members)) for members, _ in packed]
