"""What a neighbour with two stages can afford: exact attention by time, kept FFNs by memory.

Skipping the attention's backward is what costs quality: the input gradient that it leaves out
reaches every layer below, those of earlier stages too. So what a time budget leaves is spent on it.
Recomputing the FFN costs time and changes no gradient: it is needed only where the activations of
two stages do not fit into the memory that one normal stage's took.
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


def topmost(count: int, stages: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The ``count`` topmost layers of the stages on one process, ascending.

    For exact attention, because the input gradient that a layer passes on is right only if every
    layer above it is; for kept FFNs, because the topmost are the first to be freed again in
    backward, before lower ones are recomputed.

    Args:
        count: How many.
        stages: Of each stage its layer numbers.
    """
    layers = sorted((number for stage in stages for number in stage), reverse=True)
    return tuple(sorted(layers[:count]))


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """What a layer keeps of a microbatch for its backward pass, in elements per token."""

    normal: int
    """A normal layer."""
    input_only: int
    """A degraded one of which the FFN is recomputed."""
    ffn_kept: int
    """A degraded one that keeps the FFN's intermediates."""
    again: int
    """What recomputing the FFN of one layer takes for a while."""


def layer_activations(
    shape: LayerShape,
    options: MecefoOptions,
    *,
    flash: bool = False,
    fused_activation: bool = False,
    dropout: bool = False,
) -> LayerActivations:
    """Count what Megatron's layer keeps, on one tensor-parallel rank if ``shape`` is a shard's.

    Exact attention backward in a degraded layer is not counted.

    Args:
        shape: Of the layer.
        options: With skip-MHA and low rank, or without.
        flash: The attention keeps no scores.
        fused_activation: The activation is one kernel that keeps its input only.
        dropout: Attention dropout is on: the scores are kept once more, and its mask.
    """
    query = shape.num_heads * shape.head_width
    key = shape.num_query_groups * shape.head_width
    scores = 0 if flash else shape.num_heads * shape.sequence * (3 if dropout else 1)
    # layer input, norm, mixed QKV, Q and K after RoPE, scores, context
    attention = 2 * shape.hidden + (query + 2 * key) + (query + key) + scores + query
    wide = (2 if shape.gated else 1) * shape.ffn
    # of a gated one: the activation of the gate and the other half
    inside = 0 if fused_activation else (2 * shape.ffn if shape.gated else 0)
    # FFN input and norm, the product, inside of the activation, input of the second product
    ffn = 2 * shape.hidden + wide + inside + shape.ffn
    kept = shape.hidden + wide + inside + 2 * options.rank if options.low_rank else ffn
    skipped = 0 if options.skip_attention else attention
    return LayerActivations(
        normal=attention + ffn,
        input_only=skipped + shape.hidden,
        ffn_kept=skipped + kept,
        # its intermediates and, at the widest place, as many gradients
        again=2 * (wide + inside + shape.ffn) + 2 * shape.hidden,
    )


def num_kept_ffns(
    memory: float, num_layers: int, kept: LayerActivations, num_in_flight: int = 1
) -> int:
    """In how many of ``num_layers`` the FFN need not be recomputed.

    Args:
        memory: What the activations may take, in units of one normal stage's, which has half of
            ``num_layers``.
        num_layers: Layers of both stages.
        kept: Of one layer.
        num_in_flight: Microbatches whose activations are alive at once.
    """
    whole = memory * kept.normal * num_layers / 2
    left = whole - num_layers * kept.input_only - kept.again / num_in_flight
    gain = kept.ffn_kept - kept.input_only
    return min(num_layers, max(0, math.floor(left / gain + 1e-9)))
