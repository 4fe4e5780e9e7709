"""MeCeFO's arithmetic without torch: budgets, gradient rule, refresh turns, flags."""

from __future__ import annotations

import argparse
import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.mecefo.budget import (
    Afforded,
    LayerActivations,
    LayerCost,
    LayerShape,
    afford,
    layer_activations,
    layer_cost,
    topmost,
)
from megatron_ft.mecefo.gradient_rule import (
    attention_factor,
    attention_parameters,
    is_attention_parameter,
    rescale,
)
from megatron_ft.mecefo.options import MecefoOptions, add_flags, from_flags

SHAPE = LayerShape(
    hidden=512, ffn=1376, gated=True, num_heads=8, num_query_groups=8, head_width=64, sequence=256
)
OFF = MecefoOptions(skip_attention=False, recompute_ffn=False, low_rank=False)


# -- gradient rule ---------------------------------------------------------------------------------


class Gradient:
    def __init__(self, value: Fraction) -> None:
        self.value: Fraction | float = value
        self.touched = False

    def mul_(self, factor: float) -> None:
        self.value = float(self.value) * factor
        self.touched = True


class Parameter:
    def __init__(self, value: Fraction) -> None:
        self.main_grad = Gradient(value)


counts = st.dictionaries(st.integers(0, 15), st.integers(0, 40), min_size=1, max_size=8)


@given(counts, st.sets(st.integers(0, 15)), st.randoms(use_true_random=False))
def test_the_rescaled_sum_is_the_mean_over_the_unaffected(contributed, affected, random) -> None:
    affected &= contributed.keys()
    total = sum(contributed.values())
    gradients = {
        replica: [Fraction(random.randint(-99, 99)) for _ in range(count)]
        for replica, count in contributed.items()
    }
    exact = [g for r, some in gradients.items() if r not in affected for g in some]
    factor = attention_factor(contributed, affected)
    if not exact:
        assert factor is None
        return
    assert factor is not None
    parameter = Parameter(sum(exact, Fraction(0)) / total)  # what data parallelism gives
    rescale([parameter], factor)
    mean = sum(exact, Fraction(0)) / len(exact)
    assert float(parameter.main_grad.value) == pytest.approx(float(mean), rel=1e-12)
    # a replica that contributed nothing is as good as unaffected: then nothing is touched
    assert parameter.main_grad.touched == (len(exact) != total)


def test_a_wrong_rule_would_be_seen() -> None:
    """Uneven quotas: a mean over replicas instead of microbatches is another number."""
    assert attention_factor({0: 1, 1: 3, 2: 4}, {2}) == 8 / 4 != 3 / 2
    assert attention_factor({0: 4, 1: 4}, ()) == 1.0
    assert attention_factor({0: 4, 1: 4}, {0, 1}) is None
    assert attention_factor({0: 4, 1: 0}, {0}) is None


def test_what_the_rule_refuses() -> None:
    with pytest.raises(ValueError, match=r"replicas \[2\] are affected"):
        attention_factor({0: 1}, {2})
    with pytest.raises(ValueError, match="negative"):
        attention_factor({0: -1}, ())


def test_parameters_of_the_attention_branch() -> None:
    class Layer:
        def named_parameters(self):
            return [(name, name) for name in names]

    names = [
        "input_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_proj.bias",
        "self_attention.q_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc2.weight",
    ]
    assert attention_parameters(Layer()) == names[:4]
    assert not is_attention_parameter("mlp.linear_fc1.weight")


# -- time and memory -------------------------------------------------------------------------------


def test_costs_are_counted_in_normal_layers() -> None:
    exact = layer_cost(SHAPE, OFF)
    assert exact.kept + exact.attention == pytest.approx(1.0)
    low = layer_cost(SHAPE, MecefoOptions(rank=32))
    # forward of attention, forward and Dgrad of the FFN, in units of hidden^2
    attention, first, second = 4 + 2 * 256 / 512, 2 * 1376 / 512, 1376 / 512
    normal = 3 * (attention + first + second)
    least = (attention + 2 * first + 2 * second) / normal
    assert least < low.kept < 1.05 * least
    assert low.again == pytest.approx(first / normal)
    assert low.attention == exact.attention == pytest.approx(2 * attention / normal)


def test_activations_are_ordered() -> None:
    for flash in (False, True):
        for fused in (False, True):
            kept = layer_activations(SHAPE, MecefoOptions(), flash=flash, fused_activation=fused)
            assert kept.input_only < kept.ffn_kept < kept.normal
            assert kept.attention < kept.normal


