"""What a process does, one after another, to run its part of a step's microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from megatron_ft.schedule.placement import Placement
from megatron_ft.schedule.routes import Route


class Kind(Enum):
    FORWARD = auto()
    BACKWARD = auto()
    SEND_ACTIVATION = auto()
    RECEIVE_ACTIVATION = auto()
    SEND_GRADIENT = auto()
    RECEIVE_GRADIENT = auto()


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVE_OF = {
    Kind.SEND_ACTIVATION: Kind.RECEIVE_ACTIVATION,
    Kind.SEND_GRADIENT: Kind.RECEIVE_GRADIENT,
}


class Action(NamedTuple):
    """One thing that a process does."""

    kind: Kind
    microbatch: int
    """Index in the list of microbatches of this call, not the id."""
    stage: int
    """The stage, on this process, that computes, has computed what is sent, or gets what comes."""
    peer: int | None = None
    """The process at the other end of a message."""


@dataclass(frozen=True)
class Schedule:
    """The actions of all processes of a replica for one list of microbatches."""

    routes: tuple[Route, ...]
    """For each microbatch."""
    placement: Placement
    actions: Mapping[int, tuple[Action, ...]]
    """For each process."""
    forward_only: bool

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    @property
    def num_microbatches(self) -> int:
        return len(self.routes)

    def computes(self, stage: int) -> tuple[Action, ...]:
        """The forwards and backwards of a stage, in order."""
        return tuple(
            action
            for action in self.actions[self.placement[stage]]
            if action.stage == stage and action.kind in COMPUTE
        )

    def peak_live(self, stage: int) -> int:
        """The most microbatches that are between forward and backward pass at a stage.

        Without backward passes nothing is kept: 0.
        """
        if self.forward_only:
            return 0
        live = peak = 0
        for action in self.computes(stage):
            live += 1 if action.kind is Kind.FORWARD else -1
            peak = max(peak, live)
        return peak
