"""A step on a process with two stages: what Megatron does for one slot is done for both.

In each of these the groups of both slots are one communicator, in which the process has one rank:
what it contributes to the gradient norm, to shared embeddings or to the number of tokens is that of
both. Groups across replicas are two, and are gone through by stage, on all processes alike, so that
no two of them wait for each other.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.clip_grads import count_zeros_fp32, get_grad_norm_fp32
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.utils import (
    get_pp_last_rank,
    is_pp_first_stage,
    is_pp_last_stage,
)
from megatron.core.utils import get_attr_wrapped_model, get_model_config

if TYPE_CHECKING:
    from megatron_ft.transaction import StepTransaction

# The package exports a function of the module's name.
stock = importlib.import_module("megatron.core.distributed.finalize_model_grads")


class Seat:
    """One of the two slots of a process, in a step.

    Args:
        stage: Its pipeline stage.
        chunk: Its model chunk.
        shown: Opens Megatron's globals as the slot sees them.
    """

    def __init__(
        self, stage: int, chunk: Any, shown: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self.stage = stage
        self.chunk = chunk
        self.shown = shown
        with shown():
            self.groups = schedules._build_default_pg_collection()


@contextlib.contextmanager
def hooks_of(chunks: Sequence[Any]) -> Iterator[None]:
    """Megatron's configuration names the hooks of its one chunk; here, of all, in their order."""
    config = get_model_config(chunks[0])
    before = config.no_sync_func, config.grad_sync_func
    if before[0] is not None:
        config.no_sync_func = [chunk.no_sync for chunk in chunks]
    if before[1] is not None:
        config.grad_sync_func = [chunk.start_grad_sync for chunk in chunks]
    try:
        yield
    finally:
        config.no_sync_func, config.grad_sync_func = before


def finalize(both: Sequence[Seat], num_tokens: Any = None, *, force_all_reduce: bool) -> None:
    """Megatron's ``finalize_model_grads`` for two slots, with the same collectives for others."""
    config = get_model_config(both[0].chunk)
    for seat in both:
        seat.chunk.finish_grad_sync(force_all_reduce=force_all_reduce)
    for seat in both:
        with seat.shown():
            stock._allreduce_non_tensor_model_parallel_grads([seat.chunk], config, seat.groups.tp)
    _shared_embeddings(both, config)
    if num_tokens is None:
        return
    last = get_pp_last_rank(both[0].groups.pp)
    dist.broadcast(num_tokens, src=last, group=both[0].groups.pp)
    for seat in both:
        tokens = num_tokens.clone()
        dist.all_reduce(tokens, group=seat.groups.dp_cp)
        seat.chunk.scale_gradients(1.0 / torch.clamp(tokens, min=1))


def _shared_embeddings(both: Sequence[Seat], config: Any) -> None:
    """Sum the gradients of embedding and head where they are one parameter on two stages."""
    ends = [seat for seat in both if _at_an_end(seat)]
    if len(ends) == 2:
        weights = [_shared_weight(seat.chunk, config) for seat in ends]
        if None not in weights:
            first, last = (weight.main_grad for weight in weights)
            first.add_(last)
            last.copy_(first)
    for seat in ends if len(ends) == 1 else ():
        with seat.shown():
            stock._allreduce_word_embedding_grads(
                [seat.chunk], config, seat.groups.embd, seat.groups.pp
            )


def _at_an_end(seat: Seat) -> bool:
    return is_pp_first_stage(seat.groups.pp) or is_pp_last_stage(seat.groups.pp)


def _shared_weight(chunk: Any, config: Any) -> Any:
    model = get_attr_wrapped_model(chunk, "pre_process", return_model_obj=True)
    return stock._get_shared_word_embedding_weight(model, config)


# -- what a commit needs -------------------------------------------------------------------------


def grad_norm(transaction: StepTransaction) -> float:
    """The gradient norm of a replica, to the last bit the same wherever its stages run.

    Megatron sums squares in the order of a reduction over the processes, which are fewer where one
    runs two stages: replicas would clip by factors that differ in the last bit, and drift apart. So
    while a stage is adopted anywhere, all processes add them up by stage.
    """
    topology = transaction.world.topology
    at = topology.coordinate(transaction.world.slots[0])
    optimizers = {at.pp: transaction.optimizer}
    if transaction.pair is not None:
        optimizers = transaction.pair.optimizers
    squares = torch.zeros(topology.pipeline, topology.tensor, dtype=torch.double, device="cuda")
    for stage, optimizer in optimizers.items():
        gradients = [g for o in optimizer.chained_optimizers for g in o.get_grads_for_grad_norm()]
        norm = get_grad_norm_fp32(gradients, grad_stats_parallel_group=transaction.alone)
        squares[stage, at.tp] = float(norm) ** 2
    dist.all_reduce(squares, group=transaction.optimizer.get_grad_stats_parallel_group())
    return float(sum(squares.view(-1).tolist()) ** 0.5)


def prepare_grads(own: Any, other: Any, chunk: Any, alone: dist.ProcessGroup) -> bool:
    """Megatron's ``prepare_grads`` of both optimizers, with one collective for others.

    Whether gradients overflowed the optimizer of each process asks its whole replica, and moves its
    loss scale on. All scales of a job move alike, so the adopted optimizer's follows the own one's.

    Args:
        own: Of this process's own stage.
        other: Of the adopted one.
        chunk: Of the own stage.
        alone: The group of this process alone.
    """
    both = list(zip(own.chained_optimizers, other.chained_optimizers, strict=True))
    scaled = [pair for pair in both if getattr(pair[0], "grad_scaler", None) is not None]
    if not scaled:
        found = own.prepare_grads()
        return bool(other.prepare_grads() or found)
    follow_scales(own, other)
    groups = [theirs.get_grad_stats_parallel_group() for _, theirs in both]
    for _, theirs in both:
        theirs.grad_stats_parallel_group = alone
    try:
        overflowed = other.prepare_grads()
    finally:
        for (_, theirs), group in zip(both, groups, strict=True):
            theirs.grad_stats_parallel_group = group
    if overflowed:
        # The step is skipped everywhere once the own optimizer finds this.
        gradient = next(p.main_grad for p in chunk.parameters() if p.requires_grad)
        gradient.view(-1)[0] = float("inf")
    found = own.prepare_grads()
    follow_scales(own, other)
    return bool(found)


def follow_scales(own: Any, other: Any) -> None:
    """Give the adopted optimizer the loss scales of the own one, if it has any."""
    for mine, theirs in zip(own.chained_optimizers, other.chained_optimizers, strict=True):
        if getattr(mine, "grad_scaler", None) is not None:
            theirs.grad_scaler.load_state_dict(mine.grad_scaler.state_dict())


def count_zeros(own: Any, other: Any) -> Any:
    """Zeros among the gradients of a replica, where this process has two optimizers of it."""
    first = own.chained_optimizers[0]
    return count_zeros_fp32(
        [*own.get_parameters(), *other.get_parameters()],
        grad_stats_parallel_group=own.get_grad_stats_parallel_group(),
        tp_group=getattr(first, "tp_group", None),
        expert_tp_group=getattr(first, "expert_tp_group", None),
    )
