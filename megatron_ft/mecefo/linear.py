"""Forward and backward of the FFN's products with exact Dgrad and low-rank Wgrad.

The collectives are those of Megatron's tensor-parallel linear layers, with two exceptions that hold
for all tensor-parallel peers alike. The input of a column-parallel product is not gathered again in
backward: of it only x V1 is needed, which is kept from the forward pass instead. And where a
row-parallel product is computed again for its backward only, the forward product and its reduction
are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_global_memory_buffer

from megatron_ft.mecefo.ready import GradReady
from megatron_ft.mecefo.wgrad import LowRankWgrad


@dataclass(frozen=True, kw_only=True)
class Product:
    """One product y = W x of one layer in one call."""

    weight: torch.nn.Parameter
    """``[m, n]``, a shard."""
    wgrad: LowRankWgrad | None
    """None for the exact weight gradient."""
    ready: GradReady
    gather_input: bool
    """The input is a part of the sequence (column-parallel under sequence parallelism)."""
    reduce_dgrad: bool
    """The input gradient is summed over the peers (column-parallel otherwise)."""
    group: Any
    """The tensor-parallel group."""
    completes: bool = True
    """Its backward pass registers the weight, see ``complete_before``."""


def column_product(x: torch.Tensor, product: Product) -> torch.Tensor:
    """W x with the low-rank weight gradient.

    Args:
        x: ``[sequence, batch, n]``; a part of the sequence if ``gather_input``.

    Returns:
        ``[sequence, batch, m]``, of the whole sequence.
    """
    assert product.wgrad is not None
    return _Product.apply(x, product)


def row_product_for_backward(x: torch.Tensor, product: Product, *, scatter: bool) -> torch.Tensor:
    """A stand-in of W x that has its backward only; what it holds are zeros.

    Args:
        x: ``[sequence, batch, n]``, n a shard's width.
        scatter: The output is scattered over the sequence (sequence parallelism).

    Returns:
        Zeros of the shape of the reduced output, ``[sequence, batch, m]`` or a part of the
        sequence.
    """
    weight = product.weight if product.wgrad is None else None
    return _RowBackward.apply(x, weight, product, scatter)


def complete_before(x: torch.Tensor, product: Product) -> torch.Tensor:
    """``x``; the weight is registered when backward comes by here.

    For a norm that is fused with the product in the stock module: its parameters come first.
    """
    return _Completes.apply(x, product)


class _Completes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, product: Product) -> torch.Tensor:
        ctx.product = product
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.product.ready.register((ctx.product.weight,))
        return grads[0], None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, product: Product) -> torch.Tensor:
        ctx.product = product
        ctx.input_shape = x.shape
        total = _gather(x, product.group) if product.gather_input else x
        ctx.save_for_backward(_projected(total, product), product.weight.detach())
        return total.matmul(product.weight.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_output,) = grads
        projected, weight = ctx.saved_tensors
        product: Product = ctx.product
        grad_input = _rows(grad_output).matmul(weight)
        grad_input = grad_input.view(*grad_output.shape[:-1], weight.shape[1])
        handle = None
        # as in Megatron, the peers' sum is under way while the weight gradient is computed
        if product.reduce_dgrad:
            handle = dist.all_reduce(grad_input, group=product.group, async_op=True)
        elif product.gather_input:
            total, grad_input = grad_input, grad_input.new_empty(ctx.input_shape)
            handle = dist.reduce_scatter_tensor(
                grad_input, total.contiguous(), group=product.group, async_op=True
            )
        _accumulate(product, grad_output, projected)
        if handle is not None:
            handle.wait()
        return grad_input, None


class _RowBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        product: Product,
        scatter: bool,
    ) -> torch.Tensor:
        ctx.product = product
        ctx.scatter = scatter
        kept = x if product.wgrad is None else _projected(x, product)
        ctx.save_for_backward(kept, product.weight.detach())
        rows = x.shape[0] // product.group.size() if scatter else x.shape[0]
        return x.new_zeros(rows, *x.shape[1:-1], product.weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_output,) = grads
        kept, weight = ctx.saved_tensors
        product: Product = ctx.product
        if ctx.scatter:
            grad_output = _gather(grad_output.contiguous(), product.group)
        grad_input = _rows(grad_output).matmul(weight)
        grad_input = grad_input.view(*grad_output.shape[:-1], weight.shape[1])
        grad_weight = None
        if product.wgrad is None:
            grad_weight = _rows(grad_output).t().matmul(_rows(kept))
        else:
            _accumulate(product, grad_output, kept)
        return grad_input, grad_weight, None, None


def _projected(x: torch.Tensor, product: Product) -> torch.Tensor:
    """x V1, ``[tokens, r]``."""
    assert product.wgrad is not None and product.wgrad.basis is not None
    return _rows(x) @ product.wgrad.basis


def _accumulate(product: Product, grad_output: torch.Tensor, projected: torch.Tensor) -> None:
    wgrad = product.wgrad
    assert wgrad is not None
    wgrad.accumulate(_rows(grad_output), projected)
    if product.completes:
        product.ready.register((product.weight,))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[sequence, batch, n]`` as ``[tokens, n]``."""
    return x.reshape(-1, x.shape[-1])


def _gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The whole sequence, in Megatron's shared buffer: to be used before the next gather."""
    shape = [x.shape[0] * group.size(), *x.shape[1:]]
    total = get_global_memory_buffer().get_tensor(shape, x.dtype, "mpu")
    dist.all_gather_into_tensor(total, x.contiguous(), group=group)
    return total
