"""Telling Megatron's DDP that a parameter's gradient is complete where autograd does not.

With ``--overlap-grad-reduce`` a bucket is reduced when each of its parameters has been registered
once in the last microbatch, as autograd's hooks do. Parameters whose gradient a degraded layer
leaves out, or adds by itself, have no such hook run: they are registered here, at the same place of
the backward pass, so that buckets become complete in the same order as on the other replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


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

    def is_last(self, parameter: torch.nn.Parameter) -> bool:
        """Whether registering ``parameter`` now may start the reduction of its bucket."""
        found = self._overlapped.get(parameter)
        return found is not None and found[1].is_last_microbatch

    def register(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Say that the gradients of ``parameters`` are complete for this microbatch."""
        for parameter in parameters:
            found = self._overlapped.get(parameter)
            if found is not None:
                wrapper, group = found
                group.register_grad_ready(parameter, wrapper.force_all_reduce)
