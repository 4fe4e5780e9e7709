"""The convergence studies: means, orders and times, and what an iteration costs."""

from __future__ import annotations

import math
import sys
from fractions import Fraction

import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))

from studies import statistics, timing

# -- statistics ------------------------------------------------------------------------------------


def test_orders() -> None:
    values = {"a": {0: 1.0, 1: 3.0}, "b": {0: 2.0, 1: 2.0}, "c": {0: 4.0, 1: 4.0}}
    check = statistics.check_order(values, ["a", "b", "c"])
    assert not check.holds and check.seeds == {0: True, 1: False}, "equal means are no order"
    values["b"][1] = 2.5
    check = statistics.check_order(values, ["a", "b", "c"])
    assert check.holds and check.found == ("a", "b", "c") and " reproduced" in check.text()
    check = statistics.check_order(values, ["c", "a", "b"])
    assert not check.holds and "NOT reproduced" in check.text()
    # Seeds differ more than methods: without seed 1 of "b" that of the others does not count.
    few = {"a": {0: 1.0, 1: 9.0}, "b": {0: 2.0}}
    check = statistics.check_order(few, ["a", "b"])
    assert check.holds and check.seeds == {0: True}
    with pytest.raises(ValueError, match="no values of d"):
        statistics.check_order(values, ["a", "d"])


def test_means() -> None:
    assert statistics.spread([2.0, 4.0]) == statistics.Spread(3.0, math.sqrt(2), 2)
    assert statistics.spread([2.0]).text() == "2.000"
    assert statistics.spread([2.0, 4.0]).text(1) == "3.0 ± 1.4"
    with pytest.raises(ValueError):
        statistics.spread([])
    assert statistics.increases({0: 11.0, 1: 8.0, 2: 9.0}, {1: 10.0, 0: 10.0}) == pytest.approx(
        [0.1, -0.2]
    )


def test_when_a_curve_reaches_a_target() -> None:
    curve = [(10.0, 5.0), (20.0, 3.0), (30.0, 3.5), (40.0, 1.0)]
    assert statistics.first_below(curve, 4.0) == 15
    assert statistics.first_below(curve, 3.0) == 20
    assert statistics.first_below(curve, 6.0) == 10
    assert statistics.first_below(curve, 0.5) is None
    assert statistics.value_at(curve, 15) == 4.0 and statistics.value_at(curve, 10) == 5.0
    with pytest.raises(ValueError):
        statistics.value_at(curve, 41)


def test_how_much_higher_a_curve_is() -> None:
    base = [(10.0, 3.0), (20.0, 2.0), (30.0, 1.0)]
    curve = [(10.0, 9.0), (20.0, 2.5), (30.0, 2.0)]
    assert statistics.mean_excess(curve, base, 10) == 0.75
    assert statistics.mean_excess(curve, base) == 2.5
    with pytest.raises(ValueError, match="after 30"):
        statistics.mean_excess(curve, base, 30)


def test_time_goes_by() -> None:
    assert statistics.elapsed([1.0, 2.0, 4.0], 2.5) == 5.0
    assert statistics.elapsed([1.0, 2.0, 4.0], 3) == 7.0
    with pytest.raises(ValueError):
        statistics.elapsed([1.0], 1.5)


# -- timing ----------------------------------------------------------------------------------------


def test_costs_of_the_simulator() -> None:
    """The table of docs/schedule.md: 27, 29 with two stages; 57, 59 with four."""
    assert timing.swap_cost(2, 8, Fraction(1, 2)) == pytest.approx(29 / 27)
    assert timing.swap_cost(4, 16, Fraction(1, 2)) == pytest.approx(59 / 57)
    assert timing.swap_cost(4, 16, Fraction(0)) == 1
    # One of 32 microbatches: in most steps nothing is swapped.
    assert 1 < timing.swap_cost(2, 8, Fraction(1, 32)) < timing.swap_cost(2, 8, Fraction(1, 8))
    assert timing.bubble(4, 16, Fraction(0)) == pytest.approx(3 / 19)
    assert 1 < timing.adoption_cost(4, 16, 0, 1.29) < 1.3
    assert timing.adoption_cost(4, 16, 0, 2.0) > 1.5


def test_costs_by_counting() -> None:
    assert timing.redundant_cost(0.15, 0.05) == pytest.approx(4 / 3)
    with pytest.raises(ValueError):
        timing.redundant_cost(0, 1)
    assert timing.quota_cost(3, 2) == 1.5
    assert timing.of_degraded(6, [(2, 2, 1.2), (3, 2, 1.1), (6, 9, 1.3)]) == [
        *(1, 1.2, 1.2, 1.1, 1, 1.3)
    ]
