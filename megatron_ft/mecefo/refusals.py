"""Layers and options that cannot be degraded, said before training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ft.mecefo import te
from megatron_ft.mecefo.layer import attention_in_backward_order
from megatron_ft.mecefo.options import MecefoOptions

_CONFIG: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda c: c.num_moe_experts is not None, "mixture of experts", "a dense FFN"),
    (lambda c: bool(c.fp8 or c.fp4), "fp8 or fp4", "bf16, fp16 or fp32"),
    (lambda c: c.cuda_graph_impl != "none", "CUDA graphs", "--cuda-graph-impl none"),
    (lambda c: c.cpu_offloading, "--cpu-offloading-num-layers", "no offloading"),
    (
        lambda c: c.fine_grained_activation_offloading,
        "--fine-grained-activation-offloading",
        "no offloading",
    ),
    (lambda c: c.mlp_chunks_for_training > 1, "--mlp-chunks-for-training", "one chunk"),
    (lambda c: c.context_parallel_size > 1, "context parallelism", "--context-parallel-size 1"),
    (lambda c: c.delay_wgrad_compute, "--delay-wgrad-compute", "weight gradients in backward"),
    (
        lambda c: c.gtp_weight_remat_size > 1,
        "sharded weights (GTP)",
        "whole tensor-parallel shards",
    ),
)


def check_layers(layers: Sequence[Any], options: MecefoOptions) -> None:
    """Refuse what a degraded layer would compute wrongly.

    Raises:
        ValueError: Says what cannot be degraded, and what to use instead.
    """
    for layer in layers:
        _check_layer(layer, options)


def _check_layer(layer: Any, options: MecefoOptions) -> None:
    where = f"MeCeFO: layer {getattr(layer, 'layer_number', '?')}"
    if getattr(layer, "is_moe_layer", False):
        raise ValueError(
            f"{where} is a mixture of experts, whose routed FFN has no low-rank rule here; "
            "only dense layers can be degraded"
        )
    if type(layer) is not TransformerLayer:
        raise ValueError(f"{where} is a {type(layer).__name__}, not Megatron's TransformerLayer")
    for refused, what, instead in _CONFIG:
        if refused(layer.config):
            raise ValueError(f"{where} cannot be degraded with {what}; use {instead}")
    if not isinstance(layer.cross_attention, IdentityOp):
        raise ValueError(f"{where} has cross-attention; only decoder layers can be degraded")
    try:
        attention_in_backward_order(layer)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    if type(layer.mlp) is not MLP:
        raise ValueError(f"{where} has a {type(layer.mlp).__name__}, not Megatron's MLP")
    linears = layer.mlp.linear_fc1, layer.mlp.linear_fc2
    if options.low_rank and not _can_be_low_rank(*map(type, linears)):
        names = " and ".join(type(linear).__name__ for linear in linears)
        raise ValueError(
            f"{where} has {names} in its FFN; low-rank weight gradients need Megatron's or "
            "Transformer Engine's parallel linear layers: --transformer-impl local, or "
            "--ft-mecefo-no-low-rank"
        )
    if options.low_rank and not all(linear.weight.requires_grad for linear in linears):
        raise ValueError(f"{where} has frozen FFN weights; --ft-mecefo-no-low-rank")


def _can_be_low_rank(first: type, second: type) -> bool:
    own = first is ColumnParallelLinear and second is RowParallelLinear
    return own or (first in te.FIRST and second in te.SECOND)
