"""Which neighbour runs each stage of a pipeline that has lost some. A small exact solver, pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

# How a stage is served: by the processes it has, or by those of its lower or upper neighbour.
Label = Literal["keep", "lower", "upper"]


@dataclass(frozen=True, kw_only=True)
class Site:
    """One stage of a pipeline, as a failure left it."""

    kept: bool = False
    """Living processes serve it as their own."""
    adopter: Literal["lower", "upper"] | None = None
    """The living neighbour that serves it already, as an adopted one."""
    adoptable: bool = False
    """It may be adopted anew: the strategy is on and living processes hold its state."""
    may_host: bool = False
    """The processes kept here may adopt a neighbouring stage, were they not doing so already."""

    @property
    def hard(self) -> bool:
        """Nobody serves it."""
        return not self.kept and self.adopter is None


class _Best(NamedTuple):
    off_side: int
    """How many adoptions are by the neighbour that rule 3 names second."""
    labels: tuple[Label, ...]


# Left to right over a pipeline. After a stage, its processes can still adopt the next one ("open")
# or cannot ("closed"), or the stage itself waits to be adopted by the next ("owed").
_State = Literal["open", "closed", "owed"]


def solve_column(column: Sequence[Site]) -> tuple[Label, ...] | None:
    """Who serves each stage of a pipeline, first to last; None where some stage has nobody.

    A process serves its own stage and at most one neighbour's. Rule 3 names the neighbour: stage 1
    for stage 0, else the stage below; the other one where that is not possible. What is served
    stays as it is.
    """
    table: dict[_State, _Best] = {"closed": _Best(0, ())}
    for stage, site in enumerate(column):
        below = column[stage - 1] if stage > 0 else None
        following: dict[_State, _Best] = {}
        for state, best in table.items():
            if site.kept:
                kept = _Best(best.off_side, (*best.labels, "keep"))
                if state != "owed":
                    _offer(following, "open", kept)
                elif below is None or not below.hard or site.may_host:
                    _offer(following, "closed", kept)
                continue
            if state == "owed":
                continue
            adopt = site.hard and site.adoptable
            if site.adopter == "upper" or adopt:
                off_side = best.off_side + (adopt and stage > 0)
                _offer(following, "owed", _Best(off_side, (*best.labels, "upper")))
            by_lower = site.adopter == "lower" or (adopt and below is not None and below.may_host)
            if state == "open" and by_lower:
                _offer(following, "closed", _Best(best.off_side, (*best.labels, "lower")))
        table = following
    found = [best for state, best in table.items() if state != "owed"]
    return min(found).labels if found else None


def _offer(table: dict[_State, _Best], state: _State, best: _Best) -> None:
    if state not in table or best < table[state]:
        table[state] = best
