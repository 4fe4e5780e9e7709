"""Per-bucket gradient snapshots stamped with the world epoch (ReCoVer, section 4).

A reduction overwrites the local gradients of a bucket, so the first one of a step is preceded by a
copy: S(b), stamped eps(b) = epoch. After a failure a bucket whose stamp is older than the new epoch
may hold a sum over processes that are gone; restoring S(b) makes it local again. The copy is taken
before DDP scales the bucket, or the scaling would be applied twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


class BucketSnapshots:
    """One copy of the gradient buckets of this process's model chunks.

    Args:
        bucket_groups: Megatron's ``_ParamAndGradBucketGroup`` objects, in order of reduction.

    Raises:
        ValueError: A bucket accumulates gradients outside of its communication buffer.
    """

    def __init__(self, bucket_groups: Iterable[Any]) -> None:
        self.own = list(bucket_groups)
        self.bucket_groups = self.own
        self._copies: dict[Any, torch.Tensor] = {}
        self._stamps: dict[Any, int] = {}
        self._check()

    def host(self, bucket_groups: Iterable[Any]) -> None:
        """From now on these are buckets of this process beside its own; what was beside is not."""
        self.bucket_groups = [*self.own, *bucket_groups]
        kept = set(self._buckets())
        for of_bucket in (self._copies, self._stamps):
            for bucket in set(of_bucket) - kept:
                del of_bucket[bucket]
        self._check()

    def _check(self) -> None:
        for bucket in self._buckets():
            if bucket.params_with_extra_main_grads:
                raise ValueError(
                    "--ft-recover needs gradients that accumulate in their communication buffer: "
                    "leave out the flags that keep a separate main gradient of higher precision"
                )

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the snapshots take."""
        return sum(copy.nbytes for copy in self._copies.values())

    def take(self, bucket_group: Any, epoch: int) -> None:
        """Copy the local gradients of ``bucket_group``, which is about to be reduced."""
        for bucket in bucket_group.buckets:
            copy = self._copies.get(bucket)
            if copy is None:
                copy = self._copies[bucket] = torch.empty_like(bucket.grad_data)
            copy.copy_(bucket.grad_data)
            self._stamps[bucket] = epoch

    def restore(self, epoch: int) -> int:
        """Bring every bucket with a stamp older than ``epoch`` back to its local gradients.

        Returns:
            How many buckets were restored.
        """
        stale = [bucket for bucket, stamp in self._stamps.items() if stamp < epoch]
        for bucket in stale:
            bucket.grad_data.copy_(self._copies[bucket])
            del self._stamps[bucket]
        return len(stale)

    def drop(self) -> None:
        """Forget the stamps: the step is committed, or its local gradients are given up."""
        self._stamps.clear()

    def reset_bookkeeping(self) -> None:
        """Make Megatron's bucket groups ready for another attempt of the same step.

        An attempt that broke leaves handles of reductions that will never end and counts of a
        backward pass that was not finished.
        """
        for group in self.bucket_groups:
            group.grad_reduce_handle = None
            group.grad_reduce_finished = False
            group.per_param_grad_ready_counts = {}
            group.is_last_microbatch = True
            for param in group.params:
                param.grad = None

    def zero(self) -> None:
        """Give up what has been accumulated in this step."""
        for bucket in self._buckets():
            bucket.grad_data.zero_()
        self.drop()

    def in_list_order(self) -> None:
        """Have this attempt's reductions start one after another when all is computed.

        Overlapped ones start as the backward pass makes gradients ready, which is another order
        than the list's, and on one communicator all must have the same: so it is for attempts in
        which a replica computes nothing, or has not yet seen which gradients become ready.
        """
        for group in self.bucket_groups:
            if group.ddp_config.overlap_grad_reduce:
                group.is_first_batch = True  # so does Megatron in its first batch

    def start_reduction(self) -> None:
        """Launch the reductions that a backward pass would have launched (overlap only)."""
        for group in self.bucket_groups:
            if group.ddp_config.overlap_grad_reduce and not group.is_first_batch:
                group.start_grad_sync()

    def _buckets(self) -> Iterator[Any]:
        for group in self.bucket_groups:
            yield from group.buckets
