"""Fewer microbatches for a replica that is slower, so that the others do not wait. Pure.

A replica with a degraded node does more work a microbatch. Dealt evenly, all others wait for it at
the reduction of gradients. Dealt by measured speed, the step takes as long as the work needs, and
the degraded replica's gradients, which are biased, weigh less.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Collection, Mapping

REMEMBERED = 5
"""Steps of which the median time counts."""


def deal_by_speed(
    num_microbatches: int, seconds: Mapping[int, float], *, fill: int = 0
) -> dict[int, int]:
    """Microbatches of each replica such that the last one to finish does so as early as possible.

    A replica needs ``(n + fill) * seconds`` for n microbatches. Each gets at least one, while
    there are enough. With equal speeds the deal is even, and lower replicas get what is left over.

    Args:
        num_microbatches: B, all of which are dealt.
        seconds: Time of a microbatch, by replica.
        fill: Microbatches that pass while the pipeline fills and drains, its stages minus one.

    Returns:
        Microbatches by replica.

    Raises:
        ValueError: No replica, or a time that is not positive.
    """
    if not seconds or not all(0 < s < float("inf") for s in seconds.values()):
        raise ValueError(f"times of microbatches must be positive: {dict(seconds)}")
    replicas = sorted(seconds)
    quotas = {r: int(k < num_microbatches) for k, r in enumerate(replicas)}
    for _ in range(num_microbatches - sum(quotas.values())):
        # One more microbatch never makes a replica end earlier, so the greedy choice is optimal.
        chosen = min(replicas, key=lambda r: ((quotas[r] + 1 + fill) * seconds[r], r))
        quotas[chosen] += 1
    return quotas


class Speeds:
    """What all processes know alike of the replicas' speeds, and the quotas that follow.

    Args:
        num_stages: Of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self._fill = num_stages - 1
        self._measured: dict[int, deque[float]] = {}

    def measured(self, seconds: float, num_microbatches: int) -> float:
        """Time of one microbatch, of a pipeline that took ``seconds`` for so many."""
        return seconds / (num_microbatches + self._fill)

    def observe(self, seconds: Mapping[int, float]) -> None:
        """Take in the agreed times of a microbatch of a committed step, by replica."""
        for replica, value in seconds.items():
            if value > 0:
                self._measured.setdefault(replica, deque(maxlen=REMEMBERED)).append(value)

    def forget(self) -> None:
        """Other processes serve, or other nodes are degraded: what was measured says nothing."""
        self._measured.clear()

    def quotas(
        self, num_microbatches: int, live: Collection[int], slower: Collection[int]
    ) -> dict[int, int] | None:
        """Microbatches of each live replica in the coming step.

        Args:
            num_microbatches: B.
            live: The whole replicas.
            slower: Those with a degraded node.

        Returns:
            None for the even deal: nobody is degraded, or a speed is not known yet.
        """
        if not set(slower) & set(live) or not set(live) <= self._measured.keys():
            return None
        seconds = {r: statistics.median(self._measured[r]) for r in live}
        return deal_by_speed(num_microbatches, seconds, fill=self._fill)
