"""From which stages a lost one is rebuilt, and what each of them counts: pure.

CheckFree (arXiv 2506.15461) sets each layer of a lost stage i to
(w_{i-1} W_{i-1} + w_{i+1} W_{i+1}) / (w_{i-1} + w_{i+1}), w_k from the gradient norm of stage k.
CheckFree+ copies where swapped microbatches have made two stages alike: the first and the second
one, the last and the last but one.

The authors' code reads the direct neighbours even if they are lost too. Here the nearest survivor
on each side stands in, and counts less the further away it is.

Stages are counted from 0; the paper counts from 1.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from megatron_ft.checkfree.options import CheckfreeOptions, Weight
from megatron_ft.topology import Shard

GradSquares = Mapping[Shard, float]
"""Shard -> its part of the squared gradient norm of its stage's layers, in the last committed step
of who tells it."""


@dataclass(frozen=True)
class Source:
    """A surviving stage that a lost one is rebuilt from."""

    stage: int
    weight: float
    """Its share of the average; the sources of a stage add up to 1."""


def plan_sources(
    lost: int,
    surviving: Collection[int],
    num_stages: int,
    *,
    options: CheckfreeOptions,
    norms: Mapping[int, float | None] | None,
) -> tuple[Source, ...] | None:
    """The sources of one lost stage, ascending; None where it cannot be rebuilt.

    Args:
        lost: A stage that no living process holds.
        surviving: The stages that some living process holds the committed state of.
        num_stages: Pipeline stages, P.
        options: Whether CheckFree+ is on, how much it swaps, and how neighbours are weighed.
        norms: Gradient norm of each stage in the last committed step; None, or None for a stage,
            before there was one.
    """
    if not 0 <= lost < num_stages or lost in surviving:
        raise ValueError(f"stage {lost} of {num_stages} is not lost: {sorted(surviving)} survive")
    partners = twins_of(lost, num_stages) if options.plus else ()
    if any(partner not in surviving for partner in partners):
        return None  # an embedding or a head went with both of its holders
    ends = lost in (0, num_stages - 1)
    if ends and not options.plus:
        return None
    alike = options.swap_share > 0 or ends
    if len(partners) == 1 and alike:
        return (Source(partners[0], 1.0),)
    below = max((s for s in surviving if s < lost), default=None)
    above = min((s for s in surviving if s > lost), default=None)
    if below is None or above is None:
        return None
    found = norms or {}
    first, second = strengths(options.weight, found.get(below), found.get(above))
    # Linear in depth: a survivor counts by how far away the other one is.
    first, second = first * (above - lost), second * (lost - below)
    share = first / (first + second)
    return (Source(below, share), Source(above, 1.0 - share))


def twins_of(stage: int, num_stages: int) -> tuple[int, ...]:
    """CheckFree+: the stages that hold what this one has of embedding and head, ascending.

    The embedding is on the first two stages, the head on the last two. With two stages each holds
    both; with three the middle one does.
    """
    if num_stages < 2:
        raise ValueError(f"twins need two stages or more, not {num_stages}")
    pairs = ((0, 1), (num_stages - 2, num_stages - 1))
    return tuple(sorted({s for pair in pairs if stage in pair for s in pair} - {stage}))


def norm_of(stage: int, tensor: int, told: Iterable[tuple[int, GradSquares]]) -> float | None:
    """The gradient norm of a stage in the last committed step; None where nobody knows it.

    A stage that a neighbour had adopted counts like any other, and so does what a process computed
    that serves it no more: all replicas of a stage have the same gradients.

    Args:
        tensor: Tensor-parallel parts of a stage.
        told: Of each living process the last step of which it holds the outcome, and its squares.
    """
    living = list(told)
    last = max((committed for committed, _ in living), default=0)
    known: dict[Shard, float] = {}
    for committed, squares in living:
        if committed == last:
            known = {**squares, **known}
    parts = [known.get(Shard(tp, stage)) for tp in range(tensor)]
    found = [part for part in parts if part is not None]
    return math.sqrt(sum(found)) if len(found) == tensor else None


def strengths(kind: Weight, first: float | None, second: float | None) -> tuple[float, float]:
    """What two neighbours count, up to a common factor, at the same distance.

    Without a usable norm of both (before the first committed step, or a gradient of zeros or of
    something that is no number) they count the same.
    """
    if kind == "uniform" or first is None or second is None:
        return 1.0, 1.0
    if not all(math.isfinite(norm) and norm > 0 for norm in (first, second)):
        return 1.0, 1.0
    largest = max(first, second)
    power = 2 if kind == "grad-norm-sq" else 1
    # In units of the larger one, so that no square overflows.
    return (first / largest) ** power, (second / largest) ** power
