"""How many layers of a neighbour with two stages can have exact attention backward.

Skipping that is what costs quality: the input gradient that it leaves out reaches every layer
below, those of earlier stages too. So what a time budget leaves is spent on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ft.mecefo.options import MecefoOptions


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What the work in one layer depends on; counts are of the whole layer, not of a shard."""

    hidden: int
    ffn: int
    """Width of the FFN; a gated one has two products of this width."""
    gated: bool
    num_heads: int
    num_query_groups: int
    head_width: int
    sequence: int
    """Tokens of a sequence."""


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Time of one layer, forward and backward, in units of a normal layer."""

    degraded: float
    """With the techniques of the options."""
    exact_attention: float
    """The same, but the attention's backward pass is exact."""


def layer_cost(shape: LayerShape, options: MecefoOptions) -> LayerCost:
    """Cost of a degraded layer by counting multiplications of the products, per token.

    Norms, activations and softmax are left out; they weigh more in small layers. Measured costs
    (``tools/bench_mecefo.py``) can take the place of these.
    """
    query = shape.num_heads * shape.head_width
    key_value = 2 * shape.num_query_groups * shape.head_width
    projections = shape.hidden * (query + key_value) + query * shape.hidden
    attention = projections + 2 * shape.sequence * query
    first = shape.hidden * shape.ffn * (2 if shape.gated else 1)
    second = shape.hidden * shape.ffn
    # forward, Dgrad and Wgrad are one product each
    ffn = 2 * (first + second)
    ffn += first if options.recompute_ffn else 0
    if options.low_rank:
        first_rank = min(options.rank, shape.hidden)
        second_rank = min(options.rank, shape.ffn)
        ffn += first_rank * (shape.hidden + first // shape.hidden)
        ffn += second_rank * (shape.ffn + shape.hidden)
    else:
        ffn += first + second
    normal = 3 * (attention + first + second)
    skipped = attention if options.skip_attention else 3 * attention
    return LayerCost(
        degraded=(skipped + ffn) / normal, exact_attention=(3 * attention + ffn) / normal
    )


def num_exact_layers(budget: float | None, num_layers: int, cost: LayerCost) -> int:
    """How many of ``num_layers`` can have exact attention backward.

    Args:
        budget: Time in units of one normal stage, which has half of ``num_layers``; None for none.
        num_layers: Layers of both stages.
        cost: Of one layer.

    Returns:
        0 also where even the degraded layers do not fit: there is nothing cheaper.
    """
    if budget is None:
        return 0
    gain = cost.exact_attention - cost.degraded
    if gain <= 0:
        return num_layers
    left = budget * num_layers / 2 - num_layers * cost.degraded
    # a budget that is met exactly must not be lost to rounding
    return min(num_layers, max(0, math.floor(left / gain + 1e-9)))


def exact_layers(
    budget: float | None, stages: Sequence[Sequence[int]], cost: LayerCost
) -> tuple[int, ...]:
    """Which layers have exact attention backward: the topmost of both stages.

    From the top down because the input gradient that a layer passes on is right only if every
    layer above it is.

    Args:
        budget: As for ``num_exact_layers``.
        stages: Of each stage on this process its layer numbers, ascending.
        cost: Of one layer.

    Returns:
        Layer numbers, ascending.
    """
    layers = sorted((number for stage in stages for number in stage), reverse=True)
    return tuple(sorted(layers[: num_exact_layers(budget, len(layers), cost)]))
