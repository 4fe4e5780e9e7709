"""The solver of a pipeline's adoptions, against trying everything."""

from __future__ import annotations

import itertools
import os

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.adopt.column import Site, solve_column


@settings(deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=250)
@given(st.integers(1, 6), st.data())
def test_a_column_is_solved_as_by_trying_everything(length: int, data: st.DataObject) -> None:
    sites: list[Site] = []
    for stage in range(length):
        kept = data.draw(st.booleans())
        adoptable = not kept and data.draw(st.booleans())
        sites.append(
            Site(kept=kept, adoptable=adoptable, may_host=kept and data.draw(st.booleans()))
        )
        if stage and not kept and sites[stage - 1].kept and data.draw(st.booleans()):
            sites[stage] = Site(adopter="lower")
        elif kept and stage and sites[stage - 1].hard and data.draw(st.booleans()):
            sites[stage - 1] = Site(adopter="upper")

    def works(labels: tuple[str, ...]) -> bool:
        served = [0] * length
        for stage, label in enumerate(labels):
            site = sites[stage]
            if (label == "keep") != site.kept:
                return False
            if label == "keep":
                continue
            host = stage + (1 if label == "upper" else -1)
            if not 0 <= host < length or labels[host] != "keep":
                return False
            served[host] += 1
            if site.adopter is None and not (sites[host].may_host and site.adoptable):
                return False
            if site.adopter not in (None, label):
                return False
        return max(served) <= 1

    def cost(labels: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
        off_side = [
            site.adopter is None and label != ("upper" if stage == 0 else "lower")
            for stage, (site, label) in enumerate(zip(sites, labels, strict=True))
            if label != "keep"
        ]
        return sum(off_side), labels

    every = itertools.product(("keep", "lower", "upper"), repeat=length)
    assert solve_column(sites) == min(filter(works, every), key=cost, default=None)
