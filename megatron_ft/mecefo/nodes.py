"""Who is degraded: in a replica, the process that runs two stages (arXiv 2510.16415). Pure.

A node is what the paper calls so: in one replica, the process that runs a stage, with its
tensor-parallel peers. When it is lost, a neighbouring stage's node runs both stages, and the layers
of both are degraded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_ft.topology import Assignment, Topology


@dataclass(frozen=True, order=True)
class Node:
    """One degraded node."""

    replica: int
    stages: tuple[int, ...]
    """The stages it runs, ascending: two, or one where the pipeline has no other."""


def neighbour(stage: int, num_stages: int, taken: Collection[int]) -> int | None:
    """The stage whose node adopts ``stage``: the one before, or after the first stage.

    Args:
        taken: Stages of the replica that are degraded already; the other side is taken then.

    Returns:
        None where no neighbour runs a single stage.
    """
    candidates = (1, -1) if stage == 0 else (stage - 1, stage + 1)
    return next((s for s in candidates if 0 <= s < num_stages and s not in taken), None)


def nodes_of(assignment: Assignment, topology: Topology) -> frozenset[Node]:
    """The nodes that serve two stages in an assignment.

    With tensor parallelism a node is degraded as soon as one of its peers is, because they take
    part in the same collectives of the backward pass.
    """
    found = set()
    for process in assignment.active_processes:
        at = [topology.coordinate(slot) for slot in assignment.slots_of(process)]
        if len(at) == 2:
            found.add(Node(at[0].dp, tuple(sorted(coordinate.pp for coordinate in at))))
    return frozenset(found)
