"""ReCoVer's hooks: the schedule, the bucket reducer, and the optimizer's collectives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from .registry import Patch


def _transaction() -> Any:
    from megatron_ft.session import current

    return current().transaction


def _schedule(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        return _transaction().wrap(original(*args, **kwargs))

    return get_forward_backward_func


def _start_grad_sync(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Megatron's own early return: in the first batch the reduction may be under way already.
        if not (self.is_first_batch and self.grad_reduce_handle is not None):
            _transaction().before_reduction(self)
        return original(self, *args, **kwargs)

    return start_grad_sync


def _rehearsed(original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__

    @functools.wraps(original)
    def answer(self: Any, *args: Any, **kwargs: Any) -> Any:
        transaction = _transaction()
        if transaction.rehearses(self) and name in transaction.rehearsed:
            return transaction.rehearsed[name]
        return original(self, *args, **kwargs)

    return answer


_OPTIMIZER = "megatron.core.optimizer.optimizer:ChainedOptimizer"
_REHEARSED = "its collective has run before the vote; the commit must be local arithmetic"

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="recover.schedule",
        target="megatron.training.training:get_forward_backward_func",
        reason="train() and evaluate() take the schedule from here; there is no other way in",
        kind="wrap",
        make=_schedule,
    ),
    Patch(
        name="recover.start_grad_sync",
        target=(
            "megatron.core.distributed.param_and_grad_buffer:"
            "_ParamAndGradBucketGroup.start_grad_sync"
        ),
        reason="a bucket is snapshotted before its first reduction, overlapped or not",
        kind="wrap",
        make=_start_grad_sync,
        requires=("self",),
    ),
    *(
        Patch(
            name=f"recover.{name}",
            target=f"{_OPTIMIZER}.{name}",
            reason=_REHEARSED,
            kind="wrap",
            make=_rehearsed,
            requires=("self",),
        )
        for name in ("prepare_grads", "get_grad_norm", "count_zeros")
    ),
)
