"""What all processes know alike of past replacements: who failed as one, who was asked to go."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from megatron_ft.topology import Topology

MAX_FAILED_REPLACEMENTS = 3


def slots_of(topology: Topology, replicas: Collection[int]) -> frozenset[int]:
    """All slots of these replicas."""
    return frozenset(slot for replica in replicas for slot in topology.replica(replica))


@dataclass
class History:
    """What all processes know alike of past replacements."""

    filled_at: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Process -> the slot that it filled and the iteration before which it did."""
    failures: dict[int, int] = field(default_factory=dict)
    """Slot -> replacements in a row that died before a step was committed."""
    drained: set[int] = field(default_factory=set)
    """Replicas that left because somebody asked them to; they stay dark until asked back."""
    asked_back: bool = False
    """Whether somebody asked for new processes and not all of them are there yet."""
    left: set[int] = field(default_factory=set)
    """Their processes, whose end is no failure."""

    @property
    def barred(self) -> frozenset[int]:
        """Slots that stay vacant because their replacements keep dying."""
        return frozenset(s for s, n in self.failures.items() if n >= MAX_FAILED_REPLACEMENTS)

    def closed(self, topology: Topology) -> frozenset[int]:
        """Slots that are not filled, for whatever reason."""
        return self.barred | slots_of(topology, self.drained)
