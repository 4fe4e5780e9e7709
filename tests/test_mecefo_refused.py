"""Layers and options that MeCeFO mode refuses."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from harness import ROOT
from mecefo_layers import EVERYTHING, FFN, HIDDEN
from mecefo_layers import groups as groups

sys.path.insert(0, str(ROOT / "tools"))

import mecefo_model
import torch


def test_a_mixture_of_experts_is_refused() -> None:
    from megatron_ft.mecefo.degraded import Degraded

    settings = {"moe_ffn_hidden_size": 48, "moe_router_load_balancing_type": "none"}
    block = mecefo_model.block(mecefo_model.config(num_moe_experts=2, **settings))
    with pytest.raises(ValueError, match="layer 1 is a mixture of experts"):
        Degraded(block.layers, EVERYTHING)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mlp_chunks_for_training", 2, "--mlp-chunks-for-training"),
        ("cuda_graph_impl", "local", "CUDA graphs"),
        ("fp8", "hybrid", "fp8"),
        ("context_parallel_size", 2, "--context-parallel-size 1"),
    ],
)
def test_options_that_are_refused(name: str, value: Any, message: str) -> None:
    from megatron_ft.mecefo.degraded import Degraded

    block = mecefo_model.block(mecefo_model.config())
    Degraded(block.layers, EVERYTHING)
    setattr(block.layers[0].config, name, value)
    with pytest.raises(ValueError, match=message):
        Degraded(block.layers, EVERYTHING)


def test_other_linear_layers_and_frozen_weights_are_refused() -> None:
    from megatron_ft.mecefo.degraded import Degraded

    block = mecefo_model.block(mecefo_model.config())
    block.layers[1].mlp.linear_fc2.weight.requires_grad_(False)
    with pytest.raises(ValueError, match="layer 2 has frozen FFN weights"):
        Degraded(block.layers, EVERYTHING)
    block.layers[1].mlp.linear_fc1 = torch.nn.Linear(HIDDEN, 2 * FFN)
    with pytest.raises(ValueError, match="Linear and RowParallelLinear in its FFN"):
        Degraded(block.layers, EVERYTHING)
    block.layers[1].self_attention.sink = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"layer 2: its attention has .*self_attention.sink"):
        Degraded(block.layers, EVERYTHING)


def test_layers_that_are_not_there() -> None:
    from megatron_ft.mecefo.degraded import Degraded

    handle = Degraded(mecefo_model.block(mecefo_model.config()).layers, EVERYTHING)
    with pytest.raises(ValueError, match=r"no layers \[2\]"):
        handle.on([1, 2])
