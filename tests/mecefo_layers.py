"""Megatron's layers in MeCeFO mode and a layer in plain torch, for the tests that compare them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import mecefo_reference as reference
import pytest
from harness import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import mecefo_model
import torch

from megatron_ft.mecefo.options import MecefoOptions

SEQUENCE, BATCH, HIDDEN, FFN, RANK = 12, 2, 32, 48, 8
BOUND = 1e-9
"""Relative. Double precision leaves 1e-13 of rounding here."""

GPT = {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": torch.nn.functional.gelu,
    "add_bias_linear": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt-biases": GPT,
    "qk-layernorm": {"qk_layernorm": True, "num_query_groups": 4, "add_qkv_bias": True},
}
DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.1}
EVERYTHING = MecefoOptions(rank=RANK)
EXACT = MecefoOptions(rank=10_000, skip_attention=False)
"""Everything is done MeCeFO's way, and nothing is approximate."""


@pytest.fixture(scope="module", autouse=True)
def groups() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with mecefo_model.megatron():
        yield
    torch.set_num_threads(threads)


def degraded(block: Any, options: MecefoOptions, *, ddp: Any = (), **on: Any) -> Any:
    from megatron_ft.mecefo.degraded import Degraded

    made = Degraded(block.layers, options, ddp=ddp)
    made.on(range(len(block.layers)), **on)
    return made


class Model:
    """A block, its input, and a pass through it."""

    def __init__(self, **options: Any) -> None:
        self.config = mecefo_model.config(**options)
        self.block = mecefo_model.block(self.config)
        with torch.no_grad():  # norms of ones and biases of zeros would hide mistakes
            for name, parameter in self.block.named_parameters():
                if "norm" in name or "bias" in name:
                    parameter.add_(0.3 * torch.randn_like(parameter))
                else:
                    parameter.mul_(6)
        shape = (SEQUENCE, BATCH, HIDDEN)
        dtype = self.config.params_dtype
        self.x = torch.randn(shape, dtype=dtype)
        self.grad = torch.randn(shape, dtype=dtype)
        self.angles = mecefo_model.rotary(self.config, SEQUENCE)

    def run(self, *, seed: int = 5, x: torch.Tensor | None = None) -> tuple[Any, Any]:
        """Forward and backward; output and input gradient."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
        torch.manual_seed(seed)
        inside = (self.x if x is None else x).clone().requires_grad_()
        output = self.block(hidden_states=inside, attention_mask=None, rotary_pos_emb=self.angles)
        torch.autograd.backward(output, self.grad)
        return output.detach(), inside.grad

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name, those that there are; taken away from the model."""
        found = {n: p.grad for n, p in self.block.named_parameters() if p.grad is not None}
        self.block.zero_grad()
        return found

    def reference(self, rank: int | None, *, skip_attention: bool = True) -> dict[str, Any]:
        """What ``run`` should give, by the formulas."""
        weights = [
            {n: p.detach().clone().requires_grad_() for n, p in layer.named_parameters()}
            for layer in self.block.layers
        ]
        shape = reference.Shape(
            heads=self.config.num_attention_heads,
            groups=self.config.num_query_groups,
            gated=self.config.gated_linear_unit,
            norm=self.config.normalization,
            skip_attention=skip_attention,
        )
        inside = self.x.clone().requires_grad_()
        result = reference.stack(inside, weights, shape, self.angles)
        torch.autograd.backward(result.output, self.grad)
        gradients = {
            f"layers.{i}.{name}": weight.grad
            for i, layer in enumerate(weights)
            for name, weight in layer.items()
            if weight.grad is not None
        }
        for i, (seen, layer) in enumerate(zip(result.seen, weights, strict=True)):
            for name, x, y in (("linear_fc1", seen.x1, seen.y1), ("linear_fc2", seen.x2, seen.y2)):
                if rank is not None:
                    weight = layer[f"mlp.{name}.weight"]
                    gradients[f"layers.{i}.mlp.{name}.weight"] = reference.low_rank(
                        y.grad, x, weight, rank
                    )
        return {"output": result.output.detach(), "input": inside.grad, "weights": gradients}


def close(a: torch.Tensor, b: torch.Tensor, bound: float = BOUND) -> bool:
    return float((a.double() - b.double()).norm() / b.double().norm()) <= bound


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], bound: float) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert close(got[name], want[name], bound), name


def wrapped(model: Model, **settings: Any) -> Any:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)
    return DistributedDataParallel(model.config, ddp, model.block)


BF16 = {"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "bf16": True}
FP32 = {"params_dtype": torch.float32, "pipeline_dtype": torch.float32}
