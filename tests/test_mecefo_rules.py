"""MeCeFO's arithmetic without torch: budgets, gradient rule, refresh turns, flags."""

from __future__ import annotations

import argparse
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.mecefo.budget import (
    LayerCost,
    LayerShape,
    layer_activations,
    layer_cost,
    num_exact_layers,
    num_kept_ffns,
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


# -- time ------------------------------------------------------------------------------------------


def test_costs_are_counted_in_normal_layers() -> None:
    none = layer_cost(SHAPE, OFF)
    assert (none.degraded, none.exact_attention) == (1.0, 1.0)
    paper = layer_cost(SHAPE, MecefoOptions(rank=32))
    kept = layer_cost(SHAPE, MecefoOptions(rank=32, recompute_ffn=False))
    assert kept.degraded < paper.degraded < paper.exact_attention < 1
    # forward of attention, forward, forward again of the first product, Dgrad, in units of hidden^2
    attention, first, second = 4 + 2 * 256 / 512, 2 * 1376 / 512, 1376 / 512
    least = (attention + 3 * first + 2 * second) / (3 * (attention + first + second))
    assert least < paper.degraded < 1.05 * least


@given(
    st.floats(0.01, 2),
    st.integers(1, 40).map(lambda half: 2 * half),
    st.floats(0.3, 0.9),
    st.floats(0.01, 0.3),
)
def test_a_budget_is_used_and_kept(
    budget: float, num_layers: int, degraded: float, gain: float
) -> None:
    cost = LayerCost(degraded=degraded, exact_attention=degraded + gain)
    count = num_exact_layers(budget, num_layers, cost)

    def time(exact: int) -> float:
        whole = exact * cost.exact_attention + (num_layers - exact) * cost.degraded
        return whole / (num_layers / 2)

    assert 0 <= count <= num_layers
    if count:
        assert time(count) <= budget + 1e-6
    if count < num_layers:
        assert time(count + 1) > budget - 1e-6


def test_no_budget_is_the_papers_behaviour() -> None:
    assert num_exact_layers(None, 8, layer_cost(SHAPE, MecefoOptions())) == 0
    assert num_exact_layers(2.0, 8, layer_cost(SHAPE, OFF)) == 8


def test_topmost_layers_of_two_stages() -> None:
    assert topmost(3, [[4, 5], [6, 7]]) == (5, 6, 7)
    assert topmost(3, [[6, 7], [4, 5]]) == (5, 6, 7)
    assert topmost(0, [[0]]) == ()


# -- memory ----------------------------------------------------------------------------------------


@given(
    st.floats(0, 2),
    st.integers(1, 40).map(lambda half: 2 * half),
    st.integers(1, 16),
    st.booleans(),
    st.booleans(),
)
def test_kept_ffns_fit(
    memory: float, num_layers: int, in_flight: int, flash: bool, fused: bool
) -> None:
    kept = layer_activations(SHAPE, MecefoOptions(), flash=flash, fused_activation=fused)
    assert kept.input_only < kept.ffn_kept < kept.normal
    count = num_kept_ffns(memory, num_layers, kept, in_flight)

    def taken(number: int) -> float:
        stored = number * kept.ffn_kept + (num_layers - number) * kept.input_only
        return stored * in_flight + kept.again

    allowed = memory * kept.normal * num_layers / 2 * in_flight
    assert 0 <= count <= num_layers
    if count:
        assert taken(count) <= allowed * (1 + 1e-6)
    if count < num_layers:
        assert taken(count + 1) > allowed * (1 - 1e-6)
    assert num_kept_ffns(0, num_layers, kept) == 0


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
