"""The process groups that this process is a member of, in order of creation.

A repair replaces the link of each. Numbers tell groups of the same slots apart; every member counts
the same, since all of them create these groups in the same order.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_ft.world.group import UlfmProcessGroup

_groups: list[UlfmProcessGroup] = []
_created: Counter[tuple[int, ...]] = Counter()


def next_number(slots: tuple[int, ...]) -> int:
    """How many groups of exactly ``slots`` this process made before; counts this one."""
    number = _created[slots]
    _created[slots] += 1
    return number


def live_groups() -> tuple[UlfmProcessGroup, ...]:
    """The groups that exist now, in order of creation."""
    return tuple(_groups)


def add(group: UlfmProcessGroup) -> None:
    _groups.append(group)


def remove(group: UlfmProcessGroup) -> None:
    _groups.remove(group)
