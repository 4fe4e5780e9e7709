"""One attempt of a step or of a batch of evaluation: compute, reduce, sum, rehearse.

It breaks where the world does; what becomes of the step then is the transaction's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ft.recover.policy_workload import PolicyWorkload
from megatron_ft.recover.rehearsal import rehearse
from megatron_ft.recover.schedule_call import ForwardStep, chunks_of, iterators_of
from megatron_ft.recover.timers import break_off, running
from megatron_ft.world.errors import WorldBroken

if TYPE_CHECKING:
    from megatron_ft.mecefo.live import Mecefo
    from megatron_ft.mecefo.quotas import Speeds
    from megatron_ft.transaction import StepTransaction

logger = logging.getLogger("megatron_ft.transaction")


class Attempt:
    """What this process does in one attempt.

    Args:
        transaction: Of which it is an attempt.
        workload: Who computes what in it.
        call: What Megatron calls its schedule with.
    """

    def __init__(
        self, transaction: StepTransaction, workload: PolicyWorkload, call: dict[str, Any]
    ) -> None:
        self.transaction = transaction
        self.workload = workload
        self.call = call
        self.ids: Sequence[int] = list(workload.to_compute(transaction.replica))
        """What this replica computes, in the order of its microbatches."""
        self.contributes = workload.counts(transaction.replica)
        self.pipeline_done = False
        """Whether this slot has done its part of the pipeline's work."""
        self.times: dict[int, float] = {}
        """Seconds of a microbatch, by replica; where quotas follow from that."""
        self._computing: ForwardStep | None = None
        self._computing_since = 0.0
        self._seconds: float | None = None
        """What this replica's pipeline took for the ids."""

    def run(self, schedule: Callable[..., Any]) -> tuple[tuple[int, ...], bool]:
        """Run it with Megatron's schedule, or with what stands in its place.

        Returns:
            How often each id was contributed, on the last stage, empty elsewhere; and whether the
            attempt went well here. If not, what others could wait in is revoked.
        """
        step = self.transaction
        training = not self.call["forward_only"]
        step.policy.in_transaction = True
        counts: tuple[int, ...] = ()
        timers = chunks_of(self.call["model"])[0].config.timers
        timed = running(timers)
        try:
            if self.ids:
                self._compute(schedule)
            elif training:
                self._reduce_only()
            self.pipeline_done = True
            counts = self._sum_reports()
            if training:
                if step.mecefo is not None:
                    step.mecefo.after_reduction(self._weights(step.mecefo))
                if step.speeds is not None:
                    self.times = self._exchange_times(step.speeds)
                rehearse(step)
            return counts, True
        except WorldBroken as broken:
            logger.warning("attempt of iteration %d broke: %s", step.iteration, broken)
            step.world.revoke_active()
            step.world.revoke_groups(pipeline=not self.pipeline_done)
            break_off(timers, timed)
            return counts, False
        finally:
            step.policy.in_transaction = False

    def computed(self) -> None:
        """This slot's pipeline work is done, and gradients are reduced next."""
        self.pipeline_done = True
        self._seconds = time.monotonic() - self._computing_since
        self._bank()

    def before_microbatch(self, microbatch: int, stage: int | None) -> None:
        """What comes before the forward pass of a microbatch.

        Args:
            stage: The stage that it passes; None where the process runs one only.
        """
        step = self.transaction
        step.policy.watch.tick()
        if step.keyed_rng is not None:
            step.keyed_rng(step.iteration, microbatch, stage)

    def _compute(self, schedule: Callable[..., Any]) -> None:
        step, call, ids = self.transaction, self.call, self.ids
        for iterator in iterators_of(call, step.pair):
            if iterator.base != step.base:  # of a stage adopted in the middle of the step
                iterator.begin_step(step.base)
            iterator.assign(ids)
        expected = call["num_microbatches"]
        per_token = chunks_of(call["model"])[0].config.calculate_per_token_loss
        scale = 1.0 if per_token else len(ids) / expected
        self._computing_since = time.monotonic()
        forward_step = ForwardStep(call["forward_step_func"], ids, scale, self.before_microbatch)
        self._computing = forward_step
        call = call | {"forward_step_func": forward_step, "num_microbatches": len(ids)}
        if step.pair is None:
            schedule(**call)
        else:
            with step.pair.both(call) as both:
                schedule(**both)
        self._bank()

    def _bank(self) -> None:
        """This slot has computed all ids of the attempt: from now on they are reported."""
        done, self._computing = self._computing, None
        if done is not None:
            passes = len(done.ids) * (1 if self.transaction.pair is None else 2)
            assert done.done == passes, f"{done.done} of {passes} forward passes ran"
            self.transaction.reports.add(done.reported, done.reports)

    def _reduce_only(self) -> None:
        """Reduce again what is there: this replica has nothing more to compute."""
        snapshots, call = self.transaction.snapshots, self.call
        assert snapshots is not None
        chunks = chunks_of(call["model"])
        config = chunks[0].config
        snapshots.start_reduction()
        tokens = torch.zeros([], dtype=torch.int, device="cuda")
        config.finalize_model_grads_func(
            chunks,
            tokens if config.calculate_per_token_loss else None,
            pg_collection=call.get("pg_collection"),
            force_all_reduce=call.get("force_all_reduce", False),
        )

    def _sum_reports(self) -> tuple[int, ...]:
        step = self.transaction
        group = step.loss_group if step.is_last_stage else None
        if group is None and step.pair is not None:
            group = step.pair.loss_group
        # Exchangeable spares count samples from beyond the step: fewer than B of them.
        num_ids = 2 * self.call["num_microbatches"] * step.world.topology.data
        return step.reports.sum(num_ids, self.contributes, group, step.pipeline_group)

    def _weights(self, mecefo: Mecefo) -> Mapping[int, int]:
        """What each replica has in the mean: microbatches; tokens where the loss is per token."""
        contributed = self.workload.contributed()
        config = chunks_of(self.call["model"])[0].config
        if not config.calculate_per_token_loss or not mecefo.nodes:
            return contributed
        step = self.transaction
        tokens = torch.zeros(step.world.topology.data, dtype=torch.long, device="cuda")
        # Tensor-parallel peers count the same ones, and where routes end at several stages all of
        # them know the sum.
        last = step.is_last_stage or (step.pair is not None and step.pair.loss_group is not None)
        if self.contributes and last and parallel_state.get_tensor_model_parallel_rank() == 0:
            tokens[step.replica] = step.reports.tokens
        dist.all_reduce(tokens)
        return {replica: int(tokens[replica]) for replica in contributed}

    def _exchange_times(self, speeds: Speeds) -> dict[int, float]:
        """Seconds of a microbatch on the slowest process of each replica, 0 where none ran."""
        step = self.transaction
        times = torch.zeros(step.world.topology.data, dtype=torch.double, device="cuda")
        if self.ids and self._seconds is not None:
            times[step.replica] = speeds.measured(self._seconds, len(self.ids))
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return dict(enumerate(times.tolist()))
