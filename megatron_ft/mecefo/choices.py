"""Which layers of a degraded node are better than the cheapest. Pure: all processes choose alike.

The gradient rule needs that: whether a replica computed a layer's attention exactly, the others
know without a message.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron_ft.mecefo.budget import LayerActivations, LayerCost, afford, topmost
from megatron_ft.mecefo.nodes import Node
from megatron_ft.mecefo.options import MecefoOptions


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Layers of one node, by their number in the model, from 1."""

    exact: frozenset[int]
    """Have an exact backward pass of the attention."""
    kept: frozenset[int]
    """Keep the intermediates of the FFN."""


class Choices:
    """What the budgets of the options come to.

    Args:
        options: The budgets.
        layers: The layer numbers of each stage, from 1.
        cost: Of one layer.
        kept: Of one layer.
        microbatches: Of one replica in a step.
    """

    def __init__(
        self,
        options: MecefoOptions,
        layers: Sequence[Sequence[int]],
        cost: LayerCost,
        kept: LayerActivations,
        *,
        microbatches: int,
    ) -> None:
        self.options = options
        self.layers = [tuple(numbers) for numbers in layers]
        self._cost = cost
        self._kept = kept
        self._microbatches = microbatches
        self._known: dict[tuple[int, ...], Choice] = {}

    def of(self, stages: tuple[int, ...]) -> Choice:
        """The choice for a node that runs ``stages``."""
        if stages not in self._known:
            self._known[stages] = self._choose(stages)
        return self._known[stages]

    def _choose(self, stages: tuple[int, ...]) -> Choice:
        layers = [self.layers[stage] for stage in stages]
        count = sum(map(len, layers))
        # 1F1B keeps so many microbatches alive at a stage; those of the upper one are fewer.
        in_flight = min(len(self.layers) - max(stages), self._microbatches)
        afforded = afford(
            self.options,
            # A single stage, where there is no pipeline, stands for the upper one of two.
            count if len(stages) == 2 else 2 * count,
            self._cost,
            self._kept,
            num_in_flight=in_flight,
        )
        return Choice(
            exact=frozenset(topmost(min(afforded.num_exact, count), layers)),
            kept=frozenset(topmost(min(afforded.num_kept, count), layers)),
        )

    def skipping(self, stage: int, nodes: Collection[Node]) -> dict[int, frozenset[int]]:
        """By layer of a stage, the replicas that skip the backward pass of its attention."""
        return {
            number: frozenset(
                node.replica
                for node in nodes
                if stage in node.stages and number not in self.of(node.stages).exact
            )
            for number in self.layers[stage]
        }
