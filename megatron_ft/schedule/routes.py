"""Routes: the order in which a microbatch visits the stages of its replica.

CheckFree+ (arXiv 2506.15461) lets a share of the microbatches visit the first two and the last two
stages in swapped order, so that neighbouring stages learn to stand in for each other. Stages are
counted from 0 here and from 1 in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

Route = tuple[int, ...]
"""All stages of a replica, each once, in the order of the forward pass."""


def identity(num_stages: int) -> Route:
    """The route of ordinary training: 0, 1, .., P-1."""
    return tuple(range(num_stages))


def swapped(num_stages: int) -> tuple[Route, ...]:
    """The routes that swapped microbatches take in turn.

    With two stages there is one pair to swap. With three the middle stage is in both pairs, so the
    microbatches alternate between swapping the first pair and the last. From four on one route
    swaps both.

    Raises:
        ValueError: One stage alone cannot be swapped.
    """
    if num_stages < 2:
        raise ValueError(f"swapped routes need two pipeline stages or more, not {num_stages}")
    if num_stages == 2:
        return ((1, 0),)
    if num_stages == 3:
        return ((1, 0, 2), (0, 2, 1))
    middle = range(2, num_stages - 2)
    return ((1, 0, *middle, num_stages - 1, num_stages - 2),)


def routes(
    num_stages: int,
    share: Fraction,
    ids: Sequence[int],
    *,
    start: int = 0,
    data: int = 1,
) -> tuple[Route, ...]:
    """The route of each microbatch id, whoever computes it.

    Swapped are evenly spaced ones: with a share of 1/4 every fourth. Ids are dealt to the replicas
    in turn, id m to replica m mod ``data``, so what is counted is m // ``data``, the place of an id
    in the list of the replica that owns it: otherwise one of two replicas would get all swapped
    ones of a share of 1/2. Counting goes on from step to step, so a share below one in a step's
    microbatches is kept too.

    Args:
        num_stages: Pipeline stages of a replica, P.
        share: How many of the microbatches are swapped, from 0 to 1.
        ids: Microbatch ids of one step, in any order.
        start: Microbatches that each replica owned in all steps before: step * G.
        data: Replicas that the job was configured with, live or not.

    Raises:
        ValueError: The share is not between 0 and 1, or there is nothing to swap.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share of swapped microbatches must be from 0 to 1, not {share}")
    straight = identity(num_stages)
    if share == 0:
        return (straight,) * len(ids)
    turns = swapped(num_stages)

    def route(microbatch: int) -> Route:
        place = start + microbatch // data
        before, after = math.floor(place * share), math.floor((place + 1) * share)
        return straight if before == after else turns[before % len(turns)]

    return tuple(route(microbatch) for microbatch in ids)
