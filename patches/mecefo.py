"""MeCeFO's layer: a TransformerLayer that is marked degraded goes another way; others do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .registry import Patch


def _layer_method(way: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def method(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            degraded = getattr(self, "ft_degraded", None)
            if degraded is None:
                return original(self, hidden_states, *args, **kwargs)
            return getattr(degraded, way)(original, hidden_states, *args, **kwargs)

        return method

    return make


def _product(way: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def _forward_impl(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
            degraded = getattr(self, "ft_degraded", None)
            if degraded is None:
                return original(self, input, weight, *args, **kwargs)
            assert not args, "Megatron passes the rest by name"
            return getattr(degraded, way)(original, self, input=input, weight=weight, **kwargs)

        return _forward_impl

    return make


def _row_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, input_: Any) -> Any:
        degraded = getattr(self, "ft_degraded", None)
        if degraded is None:
            return original(self, input_)
        return degraded.row_forward(original, self, input_)

    return forward


_LAYER = "megatron.core.transformer.transformer_layer:TransformerLayer"
_LINEAR = "megatron.core.tensor_parallel.layers"

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="mecefo.attention",
        target=f"{_LAYER}._forward_attention",
        reason="a degraded layer's attention keeps nothing and has no backward; the choice is made "
        "anew in each step, so another module or spec would not do",
        kind="wrap",
        make=_layer_method("forward_attention"),
        requires=("self", "hidden_states"),
    ),
    Patch(
        name="mecefo.ffn",
        target=f"{_LAYER}._forward_mlp",
        reason="a degraded layer's FFN is computed again in backward",
        kind="wrap",
        make=_layer_method("forward_ffn"),
        requires=("self", "hidden_states"),
    ),
    Patch(
        name="mecefo.column_product",
        target=f"{_LINEAR}:ColumnParallelLinear._forward_impl",
        reason="linear_fc1 of a degraded layer has a low-rank weight gradient; the collectives "
        "around the product stay Megatron's",
        kind="wrap",
        make=_product("column_product"),
        requires=("self", "input", "weight"),
    ),
    Patch(
        name="mecefo.row_product",
        target=f"{_LINEAR}:RowParallelLinear._forward_impl",
        reason="the same for linear_fc2",
        kind="wrap",
        make=_product("row_product"),
        requires=("self", "input", "weight"),
    ),
    Patch(
        name="mecefo.row_forward",
        target=f"{_LINEAR}:RowParallelLinear.forward",
        reason="the output of linear_fc2 is not needed when it is computed again for backward",
        kind="wrap",
        make=_row_forward,
        requires=("self", "input_"),
    ),
)
