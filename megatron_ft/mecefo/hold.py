"""Holding parameters still through one optimizer step, to the last bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.optimizer.optimizer import (
    ChainedOptimizer,
    Float16OptimizerWithFloat16Params,
    FP32Optimizer,
)


@contextlib.contextmanager
def hold(optimizer: Any, parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """While it lasts, ``optimizer.step()`` does not see ``parameters`` of the model.

    They are taken out of the parameter groups of the optimizer inside, so that neither they, nor
    their moments and step counts, nor their fp32 copies are touched, by weight decay either.
    (Apex's and Transformer Engine's Adam count steps by group: there the count goes on.) What the
    model holds in bf16 is cast anew from the fp32 copy, which gives the same bits again.

    Their gradients must be zero, as they are where nobody contributed to them; they are left out of
    the gradient norm too if that is taken inside.

    Args:
        optimizer: Megatron's, chained or not: fp32, or fp16/bf16 with fp32 copies.
        parameters: Of the model; those that ``optimizer`` does not have are ignored.

    Raises:
        ValueError: Another kind of optimizer, such as the distributed one.
    """
    wanted = {id(parameter) for parameter in parameters}
    groups = [group for inner in _inner(optimizer) for group in inner.optimizer.param_groups]
    held = wanted | {id(copy) for inner in _inner(optimizer) for copy in _copies(inner, wanted)}
    whole = [group["params"] for group in groups]
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in held]
    try:
        yield
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def _inner(optimizer: Any) -> list[Any]:
    chained = (
        optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
    )
    for one in chained:
        # exactly these: the distributed optimizer steps shards of parameters
        if type(one) not in (FP32Optimizer, Float16OptimizerWithFloat16Params):
            raise ValueError(
                f"MeCeFO cannot hold parameters of {type(one).__name__}; it needs Megatron's fp32 "
                "or fp16/bf16 optimizer (no --use-distributed-optimizer)"
            )
    return [one for one in chained if not one.is_stub_optimizer]


def _copies(one: Any, wanted: set[int]) -> Iterator[torch.Tensor]:
    """The fp32 copies that stand for 16-bit parameters in the groups."""
    if isinstance(one, Float16OptimizerWithFloat16Params):
        for models, copies in zip(one.float16_groups, one.fp32_from_float16_groups, strict=True):
            for model, copy in zip(models, copies, strict=True):
                if id(model) in wanted:
                    yield copy
