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
    """Time of a degraded layer, forward and backward, in units of a normal layer."""

    kept: float
    """With the techniques of the options, but its FFN is not recomputed."""
    again: float
    """What recomputing the FFN adds."""
    attention: float
    """What an exact backward pass of the attention adds."""


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
    if options.low_rank:
        first_rank, second_rank = min(options.rank, shape.hidden), min(options.rank, shape.ffn)
        wgrad = first_rank * (shape.hidden + first // shape.hidden)
        wgrad += second_rank * (shape.ffn + shape.hidden)
    else:
        wgrad = first + second
    # forward, Dgrad and Wgrad are one product each
    normal = 3 * (attention + first + second)
    return LayerCost(
        kept=(attention + 2 * (first + second) + wgrad) / normal,
        again=first / normal,
        attention=2 * attention / normal,
    )


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """What a layer keeps of a microbatch for its backward pass, in elements per token."""

    normal: int
    """A normal layer."""
    input_only: int
    """A degraded one of which the FFN is recomputed."""
    ffn_kept: int
    """A degraded one that keeps the FFN's intermediates."""
    attention: int
    """What an exact backward pass of the attention adds."""
    again: int
    """What the work in one layer takes for a while, recomputing its FFN above all."""


def layer_activations(
    shape: LayerShape,
    options: MecefoOptions,
    *,
    flash: bool = False,
    fused_activation: bool = False,
    dropout: bool = False,
) -> LayerActivations:
    """Count what Megatron's layer keeps, on one tensor-parallel rank if ``shape`` is a shard's.

    Args:
        shape: Of the layer.
        options: With low rank, or without.
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
    return LayerActivations(
        normal=attention + ffn,
        input_only=shape.hidden,
        ffn_kept=shape.hidden + wide + inside + 2 * options.rank if options.low_rank else ffn,
        attention=attention,
        # the FFN's intermediates and as many gradients, or the attention's forward pass
        again=max(2 * (wide + inside + shape.ffn) + 2 * shape.hidden, attention + 2 * scores),
    )


@dataclass(frozen=True, kw_only=True)
class Afforded:
    """How many layers of both stages are better than the cheapest ones."""

    num_exact: int
    """Have an exact backward pass of the attention."""
    num_kept: int
    """Keep the FFN's intermediates."""


def afford(
    options: MecefoOptions,
    num_layers: int,
    cost: LayerCost,
    kept: LayerActivations,
    *,
    num_in_flight: int = 1,
) -> Afforded:
    """Exact attention in as many layers as time and memory allow, then kept FFNs.

    Exact attention comes first because it is what the quality of training needs; kept FFNs pay for
    it in time, and both in memory. Without a time budget no attention is exact, as in the paper.

    Args:
        options: The budgets, and which techniques there are.
        num_layers: Layers of both stages; a normal stage has half of them.
        cost: Of one layer.
        kept: Of one layer.
        num_in_flight: Microbatches whose activations are alive at once.

    Returns:
        Nothing of either where not even the cheapest layers fit: there is nothing cheaper.
    """
    if not options.skip_attention:
        candidates = range(num_layers, num_layers + 1)
    elif options.budget is None:
        candidates = range(1)
    else:
        candidates = range(num_layers, -1, -1)
    for num_exact in candidates:
        num_kept = num_layers
        if options.recompute_ffn:
            num_kept = _num_kept(options.memory, num_layers, kept, num_exact, num_in_flight)
        time = num_layers * cost.kept + num_exact * cost.attention
        time += (num_layers - max(num_kept, 0)) * cost.again
        in_time = options.budget is None or time <= options.budget * num_layers / 2 + 1e-9
        if (in_time and num_kept >= 0) or num_exact == candidates[-1]:
            return Afforded(num_exact=num_exact, num_kept=max(num_kept, 0))
    raise AssertionError("the last candidate is taken as it is")


def _num_kept(
    memory: float, num_layers: int, kept: LayerActivations, num_exact: int, num_in_flight: int
) -> int:
    """FFNs that can be kept beside exact attention; negative if that alone is too much."""
    left = memory * kept.normal * num_layers / 2
    left -= num_layers * kept.input_only + num_exact * kept.attention
    gain = kept.ffn_kept - kept.input_only
    if left >= num_layers * gain:  # nothing is recomputed
        return num_layers
    return min(num_layers - 1, math.floor((left - kept.again / num_in_flight) / gain + 1e-9))


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
