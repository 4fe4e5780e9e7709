"""What a neighbour's gradient weighs in a rebuilt stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ft.checkfree import parts


@torch.no_grad()
def shard_grad_square(optimizer: Any, model: Sequence[Any]) -> float:
    """This process's share of the square of its stage's gradient norm, before clipping.

    Only layers count, since only they are averaged: a stage does not weigh more because it also
    holds the embedding. (The authors' code keeps embedding and head on a stage of their own.)
    Summed over the tensor-parallel peers of a stage this is the square of the norm; what all peers
    hold alike counts once, as in Megatron's own gradient norm. Data-parallel replicas have the
    same gradients after their reduction.

    Args:
        optimizer: Megatron's, after ``prepare_grads`` and before clipping, so that gradients are
            summed over the replicas and free of the loss scale.
        model: Megatron's list of the chunk that it trains here.
    """
    wanted = {id(parts.master(p)) for p in parts.layers(model).values()}
    total = 0.0
    for single in parts.optimizers(optimizer):
        grads = single._filter_grads_for_norm(
            single.get_parameters(), param_filter=lambda p: id(p) in wanted
        )
        if grads:
            norms = torch.stack([norm.double() for norm in torch._foreach_norm(grads)])
            total += float(norms.square().sum())
    return total
