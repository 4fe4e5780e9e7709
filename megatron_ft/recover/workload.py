"""Who computes which microbatch ids of a step, attempt by attempt."""

from __future__ import annotations

from collections.abc import Sequence


class StepWorkload:
    """Interim: balanced, exact."""

    def __init__(self, num_replicas: int, per_replica: int, policy: str, replay: str) -> None:
        self.num_replicas = num_replicas
        self.total = num_replicas * per_replica
        self.contributed: dict[int, list[int]] = {}
        self.todo: dict[int, list[int]] = {}

    def begin(self, live: Sequence[int]) -> None:
        self.contributed = {r: [] for r in live}
        self.todo = {r: [] for r in live}
        if len(live) == self.num_replicas:
            for m in range(self.total):
                self.todo[m % self.num_replicas].append(m)
        else:
            self._deal(range(self.total), live)

    def _deal(self, ids: Sequence[int], live: Sequence[int]) -> None:
        for k, m in enumerate(ids):
            self.todo[live[k % len(live)]].append(m)

    def to_compute(self, replica: int) -> Sequence[int]:
        return self.todo[replica]

    def counts(self, replica: int) -> bool:
        return True

    def after_failure(self, live: Sequence[int], forfeited: Sequence[int]) -> None:
        lost: list[int] = []
        for r in list(self.contributed):
            self.contributed[r] += self.todo[r]
            self.todo[r] = []
            if r not in live or r in forfeited:
                lost += self.contributed[r]
                self.contributed[r] = []
            if r not in live:
                del self.contributed[r], self.todo[r]
        self._deal(sorted(lost), live)

    def quotas(self) -> list[int]:
        return [
            len(self.contributed.get(r, [])) + len(self.todo.get(r, []))
            for r in range(self.num_replicas)
        ]
