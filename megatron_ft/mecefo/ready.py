"""Telling Megatron's DDP that a parameter's gradient is complete where autograd does not.

With ``--overlap-grad-reduce`` a bucket is reduced when each of its parameters has been registered
once in the last microbatch, as autograd's hooks do. Parameters whose gradient a degraded layer
leaves out, or adds by itself, have no such hook run: they are registered here, in the order of the
stock backward pass. Another order would complete buckets in another order than on the other
replicas, which would reduce one bucket with another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

_QKV = "self_attention.linear_qkv"
ATTENTION_BACKWARD = (
    *("self_attention.linear_proj.bias", "self_attention.linear_proj.weight"),
    *("self_attention.k_layernorm.weight", "self_attention.k_layernorm.bias"),
    *("self_attention.q_layernorm.weight", "self_attention.q_layernorm.bias"),
    # Transformer Engine's fused norm comes back from the same function
    *(f"{_QKV}.layer_norm_weight", f"{_QKV}.layer_norm_bias"),
    *(f"{_QKV}.weight", f"{_QKV}.bias"),
    *("input_layernorm.weight", "input_layernorm.bias"),
)
"""In what order the stock backward pass completes the parameters of a layer's attention branch."""


def in_backward_order[P](parameters: Mapping[str, P]) -> list[P]:
    """The parameters of an attention branch as the stock backward pass completes them.

    Args:
        parameters: By name in their TransformerLayer.

    Raises:
        ValueError: A name is unknown, so that its place is too.
    """
    unknown = sorted(parameters.keys() - set(ATTENTION_BACKWARD))
    if unknown:
        raise ValueError(f"its attention has parameters that MeCeFO does not know: {unknown}")
    return [parameters[name] for name in ATTENTION_BACKWARD if name in parameters]


class GradReady:
    """Registers parameters with the DDP instances that hold them.

    Args:
        ddp: Megatron's ``DistributedDataParallel`` wrappers; none where a model is used without.
    """

    def __init__(self, ddp: Iterable[Any] = ()) -> None:
        self._overlapped = {
            parameter: (wrapper, group)
            for wrapper in ddp
            if wrapper.ddp_config.overlap_grad_reduce
            for parameter, group in wrapper.param_to_bucket_group.items()
        }

    def register(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Say that the gradients of ``parameters`` are complete for this microbatch."""
        for parameter in parameters:
            found = self._overlapped.get(parameter)
            if found is not None:
                wrapper, group = found
                group.register_grad_ready(parameter, wrapper.force_all_reduce)