def taken(kept: LayerActivations, num_layers: int, can: Afforded, in_flight: int) -> float:
    """Elements per token that the layers of both stages keep at the most."""
    stored = can.num_kept * kept.ffn_kept + (num_layers - can.num_kept) * kept.input_only
    stored += can.num_exact * kept.attention
    return stored * in_flight + (kept.again if can.num_kept < num_layers else 0)


def time_of(cost: LayerCost, num_layers: int, can: Afforded) -> float:
    """In normal stages."""
    again = (num_layers - can.num_kept) * cost.again
    return 2 * (cost.kept + (can.num_exact * cost.attention + again) / num_layers)


@given(
    st.none() | st.floats(0.01, 2),
    st.floats(0, 2),
    st.integers(1, 20).map(lambda half: 2 * half),
    st.integers(1, 16),
    st.booleans(),
)
def test_both_budgets_are_kept_and_used(
    budget: float | None, memory: float, num_layers: int, in_flight: int, flash: bool
) -> None:
    options = MecefoOptions(budget=budget, memory=memory)
    cost = layer_cost(SHAPE, options)
    kept = layer_activations(SHAPE, options, flash=flash)
    allowed = memory * kept.normal * num_layers / 2 * in_flight
    can = afford(options, num_layers, cost, kept, num_in_flight=in_flight)

    def fits(other: Afforded) -> bool:
        in_time = budget is None or time_of(cost, num_layers, other) <= budget + 1e-9
        return in_time and taken(kept, num_layers, other, in_flight) <= allowed * (1 + 1e-9)

    if can != Afforded(num_exact=0, num_kept=0) and can.num_exact:
        assert fits(can)
    assert budget is not None or can.num_exact == 0
    if can.num_kept:
        assert taken(kept, num_layers, can, in_flight) <= allowed * (1 + 1e-9)
    # nothing better would have fitted: neither more exact layers nor more kept ones
    for num_exact in range(can.num_exact + 1, num_layers + 1) if budget is not None else ():
        for num_kept in range(num_layers + 1):
            assert not fits(Afforded(num_exact=num_exact, num_kept=num_kept))
    if can.num_kept < num_layers:
        more = dataclasses.replace(can, num_kept=can.num_kept + 1)
        assert taken(kept, num_layers, more, in_flight) > allowed * (1 - 1e-9)


def test_techniques_that_are_off_are_not_dealt() -> None:
    cost, kept = layer_cost(SHAPE, OFF), layer_activations(SHAPE, OFF)
    assert afford(OFF, 8, cost, kept) == Afforded(num_exact=8, num_kept=8)
    paper = MecefoOptions(memory=0)
    assert afford(paper, 8, cost, kept) == Afforded(num_exact=0, num_kept=0)


def test_topmost_layers_of_two_stages() -> None:
    assert topmost(3, [[4, 5], [6, 7]]) == (5, 6, 7)
    assert topmost(3, [[6, 7], [4, 5]]) == (5, 6, 7)
    assert topmost(0, [[0]]) == ()


# -- flags -----------------------------------------------------------------------------------------


def parse(*flags: str) -> MecefoOptions:
    return from_flags(add_flags(argparse.ArgumentParser()).parse_args(flags))


def test_flags_and_defaults() -> None:
    assert parse() == MecefoOptions()
    assert not parse().enabled
    given = parse(
        *("--ft-mecefo", "--ft-mecefo-rank", "7", "--ft-mecefo-svd-interval", "9"),
        *("--ft-mecefo-budget", "1.5", "--ft-mecefo-memory", "0.5"),
        *("--ft-mecefo-no-recompute", "--ft-mecefo-no-low-rank"),
    )
    assert given == MecefoOptions(
        enabled=True,
        rank=7,
        svd_interval=9,
        budget=1.5,
        memory=0.5,
        recompute_ffn=False,
        low_rank=False,
    )
    assert not parse("--ft-mecefo-no-skip-attention").skip_attention


@pytest.mark.parametrize(
    "flags",
    [
        ("--ft-mecefo-rank", "0"),
        ("--ft-mecefo-svd-interval", "0"),
        ("--ft-mecefo-budget", "0"),
        ("--ft-mecefo-budget", "2.1"),
        ("--ft-mecefo-memory", "-1"),
        ("--ft-mecefo-budget", "1.5", "--ft-mecefo-no-skip-attention"),
    ],
)
def test_values_that_make_no_sense(flags: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=flags[0]):
        parse(*flags)
