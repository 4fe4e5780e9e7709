"""Transformer Engine's FFN modules in a degraded layer: torch operations on their parameters.

Transformer Engine computes weight gradients inside of its own autograd functions, where a low-rank
one has no way in. So in a degraded layer its modules compute what they would, norm included, by the
functions that Megatron's own linear layers are degraded with. A forward pass that is recomputed
anyway stays Transformer Engine's, to the bit.

Written against Transformer Engine 2 and not run with it yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions.transformer_engine import (
    TEColumnParallelLinear,
    TELayerNormColumnParallelLinear,
    TERowParallelLinear,
)
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from megatron_ft.mecefo.linear import (
    Product,
    column_product,
    complete_before,
    row_product_for_backward,
)

FIRST = (TELayerNormColumnParallelLinear, TEColumnParallelLinear)
SECOND = (TERowParallelLinear,)


def normalized(x: torch.Tensor, linear: Any) -> torch.Tensor:
    """The input norm that is fused into ``linear``, of ``[sequence, batch, hidden]``."""
    config = linear.config
    weight = linear.layer_norm_weight
    if config.layernorm_zero_centered_gamma:
        weight = weight + 1
    shape = (x.shape[-1],)
    if config.normalization == "RMSNorm":
        return F.rms_norm(x, shape, weight, config.layernorm_epsilon)
    return F.layer_norm(x, shape, weight, linear.layer_norm_bias, config.layernorm_epsilon)


def forward_first(linear: Any, x: torch.Tensor, product: Callable[..., Product]) -> Any:
    """``linear_fc1``, with its norm: output of the whole sequence, and bias or None.

    Args:
        linear: The module.
        x: ``[sequence, batch, hidden]``, a part of the sequence under sequence parallelism.
        product: Makes the product's description from what is given by name.
    """
    fused = hasattr(linear, "layer_norm_weight")
    group = linear._tp_group
    scattered = linear.config.sequence_parallel and group.size() > 1
    made = product(
        gather_input=scattered,
        reduce_dgrad=group.size() > 1 and not scattered,
        group=group,
        completes=not fused,
    )
    if fused:
        x = normalized(complete_before(x, made), linear)
    return _with_bias(linear, column_product(x, made))


def forward_second(
    linear: Any, x: torch.Tensor, product: Callable[..., Product], *, again: bool
) -> Any:
    """``linear_fc2``; only its backward pass if ``again``."""
    group = linear._tp_group
    scattered = linear.config.sequence_parallel and group.size() > 1
    made = product(gather_input=False, reduce_dgrad=False, group=group)
    if again:
        return _with_bias(linear, row_product_for_backward(x, made, scatter=scattered))
    output = column_product(x, made)
    if scattered:
        return _with_bias(linear, reduce_scatter_to_sequence_parallel_region(output, group=group))
    return _with_bias(linear, reduce_from_tensor_model_parallel_region(output, group=group))


def _with_bias(linear: Any, output: torch.Tensor) -> Any:
    if linear.te_return_bias:
        return output, linear.bias
    return (output + linear.bias if linear.use_bias else output), None
