"""MeCeFO's gradient rule: what a stage does with attention gradients that some replicas lack.

For a layer in step t let N be the replicas that computed its attention exactly. The gradient of its
attention branch is the mean over N, weighted by contributed microbatches; where N is empty these
parameters are held: no update, no momentum, no weight decay (arXiv 2510.16415, technique I).
Gradients of the FFN are the mean over all replicas.

Data parallelism sums over the replicas what is scaled by 1/B, B the microbatches of the step. A
replica outside N contributes zeros, so the mean over N is that sum times B over the microbatches of
N. It must be applied after the reduction and before the gradient norm is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class _Gradient(Protocol):
    def mul_(self, factor: float) -> object: ...


class _Reduced(Protocol):
    main_grad: _Gradient


class _Layer(Protocol):
    def named_parameters(self) -> Iterable[tuple[str, _Reduced]]: ...


ATTENTION_BRANCH = ("input_layernorm.", "self_attention.")
"""Prefixes of a TransformerLayer's parameters that skip-MHA leaves without gradient. Transformer
Engine fuses the input norm into ``self_attention.linear_qkv``, which is covered too."""


def is_attention_parameter(name: str) -> bool:
    """Whether a TransformerLayer's parameter, by its name in the layer, is of the attention."""
    return name.startswith(ATTENTION_BRANCH)


def attention_parameters(layer: _Layer) -> list[_Reduced]:
    """The parameters of a layer's attention branch, input norm included."""
    return [p for name, p in layer.named_parameters() if is_attention_parameter(name)]


def attention_factor(contributed: Mapping[int, int], affected: Iterable[int]) -> float | None:
    """By what the summed attention gradient of a layer must be multiplied.

    Args:
        contributed: Microbatches that each replica contributed to this step, their sum is B; or
            counted tokens where the loss is per token.
        affected: Replicas whose attention backward was skipped in this layer.

    Returns:
        B over the microbatches of the replicas that are not affected; exactly 1 if none is. None
        if no microbatch is left: the parameters must be held.

    Raises:
        ValueError: A replica is affected that is not in the step, or a count is negative.
    """
    skipped = set(affected)
    unknown = skipped - contributed.keys()
    if unknown:
        raise ValueError(f"replicas {sorted(unknown)} are affected, but not part of the step")
    if any(count < 0 for count in contributed.values()):
        raise ValueError(f"negative counts of microbatches: {dict(contributed)}")
    total = sum(contributed.values())
    exact = sum(count for replica, count in contributed.items() if replica not in skipped)
    if exact == 0:
        return None
    return 1.0 if exact == total else total / exact


def rescale(parameters: Iterable[_Reduced], factor: float) -> None:
    """Multiply reduced gradients by ``attention_factor``'s answer, in place.

    A factor of 1 touches nothing, so that a step in which nobody is affected is stock to the bit.
    """
    if factor != 1.0:
        for parameter in parameters:
            parameter.main_grad.mul_(factor)
