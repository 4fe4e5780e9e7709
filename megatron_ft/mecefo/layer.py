"""One TransformerLayer in MeCeFO mode: what its patched methods do while it is degraded.

Everything is switched by the attribute ``ft_degraded`` of a layer and ``ft_product`` of its FFN's
linear modules, which ``degraded.Degraded`` sets and takes away. Without them the patches call
Megatron's own methods.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import torch
from megatron.core import tensor_parallel

from megatron_ft.mecefo import te
from megatron_ft.mecefo.gradient_rule import is_attention_parameter
from megatron_ft.mecefo.linear import Product, column_product, row_product_for_backward
from megatron_ft.mecefo.ready import GradReady, in_backward_order
from megatron_ft.mecefo.wgrad import LowRankWgrad


class Phase(StrEnum):
    """What a call of the FFN is for."""

    STOCK = "stock"
    """Outside of a degraded layer, or a forward pass of which nothing is kept."""
    FORWARD = "forward"
    """A forward pass that keeps what its backward needs."""
    AGAIN = "again"
    """In backward: the forward pass again, for what the backward pass needs of it."""


def attention_in_backward_order(layer: Any) -> list[torch.nn.Parameter]:
    """What skip-MHA leaves without gradient.

    Raises:
        ValueError: The attention is of a kind whose backward pass is unknown.
    """
    named = {n: p for n, p in layer.named_parameters() if is_attention_parameter(n)}
    return in_backward_order(named)


class DegradedLayer:
    """The state of one layer in MeCeFO mode.

    Args:
        layer: Megatron's TransformerLayer.
        ready: Where parameters without autograd's hooks are registered.
        low_rank: Technique III.
    """

    def __init__(self, layer: Any, ready: GradReady, *, low_rank: bool) -> None:
        self.layer = layer
        self.ready = ready
        self.skip_attention = True
        """Technique I."""
        self.recompute_ffn = True
        """Technique II."""
        self.phase = Phase.STOCK
        self.linears = (layer.mlp.linear_fc1, layer.mlp.linear_fc2)
        self.wgrads = tuple(LowRankWgrad(linear.weight) for linear in self.linears if low_rank)
        self._attention = attention_in_backward_order(layer)

    # -- technique I -------------------------------------------------------------------------------

    def forward_attention(
        self, stock: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        """Attention, norm and residual exactly; backward through the residual only.

        Random numbers and forward collectives are those of the stock layer. Nothing is kept.
        """
        if not (self.skip_attention and torch.is_grad_enabled()):
            return stock(self.layer, hidden_states, *args, **kwargs)
        with torch.no_grad():
            attended, context = stock(self.layer, hidden_states.detach(), *args, **kwargs)
        return _ThroughResidual.apply(hidden_states, [attended.detach()], self), context

    def attention_is_done(self) -> None:
        """The backward pass went by the attention; its parameters get no gradient."""
        self.ready.register(self._attention)

    # -- techniques II and III ---------------------------------------------------------------------

    def forward_ffn(
        self, stock: Callable[..., Any], hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Norm, FFN and residual; exact, with what is kept for backward as the options say."""
        run = functools.partial(self._run_ffn, stock, args, kwargs)
        # Who asked Megatron to recompute it has it recomputed, here in our way.
        recompute = self.recompute_ffn or self.layer.recompute_mlp
        if not (recompute and torch.is_grad_enabled()):
            return run(hidden_states, phase=Phase.FORWARD)
        # Megatron's own: it replays the random numbers and composes with recomputation outside.
        return tensor_parallel.checkpoint(
            functools.partial(run, phase=Phase.AGAIN), False, hidden_states
        )

    def _run_ffn(
        self,
        stock: Callable[..., Any],
        args: Any,
        kwargs: Any,
        hidden_states: torch.Tensor,
        *,
        phase: Phase,
    ) -> torch.Tensor:
        self.phase = phase if torch.is_grad_enabled() else Phase.STOCK
        try:
            with self._no_recomputation_inside(phase):
                return stock(self.layer, hidden_states, *args, **kwargs)
        finally:
            self.phase = Phase.STOCK

    @contextlib.contextmanager
    def _no_recomputation_inside(self, phase: Phase) -> Iterator[None]:
        """Selective recomputation of the norm and the FFN would compute them a third time."""
        names = ("recompute_mlp", "recompute_pre_mlp_layernorm") if phase is Phase.AGAIN else ()
        before = {name: getattr(self.layer, name) for name in names}
        for name in names:
            setattr(self.layer, name, False)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(self.layer, name, value)

    def product(self, stock: Callable[..., Any], linear: Any, **call: Any) -> torch.Tensor:
        """What one of Megatron's linear modules does between its collectives of the forward pass.

        Row-parallel products have no collectives of their own: Megatron passes that on in ``call``.
        """
        if self.phase is Phase.STOCK or not self.wgrads:
            return stock(linear, **call)
        product = self._product(
            linear,
            gather_input=call["sequence_parallel"],
            reduce_dgrad=call["allreduce_dgrad"],
            group=linear.tp_group,
        )
        return column_product(call["input"], product)

    def row_forward(self, stock: Callable[..., Any], linear: Any, x: torch.Tensor) -> Any:
        """The whole of ``linear_fc2``: of a product that is made again only the backward pass."""
        fused = not self.wgrads and linear.gradient_accumulation_fusion
        if self.phase is not Phase.AGAIN or fused:
            return stock(linear, x)
        assert linear.skip_bias_add, "Megatron's FFN adds the bias outside"
        product = self._product(
            linear, gather_input=False, reduce_dgrad=False, group=linear.tp_group
        )
        output = row_product_for_backward(x, product, scatter=linear.sequence_parallel)
        return output, linear.bias

    def te_forward(self, stock: Callable[..., Any], linear: Any, x: torch.Tensor) -> Any:
        """The whole of a Transformer Engine module of the FFN, see ``te``."""
        if self.phase is Phase.STOCK or not self.wgrads:
            return stock(linear, x)
        product = functools.partial(self._product, linear)
        if linear is self.linears[0]:
            return te.forward_first(linear, x, product)
        return te.forward_second(linear, x, product, again=self.phase is Phase.AGAIN)

    def _product(self, linear: Any, **call: Any) -> Product:
        wgrad = self.wgrads[self.linears.index(linear)] if self.wgrads else None
        return Product(weight=linear.weight, wgrad=wgrad, ready=self.ready, **call)


class _ThroughResidual(torch.autograd.Function):
    """Values of the layer's attention, gradient of its residual."""

    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, attended: list[torch.Tensor], layer: DegradedLayer
    ) -> torch.Tensor:
        ctx.layer = layer
        ctx.dtype = hidden_states.dtype
        return attended.pop()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad_output,) = grads
        ctx.layer.attention_is_done()
        # the residual stream may be wider than what enters the layer (--fp32-residual-connection)
        return grad_output.to(ctx.dtype), None, None
