"""Which nodes the `degrade` faults of a run degrade in which iteration. Pure.

Every process computes this from the faults alone, so that all know who is degraded when a step
begins, as they do of nodes that have really adopted a stage. A fault finds its node as a death
does: the neighbour that runs both stages is the one before, after the first stage, or on the other
side if that one is degraded already. Where there is none, or the stage is degraded already, the
fault does not strike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from megatron_ft.faults.plan import FaultPlan
from megatron_ft.faults.spec import FaultSpec
from megatron_ft.mecefo.nodes import Node, neighbour
from megatron_ft.topology import Topology


class Degradations:
    """Degraded nodes by iteration.

    Args:
        begins: Iteration -> the `degrade` faults that begin in it.
        topology: Of the job.
    """

    def __init__(self, begins: Callable[[int], Iterable[FaultSpec]], topology: Topology) -> None:
        self._begins = begins
        self._topology = topology
        self._restart()

    def nodes_at(self, iteration: int) -> frozenset[Node]:
        """The nodes that are degraded in ``iteration``, which counts from 1."""
        if iteration < self._iteration:
            self._restart()
        while self._iteration < iteration:
            self._advance()
        return frozenset(self._until)

    def strikes(self, spec: FaultSpec, slot: int) -> bool:
        """Whether a fault degrades the node of ``slot``, in the iteration in which it begins."""
        self.nodes_at(spec.iteration)
        replica = self._topology.replica_of(slot)
        return (spec, replica) in self._struck

    def _restart(self) -> None:
        self._iteration = 0
        self._until: dict[Node, float] = {}
        self._struck: set[tuple[FaultSpec, int]] = set()

    def _advance(self) -> None:
        self._iteration += 1
        self._until = {n: end for n, end in self._until.items() if end > self._iteration}
        self._struck = set()
        for spec in self._begins(self._iteration):
            for replica, stage in self._targets(spec):
                node = self._node(replica, stage)
                if node is not None:
                    lasts = math.inf if spec.duration is None else spec.duration
                    self._until[node] = self._iteration + lasts
                    self._struck.add((spec, replica))

    def _targets(self, spec: FaultSpec) -> list[tuple[int, int]]:
        if spec.slot is not None:
            at = self._topology.coordinate(spec.slot)
            return [(at.dp, at.pp)]
        assert spec.stage is not None, "the grammar demands one of both"
        return [(replica, spec.stage) for replica in range(self._topology.data)]

    def _node(self, replica: int, stage: int) -> Node | None:
        taken = {s for node in self._until if node.replica == replica for s in node.stages}
        if stage in taken:
            return None
        if self._topology.pipeline == 1:
            return Node(replica, (stage,))
        other = neighbour(stage, self._topology.pipeline, taken)
        return None if other is None else Node(replica, tuple(sorted((stage, other))))


def degradations_of(plan: FaultPlan, topology: Topology) -> Degradations:
    """The degraded nodes of all `degrade` faults of a plan, named and drawn."""
    drawn = plan.schedule(num_slots=topology.num_slots, num_stages=topology.pipeline)
    named: dict[int, list[FaultSpec]] = {}
    for spec in plan.specs:
        named.setdefault(spec.iteration, []).append(spec)

    def begins(iteration: int) -> list[FaultSpec]:
        specs = [*named.get(iteration, ()), *drawn.specs_at(iteration)]
        return [spec for spec in specs if spec.kind == "degrade"]

    return Degradations(begins, topology)
