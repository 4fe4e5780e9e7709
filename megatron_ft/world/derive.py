"""Which ``Split`` of the world makes which groups: pure, so that all processes agree.

After a failure every communicator is derived by Split over the repaired world (Create_group may
hang there). A Split is collective over the world and cuts it into disjoint parts, so groups with no
process in common share one: a round.

Megatron makes many groups of the same slots. After a failure they share one communicator: all its
members call the operations of all these groups in the same order, as they do with any backend. So a
repair takes less time, and so does the moment in which another death is dangerous: Open MPI 5.0.11
follows a null pointer when it hears of one while it makes a communicator.
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
    """One Split: the sets of slots it makes a communicator for, no process in two of them."""

    parts: tuple[tuple[int, ...], ...]

    def color(self, slots: Iterable[int]) -> int | None:
        """Which part a process that serves ``slots`` belongs to; None if to no part."""
        mine = set(slots)
        for color, part in enumerate(self.parts):
            if mine & set(part):
                return color
        return None


def rounds(groups: Iterable[GroupKey], process_of: Sequence[int | None]) -> list[Round]:
    """Pack the slots of the groups that need a communicator into few rounds.

    Args:
        groups: Every group of every process, duplicates allowed.
        process_of: The process that serves each slot, None where it is vacant.

    Returns:
        Rounds in the order in which every process must take part. A group served by fewer than
        two processes needs no communicator and is in no round.
    """
    packed: list[tuple[list[tuple[int, ...]], set[int]]] = []
    for slots in dict.fromkeys(group.slots for group in sorted(set(groups))):
        processes = {p for slot in slots if (p := process_of[slot]) is not None}
        if len(processes) < 2:
            continue
        for parts, taken in packed:
            if not processes & taken:
                parts.append(slots)
                taken |= processes
                break
        else:
            packed.append(([slots], set(processes)))
    return [Round(tuple(parts)) for parts, _ in packed]
