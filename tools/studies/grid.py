"""The cells of a study by what they vary, and their results once they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from .cells import Cell
from .results import Result
from .statistics import Curve

Grid = dict[tuple[str, int], Cell]
"""(what is varied, seed) -> cell. Two places may have the same cell."""


@dataclass(frozen=True)
class Found:
    """Results by what is varied and by seed; those that are missing are left out."""

    results: Mapping[tuple[str, int], Result]

    def of(self, name: str) -> dict[int, Result]:
        """Seed -> result."""
        return {seed: result for (key, seed), result in self.results.items() if key == name}

    def values(self, name: str, value: Callable[[Result], float]) -> dict[int, float]:
        """Seed -> a number of the result."""
        return {seed: value(result) for seed, result in sorted(self.of(name).items())}

    def perplexities(self, name: str) -> dict[int, float]:
        return self.values(name, lambda result: result.perplexity)

    def perplexity_curves(self, names: Iterable[str]) -> dict[str, list[Curve]]:
        """Name -> a curve for each seed; names without results are left out."""
        return {
            name: [result.perplexities for result in self.of(name).values()]
            for name in names
            if self.has(name)
        }

    def common(self, names: Iterable[str]) -> set[int]:
        """The seeds that all of them have: means over different seeds cannot be compared."""
        seeds = [set(self.of(name)) for name in names if self.has(name)]
        return set.intersection(*seeds) if seeds else set()

    def has(self, *names: str) -> bool:
        """Whether each has a result of one seed at least."""
        return all(self.of(name) for name in names)


def look_up(grid: Grid, results: Mapping[str, Result]) -> Found:
    """Raises nothing for cells that are not done: a report says what there is."""
    return Found({at: results[cell.key] for at, cell in grid.items() if cell.key in results})
