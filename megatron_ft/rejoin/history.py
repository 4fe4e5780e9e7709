"""What all processes know alike of past replacements: who failed as one, who was asked to go."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_ft.recovery_plan import Fill, Rebuild, RecoveryPlan
from megatron_ft.topology import Topology

if TYPE_CHECKING:
    from megatron_ft.planner import Facts

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
    committed: int = 0
    """The last step that somebody had committed by the last repair."""

    @property
    def barred(self) -> frozenset[int]:
        """Slots that stay vacant because their replacements keep dying."""
        return frozenset(s for s, n in self.failures.items() if n >= MAX_FAILED_REPLACEMENTS)

    def closed(self, topology: Topology) -> frozenset[int]:
        """Slots that are not filled, for whatever reason."""
        return self.barred | slots_of(topology, self.drained)

    def count_failures(
        self, dead: Collection[int], living: Mapping[int, Facts], begun: Mapping[int, int | None]
    ) -> None:
        """Count replacements that came to nothing before a step was committed, and note that.

        Args:
            dead: The processes that died before this repair.
            living: What the others have told in it.
            begun: For which slot each process was building, as far as the last repair tells.
        """
        committed = max((self.committed, *(facts.committed for facts in living.values())))
        self.committed = committed
        for process in dead:
            slot, at = self.filled_at.pop(process, (None, 0))
            if slot is None:
                slot, at = begun.get(process), committed
            if slot is not None:
                self.failures[slot] = self.failures.get(slot, 0) + 1 if committed <= at else 0
        for process, facts in living.items():
            if facts.receiving and process in self.filled_at:
                # It lives, but its state did not arrive: no better than one that died.
                slot, at = self.filled_at.pop(process)
                self.failures[slot] = self.failures.get(slot, 0) + 1 if committed <= at else 0

    def count_unborn(self, slots: Collection[int]) -> None:
        """Count replacements that died while they built, before they were one of the world.

        Args:
            slots: For which slot each one built.
        """
        for slot in slots:
            self.failures[slot] = self.failures.get(slot, 0) + 1

    def note_fills(self, plan: RecoveryPlan) -> None:
        """Note who replaces somebody, in which slot, and before which step.

        Who only takes its slot again, with the state that it holds, is no replacement.
        """
        for action in plan.actions:
            if isinstance(action, Rebuild) or (isinstance(action, Fill) and action.is_copy):
                self.filled_at[action.process] = (action.slot, self.committed)
