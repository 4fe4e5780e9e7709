"""The model chunks of a process, one for each stage it runs; when each reduces its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from megatron.core.utils import get_model_config

from megatron_ft.schedule.actions import Schedule
from megatron_ft.schedule.by_index import ByIndex
from megatron_ft.schedule.passage import changes_ends, innermost
from megatron_ft.schedule.placement import stages_of
from megatron_ft.schedule.routes import identity

REFUSED = {
    "variable_seq_lengths": "sequences of varying length",
    "overlap_p2p_comm": "overlapped point-to-point communication, which is interleaved 1F1B's",
    "overlap_moe_expert_parallel_comm": "overlapped expert-parallel communication",
    "hybrid_context_parallel": "hybrid context parallelism",
    "mtp_standalone": "multi-token prediction on a stage of its own",
    "moe_paged_stash": "paged stashing of expert activations",
    "fine_grained_activation_offloading": "fine-grained activation offloading",
    "use_ring_exchange_p2p": "ring exchange",
}
"""Settings of Megatron's configuration that the executor does not know."""


class Chunk:
    """The model of one stage on this process, with what Megatron keeps for it.

    Args:
        stage: Which stage it is.
        model: The chunk, wrapped as Megatron wraps it.
        iterator: Its microbatches; None where this slot reads none.
        hooks: ``no_sync_func`` and ``grad_sync_func`` of this chunk, or None.
    """

    def __init__(self, stage: int, model: Any, iterator: Any, hooks: tuple[Any, Any]) -> None:
        self.stage = stage
        self.model = model
        self.innermost = innermost(model)
        self.config = get_model_config(model)
        self.iterator = iterator
        self.no_sync_func, self.grad_sync_func = hooks
        self.takes_passage = bool(getattr(self.innermost, "takes_passage", False))
        self._no_sync = contextlib.ExitStack()

    def hold_back_reduction(self) -> contextlib.ExitStack:
        """Keep backward passes from starting to reduce gradients, until ``let_reduce``."""
        if self.no_sync_func is not None:
            self._no_sync.enter_context(self.no_sync_func())
        return self._no_sync

    def before_last_backward(self) -> None:
        """The pass that follows completes this chunk's gradients and may reduce them.

        With ``grad_sync_func`` (aligned reduction) Megatron's first stage does so and the others
        reduce when they are done with everything. So does a chunk that takes passages: the last
        microbatch need not give its embedding and its head a gradient, and Megatron's buckets would
        wait for one.
        """
        if not self._reduces_last:
            self._no_sync.close()

    def after_last_action(self) -> None:
        """All stages of this process are done."""
        if self.no_sync_func is None or not self._reduces_last:
            return
        self._no_sync.close()
        if self.grad_sync_func is not None:
            self.grad_sync_func(self.model.parameters())
        else:
            self.model.start_grad_sync()

    @property
    def _reduces_last(self) -> bool:
        aligned = self.grad_sync_func is not None and self.stage != 0
        return aligned or self.takes_passage


def chunks_for(
    schedule: Schedule, process: int, model: Any, data_iterator: Any
) -> dict[int, Chunk]:
    """The chunks of a process's stages.

    Raises:
        ValueError: There are more or fewer chunks, iterators or hooks than stages, a model cannot
            follow the routes, or its configuration has something that the executor does not do.
    """
    stages = stages_of(schedule.placement, process)
    models = model if isinstance(model, list) else [model]
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if data_iterator is None:
        iterators = [None] * len(stages)
    config = get_model_config(models[0])
    hooks = [
        _of_each(name, getattr(config, name), len(stages))
        for name in ("no_sync_func", "grad_sync_func")
    ]
    if len(models) != len(stages) or len(iterators) != len(stages):
        raise ValueError(
            f"process {process} runs the stages {stages}, with {len(models)} model chunks and "
            f"{len(iterators)} data iterators: one each is needed"
        )
    straight_on = set(schedule.routes) <= {identity(schedule.num_stages)}
    chunks = {}
    for at, stage in enumerate(stages):
        iterator = iterators[at]
        if iterator is not None and not straight_on:
            iterator = ByIndex(iterator)
        chunks[stage] = Chunk(stage, models[at], iterator, (hooks[0][at], hooks[1][at]))
        _check(chunks[stage], schedule)
    return chunks


def _of_each(name: str, hook: Any, count: int) -> Sequence[Any]:
    """A hook of Megatron's configuration for each chunk: a list where there are several."""
    if hook is None:
        return [None] * count
    hooks = list(hook) if isinstance(hook, list | tuple) else [hook]
    if len(hooks) != count:
        raise ValueError(f"config.{name} must be a list of {count}, one for each model chunk")
    return hooks


def _check(chunk: Chunk, schedule: Schedule) -> None:
    config = chunk.config
    for name, what in REFUSED.items():
        if getattr(config, name, False):
            raise ValueError(f"the schedule executor does not support {what} ({name})")
    if getattr(config, "cuda_graph_impl", None) == "local":
        raise ValueError("the schedule executor does not support local CUDA graphs")
    if getattr(getattr(chunk.model, "ddp_config", None), "use_megatron_fsdp", False):
        raise ValueError("the schedule executor does not support FSDP")
    if changes_ends(set(schedule.routes), chunk.stage):
        if not chunk.takes_passage:
            raise ValueError(
                f"microbatches begin or end their route at stage {chunk.stage} in turns, and its "
                "model does not follow: it needs an embedding or head of its own (takes_passage)"
            )
        if config.defer_embedding_wgrad_compute:
            raise ValueError("swapped routes do not support defer_embedding_wgrad_compute")
